"""The shipped configurations: planned without network or cache, they fit with room to spare, and
their layouts are about the best that a search finds.
"""

import json
import re
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli

from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.commands.plan.estimate import Plan
from megatron_opsft.commands.plan.job import check_planned_run, make_planned_run
from megatron_opsft.commands.plan.search import search_layouts
from megatron_opsft.config.load import load_config
from megatron_opsft.models.storage.model_paths import MODEL_CONFIGS, resolve_config

CONFIGS = ROOT / "examples/configs"
PRESETS = sorted(CONFIGS.glob("r1_*.yaml")) + sorted(CONFIGS.glob("qwen3p5_*.yaml"))
COMMAND = re.compile(r"^#   megatron-opsft plan (\S+) --nodes ([\d,]+) --gpu h100$", re.MULTILINE)
# What training starts at, most responses cut off by the limit.
START = {"mean_tokens": 10_000.0, "acceptance": 0.3}


def nodes_of(path: Path) -> list[int]:
    """Numbers of nodes in the command at the head of a configuration."""
    (command,) = COMMAND.findall(path.read_text(encoding="utf-8"))
    assert command[0] == str(path.relative_to(ROOT))
    return [int(part) for part in command[1].split(",")]


def planned(path: Path, num_nodes: int, **responses: float) -> Plan:
    run = make_planned_run(load_config(path), load_hardware("h100"), 8 * num_nodes, **responses)
    check_planned_run(run)
    return Plan(run=run, num_steps=1)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_layout_fits_with_room_and_is_about_the_fastest(path: Path) -> None:
    for num_nodes in nodes_of(path):
        for responses in ({}, START):
            plan = planned(path, num_nodes, **responses)
            assert plan.is_safe
            assert plan.worst.margin > 0.1 * plan.worst.limit
    plan = planned(path, nodes_of(path)[0])
    found = search_layouts(plan.run, 1)
    fastest = min(one.step["total"] for one in found if one.is_safe)
    assert plan.step["total"] < 1.06 * fastest


def test_a_plan_needs_no_network_and_no_cache(cli: ForkedCli, tmp_path: Path) -> None:
    path = ROOT / "examples/configs/qwen3_30b_a3b.yaml"
    empty = (
        "import huggingface_hub.constants as hub\n"
        f"hub.HF_HUB_OFFLINE, hub.HF_HUB_CACHE = True, {str(tmp_path)!r}\n"
    )
    ended = cli.run(["plan", path, "--nodes", nodes_of(path)[0], "--json"], prelude=empty)
    assert ended.exit_code == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["is_safe"] and plan["checkpoint"]["saved_bytes"] > 0
    assert plan["seconds"]["total"] == planned(path, nodes_of(path)[0]).step["total"]


def test_a_directory_is_meant_before_a_shipped_config_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = load_config(PRESETS[0]).model.path
    assert resolve_config(name) == MODEL_CONFIGS / name
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_config(name).resolve() == tmp_path / name
