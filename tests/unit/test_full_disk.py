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
    ("words", "place", "error", "advice"),
    [
        (
            ["train", ROOT / "examples/configs/quickstart.yaml", "run.dir=runs/never_made"],
            "train.train",
            "FullDiskError('cannot write x: No space')",
            "make room, then continue with --resume",
        ),
        (
            ["convert", "check", "tiny_reasoner", "tiny_reasoner"],
            "convert.run.open_source",
            "OSError(errno.ENOSPC, 'No space')",
            "make room, then give the same command again",
        ),
    ],
)
def test_resume_is_advised_to_training_runs_alone(
    cli: ForkedCli, words: list[object], place: str, error: str, advice: str
) -> None:
    """An evaluation is continued, and a conversion started again, by the same command."""
    module, _, function = place.rpartition(".")
    full = (
        "import errno, importlib\n"
        "from megatron_opsft.runtime.durable import FullDiskError\n"
        f"def full(*a, **k): raise {error}\n"
        f"importlib.import_module('megatron_opsft.{module}').{function} = full\n"
    )
    ended = cli.run(words, full)
    assert "No space" in ended.error and ended.error.endswith(advice)
