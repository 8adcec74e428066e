"""`report` of runs on a terminal, and the lines that it is made of."""

from pathlib import Path
from typing import Any

import pytest
from rows import write_rows

from megatron_opsft.errors import UserError
from megatron_opsft.report.runs import describe_run, read_json_lines

STEP = {"num_accepted": 1, "step_seconds": 2.0, "accuracy": 0.5, "mean_response_tokens": 9.0}


def evaluation(step: int, accuracy: float, tokens: float, name: str = "") -> dict[str, Any]:
    line = {"accuracy": accuracy, "mean_response_tokens": tokens}
    return {"step": step} | {f"eval_{name}{key}": value for key, value in line.items()}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("null", "not a JSON object"),
        ('{"step": 3, "loss', "not a JSON object"),
        ('{"loss": 0.9}', "step is null, not a number"),
        ('{"step": 3, "eval_accuracy": 0.5}', "loss is null, not a number"),
    ],
)
def test_a_damaged_line_is_named_and_a_torn_last_one_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str, message: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert read_json_lines(path, required=["loss"]) == [{"step": 1, "loss": 0.5}]
    assert caplog.messages == [
        f"{path}: the last line is incomplete, as after a kill; it is left out"
    ]
    path.write_text(f'{{"step": 1, "loss": 0.5}}\n{line}\n{{"step": 4, "loss": 1}}\n')
    with pytest.raises(UserError, match=rf"metrics\.jsonl:2: {message}; restore the file"):
        read_json_lines(path, required=["loss"])


def test_a_finished_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", (STEP | {"step": n} for n in range(1, 41)))
    before = evaluation(0, 0.961, 120) | evaluation(0, 0.1, 200, "hard_")
    after = evaluation(40, 0.958, 30) | evaluation(40, 0.1, 50, "hard_")
    write_rows(tmp_path / "evals.jsonl", [before, after])
    best = {"step": 30, "accuracy": 0.961, "mean_response_tokens": 28.0}
    write_rows(tmp_path / "summary.json", [{"best": best}])
    table = describe_run(tmp_path)
    tokens, accuracy, of_hard, _, *footer = table.splitlines()[2:]
    assert tokens.split() == ["mean", "response", "tokens", "120.0", "30.0", "-75.0", "%"]
    assert accuracy.split() == ["accuracy", "96.1", "%", "95.8", "%", "-0.3", "points"]
    assert of_hard.split()[3:] == ["hard", "200.0", "50.0", "-75.0", "%"]
    last = "best evaluation: after step 30, 28.0 tokens, accuracy 96.1 %"
    assert footer == ["40 steps in 80 s", last]
    assert all(line.isprintable() for line in table.splitlines())
    write_rows(tmp_path / "summary.json", [{"best": best | {"step": 40}}])
    assert "best" not in describe_run(tmp_path)
    for damaged in ("null", "{"):
        (tmp_path / "summary.json").write_text(damaged)
        with pytest.raises(UserError, match=r"summary\.json: not the summary of a run; restore it"):
            describe_run(tmp_path)


def test_a_run_that_is_not_finished_has_a_table_up_to_its_last_evaluation(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"kind": "diagnosis"}')
    with pytest.raises(UserError, match="no run there, and no evaluation"):
        describe_run(tmp_path)
    (tmp_path / "config.yaml").write_text("run: {steps: 9}")  # killed before its first step
    assert "0 steps in 0 s" in describe_run(tmp_path)
    lines = [STEP | {"step": n, "num_accepted": n - 1} for n in (1, 2)]
    write_rows(tmp_path / "metrics.jsonl", lines)
    table = describe_run(tmp_path)
    assert "mean response tokens in training" in table and "2 steps in 4 s" in table
    assert "1 of 2 steps accepted no response" in table
    assert table.endswith("not finished: 2 of 9 steps; continue with --resume")
    write_rows(tmp_path / "metrics.jsonl", lines[:1])
    assert "NOTHING WAS LEARNED" in describe_run(tmp_path)
    write_rows(tmp_path / "evals.jsonl", [evaluation(0, 0.5, 100), evaluation(1, 0.5, 80)])
    assert "-20.0 %" in describe_run(tmp_path)
