"""`report` of a diagnosis: its page, from its JSONL alone; tests/browser looks at it."""

import json
from pathlib import Path

import pytest
from forked_cli import ForkedCli
from made_diagnosis import NUM_RESPONSES, TOKENS, make_diagnosis
from made_runs import HARM, make_run

from megatron_opsft.diagnose.directory import PAGE
from megatron_opsft.diagnose.outputs import write_outputs, write_report
from megatron_opsft.errors import UserError
from megatron_opsft.report.diagnosis import is_diagnosis


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_diagnosis(tmp_path_factory.mktemp("made") / "diagnosis")


def copied(diagnosis: Path, to: Path, *names: str) -> Path:
    to.mkdir()
    for name in names:
        (to / name).write_bytes((diagnosis / name).read_bytes())
    return to


def test_a_diagnosis_is_told_from_a_run(diagnosis: Path, tmp_path: Path) -> None:
    assert is_diagnosis(diagnosis)
    assert is_diagnosis(copied(diagnosis, tmp_path / "only", "tokens.jsonl"))
    assert is_diagnosis(copied(diagnosis, tmp_path / "begun", "manifest.json"))
    assert not is_diagnosis(make_run(tmp_path / "run"))
    assert not is_diagnosis(tmp_path)


def test_the_table_and_the_page(cli: ForkedCli, diagnosis: Path) -> None:
    ended = cli.run(["report", diagnosis])
    assert ended.exit_code == 0, ended.stderr
    assert "long against short: 60 tokens of 4 responses" in ended.stdout
    assert ended.stdout.endswith(f"page: {diagnosis / 'report.html'}\n")
    assert "<h1>long against short</h1>" in (diagnosis / "report.html").read_text()


def test_the_tokens_alone_make_the_page(diagnosis: Path, tmp_path: Path) -> None:
    only = copied(diagnosis, tmp_path / "only", "tokens.jsonl")
    write_report(only, tmp_path / "new/page.html", max_mb=20)
    page = (tmp_path / "new/page.html").read_text()
    assert "<h1>original against efficient</h1>" in page
    assert page.count("<pre>") == NUM_RESPONSES
    assert page.count("<i ") == NUM_RESPONSES * (len(TOKENS) + 1)
    told = 'class="k9" title="D = 5; efficient: &#39;&lt;/think&gt;&#39; 90 %'
    assert page.count(told) == 1
    assert HARM[:20] not in page and page.count("</script") == 2


def test_no_larger_than_asked_for(diagnosis: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report(diagnosis, page, max_mb=20)
    whole = page.stat().st_size
    write_report(diagnosis, page, max_mb=(whole - 1) / 1e6)
    assert page.stat().st_size < whole
    assert f"2 of {NUM_RESPONSES}: the first" in page.read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["run"], "diagnosis: a diagnosis has a page of its own; give it alone"),
        (["--max-mb", "0"], "--max-mb=0: Input should be greater than 0"),
        (["--html", "."], "page .: is a directory"),
    ],
)
def test_what_cannot_be_is_one_line(
    cli: ForkedCli, diagnosis: Path, tmp_path: Path, more: list[str], words: str
) -> None:
    there = {"run": make_run(tmp_path / "run"), "diagnosis": diagnosis}
    ended = cli.run(["report", diagnosis, *(there.get(word, word) for word in more)])
    assert ended.exit_code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and words in line
    assert not (tmp_path / "run/report.html").exists()


def test_a_diagnosis_that_cannot_be_read_is_said(diagnosis: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    begun = copied(diagnosis, tmp_path / "begun", "manifest.json")
    with pytest.raises(UserError, match="diagnosis not finished; give its command again"):
        write_report(begun, page, max_mb=20)
    tokens = begun / "tokens.jsonl"
    tokens.write_text("")
    with pytest.raises(UserError, match=r"tokens\.jsonl: holds no response"):
        write_report(begun, page, max_mb=20)
    row = json.loads((diagnosis / "tokens.jsonl").read_text().splitlines()[0])
    row["alternatives"][0]["position"] = len(row["tokens"])
    tokens.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"tokens\.jsonl:1: not a diagnosed response"):
        write_report(begun, page, max_mb=20)
    assert not page.exists()


def test_half_a_character_in_a_token_is_a_question_mark(diagnosis: Path, tmp_path: Path) -> None:
    """A lone surrogate, as JSON can say it: no other file can hold it, and no font draws it."""
    half, mark = (copied(diagnosis, tmp_path / name, "tokens.jsonl") for name in ("half", "mark"))
    for directory, sign in ((half, "\\ud83d"), (mark, "?")):
        tokens = directory / "tokens.jsonl"
        tokens.write_text(tokens.read_text().replace('"Wait"', f'"Wait{sign}"'))
        write_outputs(directory)
    for name in (PAGE, "summary.json"):
        assert (half / name).read_bytes() == (mark / name).read_bytes(), name
