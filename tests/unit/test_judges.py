"""A user's own judge: what it gets and may return, and what is said of mistakes."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT, ForkedCli
from rows import write_rows
from small_run import QUICKSTART

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.config import VerifyConfig
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout
from megatron_opsft.run_input import read_input
from megatron_opsft.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.verify.verifier import Verifier, check_judge, describe_judge

CORRECT, WRONG, NO_ANSWER = Outcome.CORRECT, Outcome.WRONG, Outcome.NO_ANSWER
EXAMPLE = "examples.own_judge:within_tolerance"


def outcomes(config: VerifyConfig, pairs: list[tuple[str, Problem]]) -> list[Outcome]:
    """Of finished responses to the problems; the same ones, cut off, are not judged."""
    rollouts = [
        Rollout(
            problem_id=problem.id,
            sample_index=0,
            prompt_ids=(1,),
            response_ids=(2,),
            text=text,
            finish_reason=reason,
            weight_version=0,
        )
        for text, problem in pairs
        for reason in (FinishReason.STOP, FinishReason.LENGTH)
    ]
    problems = {problem.id: problem for _, problem in pairs}
    with Verifier(config) as verifier:
        verdicts = verifier.score(rollouts, problems)
        assert verifier.score(rollouts, problems) == verdicts
    assert {verdict.outcome for verdict in verdicts[1::2]} == {Outcome.UNFINISHED}
    return [verdict.outcome for verdict in verdicts[::2]]


def test_what_a_function_may_return_and_what_an_exception_becomes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem = Problem(id="p", text="", answer="x", fields={"answer": "x"})
    other = Problem(id="q", text="", answer="x", fields={"answer": "y"})
    config = VerifyConfig(workers=1, judge="own_judges:any_return")
    returned = ("true", "0.0", "1.0", "outcome", "none", "raise")
    pairs = [(text, problem) for text in returned]
    with caplog.at_level(logging.WARNING, "megatron_opsft"):
        got = outcomes(config, [*pairs, ("fields", problem), ("fields", other)])
    error = Outcome.ERROR
    assert got == [CORRECT, WRONG, CORRECT, NO_ANSWER, error, error, CORRECT, WRONG]
    (message,) = [record.getMessage() for record in caplog.records]  # of two calls
    assert "2 of 8 responses could not be judged" in message
    assert "it returned NoneType, not a bool, a number, an Outcome or a Verdict" in message


def test_a_judge_that_is_not_there_is_one_line_before_anything_is_written(
    cli: ForkedCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ["train", QUICKSTART, f"run.dir={tmp_path / 'run'}", "verify.judge=no_such:judge"]
    evaluate = ["eval", "model=tiny_reasoner", f"out={tmp_path / 'eval'}", "judge=no_such:judge"]
    for words in (train, evaluate):
        assert "judge no_such:judge: no_such cannot be imported" in cli.run(words).error
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    Path("broken_judge.py").write_text("import no_such_package\n")
    Path("other_judge.py").write_text("from math import pi\n")
    for name, said in {
        "broken_judge:judge": "No module named 'no_such_package'",
        "other_judge:judge": "other_judge.py has no function judge",
        "other_judge:pi": "other_judge.py has no function pi",
    }.items():
        with pytest.raises(UserError, match=f"^[^\n]*{said}[^\n]*$"):
            check_judge(VerifyConfig(judge=name))
    with pytest.raises(ValueError, match="'maths' is not a judge"):
        VerifyConfig(judge="maths")


def test_the_example_s_columns_reach_it_in_training_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    rows = [{"problem": "p", "answer": "5"}, {"problem": "q", "answer": "5", "tolerance": 2}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    words = [f"data.train={source}", f"eval.data={source}", f"verify.judge={EXAMPLE}"]
    model = ASSETS / TINY_REASONER
    read = read_input(load_config(Path(QUICKSTART), words), model, read_model_shape(model))
    assert read.held_out is not None
    for problems in (read.problems.problems, sorted(read.held_out.problems, key=lambda p: p.text)):
        pairs = [(text, problem) for text in ("It is 5.", "It is 6.") for problem in problems]
        got = outcomes(VerifyConfig(workers=1, judge=EXAMPLE), pairs)
        assert got == [CORRECT, CORRECT, WRONG, CORRECT]


def test_an_evaluation_is_of_one_judge_and_its_code(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(
        "math-verify 0, rules [0-9a-f]{16}", describe_judge(VerifyConfig(), "math-verify 0")
    )
    own, code = VerifyConfig(judge="mine.judges:judge"), tmp_path / "mine" / "judges.py"
    code.parent.mkdir()
    said = set()
    for text in ("judge = bool\n", "judge = str\n"):
        code.write_text(text)
        said.add(describe_judge(own, ""))
    assert len(said) == 2
    assert all(line.startswith("mine.judges:judge, sha256 ") for line in said)
