"""The figure and the before/after table of a run."""

import json
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.report.curves import before_after_table, plot_run, read_summary

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
