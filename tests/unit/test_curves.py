"""The figure and the before/after table of a run."""

import json
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.report.before_after import before_and_after
from megatron_opsft.report.curves import before_after_table, plot_run, read_summary
from megatron_opsft.report.differences import compare_runs
from megatron_opsft.report.lines import read_json_lines
from megatron_opsft.report.runs import describe_run, report_runs

SUMMARY = {
    "base": {"accuracy": 0.961, "mean_response_tokens": 120.0},
    "final": {"accuracy": 0.958, "mean_response_tokens": 30.0},
    "steps": 40,
    "seconds": 61.7,
    "config_hash": "abc123",
}


def _write_run(directory: Path, evals_in_metrics: bool = False) -> Path:
    steps = [
        {"step": n, "mean_response_tokens": 120.0 - 2 * n, "accuracy": 0.95} for n in range(1, 41)
    ]
    evals = [
        {"step": n, "eval_accuracy": 0.96, "eval_mean_response_tokens": 120.0 - 2 * n}
        for n in (0, 40)
    ]
    if evals_in_metrics:
        steps, evals = [evals[0], *steps[:-1], steps[-1] | evals[1]], []
    for name, rows in (("metrics.jsonl", steps), ("evals.jsonl", evals)):
        if rows:
            (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.mark.parametrize("evals_in_metrics", [False, True])
def test_png_and_svg(tmp_path: Path, evals_in_metrics: bool) -> None:
    run = _write_run(tmp_path, evals_in_metrics)
    plot_run(run, tmp_path / "figures" / "curves.png")
    assert (tmp_path / "figures" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    plot_run(run, tmp_path / "a.svg")
    plot_run(run, tmp_path / "b.svg")
    svg = (tmp_path / "a.svg").read_bytes()
    assert b"</svg>" in svg
    assert svg == (tmp_path / "b.svg").read_bytes()


def test_a_torn_last_line_does_not_stop_the_figure(tmp_path: Path) -> None:
    run = _write_run(tmp_path)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "mean_resp')
    plot_run(run, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        plot_run(tmp_path, tmp_path / "curves.png")
    with pytest.raises(UserError, match=r"curves\.bmp: the suffix"):
        plot_run(_write_run(tmp_path), tmp_path / "curves.bmp")
    with pytest.raises(UserError, match=r"summary\.json: not found"):
        read_summary(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("null", "not a JSON object but null"),
        ('{"step": 41, "accu', "not a line of JSON"),
        ("\0\0\0\0", "not a line of JSON"),
        ('{"accuracy": 0.9}', "step is null, no number"),
        ('{"step": "41"}', 'step is "41", no number'),
        ('{"step": 41, "accuracy": "high"}', 'accuracy is "high", no number'),
        ('{"step": 41, "eval_accuracy": [1]}', r"eval_accuracy is \[1\], no number"),
    ],
)
def test_a_damaged_line_is_named_with_its_file(tmp_path: Path, line: str, message: str) -> None:
    run = _write_run(tmp_path)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(line + "\n" + '{"step": 42}\n')
    with pytest.raises(UserError, match=rf"metrics\.jsonl:41: {message}; restore"):
        plot_run(run, tmp_path / "curves.png")


def test_what_a_step_has_no_number_for_is_left_out(tmp_path: Path) -> None:
    run = _write_run(tmp_path)
    plot_run(run, tmp_path / "before.svg")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "accuracy": null, "mean_response_tokens": null}\n')
    with open(run / "evals.jsonl", "a") as file:
        file.write('{"step": 40, "eval_accuracy": null}\n')
    plot_run(run, tmp_path / "after.svg")
    assert (tmp_path / "after.svg").read_bytes() == (tmp_path / "before.svg").read_bytes()


def test_a_torn_last_line_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert read_json_lines(path, required=["loss"]) == [{"step": 1, "loss": 0.5}]
    assert [r.message for r in caplog.records] == [
        f"{path}: the last line is torn, as by a kill; it is left out"
    ]


def test_a_line_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "eval_accuracy": 0.5}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: no loss; restore the file"):
        read_json_lines(path, required=["loss"])


def test_two_runs_are_compared_without_what_a_kill_left(tmp_path: Path) -> None:
    for name, torn in (("one", ""), ("other", '{"step": 41, "mean_resp')):
        (tmp_path / name).mkdir()
        with open(_write_run(tmp_path / name) / "metrics.jsonl", "a") as file:
            file.write(torn)
    assert compare_runs(tmp_path / "one", tmp_path / "other") == []
    (tmp_path / "other/evals.jsonl").write_text("null\n")
    with pytest.raises(UserError, match=r"other/evals\.jsonl:1: not a JSON object but null"):
        compare_runs(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize(
    "text", ["", "null", "{", '{"base": null}', json.dumps(SUMMARY | {"seconds": "x"})]
)
def test_a_damaged_summary_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json: not the summary of a run; restore it"):
        read_summary(tmp_path)


def test_before_after_table(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    table = before_after_table(read_summary(tmp_path))
    tokens, accuracy, footer = table.splitlines()[-3:]
    assert tokens.split() == ["mean", "response", "tokens", "120.0", "30.0", "-75.0", "%"]
    assert accuracy.split() == ["accuracy", "96.1", "%", "95.8", "%", "-0.3", "points"]
    assert footer == "40 steps in 62 s, config abc123"
    assert all(line.isprintable() for line in table.splitlines())


def test_table_of_a_run_without_evaluation() -> None:
    empty = {"accuracy": None, "mean_response_tokens": None}
    table = before_after_table(SUMMARY | {"base": empty, "final": empty})
    assert table.splitlines()[-2].split() == ["accuracy", "-", "-", "-"]


def test_a_run_that_is_not_finished_has_a_table_up_to_its_last_evaluation(tmp_path: Path) -> None:
    lines = [
        {"step": n, "num_accepted": n - 1, "num_rollouts": 8, "step_seconds": 2.0} for n in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = describe_run(tmp_path)
    assert "2 steps in 4 s, config unknown" in table
    assert "1 of 2 steps accepted no response" in table
    assert "not finished: continue with --resume" in table
    (tmp_path / "failed_step_000003.json").touch()
    assert str(tmp_path / "failed_step_000003.json") in describe_run(tmp_path)
    evals = [
        {"step": n, "eval_accuracy": 0.5, "eval_mean_response_tokens": 100.0 - 20 * n}
        for n in (0, 1)
    ]
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    assert "-20.0 %" in describe_run(tmp_path)


def test_skipped_steps_of_a_finished_run_are_in_its_table() -> None:
    assert "NOTHING WAS LEARNED" in before_after_table(SUMMARY | {"skipped_steps": 40})


def test_more_sets_and_the_best_evaluation_are_in_the_table() -> None:
    ends = {"base": SUMMARY["base"], "final": SUMMARY["final"]}
    best = {"step": 30, "accuracy": 0.961, "mean_response_tokens": 28.0, "samples": 8}
    table = before_after_table(SUMMARY | {"more": {"aime": ends}, "best": best})
    assert "aime: mean response tokens" in table and table.count("-75.0 %") == 2
    said = "best evaluation: after step 30, 28.0 tokens, accuracy 96.1 %"
    assert table.splitlines()[-1] == said
    assert "best" not in before_after_table(SUMMARY | {"best": best | {"step": SUMMARY["steps"]}})


def test_before_and_after_of_each_set() -> None:
    first = {"step": 0, "eval_accuracy": 0.5, "eval_mean_response_tokens": 9.0, "eval_samples": 4}
    aime = {"eval_aime_accuracy": 0.1, "eval_aime_mean_response_tokens": 7.0}
    found = before_and_after([first | aime, first | {"step": 4, "eval_aime_accuracy": 0.2}])
    assert found["base"] == {"accuracy": 0.5, "mean_response_tokens": 9.0, "samples": 4}
    assert found["more"]["aime"]["base"]["accuracy"] == 0.1
    assert found["more"]["aime"]["final"]["accuracy"] == 0.2
    assert before_and_after([])["final"]["accuracy"] is None


def test_report_of_finished_failed_and_foreign_directories(tmp_path: Path) -> None:
    """Each that can be read is shown; the others are named, and are an error at the end."""
    done, begun, foreign = (tmp_path / name for name in ("done", "begun", "foreign"))
    for directory in (done, begun, foreign):
        directory.mkdir()
    (done / "summary.json").write_text(json.dumps(SUMMARY))
    line = {"step": 1, "accuracy": 0.5, "mean_response_tokens": 9.0}
    (done / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (begun / "manifest.json").write_text('{"config_hash": "abc"}')  # killed before its first step
    said: list[str] = []
    unread = report_runs([begun, foreign, done], None, said.append)
    assert list(unread) == [foreign]
    assert said[0].startswith(f"{begun}:\n") and "figure" not in said[0]
    assert "0 steps in 0 s, config abc" in said[0] and "not finished: continue" in said[0]
    assert said[1] == f"{foreign}:\nnot read: {foreign}: no run there"
    assert said[2].endswith(f"figure: {done / 'curves.png'}")
    assert (done / "curves.png").is_file() and not (begun / "curves.png").exists()
    with pytest.raises(UserError, match="foreign: no run there"):
        report_runs([foreign], None, said.append)
