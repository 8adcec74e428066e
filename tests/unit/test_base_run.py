"""A run without steps: it evaluates the model, keeps every response, and is reported in words."""

import html
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ForkedCli
from made_runs import make_run
from rows import write_rows
from small_run import QUICKSTART, SMALL_RUN

from megatron_opsft.commands.report.chart import Chart, Series
from megatron_opsft.commands.report.curves import curves_of
from megatron_opsft.commands.report.page import write_page
from megatron_opsft.commands.report.runs import describe_run, read_run
from megatron_opsft.run.run_files import REASONS, describe_rejected, read_json_lines
from megatron_opsft.runtime.durable import json_lines

NAMES = dict(zip(REASONS, ("unfinished", "wrong", "no_answer", "timeout", "error"), strict=True))


def data_of(page: Path) -> list[dict[str, Any]]:
    (found,) = re.findall(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    runs = json.loads(found)["runs"]
    assert isinstance(runs, list)
    return runs


def texts_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8").split("<main>")[1].split("</main>")[0]
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def test_a_base_run_keeps_its_responses_and_its_report_opens_them(
    cli: ForkedCli, tmp_path: Path
) -> None:
    run = tmp_path / "base"
    words = ["train", QUICKSTART, *SMALL_RUN, "run.steps=0", f"run.dir={run}"]
    words += ["eval.num_problems=8", "eval.max_response_tokens=60"]
    words += ["eval.more={other: {data: arithmetic, num_problems: 2}}"]
    ended = cli.run(words)
    assert ended.exit_code == 0, ended.stderr
    (line,) = read_json_lines(run / "evals.jsonl")
    for prefix, name, file in (
        ("eval_", "held-out", "held_out/step_000000.jsonl.gz"),
        ("eval_other_", "other", "held_out/other/step_000000.jsonl.gz"),
    ):
        rows = list(json_lines(run / file))
        outcomes = Counter(row["outcome"] for row in rows)
        assert len(rows) == line[f"{prefix}samples"] == {"held-out": 8, "other": 2}[name]
        for key, outcome in NAMES.items():
            assert line[f"{prefix}{key}"] == outcomes[outcome]
        assert line[f"{prefix}accuracy"] == outcomes["correct"] / len(rows)
        rejected = describe_rejected(line, prefix)
        said = f"({len(rows)} samples: {rejected})" if rejected else f"({len(rows)} samples)"
        assert re.search(f"^{name} after step 0: .* {re.escape(said)}", ended.stdout, re.MULTILINE)
    assert line["eval_num_unfinished"] > 0  # of 60 tokens
    reported = cli.run(["report", run])
    assert reported.exit_code == 0, reported.stderr
    told = f"held-out: {describe_rejected(line, 'eval_')}, of 8 responses after step 0"
    assert told in reported.stdout and told in texts_of(run / "report.html")
    held_out, other = data_of(run / "report.html")
    assert (held_out["name"], other["name"]) == ("base, held-out", "base, held-out, other")
    assert held_out["rollouts"]["total"] == len(held_out["rollouts"]["rows"]) == 8
    assert other["rollouts"]["total"] == 2
    assert "<figure>" not in (run / "report.html").read_text()
    # Without them the numbers are the same.
    bare = cli.run([*words, "--overwrite", "run.save_rollouts=false"])
    assert bare.exit_code == 0, bare.stderr
    (bare_line,) = read_json_lines(run / "evals.jsonl")
    assert bare_line | {"eval_seconds": line["eval_seconds"]} == line
    assert not (run / "held_out").exists()


def test_one_evaluation_is_said_in_numbers_and_two_are_compared(tmp_path: Path) -> None:
    line = {"step": 0, "eval_accuracy": 0.96875, "eval_mean_response_tokens": 120.25}
    line |= {"eval_samples": 512, "eval_num_wrong": 9, "eval_num_no_answer": 4}
    line |= {"eval_num_unfinished": 3, "eval_verify_timeouts": 0, "eval_verify_errors": 0}
    write_rows(tmp_path / "evals.jsonl", [line])
    (tmp_path / "summary.json").write_text('{"steps": 0}')
    said = describe_run(tmp_path).splitlines()
    assert said[0].split() == ["held-out", "problems", "before", "after", "change"]
    assert said[2].split() == ["mean", "response", "tokens", "120.2"]
    assert said[3].split() == ["accuracy", "96.9", "%"]
    assert said[4] == "held-out: 3 cut off, 9 wrong, 4 no answer, of 512 responses after step 0"
    write_page(tmp_path / "page.html", [tmp_path])
    text = texts_of(tmp_path / "page.html")
    assert "Mean response tokens 120.2 Accuracy 96.9 %" in text and "→" not in text
    assert "Accuracy at step 0: held-out problems 96.9 %" in text
    right = dict.fromkeys((f"eval_{key}" for key in REASONS), 0)
    write_rows(tmp_path / "evals.jsonl", [line, line | right | {"step": 4, "eval_accuracy": 1.0}])
    said = describe_run(tmp_path).splitlines()
    assert said[3].split() == ["accuracy", "96.9", "%", "100.0", "%", "+3.1", "points"]
    after = "; all correct, of 512 responses after step 4"
    assert said[4].endswith(f"9 wrong, 4 no answer, of 512 responses after step 0{after}")
    # A line of an earlier version does not say.
    del line["eval_num_wrong"]
    write_rows(tmp_path / "evals.jsonl", [line])
    assert "512 responses" not in describe_run(tmp_path)


def test_a_metric_of_one_step_is_a_sentence_and_no_chart(tmp_path: Path) -> None:
    one, three = make_run(tmp_path / "one", steps=1), make_run(tmp_path / "three", steps=3)
    top, others = curves_of([read_run(one, "one")])
    drawn = [chart.title for chart in (*top, *others) if isinstance(chart, Chart)]
    # Training and the evaluations before and after have two steps together.
    assert drawn == [
        "Mean response tokens",
        "Accuracy",
        "Mean response tokens, hard",
        "Accuracy, hard",
    ]
    said = [chart for chart in (*top, *others) if not isinstance(chart, Chart)]
    assert "<p>Accepted responses at step 1: 25.0 %</p>" in said
    assert "<p>Seconds by phase at step 1: rollout 2, train 1, step 3.5</p>" in said
    # Beside a run of three steps it is a dot.
    top, others = curves_of([read_run(one, "one"), read_run(three, "three")])
    accepted = top[2]
    assert isinstance(accepted, Chart)
    assert [len(series.points) for series in accepted.series] == [1, 3]
    assert "Seconds by phase: one at step 1: rollout 2" in " ".join(map(str, others))


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [
        ((0, 1), ["0", "1"]),
        ((0, 2), ["0", "1", "2"]),
        ((1, 4), ["1", "2", "3", "4"]),
        ((0, 24), ["0", "5", "10", "15", "20"]),
        ((0.5, 1), ["0.5", "0.6", "0.7", "0.8", "0.9", "1"]),  # no steps
    ],
)
def test_steps_on_an_axis_are_whole(steps: tuple[float, float], ticks: list[str]) -> None:
    points = [(step, 0.5 * step) for step in steps]
    series = Series(label="", style_index=0, points=points)
    axes = Chart(name="c", title="C", y="c", series=[series]).axes()
    assert [*axes.x_ticks.values()] == ticks
