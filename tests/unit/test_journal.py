"""Lines of JSON that a command appends, and what a second start of it finds."""

import logging
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.journal import Journal

SEED = {"seed": 1}


def test_a_second_start_finds_all_lines_but_a_torn_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    assert first.resume() == []
    first.append({"a": 1}, {"b": "ü"})
    first.append({"c": 3})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"d": ')
    with caplog.at_level(logging.WARNING):
        assert Journal(path).resume() == [{"a": 1}, {"b": "ü"}, {"c": 3}]
    assert caplog.text.count("the last line is incomplete") == 1
    assert path.read_bytes() == whole
    Journal(path).append({"d": 4})
    assert Journal(path).resume()[3:] == [{"d": 4}]


def test_a_journal_of_another_job_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path, SEED)
    assert first.resume() == []
    first.append({"a": 1})
    before = path.read_bytes()
    assert before.splitlines()[0] == b'{"seed": 1}'
    assert Journal(path, SEED).resume() == [{"a": 1}]
    with pytest.raises(UserError, match=r"journal\.jsonl was begun with other seed and limit; "):
        Journal(path, {"seed": 2, "limit": 3}).resume()
    words = {"seed": "settings"}
    with pytest.raises(UserError, match="was begun with other settings; remove it, or name"):
        Journal(path, {"seed": 2}, words).resume()
    assert path.read_bytes() == before


def test_an_identity_whose_line_was_torn_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"se')
    assert Journal(path, SEED).resume() == []
    assert path.read_bytes() == b'{"seed": 1}\n'
