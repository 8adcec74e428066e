"""Pushes on a GPU, against the same code on the CPU."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import apart, skip_without_vllm
from vllm_jobs import train_and_compare, with_session

import megatron_opsft
from megatron_opsft.errors import SyncError
from megatron_opsft.models.weights.checksum import checksum
from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.train import run_step

TINY_REASONER = Path(megatron_opsft.__file__).parent / "assets/tiny_reasoner"
BFLOAT16 = ["run.device=cuda", "model.dtype=bfloat16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 3, 96, 1000])
def test_checksums_are_those_of_the_cpu(dtype: torch.dtype, columns: int) -> None:
    values = torch.randn(777, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    rect = Rect("x", 5, 782, 0, columns)
    on_cpu = checksum(values, rect, salt=3)
    on_gpu = checksum(values.to("cuda"), rect, salt=3)
    assert int(on_cpu) == int(on_gpu)


def test_hf_engine_is_written_in_place(tmp_path: Path) -> None:
    overrides = ["run.device=cuda", "rollout.engine=hf"]
    differences, not_pulled = with_session(
        tmp_path, overrides, partial(train_and_compare, num_steps=3)
    )
    assert not_pulled == 0
    assert max(differences) < 1e-3


@pytest.mark.vllm
def test_vllm_sleeps_wakes_and_is_written_in_place(tmp_path: Path) -> None:
    """Log-probs in bfloat16 differ by rounding; wrong weights would differ by whole nats."""
    skip_without_vllm()
    differences, not_pulled = apart(
        with_session, tmp_path, BFLOAT16, partial(train_and_compare, num_steps=5)
    )
    assert not_pulled == 0
    assert max(differences) < 0.3


def free_memory_around_sleep(session: Session, recorder: RunRecorder) -> tuple[int, int]:
    run_step(session, recorder, 1)
    before = torch.cuda.mem_get_info()[0]
    session.sampler.engine.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    session.sync.push(2, session.probes(2))
    return before, asleep


@pytest.mark.vllm
def test_a_sleeping_engine_gives_its_memory_back(tmp_path: Path) -> None:
    skip_without_vllm()
    overrides = [*BFLOAT16, "rollout.kv_cache_bytes=4000000000"]
    before, asleep = apart(with_session, tmp_path, overrides, free_memory_around_sleep)
    assert asleep - before > 3_500_000_000


def sleep_with_and_without(session: Session, recorder: RunRecorder) -> list[str]:
    """A draft model wakes with its own weights, or the run stops: what three pushes after a sleep
    say, two with the draft kept and one with it dropped.
    """
    said = []
    for step in (1, 2):
        run_step(session, recorder, step)
        said.append("")
    engine: Any = session.sampler.engine
    (wrapper,) = engine._llm.collective_rpc(lambda worker: worker)
    wrapper.worker.model_config.sleep_preserve_parameter_names = []
    engine.sleep()
    try:
        session.sync.push(3, session.probes(3))
        said.append("")
    except SyncError as error:
        said.append(str(error))
    return said


@pytest.mark.vllm
def test_a_draft_model_wakes_as_it_was_and_a_lost_one_is_seen(tmp_path: Path) -> None:
    skip_without_vllm()
    speculative = {"method": "draft_model", "model": str(TINY_REASONER)}
    speculative["num_speculative_tokens"] = 3
    overrides = [*BFLOAT16, f"rollout.speculative={speculative}"]
    kept, again, lost = apart(with_session, tmp_path, overrides, sleep_with_and_without)
    assert kept == again == ""
    assert "the draft model of rollout.speculative is not as it was loaded" in lost
