"""Which judge gave a verdict, as the identity of an evaluation says it."""

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_opsft.config import VerifyConfig


def describe_judge(config: VerifyConfig, math: str) -> str:
    """math: the version of the default judge, which alone is what is said of it. Of a user's
    function a hash of its file is part: another code, another judge.
    """
    parts = [math if config.judge == "math" else config.judge]
    if config.own_judge and (file := _find_file(config.judge.partition(":")[0])):
        parts.append(f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}")
    if config.judge_field is not None:
        parts.append(f"by {config.judge_field}, {math}")
    return ", ".join(parts)


def _find_file(module_name: str) -> Path | None:
    """The file of a module, which is not imported; None where it has none."""
    places: Sequence[str] | None = [*sys.path, os.getcwd()]
    origin = None
    for name in module_name.split("."):
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return None
        origin, places = spec.origin, spec.submodule_search_locations
    return Path(origin) if origin is not None else None
