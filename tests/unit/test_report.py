"""`report`: the page of runs and evaluations, at which tests/browser looks, and the tables."""

import gzip
import html
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from eval_samples import made_model
from forked_cli import ForkedCli
from made_runs import HARM, make_evaluation, make_run, response, write_report, write_responses
from rows import write_rows

from megatron_opsft.commands.report.page import distinct, write_page
from megatron_opsft.commands.report.runs import change_of, describe_run
from megatron_opsft.commands.report.sampling import rollouts_of, sample_responses
from megatron_opsft.errors import UserError
from megatron_opsft.run.run_files import read_json_lines
from megatron_opsft.runtime.durable import write_packed_lines
from megatron_opsft.runtime.formatting import number


def data_of(page: Path) -> list[dict[str, Any]]:
    """Name and responses of each run and evaluation."""
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall('<script type="application/json" id="data">(.*?)</script>', text)
    runs = json.loads(found)["runs"]
    assert isinstance(runs, list)
    return runs


def names_of(page: Path) -> list[str]:
    return [one["name"] for one in data_of(page)]


def texts_of(page: Path) -> str:
    """What is seen without JavaScript, one space between texts."""
    text = page.read_text(encoding="utf-8").split("<main>")[1].split("</main>")[0]
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def test_everything_of_two_runs_and_an_evaluation(tmp_path: Path) -> None:
    """Texts that mean harm stay texts."""
    page = tmp_path / "new/page.html"
    runs = [make_run(tmp_path / name, lr=lr) for name, lr in (("a", 1e-4), ("b", 2e-4))]
    write_report(page, [make_evaluation(tmp_path / "eval", "short", 100, 7)], runs)
    text, source = texts_of(page), page.read_text(encoding="utf-8")
    both = "finished: 3 steps 80.0 to 77.0 (-3.7 %) 50.0 % to 75.0 % (+25.0 points) 25.0 % 3.5"
    assert f"a {both} b {both}" in text
    assert "Settings that differ setting a b optimizer.lr 0.0001 0.0002 All settings" in text
    assert "GSM8K: 10 problems, N = 2" in text
    assert re.search(r"short 70\.0 \[\S+, \S+\] 70\.0 \[\S+, \S+\] 104 \[", text)
    said = "b 40.0 % at step 1 to 60.0 % at step 3; b, held-out 50.0 % at step 0 to 75.0 %"
    assert f"{said} at step 3" in source and "<title>a, held-out, step 0: 50.0 %</title>" in source
    assert "Accuracy, hard: a, held-out 25.0 % at step 0 to 37.5 %" in source
    assert source.lower().count("</script") == 2 == source.lower().count("<script")
    assert "<img" not in source and "<!--" not in source
    assert names_of(page) == ["a", "b", "evaluation of short"]
    rollouts, _, samples = (one["rollouts"] for one in data_of(page))
    assert len(rollouts["rows"]) == rollouts["total"] == 3 * 4 * 3
    harm = HARM.replace("\udc9f", "?")  # what is no Unicode
    assert rollouts["problems"]["p-2"] == [f"What is p-2? {harm}", "7"]
    wanted = {"step": 3} | response(3, "p-3", 2)
    wanted["text"] = wanted["text"].replace("\udc9f", "?")
    assert rollouts["rows"][-1] == [wanted[name] for name in rollouts["fields"]]
    row = ["gsm8k", "p7", 1, "wrong", "7", None, None, "stop", 107, "short says 7"]
    assert row in samples["rows"] and samples["problems"]["gsm8k/p7"] == [None, "8"]
    assert len(samples["rows"]) == samples["total"] == 20


def test_before_and_after_are_the_first_thing(tmp_path: Path) -> None:
    """Of a run its evaluations, or else its rollouts; of evaluations the first and the last."""
    run, page = make_run(tmp_path / "run"), tmp_path / "page.html"
    write_page(page, [run])
    text = texts_of(page)
    told = "Mean response tokens 80.0 → 77.0 -3.7 % Accuracy 50.0 % → 75.0 % +25.0 points"
    assert text.startswith(f"finished: 3 steps {told} Mean response tokens, hard")
    problem = re.escape(HARM.replace("\udc9f", "?").replace("\u2028", " "))
    assert re.search(
        rf"A problem, before and after What is p-2\? {problem} \(answer: 7\) "
        "Before: correct , 100 tokens correct in step 1",
        text,
    )
    assert "After: correct , 33 tokens" in text
    (run / "evals.jsonl").unlink()
    write_page(page, [run])
    assert "Mean response tokens in training 100.0 → 33.3 -66.7 %" in texts_of(page)
    models = [make_evaluation(tmp_path / n, n, t, 6) for n, t in (("long", 300), ("short", 100))]
    write_report(page, models)
    text, source = texts_of(page), page.read_text()
    assert "Mean response tokens, long to short 304.5 → 104.5 -65.7 %" in text
    assert "Before: correct , 30" in text and "After: correct , 10" in text
    (scatter,) = re.findall("(?s)<figcaption>Accuracy against .*?</svg>", source)
    assert scatter.count("<circle") == 2 and scatter.count("whisker") == 4  # both ways
    assert source.count("<figure>") == 1 + 1 + 3  # lengths, points and three curves


def test_the_page_keeps_its_size_and_its_groups_whole(tmp_path: Path) -> None:
    """Of 30 x 6 groups of 3 with 5 kB each: the same problems in every step, evenly."""
    run = make_run(tmp_path / "run", steps=30, problems=6, words=1000)
    write_page(tmp_path / "page.html", [run], max_mb=0.6)
    assert 0.45e6 < (tmp_path / "page.html").stat().st_size < 0.65e6
    rollouts = data_of(tmp_path / "page.html")[0]["rollouts"]
    assert rollouts["total"] == 540
    groups = Counter((step, problem) for step, problem, *_ in rollouts["rows"])
    assert set(groups.values()) == {3}
    # The first problem by hash is in nearly all; a second one where room was left.
    steps = {step for step, _ in groups}
    assert {1, 30, 15} <= steps and len(steps) >= 25
    assert len({problem for _, problem in groups}) <= 2
    first, path = sample_responses(rollouts_of(run), 400_000), rollouts_of(run)[2][0]
    lines = gzip.decompress(path.read_bytes()).splitlines(True)
    path.write_bytes(gzip.compress(b"".join(lines[::-1])))
    assert sample_responses(rollouts_of(run), 400_000) == first  # the same run, the same responses
    # Where a group a step is too much.
    found = sample_responses({n: paths for n, paths in rollouts_of(run).items() if n < 18}, 82_500)
    assert sorted({row[0] for row in found["rows"]}) == [1, 5, 9, 13, 17]


def test_curves_are_thinned_to_what_is_seen(tmp_path: Path) -> None:
    """First and last step stay, and what is small stays whole."""
    run = make_run(tmp_path / "run", steps=2)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    lines = [line | {"step": n, "loss": n / 7} for n in range(1, 20_001)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    other = make_run(tmp_path / "other")
    write_page(tmp_path / "page.html", [run, other], max_mb=0.5)
    assert (tmp_path / "page.html").stat().st_size < 0.55e6
    text = (tmp_path / "page.html").read_text()
    (loss,) = re.findall("(?s)<figcaption>Loss</figcaption>.*?</svg>", text)
    assert 'aria-label="Loss: run 0.143 at step 1 to 2,857 at step 20,000; other 1 at' in loss
    long, short = re.findall(' d="([^"]*)"', loss)
    assert 300 < long.count("L") <= 400 and short.count("L") == 1  # NaN is none
    assert all(len(run["rollouts"]["rows"]) > 0 for run in data_of(tmp_path / "page.html"))


def test_what_a_run_writes_is_read_and_ids_with_quotes_are_told_apart(tmp_path: Path) -> None:
    """Ids as they may be, and room for all: every response, with its problem's own text."""
    ids = ['a"0', 'a"1', "a\\", 'a\\"', 'b", "problem_id": "c', "c", "", "\u2028", "né"]
    more = {"log_probs": [-0.125, 0.0, -7.5], "piece_lengths": [3, 0, 45]}
    more["text"] = 'it is [1], "problem_id": "no", or ", "problem_id": "x"'
    lines = [
        {"step": 50} | response(50, i, n) | {"problem": f"What is {i}?"} | more
        for i in ids
        for n in range(2)
    ]
    facts = "response_ids", "weight_version", "num_prompt_tokens", "reward", "advantage"
    assert [lines[0][name] for name in facts] == [(0, 1), 7, 1, 1.0, 0.5]
    (tmp_path / "rollouts").mkdir()
    write_packed_lines(tmp_path / "rollouts/step_000050_rank_0003.jsonl.gz", lines, level=1)
    found = sample_responses(rollouts_of(tmp_path), 1_000_000)
    lines.sort(key=lambda line: (line["problem_id"], line["sample_index"]))
    assert found["rows"] == [[line[name] for name in found["fields"]] for line in lines]
    assert found["fields"][-2:] == ("log_probs", "piece_lengths")
    assert found["problems"] == {i: [f"What is {i}?", "7"] for i in ids}


def test_a_crashed_run_opens(tmp_path: Path) -> None:
    """Metrics torn in a line, a torn file of responses, no evaluation, no summary."""
    run = make_run(tmp_path / "run", finished=False)
    (run / "evals.jsonl").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    path = run / "rollouts/step_000004.jsonl.gz"
    write_responses(path, [response(4, f"p-{n}", 0, words=n * 3000) for n in range(9)])
    os.truncate(path, path.stat().st_size // 2)
    write_page(tmp_path / "page.html", [run])
    assert texts_of(tmp_path / "page.html").startswith("not finished: 3 of 3 steps")
    steps = [row[0] for row in data_of(tmp_path / "page.html")[0]["rollouts"]["rows"]]
    assert steps.count(3) == 12 and 0 < steps.count(4) < 9
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text("run: {steps: 9, start: 2026-01-01}\n")
    write_page(tmp_path / "page.html", [begun])
    text = texts_of(tmp_path / "page.html")
    assert text.startswith("not finished: 0 of 9 steps") and "run.start 2026-01-01" in text


def test_report_writes_the_page(cli: ForkedCli, tmp_path: Path) -> None:
    """Of one path in its directory, of several where --html says; a baseline comes along."""
    run, old = make_run(tmp_path / "run"), made_model("old", 200, 6)
    evaluation = make_evaluation(tmp_path / "eval", "new", 100, 7, old)
    make_evaluation(evaluation / "baseline", "old", 200, 6)
    said = cli.run(["report", evaluation]).stdout.splitlines()
    assert [line.split()[:2] for line in said[1:3]] == [["GSM8K", "old"], ["new", "70.0"]]
    compared = cli.run(["eval", "compare", evaluation, f"--out={tmp_path / 'compared'}"])
    assert compared.stdout.splitlines()[1:3] == said[1:3]
    models = ["evaluation of old", "evaluation of new"]
    assert names_of(evaluation / "report.html") == models
    page = tmp_path / "p"
    both = cli.run(["report", run, evaluation, "--html", page, "--max-mb", "0.08"])
    assert both.exit_code == 0 and "new  70.0 [" in both.stdout and "-3.7 %" in both.stdout
    assert names_of(page) == ["run", *models]
    assert 0 < len(data_of(page)[0]["rollouts"]["rows"]) < 36
    words = ["report", evaluation, evaluation / "baseline", "--html", page, "--overwrite"]
    assert "CR" in cli.run([*words, "--baseline", "old"]).stdout
    assert "baseline nobody: there are new, old" in cli.run([*words, "--baseline=nobody"]).error
    assert "there is no evaluation" in cli.run(["report", run, "--baseline", "old"]).error


def test_no_file_is_replaced_without_overwrite(cli: ForkedCli, tmp_path: Path) -> None:
    """But for the page of a run in its own directory, which is written again."""
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("report.html", "mine.html"):
        (here / name).write_text("mine")
    inside = f"import os; os.chdir({str(here)!r})"
    for words, file in (([a, b], "report.html"), ([a, b, "--html", "mine.html"], "mine.html")):
        ended = cli.run(["report", *words], prelude=inside)
        assert f"report: {file} exists; name another file" in ended.error and ended.stdout == ""
        assert (here / file).read_text() == "mine"
    assert cli.run(["report", a, b, "--overwrite"], prelude=inside).exit_code == 0
    assert names_of(here / "report.html") == ["a", "b"]
    for _ in range(2):
        assert cli.run(["report", a], prelude=inside).exit_code == 0


def test_directories_are_told_apart_and_must_hold_a_run(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/seed_0/run", "a/seed_1/run", "b/seed_0/run")]
    assert distinct(paths) == ["a/seed_0/run", "a/seed_1/run", "b/seed_0/run"]
    assert distinct([paths[0], paths[0]]) == ["run", "run"]
    evaluations = [make_evaluation(path, "model", 100, 7) for path in paths[:2]]
    write_report(tmp_path / "p", evaluations)
    assert names_of(tmp_path / "p") == ["evaluation of model", "evaluation of model (2)"]
    with pytest.raises(UserError, match="no run there, and no evaluation"):
        write_page(tmp_path / "p", [tmp_path])
    with pytest.raises(UserError, match="is a directory"):
        write_page(tmp_path, [tmp_path])


STEP = {"trained_tokens": 9, "step_seconds": 2.0, "mean_response_tokens": 9.0}


def evaluation(step: int, accuracy: float, tokens: float, n: str = "") -> dict[str, Any]:
    return {"step": step, f"eval_{n}accuracy": accuracy, f"eval_{n}mean_response_tokens": tokens}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("null", "not a JSON object but null"),
        ('{"step": 3, "loss', "not a line of JSON"),
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
    (said,) = caplog.messages
    assert said == f"{path}: the last line is incomplete, as after a kill; it is left out"
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
    said = "best evaluation: after step 30, 28.0 tokens, accuracy 96.1 %"
    assert footer == ["40 steps in 80 s", said]
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
    lines = [STEP | {"step": n, "trained_tokens": n - 1} for n in (1, 2)]
    write_rows(tmp_path / "metrics.jsonl", lines)
    table = describe_run(tmp_path)
    assert "mean response tokens in training" in table and "2 steps in 4 s" in table
    assert "1 of 2 steps trained on no token" in table
    assert table.endswith("not finished: 2 of 9 steps; continue with --resume")
    write_rows(tmp_path / "metrics.jsonl", lines[:1])
    assert "NOTHING WAS LEARNED" in describe_run(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [lines[0] | {"trained_tokens": 9}])
    assert "LEARNED" not in describe_run(tmp_path)
    write_rows(tmp_path / "evals.jsonl", [evaluation(0, 0.5, 100), evaluation(1, 0.5, 80)])
    assert "-20.0 %" in describe_run(tmp_path)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.5, "0.5"), (12.34, "12.3"), (999.4, "999"), (999.6, "1,000"), (1e-5, "1e-05")],
)
def test_a_number_for_people_has_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown and number(None) == number(float("nan")) == "–"


@pytest.mark.parametrize(
    ("before", "after", "is_share", "change", "is_better"),
    [
        (120.0, 18.0, False, "-85.0 %", True),
        (18.0, 120.0, False, "+566.7 %", False),
        (0.5, 0.6, True, "+10.0 points", True),
        (0.6, 0.5, True, "-10.0 points", False),
        (0.5, 0.5, True, "+0.0 points", True),
    ],
)
def test_fewer_tokens_and_more_accuracy_are_better(
    before: float, after: float, is_share: bool, change: str, is_better: bool
) -> None:
    found = change_of("t", before, after, is_share=is_share)
    assert (found.change, found.is_better) == (change, is_better)
