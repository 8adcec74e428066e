"""The directory of a diagnosis."""

from collections.abc import Sequence
from pathlib import Path

from megatron_opsft.report.diagnosis import KIND, SUMMARY, TOKENS, parse_response
from megatron_opsft.runtime.durable import remove, write_bytes
from megatron_opsft.runtime.owned_directory import OwnedDirectory

PAGE, REPORT = "tokens.html", "report.html"  # of `diagnose` and of `report`


class DiagnosisDirectory(OwnedDirectory):
    """tokens.jsonl and what is made of it.

    If the original model samples, `responses` holds that evaluation, which comes before the
    manifest.
    """

    kind = KIND
    names = (SUMMARY, TOKENS, PAGE, REPORT)

    @property
    def responses(self) -> Path:
        """Where the original samples."""
        return self.path / "responses"

    def clear(self, needed: Sequence[Path] = ()) -> None:
        """The evaluation too."""
        remove(self.responses)
        super().clear(needed)


def keys_of_whole_lines(tokens: Path) -> set[tuple[str, int]]:
    """(problem id, sample index) of what tokens.jsonl holds. What a failing machine tore is cut
    off, and will be diagnosed again.
    """
    lines = tokens.read_bytes().splitlines(keepends=True) if tokens.exists() else []
    whole = {}
    for line in lines:
        try:
            row = parse_response(line)
        except (ValueError, TypeError, KeyError):
            continue
        if line.endswith(b"\n"):
            whole[row.problem_id, row.sample_index] = line
    if len(whole) < len(lines):
        write_bytes(tokens, b"".join(whole.values()))
    return set(whole)
