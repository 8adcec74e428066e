"""Direct reads and writes: every byte in its place at any offset, with and without support."""

import errno
import os
import random
from pathlib import Path

import pytest

from megatron_opsft.storage.direct_io import ALIGNMENT, DirectFile, Staging

SIZE = 10 * ALIGNMENT + 123


@pytest.fixture(
    params=[
        ("direct", 0),
        ("refused at open", errno.EINVAL),
        ("refused at transfer", errno.EOPNOTSUPP),
    ],
    ids=str,
)
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems with direct transfers, and the ways to have none."""
    kind, number = request.param
    flag, direct = os.O_DIRECT, set()
    open_file, write, read = os.open, os.pwrite, os.preadv

    def open_here(path: Path, flags: int, *rest: int) -> int:
        if kind == "refused at open" and flags & flag:
            raise OSError(number, "no direct transfers here")
        file = open_file(path, flags, *rest)
        (direct.add if flags & flag else direct.discard)(file)
        return file

    def refuse(file: int) -> None:
        if kind == "refused at transfer" and file in direct:
            raise OSError(number, "no direct transfers here")

    monkeypatch.setattr(os, "open", open_here)
    monkeypatch.setattr(os, "pwrite", lambda f, *rest: refuse(f) or write(f, *rest))
    monkeypatch.setattr(os, "preadv", lambda f, *rest: refuse(f) or read(f, *rest))


@pytest.mark.usefixtures("refusal")
def test_pieces_come_together(tmp_path: Path) -> None:
    draw = random.Random(0)
    content = draw.randbytes(SIZE)
    cuts = sorted({0, 1, 4095, 4096, 4097, 8192, SIZE, *draw.sample(range(SIZE), 12)})
    pieces = list(zip(cuts, cuts[1:], strict=False))
    draw.shuffle(pieces)
    staging, file = Staging(), DirectFile(tmp_path / "file", SIZE)
    for start, stop in pieces:
        place = staging.place_for(start, stop - start)
        place[:] = content[start:stop]
        file.write_staged(place, start)
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == content
    for start, stop in pieces:
        assert staging.read(tmp_path / "file", start, stop - start) == content[start:stop]
    with pytest.raises(EOFError, match=str(SIZE)):
        staging.read(tmp_path / "file", SIZE - 5, 6)
