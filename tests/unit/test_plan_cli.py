"""`megatron-opsft plan` as a user calls it, with shipped configurations."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli

SMALL = ROOT / "examples/configs/r1_distill_1p5b_paper.yaml"
# Every rank would hold all weights, gradients and optimizer of 30 B parameters.
TOO_LARGE = (ROOT / "examples/configs/qwen3_30b_a3b.yaml", "parallel.ep=1", "parallel.tp=1")


def test_a_run_that_fits(cli: ForkedCli) -> None:
    ended = cli.run(["plan", SMALL])
    assert ended.exit_code == 0, ended.stderr
    said = ended.stdout
    assert "1.78 B parameters on 8 x h100: TP 1 x PP 1 x DP 8" in said
    assert "FITS, with " in said and "Bottleneck: rollout" in said
    assert "24.9 GB; a node writes 24.9 GB from as much host memory (of 2,000.0) in 2.5 s" in said
    assert "reads 46.2 GB in 4.6 s to resume" in said


def test_as_json(cli: ForkedCli) -> None:
    ended = cli.run(["plan", "run", SMALL, "parallel.tp=2", "--nodes", 2, "run.steps=7", "--json"])
    assert ended.exit_code == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert (plan["world_size"], plan["tp"], plan["dp"], plan["steps"]) == (16, 2, 8, 7)
    assert plan["fits"] is True and plan["problems"] == []
    assert plan["parameters"] == 1_777_088_000
    (stage,) = plan["stages"]
    # Twice the norms: every tensor-parallel rank holds them.
    assert stage["parameters"] == 888_587_776
    seconds = plan["seconds"]
    phases = [seconds[name] for name in ("rollout", "verify", "train", "sync")]
    assert seconds["total"] == pytest.approx(sum(phases))
    assert plan["device_hours"] == pytest.approx(7 * 16 * seconds["total"] / 3600)


def test_several_numbers_of_nodes_are_a_row_each(cli: ForkedCli) -> None:
    ended = cli.run(["plan", SMALL, "--nodes", "1,8,64", "--json"])
    assert ended.exit_code == 0, ended.stderr
    rows = json.loads(ended.stdout)["runs"]
    assert [row["world_size"] for row in rows] == [8, 64, 512]
    # Of the same prompts more devices make a step faster, and the run dearer.
    assert all(a["seconds"]["total"] > b["seconds"]["total"] for a, b in pairwise(rows[:2]))
    assert rows[0]["price"] < rows[1]["price"] < rows[2]["price"]
    alone = json.loads(cli.run(["plan", SMALL, "--nodes", 8, "--json"]).stdout)
    assert rows[1] == alone
    shown = cli.run(["plan", SMALL, "--nodes", "1,8,64"]).stdout
    assert "100.0%" in shown and shown.count("yes") == 3


def test_what_does_not_fit_is_said_and_is_the_exit_code(cli: ForkedCli) -> None:
    ended = cli.run(["plan", *TOO_LARGE])
    assert ended.exit_code == 4 and "DOES NOT FIT" in ended.stdout
    assert cli.run(["plan", *TOO_LARGE, "--nodes", "1,64"]).exit_code == 4


@pytest.mark.parametrize(
    ("layout", "ranks"), [([], 1), (["parallel.tp=2", "parallel.pp=2"], 4), (["--search"], 1)]
)
def test_on_cpus_as_many_ranks_as_the_layout_needs(
    cli: ForkedCli, layout: list[str], ranks: int
) -> None:
    words = ["plan", ROOT / "examples/configs/quickstart.yaml", "--gpu", "cpu", *layout]
    ended = cli.run(words)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.startswith(f"ranks of a node: {ranks}, as the layout needs; others with")
    given = cli.run([*words, "--gpus-per-node", 8])
    assert given.exit_code == 0 and "as the layout needs" not in given.stdout


def test_a_search_prints_what_to_override(cli: ForkedCli) -> None:
    ended = cli.run(["plan", SMALL, "--search", "--json"])
    assert ended.exit_code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["fits"] is True
    best, *_ = found["layouts"]
    again = cli.run(["plan", SMALL, *best["overrides"], "--json"])
    assert json.loads(again.stdout)["seconds"] == best["seconds"]
    assert "use: parallel.tp=" in cli.run(["plan", SMALL, "--search"]).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.tp=4"], "parallel.tp=4 does not divide the model's 2 key/value heads"),
        (["rollout.tp=8"], "rollout.tp=8 does not divide num_attention_heads=12"),
        (["--nodes", "1,none"], "--nodes=1,none must be a number of nodes"),
        (["--nodes", "1,2", "--search"], "--nodes=1,2 and --search exclude each other"),
        (["--gpu", "h900"], "--gpu=h900 is not in"),
        (["--hardware", "no.yaml"], "--hardware=no.yaml does not exist"),
        (["model.path=./nowhere"], "model.path=./nowhere is not a directory"),
    ],
)
def test_bad_input_is_one_line(cli: ForkedCli, arguments: list[str | Path], message: str) -> None:
    assert message in cli.run(["plan", SMALL, *arguments]).error
