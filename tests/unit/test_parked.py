"""Memory that is given up for a while and comes back, on a CPU and on a pretended GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from pretend_gpu import Gpu, pretended

from megatron_opsft.runtime.parked import ParkedMemory, in_place


@contextmanager
def device(name: str) -> Iterator[Gpu | None]:
    if name == "cpu":
        yield None
        return
    with pretended() as gpu:
        yield gpu
        assert gpu.faults == []


def tensors_on(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix, a column of it, and a vector of another type."""
    matrix = torch.arange(12.0, device=name).view(3, 4)
    return matrix, matrix[:, 1], torch.arange(5, device=name, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_parked_memory_is_gone_and_comes_back_bit_for_bit(name: str) -> None:
    with device(name) as gpu:
        matrix, column, vector = tensors_on(name)
        held = gpu.num_bytes if gpu else 0
        memory = ParkedMemory(keeps=True)
        for _ in range(2):
            memory.begin([matrix, column, vector])
            assert memory.num_bytes == 0 and matrix.sum() == 66  # still to be read
            memory.park([matrix, column, vector])
            memory.park([matrix, column, vector])
            assert memory.num_bytes == 12 * 4 + 5 * 2  # the column is the matrix's
            assert matrix.untyped_storage().nbytes() == vector.untyped_storage().nbytes() == 0
            if gpu:
                assert gpu.num_bytes == held - memory.num_bytes
            memory.wake()
            memory.wake()
            assert memory.num_bytes == 0
            assert gpu is None or gpu.num_bytes == held
            assert column.tolist() == [1, 5, 9] and vector.tolist() == [0, 1, 2, 3, 4]
        if gpu:
            assert len(gpu.registered) == 1  # one block, which is kept
        del matrix, column, vector, memory


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_values_are_read_and_written_where_they_wait(name: str) -> None:
    with device(name):
        matrix, column, vector = tensors_on(name)
        memory = ParkedMemory(keeps=True)
        assert memory.stored(matrix) is None
        memory.park([matrix])
        stored, part = memory.stored(matrix), memory.stored(column)
        assert stored is not None and part is not None
        assert not stored.is_cuda and stored.shape == (3, 4)
        assert part.tolist() == [1, 5, 9]
        assert memory.stored(vector) is None  # of other memory
        stored[1, 1] = 50
        memory.wake()
        assert column.tolist() == [1, 50, 9] and memory.stored(matrix) is None
        assert in_place(matrix) is matrix
        del matrix, column, vector, memory, stored, part


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_memory_whose_bytes_are_not_kept_comes_back_with_any(name: str) -> None:
    with device(name) as gpu:
        gradient = torch.ones(1000, device=name)
        part = gradient[10:20]
        memory = ParkedMemory(keeps=False)
        memory.park([gradient])
        assert memory.num_bytes == 4000 and memory.stored(gradient) is None
        assert gpu is None or (gpu.num_bytes == 0 and gpu.registered == {})
        memory.wake()
        gradient.zero_()
        part += 1
        assert gradient.sum() == 10
        del gradient, part, memory


def test_nothing_may_be_written_until_it_is_copied() -> None:
    """On a GPU the copy runs beside what follows; a second set of tensors waits for the first."""
    with pretended() as gpu:
        one, other = torch.ones(4, device="cuda"), torch.ones(8, device="cuda")
        memory = ParkedMemory(keeps=True)
        memory.begin([one])
        assert gpu.is_copying
        memory.begin([other])  # the first set is on its way
        memory.park([one])
        assert not gpu.is_copying
        assert one.untyped_storage().nbytes() == 0 and other.sum() == 8
        memory.wake()
        memory.park([other])  # larger: another block
        assert memory.num_bytes == 32 and len(gpu.registered) == 1
        memory.wake()
        assert other.sum() == 8
        del one, other, memory
