"""Pushes on a GPU, against the same code on the CPU."""

from functools import partial
from pathlib import Path

import pytest
import torch
from vllm_jobs import train_and_compare, with_session

from megatron_opsft.run.recorder import RunRecorder
from megatron_opsft.session import Session
from megatron_opsft.train import run_step
from megatron_opsft.weights.checksum import checksum
from megatron_opsft.weights.rectangles import Rect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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
    differences, ways, not_pulled = with_session(
        tmp_path, overrides, partial(train_and_compare, num_steps=3)
    )
    assert ways == ["in_place"] * 3
    assert not_pulled == 0
    assert max(differences) < 1e-3


@pytest.mark.vllm
def test_vllm_sleeps_wakes_and_is_written_in_place(tmp_path: Path) -> None:
    """Log-probs in bfloat16 differ by rounding; wrong weights would differ by whole nats."""
    pytest.importorskip("vllm")
    differences, ways, not_pulled = with_session(
        tmp_path, BFLOAT16, partial(train_and_compare, num_steps=5)
    )
    assert ways == ["in_place"] * 5
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
    pytest.importorskip("vllm")
    overrides = [*BFLOAT16, "rollout.kv_cache_bytes=4000000000"]
    before, asleep = with_session(tmp_path, overrides, free_memory_around_sleep)
    assert asleep - before > 3_500_000_000
