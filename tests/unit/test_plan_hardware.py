"""The file of figures: every one has a source, and mistakes in it are named."""

from pathlib import Path

import pytest
import yaml

from megatron_opsft.errors import UserError
from megatron_opsft.plan.hardware import SHIPPED, figures_of, load_hardware, read_entries
from megatron_opsft.runtime.device import _PEAK_FLOPS


def test_every_shipped_figure_has_a_source() -> None:
    entries = read_entries(SHIPPED)
    assert set(entries) == {"h100", "h200", "a100", "b200", "cpu"}
    for name, entry in entries.items():
        figures = figures_of(load_hardware(name))
        assert set(entry) == {*figures, "sources"}
        assert set(entry["sources"]) == set(figures), name
        assert all(entry["sources"].values())


def test_peaks_are_those_that_the_trainer_reports_utilization_by() -> None:
    for model, peak in _PEAK_FLOPS.items():
        assert load_hardware(model.lower()).peak_flops == peak


def test_links_are_those_of_the_node_while_it_holds_all_ranks() -> None:
    hardware = load_hardware("h100", gpus_per_node=4)
    assert hardware.bandwidth(4) == hardware.link_bandwidth == 450e9
    assert hardware.bandwidth(5) == hardware.network_bandwidth == 50e9


def spoilt(path: Path, **changes: object) -> Path:
    entries = read_entries(SHIPPED)
    for key, value in changes.items():
        if value is None:
            del entries["h100"][key]
        else:
            entries["h100"][key] = value
    path.write_text(yaml.safe_dump(entries))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_flops": None}, "h100 has no peak_flops"),
        ({"peek_flops": 1}, r"h100\.peek_flops is unknown"),
        ({"peak_flops": "fast"}, r"h100\.peak_flops='fast' must be a number"),
        ({"peak_flops": 0}, r"h100\.peak_flops=0\.0 must be positive"),
        ({"host_memory_bytes": 0}, r"h100\.host_memory_bytes=0\.0 must be positive"),
        ({"engine_batch_tokens": None}, "h100 has no engine_batch_tokens; add it"),
        ({"decode_fraction": 1.5}, r"h100\.decode_fraction=1\.5 must be above 0, at most 1"),
        ({"price_per_hour": -1}, r"h100\.price_per_hour=-1 must be a finite number"),
    ],
)
def test_mistakes_in_a_file_are_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_hardware("h100", spoilt(tmp_path / "h.yaml", **changes))


def test_unknown_devices_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--gpu=h900 .*there are: h100, h200"):
        load_hardware("h900")
    with pytest.raises(UserError, match=r"no\.yaml does not exist"):
        load_hardware("h100", tmp_path / "no.yaml")
