"""Which judge gave a verdict, as the identity of an evaluation says it."""

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_opsft.config import VerifyConfig

# What decides a verdict of the shipped judges.
_RULES = (
    *("answer", "comparison", "equality", "math_verifier", "numerals", "reading", "spelling"),
    *("text_judges", "units"),
)


def describe_judge(config: VerifyConfig, math: str) -> str:
    """math: the version of math-verify. Of the rules in front of it, and of a user's function, a
    hash of the files is part: another code, another judge.
    """
    rules = f"rules {_hash_of_rules()}"
    if config.own_judge:
        parts = [config.judge]
        if file := _find_file(config.judge.partition(":")[0]):
            parts.append(f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}")
    else:
        parts = [math if config.judge == "math" else config.judge, rules]
    if config.judge_field is not None:
        parts.append(f"by {config.judge_field}, {math}, {rules}")
    return ", ".join(parts)


def _hash_of_rules() -> str:
    folder = Path(__file__).parent
    files = [folder / f"{name}.py" for name in _RULES]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


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
