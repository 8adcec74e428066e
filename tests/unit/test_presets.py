"""The shipped configurations: planned without network or cache, they fit with room to spare, and
their layouts are about the best that a search finds.
"""

import json
import re
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli

from megatron_opsft.config.load import load_config
from megatron_opsft.plan.assumptions import PAPER_ACCEPTANCE, load_hardware
from megatron_opsft.plan.estimate import Plan
from megatron_opsft.plan.job import check_job, make_job
from megatron_opsft.plan.search import search_layouts
from megatron_opsft.storage.model_paths import MODEL_CONFIGS, resolve_config

CONFIGS = sorted((ROOT / "examples/configs").glob("*.yaml"))
ON_CLUSTERS = [path for path in CONFIGS if path.name != "quickstart.yaml"]
PRESETS = [path for path in CONFIGS if path.name.startswith("r1_distill")]
COMMAND = re.compile(r"^#   megatron-opsft plan (\S+) --nodes ([\d,]+) --gpu h100$", re.MULTILINE)
# What training starts at, most responses cut off by the limit.
START = {"mean_tokens": 10_000.0, "acceptance": 0.3}


def nodes_of(path: Path) -> list[int]:
    """Numbers of nodes in the command at the head of a configuration."""
    (command,) = COMMAND.findall(path.read_text(encoding="utf-8"))
    assert command[0] == str(path.relative_to(ROOT))
    return [int(part) for part in command[1].split(",")]


def planned(path: Path, num_nodes: int, **responses: float) -> Plan:
    job = make_job(load_config(path), load_hardware("h100"), 8 * num_nodes, **responses)
    check_job(job)
    return Plan(job=job, num_steps=1)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_layout_fits_with_room_and_is_about_the_fastest(path: Path) -> None:
    for num_nodes in nodes_of(path):
        for responses in ({}, START):
            plan = planned(path, num_nodes, **responses)
            assert plan.is_safe
            assert plan.worst.margin > 0.1 * plan.worst.limit
    plan = planned(path, nodes_of(path)[0])
    found = search_layouts(plan.job, 1)
    fastest = min(one.step["total"] for one in found if one.is_safe)
    assert plan.step["total"] < 1.06 * fastest


@pytest.mark.parametrize("path", ON_CLUSTERS, ids=lambda path: path.stem)
def test_a_step_takes_about_as_long_as_its_longest_response(path: Path) -> None:
    """Two minutes at most, or what an engine takes for it at 6 ms a token (weights read: 4.5 ms),
    with the paper's share accepted.
    """
    for num_nodes in nodes_of(path):
        plan = planned(path, num_nodes)
        assert len(plan.job.workload.trained) == round(PAPER_ACCEPTANCE * plan.job.num_responses)
        longest = 6e-3 * plan.job.config.rollout.max_response_tokens
        assert 0 < plan.step["train"] < plan.step["total"] < max(120, longest)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_plan_needs_no_network_and_no_cache(cli: ForkedCli, tmp_path: Path, path: Path) -> None:
    where = ["--gpu", "cpu", "--gpus-per-node", 1]
    if path in ON_CLUSTERS:
        where = ["--nodes", nodes_of(path)[0]]
    empty = (
        "import huggingface_hub.constants as hub\n"
        f"hub.HF_HUB_OFFLINE, hub.HF_HUB_CACHE = True, {str(tmp_path)!r}\n"
    )
    ended = cli.run(["plan", path, *where, "--json"], prelude=empty)
    assert ended.exit_code == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["is_safe"] and plan["checkpoint"]["saved_bytes"] > 0
    if path in ON_CLUSTERS:
        assert plan["seconds"]["total"] == planned(path, nodes_of(path)[0]).step["total"]


def test_a_directory_is_meant_before_a_shipped_config_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = load_config(PRESETS[0]).model.path
    assert resolve_config(name) == MODEL_CONFIGS / name
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_config(name).resolve() == tmp_path / name
