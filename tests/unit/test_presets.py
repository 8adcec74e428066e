"""The shipped configurations: planned without network or cache, what their comments predict is what
a plan predicts now, and their layouts are about the best that a search finds.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.config_file import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.plan.presets import (
    FIRST_LINE,
    LAST_LINE,
    estimate_preset,
    has_block,
    with_figures,
)
from megatron_opsft.plan.search import search_layouts
from megatron_opsft.storage.model_paths import MODEL_CONFIGS, resolve_config, resolve_model

CONFIGS = sorted((ROOT / "examples/configs").glob("*.yaml"))
PRESETS = [path for path in CONFIGS if path.name.startswith("r1_distill")]
COMMAND = re.compile(r"megatron-opsft plan (\S+) --nodes (\d+) --gpu (\w+)")


def commands_of(path: Path) -> list[tuple[str, int, str]]:
    """(file, nodes, device) of every command at the head of a configuration."""
    found = COMMAND.findall(path.read_text(encoding="utf-8"))
    return [(file, int(nodes), device) for file, nodes, device in found]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_figures_at_the_head_are_those_of_the_plan(path: Path) -> None:
    """Otherwise: python tools/update_presets.py"""
    text = path.read_text(encoding="utf-8")
    assert has_block(text)
    assert {file for file, _, _ in commands_of(path)} == {str(path.relative_to(ROOT))}
    assert with_figures(path) == text


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_layout_fits_with_room_and_is_about_the_fastest(path: Path) -> None:
    config = load_config(path)
    for _, num_nodes, device in commands_of(path):
        for at_start in (False, True):
            plan = estimate_preset(config, num_nodes, device, at_start=at_start)
            assert plan.is_safe
            assert plan.worst.margin > 0.1 * plan.worst.limit
    _, num_nodes, device = commands_of(path)[0]
    plan = estimate_preset(config, num_nodes, device, at_start=False)

    found = search_layouts(plan.job, plan.workload, 1)
    fastest = min(one.estimate.step.total for one in found if one.estimate.is_safe)
    assert plan.step.total < 1.06 * fastest


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_plan_needs_no_network_and_no_cache(cli: ForkedCli, tmp_path: Path, path: Path) -> None:
    cluster = commands_of(path)[:1]
    where = ["--nodes", cluster[0][1]] if cluster else ["--gpu", "cpu", "--gpus-per-node", 1]
    empty = (
        "import huggingface_hub.constants as hub\n"
        f"hub.HF_HUB_OFFLINE, hub.HF_HUB_CACHE = True, {str(tmp_path)!r}\n"
    )
    ended = cli.run(["plan", path, *where, "--json"], prelude=empty)
    assert ended.exit_code == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["is_safe"] and plan["checkpoint"]["saved_bytes"] > 0
    if cluster:
        counted = estimate_preset(load_config(path), cluster[0][1], cluster[0][2], at_start=False)
        assert plan["margin_bytes"] == pytest.approx(counted.worst.margin, abs=2e7)
        assert plan["seconds"]["total"] == pytest.approx(counted.step.total)


def test_the_host_memory_in_the_docs_is_that_of_the_plan() -> None:
    page = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
    needed = [
        estimate_preset(load_config(path), 1, "h100", at_start=False).checkpoint.saved_bytes
        for path in PRESETS
        if path.stem.endswith("paper")
    ]
    small, large = (f"{num_bytes / 1e9:.0f} GB for" for num_bytes in needed)
    assert f"{small} R1-Distill-Qwen-1.5B and {large} 7B" in page


@pytest.mark.slow
def test_a_simulation_needs_no_network_and_no_cache(tmp_path: Path) -> None:
    preset = "examples/configs/r1_distill_7b_paper.yaml"
    ended = subprocess.run(
        [sys.executable, "tools/scaling.py", "simulate", preset, "--ranks", "8", "--steps", "1"]
        + ["--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "out/points.json").read_text())


def test_models_of_the_examples_have_their_config_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in {load_config(path).model.path for path in PRESETS}:
        assert resolve_config(name) == MODEL_CONFIGS / name
        read_model_shape(resolve_config(name))
        # A run needs the weights too, and says so.
        with pytest.raises(UserError, match=f"model.path={name} .*not in the Hugging Face cache"):
            resolve_model(name)
    with pytest.raises(UserError, match=r"model\.path=some/model .*not in the Hugging Face cache"):
        resolve_config("some/model")
    # A directory of that name is meant first.
    own = tmp_path / name
    own.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_config(name).resolve() == own


@pytest.mark.parametrize("block", [f"{FIRST_LINE}\n", f"{FIRST_LINE}\n# 3 GB\n{LAST_LINE}\n"])
def test_a_broken_block_is_named(tmp_path: Path, block: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{block}run: {{steps: 1}}\n")
    with pytest.raises(UserError, match=r"mine\.yaml: between .*must be lines such as"):
        with_figures(path)
