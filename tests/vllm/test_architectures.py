"""Every architecture in real vLLM: the layout that the plan assumes is the one that vLLM has."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_reference import hf_model
from tiny_models import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_jobs import engine_against_disk, hf_log_probs, spoil_and_pull, with_session
from world import World

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.rollout.vllm.options import start_llm
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.session import Session

pytestmark = pytest.mark.vllm

TINY = resolve_model("tiny_reasoner")
# Tensor- and pipeline-parallel ranks of the trainer, tensor-parallel ranks of an engine.
LAYOUTS = {
    "qwen2": (2, 1, 1),
    "qwen2_tied": (2, 1, 1),
    "llama_mha": (1, 1, 2),
    "qwen3": (2, 1, 2),
}
# Hybrid models: test_hybrid.py.
DENSE = [name for name, shape in SHAPES.items() if shape.moe is None and shape.delta is None]


def make_model(name: str, directory: Path) -> None:
    """The architecture of `SHAPES` with heads as vLLM's CPU kernels have them, and a tokenizer."""
    described = hf_model(name).config.to_dict()
    described |= {"head_dim": 32, "hidden_size": 32 * described["num_attention_heads"]}
    tiny = AutoConfig.from_pretrained(TINY)
    described |= {key: getattr(tiny, key) for key in ("vocab_size", "eos_token_id", "bos_token_id")}
    config = AutoConfig.for_model(**described)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    for file in TINY.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, directory)


def push_and_pull(session: Session, recorder: RunRecorder) -> tuple[float, str, int]:
    """The engine's difference from Hugging Face after a push of the model's own weights over
    others, the way it took, and how many shards a pull does not bring back.
    """
    mine = {name: tensor.clone() for name, tensor in session.shards.by_name.items()}
    for tensor in session.shards.by_name.values():
        tensor.mul_(0.5)
    session.sync.push(1, session.probes(1))
    for name, tensor in session.shards.by_name.items():
        tensor.copy_(mine[name])
    pushed = session.sync.push(2, session.probes(1))
    model = AutoModelForCausalLM.from_pretrained(session.model_dir, dtype=torch.float32).eval()
    probes = session.probes(1)
    scores = session.sampler.engine.score(probes).log_probs
    difference = max(
        float((hf_log_probs(model, probe) - torch.tensor(scored)).abs().max())
        for probe, scored in zip(probes, scores, strict=True)
    )
    return difference, pushed.path, spoil_and_pull(session)


def start_push_and_pull(session: Session, recorder: RunRecorder) -> tuple[Any, Any]:
    return engine_against_disk(session, recorder), push_and_pull(session, recorder)


@pytest.mark.parametrize("name", DENSE)
def test_first_weights_push_and_pull(vllm_world: World, tmp_path: Path, name: str) -> None:
    make_model(name, tmp_path / "model")
    tp, pp, rollout_tp = LAYOUTS.get(name, (1, 1, 1))
    layout = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"rollout.tp={rollout_tp}"]
    overrides = [f"model.path={tmp_path / 'model'}", *layout, "eval.max_response_tokens=64"]
    for start, (difference, path, wrong) in vllm_world.run(
        with_session,
        max(tp * pp, rollout_tp),
        tmp_path / "run",
        overrides,
        start_push_and_pull,
    ):
        _, wrong_at_start = start
        assert wrong_at_start == []
        assert difference < 1e-4
        assert (path, wrong) == ("in_place", 0)


def test_experts_on_a_cpu_are_refused() -> None:
    settings: Any = SimpleNamespace(is_cuda=False, dtype="float32")
    with pytest.raises(UserError, match=r"on a CPU use rollout\.engine=hf for a mixture of exp"):
        start_llm(settings, WeightTable(SHAPES["qwen3_moe"]))
