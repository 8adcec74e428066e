"""`data stop`: what is cut from hand-made responses, and a whole run on the tiny reasoner."""

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from forked_cli import ForkedCli
from meter_by_hand import tokens_up_to
from responses import facts
from test_make_data import ONE, SMALL, TOKENIZER, TRAIN, made

from megatron_opsft.commands.make_data import stop
from megatron_opsft.commands.make_data.stop import cut_response, middle
from megatron_opsft.data.stored_responses import StoredResponse, read_stored_responses
from megatron_opsft.methods.catalog.fixed_data import Stop
from megatron_opsft.records import Outcome, Problem, Rollout, Thinking, TokenUse, Verdict
from megatron_opsft.rollout.requests import split_text_by_token

CLOSED, NONE = Thinking.CLOSED, Thinking.NONE


def with_first_right(marked: str, thinking: Thinking) -> tuple[StoredResponse, TokenUse]:
    """A response whose first right answer ends at the mark `^`."""
    up_to, _, rest = marked.partition("^")
    ids = TOKENIZER.encode(up_to + rest, add_special_tokens=False)
    texts = split_text_by_token(TOKENIZER, ids)
    assert "".join(texts) == up_to + rest
    row = replace(ONE, response_ids=(*ids, TOKENIZER.eos_token_id))
    use = TokenUse(thinking=thinking, first_right=tokens_up_to(texts, len(up_to)))
    return row, use


def cut_text(row: StoredResponse, use: TokenUse) -> str | None:
    texts = split_text_by_token(TOKENIZER, row.response_ids)
    line_end = tuple(TOKENIZER.encode("\n", add_special_tokens=False))
    found = cut_response(row.response_ids, texts, use, line_end)
    if found is None:
        return None
    assert found[-1] == TOKENIZER.eos_token_id
    return str(TOKENIZER.decode(found[:-1]))


@pytest.mark.parametrize(
    ("marked", "thinking", "expected"),
    [
        ("2+2=4^.\nWait, no.\n</think>\n4", CLOSED, "2+2=4.\n</think>\n4"),
        ("<think>\n2+2=4^.\nWait.\n</think>\n4", CLOSED, "<think>\n2+2=4.\n</think>\n4"),
        # It closes on a line of its own, as before.
        ("It is 4^. Wait, 4. Yes.\n</think>\n4", CLOSED, "It is 4.\n</think>\n4"),
        ("It is 4^. Wait.</think>4", CLOSED, "It is 4.</think>4"),
        ("It is 4^, not 5. Wait.\n</think>4", CLOSED, "It is 4, not 5.\n</think>4"),
        ("It is 4^ or 4.5 in all! Wait.</think>4", CLOSED, "It is 4 or 4.5 in all!</think>4"),
        ("(It is 4.5^.) Wait.</think>4", CLOSED, "(It is 4.5.)</think>4"),
        ("2+2=4^\nWait\n</think>4", CLOSED, "2+2=4\n</think>4"),
        ("It is 4^</think>4", CLOSED, "It is 4</think>4"),
        ("It is 4^.\n</think>4", CLOSED, "It is 4.\n</think>4"),
        ("It is 4^. So 4", NONE, "It is 4."),
        ("It is 4^", NONE, "It is 4"),
        ("It is 5.</think>4^.", CLOSED, None),
        ("4^. <think>It is 4.</think>4", CLOSED, None),
        ("It is 4^. Wait", Thinking.OPEN, None),
        ("It is 4^. Wait.</think>4</think>", Thinking.MALFORMED, None),
    ],
)
def test_stop_cuts_behind_the_sentence_of_the_first_right_answer(
    marked: str, thinking: Thinking, expected: str | None
) -> None:
    row, use = with_first_right(marked, thinking)
    assert cut_text(row, use) == expected
    assert cut_text(row, use._replace(first_right=None)) is None


def test_stop_takes_the_correct_response_of_median_length() -> None:
    """Of all tokens, or of thinking; of two the longer."""
    lengths = {3: (9, 1), 7: (5, 5), 8: (2, 7), 9: (1, 9)}
    found = []
    for num_tokens, (num_thinking, problem_index) in lengths.items():
        use = TokenUse(num_thinking=num_thinking)
        found.append(facts(num_tokens=num_tokens, token_use=use, problem_index=problem_index > 8))
    found.insert(0, facts(num_tokens=6, outcome=Outcome.WRONG))
    for length_of, chosen in (("response", [7, 9]), ("thinking", [7, 9])):
        assert [r.num_tokens for r in middle(found, 9, length_of)] == chosen
    assert [r.num_tokens for r in middle(found[:3], 9, "response")] == [7]
    assert [r.num_tokens for r in middle(found[:3], 9, "thinking")] == [3]
    assert [r.num_tokens for r in middle(found, 8, "response")] == [7]


def test_stop_judges_what_it_cuts_and_says_what_became_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without thinking, a response that is wrong when cut stays whole."""
    given = [
        with_first_right("It is 4^. Wait.</think>4", CLOSED),
        with_first_right("It is 4^. Wait.</think>5", CLOSED),
        with_first_right("It is 4^.</think>5", CLOSED),  # nothing to cut, nothing to judge
        with_first_right("It is 5.</think>4^", CLOSED),
        with_first_right("It is 4^. So \\boxed{4}", NONE),
        with_first_right("So \\boxed{4^}. Yes.", NONE),
    ]
    responses = [facts(problem_index=n, token_use=use) for n, (_, use) in enumerate(given)]
    monkeypatch.setattr(stop, "collect_rows", lambda s, judged, chosen: [row for row, _ in given])
    monkeypatch.setattr(stop, "gather_from_all", lambda rows: rows)

    def score(rollouts: list[Rollout], problems: dict[str, Problem]) -> list[Verdict]:
        assert [one.text for one in rollouts] == [
            "It is 4.</think>4",
            "It is 4.</think>5",
            "It is 4.",
            "So \\boxed{4}.",
        ]
        found = [text.endswith(("k>4", "{4}.")) for text in (one.text for one in rollouts)]
        return [Verdict(outcome=Outcome.CORRECT if right else Outcome.WRONG) for right in found]

    session = MagicMock()
    session.layout.rank, session.layout.world_size, session.layout.is_main = 0, 1, True
    session.settings.max_response_tokens = 99
    session.settings.end_token_ids = (TOKENIZER.eos_token_id,)
    session.sampler.encoder.tokenizer = TOKENIZER
    session.verifier.score = score
    judged = MagicMock(responses=responses, problems=[])
    with caplog.at_level("INFO"):
        rows = stop.stop_rows(session, judged, Stop())
    assert [TOKENIZER.decode(row.response_ids[:-1]) for row in rows] == [
        "It is 4.</think>4",
        "It is 4.</think>5",
        "It is 4. So \\boxed{4}",
        "So \\boxed{4}.",
    ]
    said = (
        "6 correct responses, one a problem: 2 cut, 2 kept whole; left out 1 with no right answer "
    )
    assert f"{said}in a closed thinking, and 1 that are not correct when cut" in caplog.text


def test_data_of_stop_are_what_off_policy_sft_samples_without_what_follows_the_answer(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """Of each problem's correct responses that of median length."""
    given = [*SMALL, "verify.judge=math", "method.samples=3", "--limit", "6"]
    whole = made(cli, tmp_path / "whole.parquet", "off_policy_sft", *given)
    out = tmp_path / "stop.parquet"
    ended = cli.run(["data", "stop", *given, "--out", out])
    assert ended.exit_code == 0, ended.stderr
    golds = {row["id"]: row["answer"] for row in map(json.loads, TRAIN.read_text().splitlines())}
    by_problem: dict[str, list[tuple[int, ...]]] = {}
    for row in whole:
        by_problem.setdefault(row.problem_id, []).append(row.response_ids)
    expected = {}
    num_cut = 0
    for problem, responses in by_problem.items():
        text = TOKENIZER.decode(sorted(responses, key=len)[len(responses) // 2])
        thought, closing, answer = text.partition("\n</think>")
        if found := re.search(rf"={golds[problem]}(?!\d)[^.\n]*\.?", thought):
            expected[problem] = thought[: found.end()] + closing + answer
            num_cut += len(thought) > found.end()
    assert {
        row.problem_id: TOKENIZER.decode(row.response_ids) for row in read_stored_responses(out)
    } == expected
    num_left_out = len(by_problem) - len(expected)
    assert num_cut > 1
    said = f"{len(by_problem)} correct responses, one a problem: {num_cut} cut"
    assert said in ended.stderr and f"left out {num_left_out} with no right" in ended.stderr
