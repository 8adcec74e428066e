"""The directory of a diagnosis."""

import json
from pathlib import Path

from megatron_opsft.runtime.owned_directory import OwnedDirectory

TOKENS, PAGE = "tokens.jsonl", "report.html"
FORMAT = 2  # of a line of tokens.jsonl: 1 had no probabilities of the original


class DiagnosisDirectory(OwnedDirectory):
    """responses: the evaluation for which the original samples, with an identity of its own."""

    kind = "diagnosis"
    names = ("responses", TOKENS, PAGE)


def is_diagnosis(directory: Path) -> bool:
    """Whether its manifest says so."""
    try:
        manifest = json.loads((directory / DiagnosisDirectory.manifest).read_bytes())
    except (OSError, ValueError):
        return False
    return (
        isinstance(manifest, dict) and manifest.get("kind") == DiagnosisDirectory.kind
    )
