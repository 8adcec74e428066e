"""Models with gated delta nets in real vLLM on a CPU: it holds exactly the trainer's weights,
computes what transformers computes, and depends on nothing but the weights.

Each model is saved in float32 and run in bfloat16, so that a log decay, which vLLM keeps in
float32, shows whether it was rounded as the trainer's was.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hf_configs import hf_config
from hf_reference import log_probs, of_labels
from safetensors.torch import save_file
from tiny_models import QWEN3_5, weight
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm_jobs import KeptSession, engine_against_disk, hf_log_probs, opened, spoil_and_pull
from vllm_weights import vllm_weights
from world import World

from megatron_opsft.errors import SyncError, UserError
from megatron_opsft.models.architectures.shape import DeltaShape
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import Rollout, Sample
from megatron_opsft.rollout.requests import make_requests
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.session import Session

pytestmark = pytest.mark.vllm

TINY = resolve_model("tiny_reasoner")
# The smallest heads that vLLM's kernels for CPUs have.
SHAPE = replace(
    QWEN3_5,
    num_layers=4,
    hidden_size=128,
    head_dim=32,
    rotary_dim=8,
    vocab_size=596,
    max_position_embeddings=1024,
    delta=DeltaShape(
        num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=64, conv_size=4
    ),
    layer_kinds=QWEN3_5.layer_kinds[:4],
)
OVERRIDES = ["model.dtype=bfloat16", "eval.max_response_tokens=64"]
SEES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


def values(factor: float) -> dict[str, Tensor]:
    """Every HF tensor of the model, in float32."""
    found = {}
    for name, shape in WeightTable(SHAPE).hf_shapes().items():
        value = weight(name, shape)
        if name.endswith("norm.weight") and "linear_attn" not in name:
            value -= 1.0  # zero-centred
        found[name] = factor * (0.5 * value if value.dim() == 2 else value)
    return found


def make_model(directory: Path, factor: float = 1.0, *, nested: bool = False) -> Path:
    """The model with `values(factor)`; nested: as the language model of one that also sees."""
    directory.mkdir()
    config = {**hf_config(SHAPE).to_dict(), "dtype": "float32"}
    config |= {"architectures": [SHAPE.architecture], "eos_token_id": 590, "bos_token_id": 591}
    tensors = values(factor)
    if nested:
        model_type = "qwen3_5"
        architectures = ["Qwen3_5ForConditionalGeneration"]
        sees = {**SEES, "model_type": "qwen3_5_vision", "out_hidden_size": SHAPE.hidden_size}
        config = {
            "architectures": architectures,
            "model_type": model_type,
            "text_config": config,
            "vision_config": sees,
            "tie_word_embeddings": False,
        }
        for name in list(tensors):
            if name.startswith("model."):
                nested_name = name.replace("model.", "model.language_model.", 1)
                tensors[nested_name] = tensors.pop(name)
        tensors["model.visual.pos_embed.weight"] = torch.ones(4, 16)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for file in TINY.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, directory)
    return directory


LAYOUTS: dict[str, tuple[int, bool, list[str]]] = {
    "1 rank": (1, False, []),
    "train TP2, rollout TP2": (2, False, ["parallel.tp=2", "rollout.tp=2"]),
    "train PP2, rollout TP1, nested": (2, True, ["parallel.pp=2"]),
}


@pytest.fixture(scope="module")
def session(
    vllm_world: World, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> KeptSession:
    ranks, nested, overrides = LAYOUTS[request.param]
    directory = tmp_path_factory.mktemp("session")
    model = make_model(directory / "model", nested=nested)
    overrides = [*OVERRIDES, f"model.path={model}", *overrides]
    return KeptSession(vllm_world, directory / "run", ranks, overrides)


def in_layouts(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("session", names, indirect=True)


def differing(session: Session, factor: float) -> list[str]:
    """What the engine holds otherwise than it should: names, dtypes and bits."""
    layout = session.sampler.engine.layout
    hf = {name: value.bfloat16() for name, value in values(factor).items()}
    expected = vllm_weights(SHAPE, hf, layout.tp_rank, layout.tp_size)
    held = session.sampler.engine.weights()
    wrong = sorted(held.keys() ^ expected.keys())
    for name in held.keys() & expected.keys():
        same = held[name].dtype == expected[name].dtype
        if not (same and torch.equal(held[name], expected[name])):
            wrong.append(name)
    return wrong


def hold_what_was_pushed(session: Session, recorder: RunRecorder) -> list[Any]:
    """At the start, after a stream, after a push in place, and after a pull."""
    _, wrong_at_start = engine_against_disk(session, recorder)
    found: list[Any] = [wrong_at_start, differing(session, 1.0)]
    for tensor in session.shards.by_name.values():
        tensor.mul_(0.5)
    session.sync.push(1, session.probes(1))
    found += [differing(session, 0.5), spoil_and_pull(session)]
    for tensor in session.shards.by_name.values():
        tensor.mul_(2.0)
    session.sync.push(2)
    return [*found, differing(session, 1.0)]


@in_layouts(*LAYOUTS)
def test_the_engine_holds_exactly_the_trainers_weights(session: KeptSession) -> None:
    for found in session.run(hold_what_was_pushed):
        assert found == [[], [], [], 0, []]


def blocks_of_the_cache(session: Session, recorder: RunRecorder) -> tuple[int, int]:
    """How many there are, and how many a full batch of the longest responses needs: vLLM keeps one
    free, and has a state of each layer of a group in one block.
    """
    engine: Any = session.sampler.engine
    config = engine._llm.llm_engine.vllm_config.cache_config
    settings = engine._settings
    keys = -(-settings.max_tokens // config.block_size)
    return config.num_gpu_blocks, 1 + settings.batch_size * (3 + keys)


@in_layouts("1 rank")
def test_the_cache_has_room_for_a_full_batch(session: KeptSession) -> None:
    ((held, needed),) = session.run(blocks_of_the_cache)
    assert needed <= held < 1.1 * needed


def spoil_a_log_decay(session: Session, recorder: RunRecorder) -> str:
    """By less than a bfloat16 can tell."""
    decays = session.sampler.engine.weights()["model.layers.1.linear_attn.A_log"]
    before = decays.clone()
    decays.mul_(1 + 2**-12)
    assert torch.equal(decays.bfloat16(), before.bfloat16())
    with pytest.raises(SyncError) as caught:
        session.sync.compare_checksums("test")
    decays.copy_(before)
    session.sync.compare_checksums("test")
    return str(caught.value)


@in_layouts("1 rank")
def test_a_log_decay_is_compared_in_all_its_bits(session: KeptSession) -> None:
    (said,) = session.run(spoil_a_log_decay)
    assert "layers.1.linear_attn.A_log" in said


def sample(session: Session, factor: float | None = None) -> list[Rollout]:
    """Responses to prompts from one token on, greedy and not.

    factor: of the weights, which are pushed before, while vLLM drops no cache.
    """
    engine: Any = session.sampler.engine
    if factor is not None:
        for tensor in session.shards.by_name.values():
            tensor.mul_(factor)
        with patch.object(engine._llm, "reset_prefix_cache", return_value=True):
            session.sync.push(session.sync.version + 1)
    requests = []
    for length in (1, 2, 5, 64, 120):
        prompt = torch.arange(length) * 7 % 590
        requests += make_requests(f"p{length}", prompt.tolist(), 2, run_seed=0, step=1)
    rollouts: list[Rollout] = []
    for temperature in (0.0, 1.0):
        settings = replace(
            session.settings, temperature=temperature, top_p=1.0, max_response_tokens=48
        )
        with patch.object(engine._llm, "reset_prefix_cache", return_value=True):
            rollouts += engine.generate(requests, settings)
    return rollouts


def sample_before_and_after(
    session: Session, recorder: RunRecorder
) -> tuple[list[Rollout], list[Rollout]]:
    """With the model's own weights, and with halves."""
    before = sample(session)
    after = sample(session, 0.5)
    sample(session, 2.0)
    return before, after


def sample_with_own(session: Session, recorder: RunRecorder) -> list[Rollout]:
    return sample(session)


def tokens(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.response_ids for rollout in rollouts]


@in_layouts("1 rank")
def test_after_a_push_it_samples_as_a_fresh_engine(
    session: KeptSession, vllm_world: World, tmp_path: Path
) -> None:
    """No cache that could be stale is kept, even if vLLM would not drop it."""
    ((before, after),) = session.run(sample_before_and_after)
    model = make_model(tmp_path / "model", 0.5, nested=True)
    overrides = [*OVERRIDES, f"model.path={model}"]
    fresh = KeptSession(vllm_world, tmp_path / "run", 1, overrides)
    (expected,) = fresh.run(sample_with_own)
    assert len(before) == 20
    assert tokens(after) == tokens(expected)
    assert sum(a == b for a, b in zip(tokens(before), tokens(after), strict=True)) < 5


def log_prob_differences(session: Session, recorder: RunRecorder) -> dict[str, Tensor]:
    """Of vLLM, and of transformers in bfloat16, from transformers in float32; and how much less
    probable there the greedy tokens are, which vLLM decoded one by one, than the most probable.
    """
    samples = [
        Sample(
            problem_id=rollout.problem_id,
            sample_index=rollout.sample_index,
            prompt_ids=rollout.prompt_ids,
            response_ids=rollout.response_ids,
        )
        for rollout in sample(session)
    ]
    of_engine = session.sampler.engine.score(samples).log_probs
    found: dict[str, list[Tensor]] = {"vllm": [], "transformers": [], "greedy": []}
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(session.model_dir, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.no_grad():
        for name, value in exact.named_parameters():
            value.copy_(rounded.get_parameter(name))
    for one, scored in zip(samples, of_engine, strict=True):
        every = log_probs(exact, one.prompt_ids, one.response_ids).detach()
        expected = of_labels(every, one.response_ids)
        found["vllm"].append((torch.tensor(scored) - expected).abs())
        found["transformers"].append((hf_log_probs(rounded, one).float() - expected).abs())
        if len(found["vllm"]) <= len(samples) // 2:
            found["greedy"].append(every.max(-1).values - expected)
    return {name: torch.cat(parts) for name, parts in found.items()}


@in_layouts("1 rank")
def test_log_probs_are_as_near_to_float32_as_those_of_transformers(session: KeptSession) -> None:
    (found,) = session.run(log_prob_differences)
    of_vllm, of_transformers, greedy = found["vllm"], found["transformers"], found["greedy"]
    assert len(of_vllm) == 2 * len(greedy) == 960
    assert 0.005 < of_vllm.mean() < 0.015 and of_vllm.max() < 0.1
    assert of_vllm.mean() < 1.2 * of_transformers.mean()
    assert greedy.mean() < 0.005 and greedy.max() < 0.1


def start_with_vllms_convolutions(run_dir: Path, overrides: list[str]) -> str:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from megatron_opsft.rollout.vllm import cpu

    with (
        patch.object(cpu, "keep_convolutions_plain"),
        patch.object(gdn_attention, "_causal_conv1d_fwd_cpu", cpu._VLLM_CONVOLVE_PROMPTS),
        patch.object(gdn_attention, "_causal_conv1d_update_cpu", cpu._VLLM_CONVOLVE_STEP),
        pytest.raises(UserError) as caught,
        opened(run_dir, overrides),
    ):
        pass
    return str(caught.value)


def test_a_convolution_that_reads_weights_otherwise_stops_the_run(tmp_path: Path) -> None:
    overrides = [*OVERRIDES, f"model.path={make_model(tmp_path / 'model')}"]
    overrides.append("sync.logprob_alarm=0.02")
    world = World()  # of a process that ends: a start that failed leaves its watch and its engine
    try:
        (said,) = world.run(start_with_vllms_convolutions, 1, tmp_path / "run", overrides)
    finally:
        world.stop()
    assert "which rounding cannot explain" in said
