"""JSON lines on disk: what is whole is read, packed or not, and damage is one line."""

import gzip
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import append_line, json_lines, whole_lines, write_packed_lines


def test_a_torn_last_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert [*whole_lines(path)] == []
    append_line(path, "1")
    append_line(path, "2\n3")
    assert [*whole_lines(path)] == [b"1", b"2", b"3"]
    path.write_bytes(b"1\n{")
    assert [*whole_lines(path)] == [b"1"]


def test_packed_lines_are_read_alike_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    for rows in ([], [{"a": "\u2028\n"}, {"b": 1}]):
        write_packed_lines(path, rows, level=1)
        assert len([*whole_lines(path)]) == len(rows)
    before = path.read_bytes()
    write_packed_lines(path, [{"a": "\u2028\n"}, {"b": 1}], level=1)
    assert path.read_bytes() == before and gzip.decompress(before).endswith(b'{"b": 1}\n')
    path.write_bytes(before[:-9])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read: .*restore or delete it"):
        [*whole_lines(path)]


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n[]\n')
    rows = json_lines(path)
    assert next(rows) == {"a": 1}
    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object"):
        next(rows)
