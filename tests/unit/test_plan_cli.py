"""`megatron-opsft plan` as a user calls it; of the model there is nothing but config.json."""

import json
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_cli import ROOT, Finished, ForkedCli

QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 131072,
}
QWEN_72B = {
    **QWEN_1_5B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "vocab_size": 152064,
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run's file beside a model of nothing but config.json."""
    return write_run_file(tmp_path, QWEN_1_5B)


def write_run_file(directory: Path, model: dict[str, Any]) -> Path:
    write_model(directory / "model", model)
    path = directory / "run.yaml"
    config = {
        "model": {"path": str(directory / "model")},
        "data": {"train": "nobody/needs-it"},
        "rollout": {"engine": "vllm", "gpu_memory_fraction": 0.6},
    }
    path.write_text(yaml.safe_dump(config))
    return path


def write_model(directory: Path, model: dict[str, Any]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model))


def error_of(ended: Finished) -> str:
    assert ended.exit_code == 2, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_a_run_that_fits(cli: ForkedCli, small: Path) -> None:
    ended = cli.run(["plan", small])
    assert ended.exit_code == 0, ended.stderr
    assert "1.78 B parameters on 8 x h100: TP 1 x PP 1 x DP 8" in ended.stdout
    assert "FITS, with " in ended.stdout
    said = ended.stdout
    assert "Bottleneck: rollout" in said
    assert "24.9 GB; a node writes 24.9 GB from as much host memory (of 2,000.0) in 2.5 s" in said
    assert "reads 46.2 GB in 4.6 s to resume" in said


def test_as_json(cli: ForkedCli, small: Path) -> None:
    ended = cli.run(["plan", "run", small, "parallel.tp=2", "--nodes", 2, "--steps", 7, "--json"])
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


def test_several_numbers_of_nodes_are_a_row_each(cli: ForkedCli, small: Path) -> None:
    ended = cli.run(["plan", small, "--nodes", "1,8,64", "--json"])
    assert ended.exit_code == 0, ended.stderr
    rows = json.loads(ended.stdout)["runs"]
    assert [row["world_size"] for row in rows] == [8, 64, 512]
    # Of the same prompts more devices make a step faster, and the run dearer.
    assert all(a["seconds"]["total"] > b["seconds"]["total"] for a, b in pairwise(rows[:2]))
    assert rows[0]["price"] < rows[1]["price"] < rows[2]["price"]
    alone = json.loads(cli.run(["plan", small, "--nodes", 8, "--json"]).stdout)
    assert rows[1] == alone
    shown = cli.run(["plan", small, "--nodes", "1,8,64"]).stdout
    assert "100.0%" in shown and shown.count("yes") == 3
    large = ["model.path=" + str(small.parent / "large"), "parallel.tp=8", "--nodes", "1,64"]
    write_model(small.parent / "large", QWEN_72B)
    assert cli.run(["plan", small, *large]).exit_code == 4  # no node alone holds it
    ended = cli.run(["plan", small, *large[:2]])
    assert ended.exit_code == 4 and "DOES NOT FIT" in ended.stdout


def test_a_plan_of_a_preset_takes_about_two_seconds() -> None:
    """Of one core, starting Python included."""
    preset = ROOT / "examples/configs/r1_distill_7b_paper.yaml"
    command = [sys.executable, "-m", "megatron_opsft", "plan", str(preset), "--nodes", "4"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4.0


def test_a_thousand_ranks(cli: ForkedCli, tmp_path: Path) -> None:
    path = write_run_file(tmp_path, QWEN_72B)
    layout = ["parallel.tp=8", "parallel.pp=16", "parallel.sequence_parallel=true", "rollout.tp=8"]
    ended = cli.run(["plan", path, *layout, "--nodes", 128, "--json"])
    assert ended.exit_code == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["world_size"] == 1024
    assert len(plan["stages"]) == 16
    assert plan["parameters"] == 72_706_203_648


def test_a_search_prints_what_to_override(cli: ForkedCli, small: Path) -> None:
    ended = cli.run(["plan", small, "--search", "--top", 2, "--json"])
    assert ended.exit_code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["fits"] is True
    assert len(found["layouts"]) == 2
    best = found["layouts"][0]
    again = cli.run(["plan", small, *best["overrides"], "--json"])
    total = json.loads(again.stdout)["seconds"]["total"]
    assert total == pytest.approx(best["step_seconds"])
    assert "use: parallel.tp=" in cli.run(["plan", small, "--search"]).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.tp=3"], "world size 8 is not a multiple"),
        (["parallel.tp=4"], "parallel.tp=4 does not divide the model's 2 key/value heads"),
        (["rollout.tp=8"], "rollout.tp=8 does not divide num_attention_heads=12"),
        (["rollout.max_response_tokens=140000"], "131072 positions"),
        (["--nodes", "1,none"], "--nodes=1,none must be a number of nodes"),
        (["--nodes", "0"], "--nodes=0 must be a number of nodes"),
        (["--nodes", "1,2", "--search"], "--nodes=1,2 and --search exclude each other"),
        (["--gpu", "h900"], "--gpu=h900 is not in"),
        (["--hardware", "no.yaml"], "--hardware=no.yaml does not exist"),
        (["model.path=./nowhere"], "model.path=./nowhere is no directory"),
    ],
)
def test_bad_input_is_one_line(
    cli: ForkedCli, small: Path, arguments: list[str], message: str
) -> None:
    assert message in error_of(cli.run(["plan", small, *arguments]))


def test_help_states_the_exit_codes(cli: ForkedCli) -> None:
    assert "calibrate" in cli.run(["plan", "--help"]).stdout
    text = " ".join(cli.run(["plan", "run", "--help"]).stdout.split())
    assert "0: it fits; 4: it does not; 2: bad input" in text
