"""`megatron-opsft plan` as a user calls it, with shipped configurations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT, ForkedCli

SMALL = ROOT / "examples/configs/r1_distill_1p5b_paper.yaml"
# Every rank would hold all weights, gradients and optimizer of 30 B parameters.
TOO_LARGE = (ROOT / "examples/configs/qwen3_30b_a3b.yaml", "parallel.ep=1", "parallel.tp=1")


def printed(cli: ForkedCli, *words: object, exit_code: int = 0) -> str:
    ended = cli.run(["plan", *words])
    assert ended.exit_code == exit_code, ended.stderr
    return ended.stdout


def plan(cli: ForkedCli, *words: object, exit_code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(cli, *words, "--json", exit_code=exit_code))
    return found


def test_a_run_that_fits_and_one_that_does_not(cli: ForkedCli) -> None:
    said = printed(cli, SMALL)
    assert "1.78 B parameters on 8 x h100: TP 1 x PP 1 x DP 8" in said
    assert "FITS, with " in said and "Bottleneck: rollout" in said
    assert "24.9 GB; a node writes 24.9 GB from as much host memory (of 2,000.0) in 2.5 s" in said
    assert "reads 46.2 GB in 4.6 s to resume" in said
    assert "DOES NOT FIT" in printed(cli, *TOO_LARGE, exit_code=4)


def test_numbers_of_nodes_are_a_row_each(cli: ForkedCli) -> None:
    rows = plan(cli, SMALL, "--nodes", "1,8,64")["runs"]
    assert [row["world_size"] for row in rows] == [8, 64, 512]
    # Of the same prompts more devices make a step faster, and the run dearer.
    assert rows[0]["seconds"]["total"] > rows[1]["seconds"]["total"]
    assert rows[0]["price"] < rows[1]["price"] < rows[2]["price"]
    shown = printed(cli, SMALL, "--nodes", "1,8,64")
    assert "100.0%" in shown and shown.count("yes") == 3
    alone = plan(cli, "run", SMALL, "--nodes", 8)
    assert rows[1] == alone
    assert alone["fits"] is True and alone["problems"] == [] and alone["parameters"] == 1777088000
    seconds = alone["seconds"]
    phases = [seconds[name] for name in ("rollout", "verify", "train", "sync")]
    assert seconds["total"] == pytest.approx(sum(phases))
    assert alone["device_hours"] == pytest.approx(alone["steps"] * 64 * seconds["total"] / 3600)


@pytest.mark.parametrize("script", ["train_1p5b", "train_7b", "train_30b_a3b"])
def test_a_job_script_promises_what_the_plan_of_its_configuration_expects(
    cli: ForkedCli, script: str
) -> None:
    text = (ROOT / f"slurm/{script}.sh").read_text()
    (config,) = re.findall(r"^CONFIG=\$\{CONFIG:-(.+)\}$", text, re.MULTILINE)
    promised = re.findall(r"^#   (\d) nodes?: +(.+)$", text, re.MULTILINE)
    nodes = ",".join(number for number, _ in promised)
    ended = cli.run(["plan", ROOT / config, "--nodes", nodes, "--json"])
    assert "does not fit" in text or ended.exit_code == 0
    for row, (number, said) in zip(json.loads(ended.stdout)["runs"], promised, strict=True):
        if row["fits"]:
            hours = row["device_hours"] / row["world_size"]
            found = f"{row['seconds']['total']:.1f} s a step, {hours:.1f} hours, "
            found += f"${row['price']:,.0f} for the run"
        else:
            found = "does not fit"
        assert " ".join(said.split()) == found
        assert row["world_size"] == 8 * int(number)


def test_seconds_in_the_page_of_methods_are_those_of_their_plans(cli: ForkedCli) -> None:
    said = " ".join((ROOT / "docs/methods.md").read_text().split())
    found = re.search(
        r"Planned seconds a step with the paper's settings on 8 H100: ([\d.]+) for on-policy SFT, "
        r"([\d.]+) for a policy gradient, ([\d.]+) with a reference model, ([\d.]+) for CRST's "
        r"fixed data. The rollout is ([\d.]+) of the first three",
        said,
    )
    assert found
    *totals, rollout = found.groups()
    for name, total in zip(("on_policy_sft", "dr_grpo", "grpo", "crst"), totals, strict=True):
        path = ROOT / f"examples/configs/methods/{name}_paper.yaml"
        seconds = plan(cli, path)["seconds"]
        assert (name, f"{seconds['total']:.1f}") == (name, total)
        assert name == "crst" or f"{seconds['rollout']:.1f}" == rollout


@pytest.mark.parametrize(
    ("layout", "ranks"), [(["parallel.tp=2", "parallel.pp=2"], 4), (["--search"], 1)]
)
def test_on_cpus_as_many_ranks_as_the_layout_needs(
    cli: ForkedCli, layout: list[str], ranks: int
) -> None:
    words = [ROOT / "examples/configs/quickstart.yaml", "--gpu", "cpu", *layout]
    told = f"ranks of a node: {ranks}, as the layout needs; others with"
    assert printed(cli, *words).startswith(told)
    assert "as the layout needs" not in printed(cli, *words, "--gpus-per-node", 8)


def test_the_first_line_says_which_gpus_are_assumed_where_there_is_none(cli: ForkedCli) -> None:
    """On a machine with one, and if the device is named, nothing is said; nor in JSON."""
    none, one = (f"import shutil; shutil.which = lambda name: {at}" for at in ("None", "'/bin/x'"))
    said = "assumed: 8 x h100 on a node, as no GPU is seen here; --gpu names another device"
    assert cli.run(["plan", SMALL], none).stdout.startswith(said)
    assert said in cli.run(["plan", SMALL, "--search", "--nodes", "1,2"], none).stdout
    for words, prelude in ((["plan", SMALL, "--gpu", "h100"], none), (["plan", SMALL], one)):
        assert cli.run(words, prelude).stdout.startswith("1.78 B parameters on 8 x h100")
    assert json.loads(cli.run(["plan", SMALL, "--json"], none).stdout)["fits"] is True


def test_a_search_prints_what_to_override(cli: ForkedCli) -> None:
    found = plan(cli, SMALL, "--search")
    assert found["fits"] is True
    best = found["layouts"][0]
    assert plan(cli, SMALL, *best["overrides"])["seconds"] == best["seconds"]
    assert f"use: {' '.join(best['overrides'])}" in printed(cli, SMALL, "--search")


def test_a_search_for_several_numbers_of_nodes_gives_each_its_own_best_layout(
    cli: ForkedCli,
) -> None:
    """The one that a search for it alone finds; where there is none, what would help."""
    words = [SMALL.with_name("r1_distill_7b_paper.yaml"), "--gpus-per-node", 1, "--search"]
    words += ["--gpu", "h100"]
    rows = plan(cli, *words, "--nodes", "1,4", exit_code=4)["runs"]
    assert [(row["world_size"], row["is_safe"]) for row in rows] == [(1, False), (4, True)]
    assert [row.pop("would_fit") for row in rows] == [["--nodes 4", "lora.rank=32"], []]
    alone = [plan(cli, *words, "--nodes", n, exit_code=e) for n, e in ((1, 4), (4, 0))]
    assert rows == [found["layouts"][0] for found in alone]
    shown = printed(cli, *words, "--nodes", "1,4", exit_code=4).splitlines()
    first, second, _, advice = shown[2:]
    assert "  no  " in first and second.endswith(" ".join(rows[1]["overrides"]))
    cells = [f"{rows[1]['seconds']['total']:.2f}", f"${rows[1]['price']:,.0f}", "yes"]
    assert {*cells} < {*second.split()}
    helps = "a search finds a layout with --nodes 4, or with lora.rank=32."
    assert advice == f"1 x h100: NOTHING FITS with 5 % to spare; {helps}"
    assert printed(cli, *words, exit_code=4).endswith(f"; {helps}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.tp=4"], "parallel.tp=4 does not divide the model's 2 key/value heads"),
        (["--nodes", "1,none"], "--nodes=1,none must be a number of nodes"),
        (["--nodes", "1,,2", "--search"], "--nodes=1,,2 must be a number of nodes"),
        (["--gpu", "h900"], "--gpu=h900 is not in"),
        (["--hardware", "no.yaml"], "no.yaml does not exist"),
        (["model.path=./nowhere"], "model.path=./nowhere is not a directory"),
        (["run.steps=0"], "run.steps=0 costs nothing"),
    ],
)
def test_bad_input_is_one_line(cli: ForkedCli, arguments: list[str | Path], message: str) -> None:
    assert message in cli.run(["plan", SMALL, *arguments]).error
