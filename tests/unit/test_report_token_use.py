"""Where the tokens of a response went: the parts of its text, and the bar of their mean lengths."""

from pathlib import Path
from typing import Any

import pytest
from made_runs import make_evaluation, make_run, measure, write_report

from megatron_opsft.commands.report.page import write_page
from megatron_opsft.commands.report.plot import place
from megatron_opsft.commands.report.token_use import (
    parts_of,
    pieces_of,
    read_token_uses,
    where_tokens_went,
)
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.records import Problem, TokenUse

CLOSED = "2 + 2 = 4. Wait: 4.</think> It is 4."
TWICE = "a</think>b</think>c"
WHOLE = {"thinking": "closed", "num_thinking": 10, "first_right": 4}


@pytest.mark.parametrize(
    ("text", "right", "thinking", "pieces"),
    [
        (
            CLOSED,
            CLOSED.index("4.") + 1,
            "closed",
            [
                ("thinking", "2 + 2 = "),
                ("right", "4"),
                ("after", ". Wait: 4.</think>"),
                ("answer", " It is 4."),
            ],
        ),
        (
            CLOSED,
            len(CLOSED) - 1,
            "closed",
            [
                ("thinking", "2 + 2 = 4. Wait: 4.</think>"),
                ("answer", " It is "),
                ("right", "4"),
                ("answer", "."),
            ],
        ),
        (CLOSED, None, "closed", [("thinking", CLOSED[:-9]), ("answer", " It is 4.")]),
        ("a</think>4", 10, "closed", [("thinking", "a</think>"), ("right", "4")]),
        (TWICE, None, "malformed", [("thinking", TWICE[:-1]), ("answer", "c")]),
        (
            "\N{GRINNING FACE} 4 so",
            3,
            "open",
            [("thinking", "\N{GRINNING FACE} "), ("right", "4"), ("after", " so")],
        ),
        ("It is 4", 7, "none", [("answer", "It is "), ("right", "4")]),
        ("4", 99, "none", [("answer", "4")]),
        ("  4", 1, "none", [("right", " "), ("answer", " 4")]),
        ("", None, "none", []),
    ],
)
def test_parts_of_a_text(
    text: str, right: int | None, thinking: str, pieces: list[tuple[str, str]]
) -> None:
    row = {"text": text, "first_right_char": right, "token_use": WHOLE | {"thinking": thinking}}
    parts = parts_of(row)
    assert parts is not None and sum(length for _, length in parts) == len(text)
    assert pieces_of({"text": text, "parts": parts or [("", 0)]}) == (pieces or [("", "")])


@pytest.mark.parametrize(
    "damaged", [None, 3, {"num_thinking": "4"}, WHOLE | {"first_right": 1.5}, WHOLE | {"text": 1}]
)
def test_a_response_that_was_not_measured_has_no_parts(damaged: Any) -> None:
    is_text = damaged is None or not isinstance(damaged, dict) or "text" not in damaged
    row = {"text": "a" if is_text else 1, "token_use": damaged, "first_right_char": 1}
    assert parts_of(row) is None
    assert pieces_of({"text": "a", "parts": None}) == [("", "a")]


def test_the_bar_has_means_of_those_whose_first_right_answer_is_known() -> None:
    before = [
        (100, TokenUse(num_thinking=80, first_right=30)),
        (60, TokenUse(num_thinking=40, first_right=50)),  # in the answer: all thinking is before
        (999, TokenUse(num_thinking=900)),
    ]
    bars = where_tokens_went({"old": before, "new": [(8, TokenUse(first_right=3))], "none": []})
    assert bars is not None
    old, new = bars.rows
    assert old.parts == [35, 25, 20] and old.value == 80 and old.text == "35 + 25 + 20"
    assert new.parts == [0, 0, 8] and (new.label, new.text) == ("new", "0 + 0 + 8")
    assert "n = 2 of 3 correct responses (old); n = 1 of 1 correct responses (new)" in bars.note
    drawn = place(bars)
    assert drawn.description == (
        "Where the tokens went: old: thinking to the first right answer 35, thinking after it 25, "
        "answer 20; new: thinking to the first right answer 0, thinking after it 0, answer 8"
    )
    widths = [part.width for part in drawn.bars[0].parts]
    assert widths[0] / widths[1] == pytest.approx(35 / 25, abs=0.01)
    assert sum(widths) == pytest.approx(drawn.bars[0].width, abs=0.2)
    ends = [part.begin + part.width for part in drawn.bars[0].parts]
    assert [part.begin for part in drawn.bars[0].parts][1:] == pytest.approx(ends[:-1], abs=0.2)
    assert where_tokens_went({"old": before[2:]}) is None


def test_correct_responses_alone_are_read(tmp_path: Path) -> None:
    """Of 4 problems sample 0 is correct."""
    run = make_run(tmp_path / "run")
    paths = sorted((run / "rollouts").iterdir())
    assert read_token_uses(paths) == []
    measure(paths[0], CLOSED, 9, thinking=20, first_right=7)
    found = read_token_uses(paths)
    assert [(count, use.first_right) for count, use in found] == [(100, 7)] * 4


def test_a_run_and_evaluations_show_where_their_tokens_went(tmp_path: Path) -> None:
    run, page = make_run(tmp_path / "run"), tmp_path / "page.html"
    write_page(page, [run])
    assert "<figcaption>Where the tokens went" not in page.read_text()
    first, _, last = sorted((run / "rollouts").iterdir())
    measure(first, CLOSED, 9, thinking=60, first_right=20)
    measure(last, CLOSED, 9, thinking=20, first_right=20)
    write_page(page, [run])
    text = page.read_text()
    named = "thinking to the first right answer"
    assert f"Where the tokens went: step 1: {named} 20, thinking after it 40, answer 40; " in text
    assert f"step 3: {named} 20, thinking after it 0, answer 13&#34;" in text.replace('"', "&#34;")
    assert "4 of 4 correct responses" in text
    assert text.count('<span class="part-right">4</span>') == 2
    made = [make_evaluation(tmp_path / n, n, 100 * len(n), 6) for n in ("long", "new")]
    for evaluation in made:
        measure(evaluation / "samples/gsm8k.jsonl.gz", CLOSED, 9, thinking=60, first_right=20)
    write_report(page, made)
    assert f"long: {named} 20, thinking after it 40, answer 342; new: {named} 20" in (
        page.read_text()
    )


def test_problems_stand_once_beside_the_samples(tmp_path: Path) -> None:
    """Two benchmarks may have equal ids; of an earlier release there is no file."""
    files = SampleFiles(tmp_path)
    assert files.problems() == {}
    files.add_problems("a", [Problem(id="1", text="One?\u2028", answer="1")])
    files.add_problems("b", [Problem(id="1", text="Two?", answer="2")])
    files.add_problems("a", [Problem(id="2", text="Three?", answer="3")])
    wanted = {("a", "1"): "One?\u2028", ("b", "1"): "Two?", ("a", "2"): "Three?"}
    assert files.problems() == wanted
    assert len((tmp_path / "problems.jsonl").read_text().split("\n")) == 4
