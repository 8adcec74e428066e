"""Which judge gave a verdict, as the identity of an evaluation says it."""

import hashlib
import os
import sys
from collections.abc import Iterable
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
    rules = f"rules {_hash(Path(__file__).with_name(f'{name}.py') for name in _RULES)}"
    if config.own_judge:
        parts = [config.judge]
        if file := _find_file(config.judge.partition(":")[0]):
            parts.append(f"sha256 {_hash([file])}")
    else:
        parts = [math if config.judge == "math" else config.judge, rules]
    if config.judge_field is not None:
        parts.append(f"by {config.judge_field}, {math}, {rules}")
    return ", ".join(parts)


def _hash(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _find_file(module: str) -> Path | None:
    """The file of a module, which is not imported; None where it has none."""
    paths = [Path(place, *module.split(".")) for place in (*sys.path, os.getcwd())]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    return next(filter(Path.is_file, files), None)
