"""`report` of the same run on several nodes: measured beside planned."""

import json
from pathlib import Path

import pytest
from forked_cli import ForkedCli

from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.plan.scaling import efficiencies, read_row, scaling_runs, scaling_table

GPUS_PER_NODE = 8
MODEL = "model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"


def make_run(folder: Path, nodes: int, seconds: float, *keys: str) -> Path:
    """Ten steps of 64 responses of 1,000 tokens, after two that start the run."""
    run = folder / f"nodes_{nodes}"
    run.mkdir(parents=True)
    config = load_config(None, [MODEL, "data.train=p.jsonl", "rollout.engine=vllm", *keys])
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "manifest.json").write_text(json.dumps({"world_size": nodes * GPUS_PER_NODE}))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 13):
            line = {
                "step": step,
                "num_rollouts": 64,
                "num_accepted": 32,
                "mean_response_tokens": 1000.0,
                "mean_accepted_tokens": 800.0,
                "rollout_seconds": 0.5 * seconds,
                "verify_seconds": 0.0,
                "train_seconds": 0.25 * seconds,
                "sync_seconds": 0.125 * seconds,
                "step_seconds": seconds if step > 2 else 100 * seconds,
            }
            file.write(json.dumps(line) + "\n")
    return run


def test_a_row_has_medians_without_the_start_and_the_plan_of_as_many_nodes(tmp_path: Path) -> None:
    rows = [
        read_row(make_run(tmp_path, nodes, seconds), None, None)
        for nodes, seconds in ((1, 16.0), (2, 10.0))
    ]
    first, second = rows
    assert first.measured == {
        "step": 16.0,
        "rollout": 8.0,
        "verify": 0.0,
        "train": 4.0,
        "sync": 2.0,
        "other": 2.0,
        "rate": 64 * 1000 / 16 / 8,
    }
    assert (second.nodes, second.gpus, second.device) == (2, 16, "h100")
    measured, planned = efficiencies(second, first)
    assert measured == pytest.approx(16 / 20)
    expected = first.planned["step"] / second.planned["step"] / 2
    assert planned == pytest.approx(expected) and 0.4 < planned < 1
    head, _, _, _, one, two = scaling_table(rows).splitlines()
    assert head.endswith("measured (planned for h100)")
    assert f"16.00 ({first.planned['step']:.2f})" in one and one.endswith("100% (100%)")
    assert two.endswith(f"80% ({planned:.0%})")


def test_the_folder_is_reported_in_the_order_of_nodes(cli: ForkedCli, tmp_path: Path) -> None:
    for nodes in (16, 2, 1):
        make_run(tmp_path, nodes, 10 / nodes)
    ended = cli.run(["report", tmp_path, "--gpu", "h200"])
    assert ended.exit_code == 0, ended.stderr
    rows = [line.split()[:2] for line in ended.stdout.splitlines() if line.endswith("%)")]
    assert rows == [["1", "8"], ["2", "16"], ["16", "128"]]
    assert "planned for h200" in ended.stdout
    page = (tmp_path / "report.html").read_text()
    assert "Median seconds of a step, measured (planned for h200)" in page
    assert "Efficiency, 1 to 16 nodes" in page and 'aria-label="Efficiency: measured 100%' in page
    words = ["report", tmp_path / "nodes_1", tmp_path / "nodes_2", "--html", tmp_path / "two.html"]
    assert cli.run(words).exit_code == 0
    assert "exists; name another file" in cli.run(words).stderr


def test_a_run_that_is_not_there_yet_does_not_hide_the_others(
    cli: ForkedCli, tmp_path: Path
) -> None:
    make_run(tmp_path, 1, 8.0)
    (tmp_path / "nodes_2").mkdir()
    ended = cli.run(["report", tmp_path])
    assert ended.exit_code == 2
    assert "nodes_2: not read: " in ended.stdout and "100% (100%)" in ended.stdout
    assert "1 of 2 could not be read" in ended.stderr and "Traceback" not in ended.stderr
    with pytest.raises(UserError, match="8 ranks was not on 3 nodes"):
        read_row((tmp_path / "nodes_1").rename(tmp_path / "nodes_3"), None, None)


def test_other_paths_are_no_scaling_experiment(tmp_path: Path) -> None:
    one, other = (make_run(tmp_path / name, 1, 8.0) for name in ("a", "b"))
    assert scaling_runs([one]) == []  # a run as any other
    assert scaling_runs([one, other]) == []  # two runs on one node
    assert scaling_runs([tmp_path]) == []
    assert scaling_runs([one.parent]) == [one]
