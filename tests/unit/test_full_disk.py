"""Files that no longer fit: what was there stays, and the message has the path."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import append_line, write_bytes


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel refuses more, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_does_not_fit_leaves_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"step": 1}')
    with (
        files_of_at_most(20),
        pytest.raises(UserError, match=r"metrics\.jsonl \(12 bytes, .* free"),
    ):
        append_line(path, '{"step": 2}')
    assert path.read_text() == '{"step": 1}\n'
    append_line(path, '{"step": 2}')
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_bytes(path, b"before")
    with files_of_at_most(1000), pytest.raises(UserError, match=r"config\.yaml \(2,000 bytes"):
        write_bytes(path, bytes(2000))
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("words", "place", "error"),
    [
        (
            ["train", ROOT / "examples/configs/quickstart.yaml", "run.dir=runs/never_made"],
            "train.train",
            "FullDiskError('cannot write x: No space')",
        ),
        (
            ["convert", "check", "tiny_reasoner", "tiny_reasoner"],
            "convert.run.open_source",
            "OSError(errno.ENOSPC, 'No space')",
        ),
    ],
)
def test_a_full_disk_is_one_line_that_says_how_to_continue(
    cli: ForkedCli, words: list[object], place: str, error: str
) -> None:
    module, _, function = place.rpartition(".")
    full = (
        "import errno, importlib\n"
        "from megatron_opsft.runtime.durable import FullDiskError\n"
        f"def full(*a, **k): raise {error}\n"
        f"importlib.import_module('megatron_opsft.{module}').{function} = full\n"
    )
    ended = cli.run(words, full)
    assert "No space; make room, then give the same command again, `train` with" in ended.error
