"""What a plan counts on: figures that have a source, and response lengths."""

import re
from pathlib import Path

import pytest
from plan_cases import LARGE, make_run

from megatron_opsft.commands.plan.assumptions import (
    SHIPPED,
    Hardware,
    load_hardware,
    make_workload,
    mean_before_the_cut,
    quantiles,
)
from megatron_opsft.errors import UserError


def test_every_shipped_figure_has_a_source() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    devices = re.findall(r"^(\w+):", text, re.MULTILINE)
    assert devices == ["h100", "h200", "a100", "b200", "cpu"]
    figures = re.findall(r"^  (\w+): \S+( +# .+)?$", text, re.MULTILINE)
    assert {name for name, _ in figures} == set(Hardware.model_fields) - {"name", "gpus_per_node"}
    assert all(source for _, source in figures)
    for name in devices:
        load_hardware(name)


def test_a_file_says_what_is_different(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("h100: {memory_bandwidth: 3e12, rollout_factor: 2}\n")
    mine_too = {"memory_bandwidth": 3e12, "rollout_factor": 2.0}
    assert load_hardware("h100", mine) == load_hardware("h100").model_copy(update=mine_too)
    assert load_hardware("b200", mine) == load_hardware("b200")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine: {peak_flops: 1e12}", "mine.memory_bytes: Field required"),
        ("h100: {peek_flops: 1}", r"h100\.peek_flops=1: Extra inputs"),
        ("h100: {peak_flops: 0}", r"h100\.peak_flops=0: .* greater than 0"),
        ("h100: {1: 2}", r"h100\.1"),
        ("h100: 3", "h100 must hold figures, not 3"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_hardware(text.split(":")[0], tmp_path / "h.yaml")


def test_lengths_have_the_mean_and_the_limit() -> None:
    free, cut = (quantiles(20_000, 1000, limit) for limit in (10**9, 1200))
    assert sum(free) / 20_000 == pytest.approx(1000, rel=0.005)
    assert cut == [min(n, 1200) for n in free]
    for measured in (300.0, 1150.0):
        values = quantiles(400, mean_before_the_cut(measured, 1200), 1200)
        assert sum(values) / 400 == pytest.approx(measured, rel=0.01)


def test_only_finished_responses_are_accepted() -> None:
    sizes = ("data.prompts_per_step=100", "rollout.group_size=10")
    config = make_run(LARGE, 8, *sizes, "rollout.max_response_tokens=2000").config
    some = make_workload(config, mean_tokens=2000, acceptance=0.4)
    assert (len(some.lengths), len(some.trained)) == (1000, 400)
    assert max(some.trained) < 2000
    assert sum(some.sequences) == sum(some.trained) + 400 * 150
    every = make_workload(config, mean_tokens=2000, acceptance=1.0)
    assert len(every.trained) == sum(n < 2000 for n in some.lengths) < 1000
