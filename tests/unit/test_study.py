"""Studies: what a file means, which runs are shared, what table and page say of directories."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from eval_samples import stored
from forked_cli import ROOT, ForkedCli
from made_runs import make_evaluation
from rows import write_rows

from megatron_opsft.commands.evaluate.results import (
    MeasuredSamples,
    build_results,
    paired_differences,
)
from megatron_opsft.commands.evaluate.settings import load_settings
from megatron_opsft.commands.report.table import OVERALL, Estimate
from megatron_opsft.commands.study.jobs import (
    RunDirectory,
    check_study_run,
    commands_of,
    trainings_of,
)
from megatron_opsft.commands.study.page import describe_study, table_rows, write_outputs
from megatron_opsft.commands.study.results import read_study_rows, read_written
from megatron_opsft.commands.study.study_file import StudyPlan, read_study
from megatron_opsft.data.stored_samples import StoredSample
from megatron_opsft.errors import UserError

BASE: dict[str, Any] = {"base": {"train": False}}
METHODS = BASE | {"ours": None, "crst": {"set": {"method.name": "crst"}, "data_problems": 4}}
LIMITS = {"L = 64": {}, "L = 48": {"set": {"rollout.max_response_tokens": 48}}}
STUDY: dict[str, Any] = {
    "title": "A <study>",
    "config": "examples/configs/quickstart.yaml",
    "set": {"run.steps": 2},
    "eval": {"benchmarks": "arithmetic", "limit": 8, "samples": 2, "max_tokens": 64},
    "seeds": [0, 1],
    "baseline": "base",
    "sections": {
        "methods": {"title": "Methods", "runs": METHODS},
        "limits": {"title": "Limits", "runs": LIMITS},
    },
}


def plan_of(tmp_path: Path, runs: Any = None, **changes: Any) -> StudyPlan:
    """runs: of the one section, where not the study's own."""
    if runs is not None:
        changes["sections"] = {"methods": {"title": "Methods", "runs": runs}}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return read_study(path, tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "examples/studies").glob("*.yaml")), ids=str)
def test_every_shipped_study_can_be_made(path: Path, tmp_path: Path) -> None:
    plan = read_study(path, tmp_path)
    for run in plan.runs:
        check_study_run(run)
    assert len({run.directory for run in plan.runs}) == len(plan.runs) > 4


def test_equal_runs_are_made_once_and_an_untrained_model_for_one_seed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    names = ["ours", "crst", "L = 48"]
    assert [run.label for run in plan.runs] == ["base", *names, *(f"{n}, seed 1" for n in names)]
    assert plan.rows["limits"]["L = 64"] == plan.rows["methods"]["ours"]
    assert plan.rows["methods"]["ours"][1].settings == {"run.steps": 2, "run.seed": 1}


def test_an_untrained_model_is_asked_as_the_trained_ones(tmp_path: Path) -> None:
    keys = {"data.template": "chat", "verify.judge": "mine:judge"}
    other = {"train": False, "set": {"model.path": "else/where"}}
    plan = plan_of(tmp_path, BASE | {"other": other, "ours": None}, set={"run.steps": 2} | keys)
    for run, model in zip(plan.runs, ("tiny_reasoner", "else/where"), strict=False):
        words = {f'model="{model}"', 'template="chat"', 'judge="mine:judge"'}
        assert words <= set(commands_of(run)[0])


def test_arguments_of_the_chat_template_reach_the_evaluation_whole(tmp_path: Path) -> None:
    """Of a model that is not trained as of the run; none of them where the study says so."""
    arguments = {"enable_thinking": False, "options": {"a.b": {}}}
    plan = plan_of(tmp_path, set={"run.steps": 2, "data.template_arguments": arguments})
    words = commands_of(plan.runs[0])[0]
    assert f"template_arguments={json.dumps(arguments)}" in words
    assert load_settings(None, words[1:]).template_arguments == arguments
    plan = plan_of(tmp_path, eval={"template_arguments": {}, "deer": {"threshold": 0.5}})
    words = commands_of(plan.runs[1])[-1]
    assert {"template_arguments={}", "deer.threshold=0.5"} <= set(words)


def test_fixed_data_are_made_before_the_training_that_reads_them(tmp_path: Path) -> None:
    run = next(run for run in plan_of(tmp_path).runs if run.name == "crst")
    data, train, evaluation = commands_of(run)
    file = run.directory / "train/round_1.parquet"
    assert data[:2] == ["data", "crst"] and data[-4:] == ["--limit", "4", "--out", str(file)]
    assert f"data.responses={file}" in train and train[-1] == "--resume=auto"
    assert evaluation[0] == "eval" and f'model="{run.directory}/train/round_1"' in evaluation
    file.parent.mkdir(parents=True)
    file.touch()
    assert [words[0] for words in commands_of(run)] == ["train", "eval"]


def test_rounds_share_out_the_steps_and_are_one_training_in_the_table(tmp_path: Path) -> None:
    rounds = {"set": {"method.name": "off_policy_sft", "run.steps": 4}, "rounds": 2, "seeds": [3]}
    plan = plan_of(tmp_path, BASE | {"off": rounds})
    run = plan.runs[1]
    commands = commands_of(run)
    assert [words[0] for words in commands] == ["data", "train"] * 2 + ["eval"]
    assert all("run.steps=2" in commands[place] for place in (1, 3))
    model = f"model.path={run.directory}/train/round_1/hf"
    assert model in commands[2] and "run.seed=4" in commands[2]
    assert f'model="{run.directory}/train/round_2"' in commands[-1]  # the last's
    for number, directory in enumerate(trainings_of(run)):
        directory.mkdir(parents=True)
        write_rows(directory / "metrics.jsonl", ({"step": n, "step_seconds": 2.0} for n in (1, 2)))
        write_rows(directory / "summary.json", [{"peak_memory_bytes": 7 - number}])
    (_, row) = read_study_rows(tmp_path, plan)
    assert row.training == {"steps": 4, "seconds": 8.0, "peak_memory_bytes": 7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "nobody"}, "baseline=nobody is not the name of a run"),
        ({"runs": {"base": {}, "base!": LIMITS["L = 48"]}}, "share the directory base-s0; rename"),
        ({"rounds": 2}, "samples while it trains and needs no rounds of fixed data"),
        ({"rounds": 3, "set": {"method.name": "crst"}}, "does not divide run.steps=2"),
        ({"eval": {"method": "deer", "budgets": [16]}}, "budgets: early exit tries answers"),
        ({"set": {"run.step": 3}}, "run 'b': .*run.step"),
        ({"train": False, "set": {"run.steps": 3}}, "'b' is not trained, so leave out set: run"),
    ],
)
def test_what_cannot_be_made_is_said_before_anything_is_run(
    tmp_path: Path, changes: Any, message: str
) -> None:
    if not changes.keys() & {"baseline", "runs"}:
        changes = {"runs": BASE | {"b": changes}}
    with pytest.raises(UserError, match=message):
        for run in plan_of(tmp_path, **changes).runs:
            check_study_run(run)


def test_one_run_alone_is_chosen_by_its_number(tmp_path: Path, cli: ForkedCli) -> None:
    plan = plan_of(tmp_path)
    words = ["study", tmp_path / "study.yaml", "--out", tmp_path]
    listed = cli.run([*words, "--list"]).stdout.splitlines()
    assert [line.split()[:2] for line in listed[:2]] == [["0", "base"], ["1", "ours"]]
    ended = cli.run([*words, "--dry-run", "--only", "1"])
    said = [shlex.split(line) for line in ended.stdout.splitlines()]
    assert ended.exit_code == 0 and said == commands_of(plan.runs[1])
    assert "has 7 runs, numbered from 0" in cli.run([*words, "--only", "7"]).error
    plan_of(tmp_path, set={"run.step": 3})
    assert "run.step" in cli.run(words).error and not (tmp_path / "runs").exists()


def test_a_run_made_with_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[1]
    directory = RunDirectory(run.directory)
    run.directory.mkdir(parents=True)
    directory.write_manifest({"identity": run.definition()})
    check_study_run(run)
    directory.write_manifest({"identity": {**run.definition(), "seed": 5}})
    with pytest.raises(UserError, match="with seed=5, not 0; set it back, delete that directory"):
        check_study_run(run)


def test_the_paper_s_script_hands_a_study_to_the_command(tmp_path: Path) -> None:
    for name, text in {"tools/make_venv.sh": "", ".venv/bin/megatron-opsft": 'echo "$@"'}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "examples/paper.sh"
    script.parent.mkdir()
    script.write_bytes((ROOT / "examples/paper.sh").read_bytes())
    words = ["bash", script, "--quick", "--jobs", "1"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert said[1:] == ["examples/studies/tiny_quick.yaml", "--out", "runs/tiny_quick", *words[3:]]
    assert (ROOT / said[1]).is_file()


def test_a_run_that_failed_has_its_last_words_in_table_and_page(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    plan.runs[1].directory.mkdir(parents=True)
    plan.runs[1].log.write_text("INFO step 1\nerror: loss is nan & no <number>\n\n")
    rows = read_study_rows(tmp_path, plan)
    said = ["not made yet", "error: loss is nan & no <number>", "not made yet"]
    assert [row.error for row in rows][:3] == said and rows[1].training is None
    write_outputs(tmp_path, plan.study, rows)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "A &lt;study&gt;" in page and "0 of 7 runs finished" in page
    assert "error: loss is nan &amp; no &lt;number&gt;" in page


def test_finished_runs_are_a_mean_and_the_best_is_beside_the_baseline(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, BASE | {"ours": {}, "worse": LIMITS["L = 48"]})
    for run in plan.runs:
        tokens = {"base": 200, "ours": 50, "worse": 100}[run.name] - 10 * run.seed
        make_evaluation(run.evaluation, run.label, tokens, 6)
    rows = read_study_rows(tmp_path, plan)
    ratios = [round(row.metrics["compression_ratio"].value * 204.5, 3) for row in rows]
    assert ratios == [204.5, 54.5, 44.5, 104.5, 94.5]
    assert [budget for budget, _ in rows[1].budgets] == [64, 128]
    write_outputs(tmp_path, plan.study, rows)
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert re.search(r"204 \[\d+, \d+\]", table) and "49.5 ± 7.1" in table  # of 44.5 and 54.5
    (_, ours, _) = table_rows(plan.study, rows, "methods")
    ends = [[at["mean_tokens"].value for _, at in row.budgets] for row in rows[1:3]]
    means = [at["mean_tokens"].value for _, at in ours.budgets[OVERALL]]
    assert means == [fmean(pair) for pair in zip(*ends, strict=True)]
    tokens = json.loads((tmp_path / "table.json").read_text())[2]["metrics"]["mean_tokens"]
    assert tokens["value"] == 44.5 and tokens["low"] < 44.5 < tokens["high"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Mean response tokens, base to ours" in page and "-75.8 %" in page
    # First the answer, then how to read it.
    legend = page.index("5 of 5 runs finished. CR:")
    assert page.index("-75.8 %") < page.index("A problem, before and after") < legend
    assert legend < page.index("<table")
    assert re.findall("<pre>(.*?)</pre>", page) == ["base says 7", "ours, seed 1 says 7"]


def test_a_study_warns_of_a_limit_that_cuts_responses_off(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, BASE | {"ours": {}})
    for run in plan.runs:
        make_evaluation(run.evaluation, run.label, 50, 6)
    rows = [
        replace(row, metrics=row.metrics | {"truncated_share": Estimate(value=share)})
        for row, share in zip(read_study_rows(tmp_path, plan), (0.6, 0.04, 0.05), strict=True)
    ]
    contents = describe_study(tmp_path, plan.study, rows)
    said = "60.0 % (base) of the responses were cut off, so accuracy and tokens are lower than the "
    said += "model's; raise max_tokens; until then the limit dominates this comparison."
    assert contents.text.endswith(f"\nWARNING {said}")
    contents.write_page(tmp_path / "page.html")
    assert said.replace("'", "&#39;") in (tmp_path / "page.html").read_text()
    fewer = [replace(row, metrics=rows[1].metrics) for row in rows]
    assert "WARNING" not in describe_study(tmp_path, plan.study, fewer).text


def made_samples(tokens: int, more_right: int = 0) -> dict[str, list[StoredSample]]:
    """Two responses to each of 20 problems of very different lengths; every second is solved."""
    return {
        "gsm8k": [
            stored(f"p{p:02}", n, tokens + 50 * p + n, p % 2 == 0 or p < 2 * more_right)
            for p in range(20)
            for n in range(2)
        ]
    }


def test_a_paired_difference_is_surer_than_those_of_each_model() -> None:
    """Ten tokens fewer on every problem are ten fewer in every resample."""
    ours, theirs = (MeasuredSamples.of(made_samples(*it)) for it in ((90, 3), (100, 0)))
    found = paired_differences([(ours, theirs)])
    tokens, accuracy = found["mean_tokens"], found["accuracy"]
    assert (tokens.value, tokens.low, tokens.high) == (-10, -10, -10)
    # Problems 1, 3 and 5 of 20, of which a resample may have none; unpaired it would hold 0.
    assert accuracy.value == pytest.approx(3 / 20)
    # The binomial quantiles of 20 draws, each with a chance of 3 in 20.
    assert (accuracy.low, accuracy.high) == pytest.approx((0 / 20, 6 / 20), abs=0.051)
    built = build_results("m", made_samples(100), {}, budgets=())
    own = built.overall.metrics["mean_tokens"]
    assert own.low is not None and own.high is not None and own.high - own.low > 200


def test_seeds_of_a_problem_stay_together_in_a_resample_and_other_problems_are_left_out() -> None:
    """What one seed gains on a problem and the other loses there is nothing on average."""
    theirs = MeasuredSamples.of(made_samples(100))
    up, down = (MeasuredSamples.of(made_samples(tokens)) for tokens in (130, 70))
    found = paired_differences([(up, theirs), (down, theirs)])
    assert found["mean_tokens"] == Estimate(value=0, low=0, high=0)
    fewer = MeasuredSamples.of({"gsm8k": made_samples(100)["gsm8k"][:10]})
    assert paired_differences([(up, theirs), (fewer, theirs)])["mean_tokens"].value == 30
    assert paired_differences([(up, fewer)]) == {}


def test_rows_have_differences_to_the_study_s_subject_over_the_seeds_that_both_have(
    tmp_path: Path,
) -> None:
    """Of seed 1 only `ours` is finished; the untrained model goes with every seed."""
    runs = BASE | {"ours": {}, "worse": LIMITS["L = 48"]}
    plan = plan_of(tmp_path, runs, title="What ours does")
    for run in plan.runs:
        if (run.name, run.seed) != ("worse", 1):
            tokens = {"base": 200, "ours": 50, "worse": 100}[run.name] - 10 * run.seed
            correct = {"base": 6, "ours": 8, "worse": 5}[run.name]
            make_evaluation(run.evaluation, run.label, tokens, correct)
    rows = read_study_rows(tmp_path, plan)
    write_outputs(tmp_path, plan.study, rows)
    written, again = read_written(tmp_path)
    assert [row.differences for row in again] == [row.differences for row in rows]
    base, ours, worse = table_rows(written, again, "methods")
    metrics = base.blocks[OVERALL], worse.blocks[OVERALL]
    tokens = [row["mean_tokens_difference"] for row in metrics]
    assert tokens == [Estimate(value=155, low=155, high=155), Estimate(value=50, low=50, high=50)]
    accuracy = metrics[1]["accuracy_difference"]
    assert accuracy.value == -0.3 and accuracy.low is not None and accuracy.low < -0.3
    assert "accuracy_difference" not in ours.blocks[OVERALL]
    assert ours.differences[OVERALL]["mean_tokens"].interval == (-155, -155)
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| Overall ΔAcc↑ |" in re.sub(" +", " ", table)
    assert "+155 [+155, +155]" in table and "-30.0 [" in table
    assert "**+" not in table and "**-" not in table
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    said = "ΔAcc, ΔTok: minus ours, over the seeds that both have; the 95 % intervals are paired"
    assert said in page
    # Of the headline too: unpaired it would be some tokens wide.
    assert "95 % interval -75.8 to -75.8 %" in page


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        ("A study", "quick"),
        ("Slow beside others", "slow"),
        ("What slow, twice does", "slow, twice"),
        ("Quick or slow", "quick"),
        ("Failed beside slow", None),
    ],
)
def test_the_headline_is_the_method_in_the_title_or_else_the_most_efficient(
    tmp_path: Path, title: str, shown: str | None
) -> None:
    runs = BASE | dict.fromkeys(("slow", "slow, twice", "quick", "failed"), {})
    settings = {n: {"set": {"run.steps": at}} for at, n in enumerate([*runs][1:], start=3)}
    plan = plan_of(tmp_path, BASE | settings, title=title, seeds=[0])
    lengths = {"base": 200, "slow": 150, "slow, twice": 140, "quick": 50}
    for run in plan.runs:
        if run.name in lengths:
            make_evaluation(run.evaluation, run.label, lengths[run.name], 6)
    write_outputs(tmp_path, plan.study, read_study_rows(tmp_path, plan))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = re.findall("Mean response tokens, base to (.*?)</h2>", page)
    assert found == ([shown] if shown else [])
