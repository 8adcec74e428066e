"""The file of figures: every one has a source, and mistakes in it are named."""

import re
from pathlib import Path

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.plan.hardware import SHIPPED, load_hardware


def test_every_shipped_figure_has_a_source() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    devices = re.findall(r"^(\w+):", text, re.MULTILINE)
    assert devices == ["h100", "h200", "a100", "b200", "cpu"]
    figures = re.findall(r"^  (\w+): \S+( +# .+)?$", text, re.MULTILINE)
    assert {name for name, _ in figures} == set(load_hardware("h100").figures)
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
        ("h100: {peak_flops: fast}", r"h100\.peak_flops='fast': Input should be a valid number"),
        ("h100: {peak_flops: 0}", r"h100\.peak_flops=0: .* greater than 0"),
        ("h100: {price_per_hour: -1}", r"h100\.price_per_hour=-1: .* greater than or equal to 0"),
        ("- h100", "must hold one section of figures for each device"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_hardware(text.split(":")[0], tmp_path / "h.yaml")
