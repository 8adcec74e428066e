"""Pinned host memory for copies of a GPU's tensors, on a pretended GPU."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_cli import ROOT
from pretend_gpu import Gpu, pretended

from megatron_opsft.runtime.pinned import HostCopies, PinnedBlock, packed_bytes

PAGE = 4096


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretended() as found:
        yield found


def on_gpu(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.arange(size, device="cuda").to(dtype) for size in sizes]


def registered(gpu: Gpu) -> list[int]:
    """Bytes of each block that is pinned."""
    return [*gpu.registered.values()]


def test_a_block_is_as_large_as_its_tensors_and_begins_each_at_64_bytes(gpu: Gpu) -> None:
    tensors = [*on_gpu(1025, 1, 33), *on_gpu(4097, dtype=torch.bfloat16)]
    block = PinnedBlock(packed_bytes(tensors))
    copies = block.copies_of(tensors)
    # torch's own pinned memory would have 8192 + 4 + 256 + 16384.
    assert registered(gpu) == [4160 + 64 + 192 + 8256]
    assert gpu.pinned_bytes == 4 * PAGE
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.is_pinned() and copy.data_ptr() % 64 == 0
        assert copy.dtype == tensor.dtype and copy.tolist() == tensor.tolist()
    del block
    assert gpu.pinned_bytes == 0 and not copies[0].is_pinned()
    assert copies[0].tolist() == tensors[0].tolist()


def test_tensors_without_elements_have_copies_without_elements(gpu: Gpu) -> None:
    for sizes in ([0], [0, 5, 0]):
        copies = HostCopies().take(on_gpu(*sizes), copy=True)
        assert [copy.numel() for copy in copies] == sizes


def test_what_saves_a_copy_finds_a_storage_of_its_size(gpu: Gpu) -> None:
    """With one storage for all of a block, each saved tensor would be copied once more."""
    tensors = on_gpu(1000, 3)
    copies = HostCopies().take(tensors, copy=True)
    assert [copy.untyped_storage().nbytes() for copy in copies] == [4000, 12]
    file = io.BytesIO()
    torch.save(copies[1], file)
    file.seek(0)
    assert torch.load(file).tolist() == [0, 1, 2]


def test_the_block_is_kept_and_only_a_larger_set_gets_a_new_one(gpu: Gpu) -> None:
    host = HostCopies()
    for sizes, expected in (([100, 50], 448 + 256), ([20], 704), ([100, 51, 1], 448 + 256 + 64)):
        copies = host.take(on_gpu(*sizes), copy=True)
        assert [copy.tolist()[-1] for copy in copies] == [size - 1 for size in sizes]
        assert registered(gpu) == [expected]
        host.release()
    del host
    assert registered(gpu) == []


def test_copies_that_are_still_read_are_not_written_over(gpu: Gpu) -> None:
    host, (first, second) = HostCopies(), on_gpu(4, 4)
    (copy,) = host.take([first], copy=True)
    with pytest.raises(RuntimeError, match="filled again while it is still read"):
        host.take([second + 1], copy=True)
    assert copy.tolist() == [0, 1, 2, 3]
    host.release()
    host.take([second + 1], copy=True)
    assert copy.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_of_the_cpu_are_copied_if_that_is_asked_for_and_pin_nothing(copy: bool) -> None:
    tensors = [torch.ones(3), torch.ones(2, 3).t()]
    found = HostCopies().take(tensors, copy=copy)
    assert [one is other for one, other in zip(found, tensors, strict=True)] == [not copy] * 2
    assert [one.tolist() for one in found] == [one.tolist() for one in tensors]
    assert found[1].stride() == tensors[1].stride()


def test_where_the_driver_refuses_one_warning_says_so_and_copies_are_right(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.can_register = False
    host = HostCopies()
    with caplog.at_level(logging.WARNING, "megatron_opsft"):
        for _ in range(2):
            (copy,) = host.take(on_gpu(1000), copy=True)
            host.release()
    (line,) = caplog.messages
    assert "does not pin 0.000 GB of host memory (cudaHostRegister: error 2)" in line
    assert gpu.last_error == 0  # the next kernel would have raised it
    assert not copy.is_pinned() and copy.tolist() == [*range(1000)]
    assert gpu.faults == []


@pytest.mark.slow
def test_checkpoints_and_a_reference_model_pin_what_the_plan_says(tmp_path: Path) -> None:
    """Of small models on a pretended GPU; tests/gpu_contract has the same with its own torch."""
    script = ROOT / "tests/gpu_contract/pretended_pinned.py"
    places = ["tests/gpu_contract", "tests/support", ""]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / place) for place in places),
        "PYTHONWARNINGS": "ignore",
    }
    words = [sys.executable, "-m", "pretend_gpu", "1", str(script), "1", str(tmp_path)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    cases = json.loads(ended.stdout.splitlines()[-1])
    assert len(cases) == 3
    for case, found in cases.items():
        assert found["blocks"] == 2, case
        for pinned, planned in zip(found["pinned"], found["planned"], strict=True):
            assert planned <= pinned <= planned + found["bound"], case
