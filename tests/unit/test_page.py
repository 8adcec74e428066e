"""The page of runs and evaluations: what is in it; tests/browser looks at it."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ForkedCli
from made_runs import HARM, made_samples, make_evaluation, make_run, response, write_responses

from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, TokenScores, Verdict
from megatron_opsft.report.page.sampling import rollouts_of, sample_responses
from megatron_opsft.report.page.write import distinct, write_page
from megatron_opsft.run.rollout_log import WrittenResponse, write_rollouts


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall('<script type="application/json" id="data">(.*?)</script>', text)
    data = json.loads(found)
    assert isinstance(data, dict)
    return data


def readable(text: str) -> str:
    """Without what is no Unicode."""
    return text.replace("\udc9f", "?")


def test_everything_of_two_runs_and_an_evaluation(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, lr=lr) for name, lr in (("a", 1e-4), ("b", 2e-4))]
    evaluation = make_evaluation(tmp_path / "eval", "short", 100, 7)
    write_page(tmp_path / "new/page.html", runs, [evaluation])
    data = data_of(tmp_path / "new/page.html")
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["settings"] == ["optimizer.lr"]
    assert [run["settings"]["optimizer.lr"] for run in data["runs"]] == [1e-4, 2e-4]
    one = data["runs"][0]
    assert one["state"] == "finished: 3 steps"
    assert one["metrics"]["loss"] == [1.0, None, pytest.approx(1 / 3)]  # NaN is none
    assert one["evals"]["eval_accuracy"] == [0.5, 0.75]
    rollouts = one["rollouts"]
    assert len(rollouts["rows"]) == rollouts["total"] == 3 * 4 * 3
    assert rollouts["problems"]["p-2"] == [readable(f"What is p-2? {HARM}"), "7"]
    row = dict(zip(rollouts["fields"], rollouts["rows"][-1], strict=True))
    wanted = {"step": 3} | response(3, "p-3", 2)
    wanted["text"] = readable(wanted["text"])
    assert row == {name: wanted[name] for name in rollouts["fields"]}
    metrics = data["evaluations"][0]["blocks"]["gsm8k"]["metrics"]
    assert metrics["accuracy"][0] == pytest.approx(0.7)
    assert metrics["mean_tokens"][0] == pytest.approx(104.5)


def test_texts_cannot_leave_their_place(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", [make_run(tmp_path / "run")], title=HARM[:40])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.lower().count("</script") == 2 == page.lower().count("<script")
    assert "<img" not in page and "<!--" not in page
    # One is the name of a format, the other is in a text.
    assert set(re.findall(r"\w+://[^\s\"'\\]*", page)) == {
        "http://www.w3.org/2000/svg",
        "http://example.invalid/a",
    }


def test_the_page_keeps_its_size_and_its_groups_whole(tmp_path: Path) -> None:
    """Of 30 x 6 groups of 3 with 5 kB each: the same problems in every step, evenly."""
    run = make_run(tmp_path / "run", steps=30, problems=6, words=1000)
    write_page(tmp_path / "page.html", [run], max_mb=0.6)
    assert 0.45e6 < (tmp_path / "page.html").stat().st_size < 0.65e6
    rollouts = data_of(tmp_path / "page.html")["runs"][0]["rollouts"]
    assert rollouts["total"] == 540
    groups: dict[tuple[int, str], int] = {}
    for step, problem, *_ in rollouts["rows"]:
        groups[step, problem] = groups.get((step, problem), 0) + 1
    assert set(groups.values()) == {3}
    # The first problem by hash is in nearly all; a second one where room was left.
    steps = {step for step, _ in groups}
    assert {1, 30, 15} <= steps and len(steps) >= 25
    assert len({problem for _, problem in groups}) <= 2


def test_curves_are_thinned_to_the_size_of_the_page(tmp_path: Path) -> None:
    """First and last step and evaluation stay, and sums are those of all steps."""
    run = make_run(tmp_path / "run", steps=2)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    lines = [line | {"step": n, "loss": n / 7} for n in range(1, 20_001)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    evals = [{"step": n, "eval_accuracy": n / 30_000} for n in range(20_001)]
    (run / "evals.jsonl").write_text("".join(json.dumps(one) + "\n" for one in evals))
    other = make_run(tmp_path / "other")
    write_page(tmp_path / "page.html", [run, other], max_mb=0.5)
    assert (tmp_path / "page.html").stat().st_size < 0.55e6
    shown, small = data_of(tmp_path / "page.html")["runs"]
    steps = shown["metrics"]["step"]
    assert 500 < len(steps) < 2_000 and (steps[0], steps[-1]) == (1, 20_000)
    assert {b - a for a, b in zip(steps[:-2], steps[1:-1], strict=True)} == {steps[1] - steps[0]}
    assert shown["metrics"]["loss"][1] == pytest.approx(steps[1] / 7)
    assert (shown["num_steps"], shown["seconds"]) == (20_000, 70_000)
    assert (shown["evals"]["step"][0], shown["evals"]["step"][-1]) == (0, 20_000)
    assert len(shown["evals"]["step"]) < 3_000
    assert small["metrics"]["step"] == [1, 2, 3]  # what is small stays whole
    assert small["num_steps"] == 3 and len(small["rollouts"]["rows"]) > 0


def test_steps_are_spread_where_a_group_a_step_is_too_much(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=17, problems=1, words=1000)
    found = sample_responses(rollouts_of(run), 5 * 16_500)
    assert sorted({row[0] for row in found["rows"]}) == [1, 5, 9, 13, 17]
    assert found["total"] == 17 * 3


@pytest.mark.parametrize(
    "scores", [None, TokenScores(log_probs=(-0.125, 0.0, -7.5), piece_lengths=(3, 0, 45))]
)
def test_what_a_run_writes_is_read(tmp_path: Path, scores: TokenScores | None) -> None:
    more = [list(scores.log_probs), list(scores.piece_lengths)] if scores else []
    (tmp_path / "rollouts").mkdir()
    text = 'it is [1], "response_ids": [2], or ", "response_ids": [3'
    rollout = Rollout(
        problem_id="né",
        sample_index=4,
        prompt_ids=(1, 2),
        response_ids=(3, 4, 5),
        text=text,
        finish_reason=FinishReason.STOP,
        weight_version=0,
    )
    verdict = Verdict(outcome=Outcome.WRONG, answer="2")
    problem = Problem(id="né", text="2 + 0 = ?", answer="2")
    row = WrittenResponse(
        rollout=rollout, verdict=verdict, reward=0.5, advantage=-0.5, scores=scores
    )
    write_rollouts(tmp_path / "rollouts/step_000007_rank_0003.jsonl.gz", [(problem, row)])
    found = sample_responses(rollouts_of(tmp_path), 10_000)
    assert found["rows"] == [[7, "né", 4, "wrong", "2", 0.5, -0.5, "stop", 3, text, *more]]
    assert found["problems"] == {"né": ["2 + 0 = ?", "2"]}


def test_problems_whose_ids_have_quotes_are_told_apart(tmp_path: Path) -> None:
    """Ids as they may be, and room for all: every response, with its problem's own text."""
    (tmp_path / "rollouts").mkdir()
    ids = ['a"0', 'a"1', "a\\", 'a\\"', 'b", "problem_id": "c', "c", "", "\u2028\udc9f", "é"]
    rows = [response(1, problem_id, sample) for problem_id in ids for sample in range(2)]
    write_responses(tmp_path / "rollouts/step_000001.jsonl.gz", rows)
    found = sample_responses(rollouts_of(tmp_path), 1_000_000)
    assert [row[1:3] for row in found["rows"]] == [[i, n] for i in sorted(ids) for n in range(2)]
    assert {i: text for i, (text, _) in found["problems"].items()} == {
        problem_id: f"What is {problem_id}? {HARM}" for problem_id in ids
    }


def test_a_crashed_run_opens(tmp_path: Path) -> None:
    """Metrics torn in a line, a torn file of responses, no evaluation, no summary."""
    run = make_run(tmp_path / "run", finished=False)
    (run / "evals.jsonl").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    rows = [response(4, f"p-{n}", 0, words=n * 3000) for n in range(9)]
    write_responses(run / "rollouts/step_000004.jsonl.gz", rows)
    whole = (run / "rollouts/step_000004.jsonl.gz").read_bytes()
    (run / "rollouts/step_000004.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    write_page(tmp_path / "page.html", [run])
    shown = data_of(tmp_path / "page.html")["runs"][0]
    assert shown["state"] == "not finished: 3 of 3 steps"
    assert shown["evals"] == {}
    steps = [row[0] for row in shown["rollouts"]["rows"]]
    assert steps.count(3) == 12 and 0 < steps.count(4) < 9


def test_the_last_failed_step_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", finished=False)
    (run / "failed_step_000004.json").write_text("{}")
    write_page(tmp_path / "page.html", [run])
    state = data_of(tmp_path / "page.html")["runs"][0]["state"]
    assert state == "failed: the loss of step 4 was not finite"


def test_a_run_that_has_only_begun_opens(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {steps: 9, start: 2026-01-01}\n")
    write_page(tmp_path / "page.html", [tmp_path])
    (shown,) = data_of(tmp_path / "page.html")["runs"]
    assert shown["state"].startswith("not finished: 0 of 9 steps")
    assert shown["settings"] == {"run.steps": 9, "run.start": "2026-01-01"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: write_page(path / "page.html", []), "no run and no evaluation"),
        (lambda path: write_page(path / "page.html", [path]), "neither a run nor an evaluation"),
        (lambda path: write_page(path, [path]), "is a directory"),
        (lambda path: write_page(path / "p", [path], max_mb=0), "--max-mb 0: must be above 0"),
        (lambda path: write_page(path / "p", [], [path]), "results.json: not found"),
    ],
)
def test_errors(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        make(tmp_path)


def test_report_writes_the_page(cli: ForkedCli, tmp_path: Path) -> None:
    """One path: in its directory; several: here, or where --html says."""
    run = make_run(tmp_path / "run")
    evaluation = make_evaluation(tmp_path / "eval", "model", 100, 7)
    alone = cli.run(["report", run])
    assert alone.exit_code == 0 and f"page: {run}/report.html" in alone.stdout
    assert [shown["name"] for shown in data_of(run / "report.html")["runs"]] == ["run"]
    page = tmp_path / "new/both.html"
    both = cli.run(["report", run, evaluation, "--html", page, "--max-mb", "0.02"])
    assert both.exit_code == 0 and "model  70.0 [" in both.stdout
    data = data_of(page)
    assert [shown["name"] for shown in data["evaluations"]] == ["model"]
    assert 0 < len(data["runs"][0]["rollouts"]["rows"]) < 36


def test_an_evaluation_is_reported_with_its_baseline(cli: ForkedCli, tmp_path: Path) -> None:
    """Where the samples are that it was compared with: a row, a point; else it is named."""
    old = made_samples("old", 200, 6)
    out = make_evaluation(tmp_path / "eval", "new", 100, 7, baseline=old)
    make_evaluation(out / "baseline", "old", 200, 6)
    said = cli.run(["report", out]).stdout
    assert [line.split()[:2] for line in said.splitlines()[1:3]] == [
        ["GSM8K", "old"],
        ["new", "70.0"],
    ]
    assert [one["name"] for one in data_of(out / "report.html")["evaluations"]] == ["old", "new"]
    assert "which has no row" not in said
    make_evaluation(out / "baseline", "old", 300, 6)  # evaluated again
    said = cli.run(["report", out]).stdout
    assert "CR: to the tokens of old, which has no row" in said
    (only,) = data_of(out / "report.html")["evaluations"]
    assert (only["name"], only["baseline"]) == ("new", "old")


def test_overall_values_of_other_benchmarks_are_not_drawn_together(tmp_path: Path) -> None:
    evaluations = [
        make_evaluation(tmp_path / name, name, 100, 7, benchmark=name)
        for name in ("gsm8k", "amc23")
    ]
    write_page(tmp_path / "p", [], evaluations)
    blocks = [list(one["blocks"]) for one in data_of(tmp_path / "p")["evaluations"]]
    assert blocks == [["gsm8k", "overall of gsm8k"], ["amc23", "overall of amc23"]]
    write_page(tmp_path / "p", [], evaluations[:1] * 2)
    blocks = [list(one["blocks"]) for one in data_of(tmp_path / "p")["evaluations"]]
    assert blocks == [["gsm8k", "overall"]] * 2


def test_no_file_is_replaced_without_overwrite(cli: ForkedCli, tmp_path: Path) -> None:
    """But for the page of a run in its own directory, which is written again."""
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("report.html", "mine.html", "mine.svg"):
        (here / name).write_text("mine")
    inside = f"import os; os.chdir({str(here)!r})"
    for words, file in (
        ([a, b], "report.html"),
        ([a, b, "--html", "mine.html"], "mine.html"),
        ([a, "--figure", "mine.svg"], "mine.svg"),
    ):
        ended = cli.run(["report", *words], prelude=inside)
        assert ended.exit_code == 2 and ended.stdout == ""
        assert f"error: report: {file} exists; name another file" in ended.stderr
        assert (here / file).read_text() == "mine"
    assert cli.run(["report", a, b, "--overwrite"], prelude=inside).exit_code == 0
    assert len(data_of(here / "report.html")["runs"]) == 2
    for _ in range(2):
        assert cli.run(["report", a], prelude=inside).exit_code == 0


def test_names_tell_directories_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/seed_0/run", "a/seed_1/run", "b/seed_0/run")]
    assert distinct(paths) == ["a/seed_0/run", "a/seed_1/run", "b/seed_0/run"]
    assert distinct(paths[:2]) == ["seed_0/run", "seed_1/run"]
    assert distinct([paths[0], paths[0]]) == ["run", "run"]
    evaluations = [make_evaluation(path, "model", 100, 7) for path in paths[:2]]
    write_page(tmp_path / "p", [], evaluations)
    data = data_of(tmp_path / "p")
    names = ["model (seed_0/run)", "model (seed_1/run)"]
    assert [shown["name"] for shown in data["evaluations"]] == names
    assert data["title"] == ", ".join(names)


def test_samples_of_an_evaluation_are_read(tmp_path: Path) -> None:
    write_page(tmp_path / "p", [], [make_evaluation(tmp_path / "eval", "model", 100, 7)])
    rollouts = data_of(tmp_path / "p")["evaluations"][0]["rollouts"]
    wanted = ["gsm8k", "p7", 1, "wrong", "7", None, None, "stop", 107, "model says 7"]
    assert wanted in rollouts["rows"]
    assert len(rollouts["rows"]) == rollouts["total"] == 20
    assert rollouts["problems"]["p7"] == [None, "8"]


def test_damaged_results_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"benchmarks": []}')
    with pytest.raises(UserError, match="not the results of an evaluation"):
        write_page(tmp_path / "p", [], [tmp_path])


def test_the_same_run_gives_the_same_responses(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6, problems=8, words=300)
    first = sample_responses(rollouts_of(run), 60_000)
    path = run / "rollouts/step_000002.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(lines[::-1])))
    assert sample_responses(rollouts_of(run), 60_000) == first
    assert 0 < len(first["rows"]) < first["total"] == 6 * 8 * 3
