"""What the workers with vLLM run: real sessions, and what their engines say of their weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_opsft.config_file import load_config
from megatron_opsft.records import Sample
from megatron_opsft.run.recorder import RunRecorder, open_recorder
from megatron_opsft.session import Session, open_session
from megatron_opsft.train import run_step

QUICKSTART = Path(__file__).parents[2] / "examples/configs/quickstart.yaml"
SMALL = [
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_response_tokens=64",
    "eval.num_problems=4",
    "eval.max_response_tokens=100",
    "run.tensorboard=false",
    "verify.workers=1",
    "rollout.engine=vllm",
]


@contextmanager
def plain_weights(wanted: bool) -> Iterator[None]:
    """vLLM on a CPU as it is on a GPU: linear weights stay as they are instead of being packed."""
    from vllm import _custom_ops

    before = _custom_ops._supports_onednn
    _custom_ops._supports_onednn = before and not wanted
    try:
        yield
    finally:
        _custom_ops._supports_onednn = before


@contextmanager
def opened(
    run_dir: Path, overrides: list[str], *, plain: bool = False
) -> Iterator[tuple[Session, RunRecorder]]:
    """A session on the quickstart's configuration, after its first push."""
    config = load_config(QUICKSTART, [*SMALL, f"run.dir={run_dir}", *overrides])
    with (
        plain_weights(plain),
        open_session(config) as session,
        open_recorder(session, resume=False, overwrite=True) as recorder,
    ):
        session.sync.push(0, session.probes(0))
        yield session, recorder


def fresh_hf_model(session: Session) -> PreTrainedModel:
    """A Hugging Face model that has just been given the trainer's weights; on every rank."""
    state = dict(session.sync.exporter.stream())
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(session.model_dir), dtype=torch.float32
    )
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def hf_log_probs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Of the response's tokens."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    start = len(sample.prompt_ids)
    logits = model(input_ids=ids).logits[0, start - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]


def difference_from_hf(session: Session, samples: list[Sample]) -> float:
    """Largest difference of the engine's log-probs from those of a fresh Hugging Face model."""
    scores = session.sampler.engine.score(samples)
    model = fresh_hf_model(session)
    return max(
        [
            float((hf_log_probs(model, sample) - torch.tensor(scored)).abs().max())
            for sample, scored in zip(samples, scores.log_probs, strict=False)
        ],
        default=0.0,
    )


def train_and_compare(
    run_dir: Path, overrides: list[str], num_steps: int, plain: bool = False
) -> tuple[list[float], list[str], int]:
    """Real steps; the difference from Hugging Face after each, by which way each push went, and
    how many shards a pull at the end does not bring back.
    """
    with opened(run_dir, overrides, plain=plain) as (session, recorder):
        ways: list[str] = []
        compared: list[Sample] = []
        push = session.sync.push

        def noting(version: int, samples: list[Sample]) -> Any:
            result = push(version, samples)
            ways.append(result.path)
            compared[:] = samples
            return result

        session.sync.push = noting  # type: ignore[method-assign]
        differences = []
        for step in range(1, num_steps + 1):
            run_step(session, recorder, step)
            differences.append(difference_from_hf(session, compared))
        return differences, ways, spoil_and_pull(session)


def spoil_and_pull(session: Session) -> int:
    """How many shards differ from before after they were spoiled and pulled from the engine."""
    before = {name: tensor.clone() for name, tensor in session.shards.by_name.items()}
    for tensor in session.shards.by_name.values():
        tensor.fill_(7.0)
    session.sync.pull()
    now = session.shards.by_name
    return sum(not torch.equal(now[name], before[name]) for name in before)


def with_session(
    run_dir: Path,
    overrides: list[str],
    act: Callable[[Session, RunRecorder], Any],
    plain: bool = False,
) -> Any:
    """`act` on an opened session; act: of a module, not nested."""
    with opened(run_dir, overrides, plain=plain) as (session, recorder):
        return act(session, recorder)
