"""Differences with their intervals, as pages, terminals and model cards name them."""

import json
from pathlib import Path

import pytest
from made_runs import make_run
from rows import write_rows

from megatron_opsft.commands.report.page import changes_between_rows, write_page
from megatron_opsft.commands.report.runs import (
    change_of,
    changes_of,
    describe_run,
    read_run,
    table_of_changes,
    warn_of_held_out,
)
from megatron_opsft.commands.report.table import (
    Estimate,
    MeanOverSeeds,
    Size,
    TableRow,
)
from megatron_opsft.run.run_files import read_json_lines
from megatron_opsft.runtime.formatting import count_of
from megatron_opsft.runtime.intervals import (
    describe_evidence,
    interval_of_points,
    share_interval,
    share_margin,
)


def test_the_margin_of_6_and_7_of_12_is_that_of_7_and_8_of_14() -> None:
    """Agresti and Caffo add one success and one failure to each side."""
    by_hand = 1.96 * ((7 / 14 * 7 / 14 + 8 / 14 * 6 / 14) / 14) ** 0.5
    assert (
        share_margin(6 / 12, 12, 7 / 12, 12)
        == pytest.approx(by_hand)
        == pytest.approx(0.3685, 1e-3)
    )
    assert share_margin(0.5, 1200, 0.5, 1200) < by_hand / 9


def test_evidence_says_in_words_what_an_interval_means() -> None:
    assert describe_evidence("", "", holds_zero=False) == ""
    assert describe_evidence("9 problems", "", holds_zero=False) == "n = 9 problems"
    said = "95 % interval -1.0 to +2.0 points; it holds 0, so this may be chance"
    assert describe_evidence("", "-1.0 to +2.0 points", holds_zero=True) == said


def test_a_change_of_tokens_has_its_interval_in_percent_of_before() -> None:
    change = change_of("t", 200.0, 100.0, is_share=False, interval=(-110.0, -90.0))
    assert change.interval == "-55.0 to -45.0 %" and change.judgement == "better"
    assert change_of("t", 1.0, 2.0, is_share=False, interval=(-1.0, 3.0)).judgement == "unclear"
    assert change_of("t", 0.0, 2.0, is_share=False, interval=(-1.0, 3.0)).interval == ""


@pytest.mark.parametrize(
    ("before", "after", "interval"),
    [
        (0.992, 0.0, "-99.2 to -96.6"),  # -101.8 by the formula
        (0.0, 0.992, "+96.6 to +100.0"),
        (1.0, 0.98, "-5.2 to +0.0"),
        (0.5, 0.5, "-12.2 to +12.2"),
    ],
)
def test_an_interval_of_accuracies_stays_within_what_can_be_lost_and_gained(
    before: float, after: float, interval: str
) -> None:
    low, high = share_interval(before, 128, after, 128)
    assert interval_of_points(before, low, high) == f"{interval} points"
    change = change_of("Accuracy", before, after, is_share=True, interval=(low, high))
    assert change.interval == f"{interval} points"
    assert change.holds_zero == (low <= 0 <= high)


@pytest.mark.parametrize(
    ("values", "noun", "text"),
    [
        ([1], "step", "1 step"),
        ([0], "step", "0 steps"),
        ([1200], "step", "1,200 steps"),
        ([1, 1], "response", "1 response"),
        ([1, 4], "response", "1–4 responses"),
        ([1], "", "1"),
    ],
)
def test_a_noun_behind_numbers_is_singular_for_one_alone(
    values: list[int], noun: str, text: str
) -> None:
    assert count_of(values, noun) == text


def test_a_report_says_in_words_that_the_model_got_worse(tmp_path: Path) -> None:
    said = "THE MODEL GOT WORSE: held-out accuracy fell from 75.0 % to 50.0 %, more than chance"
    run = measured_run(tmp_path / "run", 1200)
    assert "GOT WORSE" not in describe_run(run)
    lines = read_json_lines(run / "evals.jsonl")
    swapped = [
        line | {"eval_accuracy": other["eval_accuracy"]}
        for line, other in zip(lines, reversed(lines), strict=True)
    ]
    write_rows(run / "evals.jsonl", swapped)
    assert f"\n{said}\n" in describe_run(run) + "\n"
    write_page(tmp_path / "page.html", [run])
    assert f"finished: 3 steps. <b>{said}</b>" in (tmp_path / "page.html").read_text()
    # Of 12 samples it may be chance, and nobody counted those of an early version.
    for samples in (12, None):
        few = [line | {"eval_samples": samples} for line in swapped]
        write_rows(run / "evals.jsonl", few)
        assert "GOT WORSE" not in describe_run(run)


def measured_run(path: Path, samples: int) -> Path:
    """A run whose accuracy rises from 50 to 75 %."""
    run = make_run(path)
    lines = read_json_lines(run / "evals.jsonl")
    write_rows(run / "evals.jsonl", [line | {"eval_samples": samples} for line in lines])
    return run


def test_few_samples_are_never_a_gain_alone(tmp_path: Path) -> None:
    few, many = (measured_run(tmp_path / str(n), n) for n in (12, 1200))
    tokens, accuracy, *hard = changes_of(read_run(few, "few"))
    assert tokens.evidence == "n = 12 responses at each end"
    interval = "-10.3 to +50.0 points"  # of 60.3 by the formula: there is no more to gain
    evidence = f"n = 12 responses at each end; 95 % interval {interval}; it holds 0, so this"
    assert accuracy.evidence == f"{evidence} may be chance" and accuracy.judgement == "unclear"
    assert [change.evidence for change in hard] == ["", ""]  # nobody counted them
    assert f"Accuracy: +25.0 points; {evidence} may be chance" in describe_run(few)
    assert f"accuracy: {accuracy.evidence}" in table_of_changes(read_run(few, "few")).note
    write_page(tmp_path / "page.html", [few])
    page = (tmp_path / "page.html").read_text()
    assert '<span class="unclear">+25.0 points</span>' in page
    assert f'<p class="note">{accuracy.evidence}</p>' in page
    _, sure, *_ = changes_of(read_run(many, "many"))
    assert sure.interval == "+21.3 to +28.7 points" and sure.judgement == "better"
    write_page(tmp_path / "both.html", [few, many])
    assert f"(+25.0 points; {evidence} may be chance)" in (tmp_path / "both.html").read_text()


def test_runs_with_other_held_out_problems_are_marked_at_the_top(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b", "c", "unknown")]
    for run, problems in zip(runs, ("1", "1", "2"), strict=False):
        hashes = {"eval": problems, "hard": "9"}
        manifest = {"identity": {"held_out_sha256": hashes}}
        (run / "manifest.json").write_text(json.dumps(manifest))
    said = (
        "Do not compare these runs' accuracies and lengths: different held-out problems: a, b | c."
    )
    assert warn_of_held_out([read_run(run, run.name) for run in runs]) == said
    assert warn_of_held_out([read_run(run, run.name) for run in runs[:2]]) == ""
    write_page(tmp_path / "page.html", runs)
    page = (tmp_path / "page.html").read_text()
    escaped = said.replace("'", "&#39;")
    assert page.index(escaped) < page.index("<table")


def row_of(label: str, accuracy: Estimate, tokens: Estimate, **more: object) -> TableRow:
    blocks = {"overall": {"accuracy": accuracy, "mean_tokens": tokens}}
    sizes = {"overall": Size(problems=10, samples=[2])}
    return TableRow(label=label, blocks=blocks, sizes=sizes, **more)  # type: ignore[arg-type]


def test_rows_have_the_paired_interval_or_that_of_independent_ones() -> None:
    base = row_of(
        "base",
        Estimate(value=0.5, low=0.2, high=0.8),
        Estimate(value=200.0, low=190.0, high=210.0),
    )
    accuracy = Estimate(value=0.6, low=0.2, high=1.0)
    tokens = Estimate(value=100.0, low=100.0, high=100.0)
    lengths, shares = changes_between_rows(base, row_of("new", accuracy, tokens), "overall")
    assert lengths.interval == "-55.0 to -45.0 %" and lengths.judgement == "better"
    # 0.3 and 0.4 make 0.5: up to 0.6, which is more than there is to gain.
    assert shares.interval == "-40.0 to +50.0 points"
    assert shares.n == "10 problems × 2 responses" and shares.judgement == "unclear"
    paired = {"overall": {"accuracy": Estimate(value=0.1, low=0.05, high=0.15)}}
    _, shares = changes_between_rows(
        base, row_of("new", accuracy, tokens, differences=paired), "overall"
    )
    assert shares.interval == "+5.0 to +15.0 points" and shares.judgement == "better"
    seeds = row_of("new", MeanOverSeeds(value=0.6, deviation=0.1), tokens, seeds=3)
    _, shares = changes_between_rows(base, seeds, "overall")
    half = 100 * (0.3**2 + (1.96 * 0.1) ** 2) ** 0.5
    assert shares.interval == f"{10 - half:+.1f} to {10 + half:+.1f} points"
    assert shares.n == "10 problems × 2 responses / 10 problems × 2 responses × 3 seeds"
    bare = row_of("new", Estimate(value=0.6), Estimate(value=100.0))
    assert [change.interval for change in changes_between_rows(base, bare, "overall")] == ["", ""]
