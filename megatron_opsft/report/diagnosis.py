"""What `megatron-opsft diagnose` leaves on disk, as everything reads it.

Of a response of the original model every token with D_t = KL(p_original || p_efficient), the
divergence of the two models' next-token distributions where that token was sampled, in nats.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError

TOKENS, SUMMARY, MANIFEST = "tokens.jsonl", "summary.json", "manifest.json"
KIND = "diagnosis"  # in manifest.json
_FIX = "restore the file, or diagnose again with --overwrite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What the efficient model prefers at a token of large D_t.

    position: of the token in the response, from 0. p_original, p_efficient: its probabilities
    under the two models. preferred: the efficient model's likeliest tokens with its probabilities,
    falling; the token itself may be among them.
    """

    position: int
    p_original: float
    p_efficient: float
    preferred: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedResponse:
    """A line of tokens.jsonl.

    gold: the problem's answer; outcome: a value of `records.Outcome`.
    tokens: as pieces of text that make up the response, its end token included; a character of
    several tokens is with the last of them. kl: of each, >= 0. alternatives: by position.
    """

    problem_id: str
    sample_index: int
    problem: str
    gold: str
    outcome: str
    tokens: tuple[str, ...]
    kl: tuple[float, ...]
    alternatives: tuple[Alternative, ...]


def is_diagnosis(directory: Path) -> bool:
    """Whether a diagnosis is there, finished or not."""
    return (directory / TOKENS).is_file() or read_manifest(directory).get("kind") == KIND


def labels_of(directory: Path) -> tuple[str, str]:
    """What the original and the efficient model are called; without a manifest by what they are."""
    original, efficient = read_manifest(directory).get("labels", ("original", "efficient"))
    return str(original), str(efficient)


def read_manifest(directory: Path) -> dict[str, Any]:
    """manifest.json; empty where there is none that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def read_responses(directory: Path) -> Iterator[DiagnosedResponse]:
    """Those of a finished diagnosis, one by one. Errors: `UserError` naming the line."""
    path = directory / TOKENS
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield parse_response(line)
                except (ValueError, TypeError, KeyError) as error:
                    raise UserError(
                        f"{path}:{number}: not a diagnosed response ({error!r}); {_FIX}"
                    ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; {_FIX}") from None


def parse_response(line: bytes) -> DiagnosedResponse:
    """Errors: `ValueError`, `TypeError` or `KeyError` for anything else than a whole line."""
    row = json.loads(line)
    found = DiagnosedResponse(
        problem_id=_text(row["problem_id"]),
        sample_index=int(row["sample_index"]),
        problem=_text(row["problem"]),
        gold=_text(row["gold"]),
        outcome=row["outcome"],
        tokens=tuple(map(_text, row["tokens"])),
        kl=tuple(map(float, row["kl"])),
        alternatives=tuple(
            Alternative(
                **each | {"preferred": tuple((_text(t), float(p)) for t, p in each["preferred"])}
            )
            for each in row["alternatives"]
        ),
    )
    if len(found.kl) != len(found.tokens):
        raise ValueError(f"{len(found.kl)} divergences of {len(found.tokens)} tokens")
    if any(not 0 <= each.position < len(found.tokens) for each in found.alternatives):
        raise ValueError("an alternative at no token")
    return found


def _text(value: Any) -> str:
    """With a ? for each lone surrogate: no font has one, and no file of UTF-8 can hold it."""
    return str(value).encode("utf-8", "replace").decode("utf-8")
