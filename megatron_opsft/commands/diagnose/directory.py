"""The directory of a diagnosis."""

import json
from pathlib import Path

from megatron_opsft.runtime.owned_directory import OwnedDirectory

TOKENS = "tokens.jsonl"
PAGE = "report.html"
# The format of a line of tokens.jsonl: 1 had no probabilities of the original.
FORMAT = 2


class DiagnosisDirectory(OwnedDirectory):
    """The directory of a diagnosis.

    `responses` in it is the evaluation for which the original samples; it has its own identity.
    """

    kind = "diagnosis"
    names = ("responses", TOKENS, PAGE)


def is_diagnosis(directory: Path) -> bool:
    """Return True if the directory's manifest is that of a diagnosis."""
    try:
        manifest = json.loads((directory / DiagnosisDirectory.manifest).read_bytes())
    except (OSError, ValueError):
        return False
    return (
        isinstance(manifest, dict) and manifest.get("kind") == DiagnosisDirectory.kind
    )
