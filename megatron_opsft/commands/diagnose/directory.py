"""The directory of a diagnosis."""

from pathlib import Path

from megatron_opsft.errors import UserError
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
        return DiagnosisDirectory(directory).read_manifest() is not None
    except (OSError, UserError):
        return False
