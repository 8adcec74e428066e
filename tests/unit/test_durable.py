"""Files that commands write: whole or not at all; damage is one line with the path."""

import errno
import gzip
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage import large_files
from megatron_opsft.models.storage.partial import PlannedFile, written_whole
from megatron_opsft.runtime import durable
from megatron_opsft.runtime.durable import (
    FullDiskError,
    append_line,
    json_lines,
    whole_lines,
    write_bytes,
    write_packed_lines,
)

QUICKSTART = ROOT / "examples/configs/quickstart.yaml"
MODELS = ["tiny_reasoner", "tiny_reasoner"]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel refuses more, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_does_not_fit_leaves_what_was_there(tmp_path: Path) -> None:
    lines, file = tmp_path / "metrics.jsonl", tmp_path / "config.yaml"
    append_line(lines, '{"step": 1}')
    write_bytes(file, b"before")
    with files_of_at_most(20):
        with pytest.raises(UserError, match=r"metrics\.jsonl \(12 bytes, .* free"):
            append_line(lines, '{"step": 2}')
        with pytest.raises(UserError, match=r"config\.yaml \(2,000 bytes"):
            write_bytes(file, bytes(2000))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == {
        lines: b'{"step": 1}\n',
        file: b"before",
    }


@pytest.mark.parametrize(
    ("words", "place", "error"),
    [
        (["train", QUICKSTART, "run.dir=x"], "run.train.train", "FullDiskError('No space')"),
        (
            ["convert", "check", *MODELS],
            "commands.convert.run.open_source",
            "OSError(28, 'No space')",
        ),
    ],
)
def test_a_full_disk_is_one_line_that_says_how_to_continue(
    cli: ForkedCli, words: list[object], place: str, error: str
) -> None:
    module, _, function = place.rpartition(".")
    full = (
        "import importlib\n"
        "from megatron_opsft.runtime.durable import FullDiskError\n"
        f"def full(*a, **k): raise {error}\n"
        f"importlib.import_module('megatron_opsft.{module}').{function} = full\n"
    )
    said = cli.run(words, full).error
    assert "No space; make room, then give the same command again, `train` with" in said


def test_a_torn_last_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert [*whole_lines(path)] == []
    path.write_bytes(b"1\n\xe2\x80\xa82\n{")
    assert [*whole_lines(path)] == [b"1", "\u20282".encode()]


def test_the_same_rows_are_the_same_packed_bytes_and_damage_is_named(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.jsonl.gz", [{"a": "\u2028\n"}, {"b": 1}]
    write_packed_lines(path, rows, level=1)
    before = path.read_bytes()
    assert [*json_lines(path)] == rows and gzip.decompress(before).endswith(b'{"b": 1}\n')
    assert before[4:8] == bytes(4)  # where gzip puts the time
    path.write_bytes(before[:-9])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read: .*restore or delete it"):
        [*whole_lines(path)]
    plain = tmp_path / "a.jsonl"
    plain.write_text('{"a": 1}\n[]\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object"):
        [*json_lines(plain)]


def test_a_directory_is_on_disk_before_it_has_its_name_and_the_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that fails may leave a name without its files, or lose the name."""
    new, name, replaced = (tmp_path / each for each in ("new", "name", "replaced"))
    for each in (new, name):
        each.mkdir()
        (each / "file").write_text(each.name)
    done: list[tuple[str, str]] = []
    rename = Path.rename
    monkeypatch.setattr(durable, "sync_path", lambda path: done.append(("sync", path.name)))

    def renamed(path: Path, target: Path) -> Path:
        done.append((path.name, target.name))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    durable.publish(new, name, replaced)
    parent = ("sync", tmp_path.name)
    assert done == [("sync", "new"), ("name", "replaced"), ("new", "name"), parent]
    assert (name / "file").read_text() == "new" and (replaced / "file").read_text() == "name"


def test_what_cannot_be_waited_for_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the rename leaves nothing of the new directory, and the earlier one whole."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("earlier")
    sync_path = durable.sync_path

    def refuse_parent(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_path(path)

    monkeypatch.setattr(durable, "sync_path", refuse_parent)
    message = "could not be written: Input/output error .*nothing was left behind"
    with pytest.raises(UserError, match=message), written_whole(out) as partial:
        (partial.directory / "file").write_text("new")
    assert (out / "file").read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [out]


def test_a_full_disk_in_a_large_file_is_said_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(large_files, "write_at", refuse)
    with (
        pytest.raises(FullDiskError, match="could not be written: No space left on device"),
        written_whole(tmp_path / "out", [PlannedFile("model.bin", 3, ())]) as partial,
    ):
        partial.files["model.bin"].write(b"abc", 0)
    assert list(tmp_path.iterdir()) == []  # and the name is free
