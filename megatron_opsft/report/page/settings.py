"""The resolved settings of a run, and those in which runs differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.config_yaml import parse_yaml


def read_settings(path: Path) -> dict[str, Any]:
    """config.yaml with dotted keys; empty where there is none, or it is damaged."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return _flat(tree) if isinstance(tree, dict) else {}


def differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that do not have the same value in all runs, sorted; where a run lives is none."""
    keys = {key for run in runs for key in run} - {"run.dir"}
    return sorted(key for key in keys if any(run.get(key) != runs[0].get(key) for run in runs))


def _flat(tree: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value
    return flat
