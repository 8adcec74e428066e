"""A diagnosis as it is left on disk, made up: small, and with texts that mean harm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from made_runs import HARM
from rows import write_rows

from megatron_opsft.commands.diagnose.page import describe_divergence

NUM_RESPONSES = 4
TOKENS = ("7", "-", "6", "=", "1", ".", "\n", "Wait", ",", " so", " 1", "\n", "</think>", "</s>")


def make_diagnosis(directory: Path) -> Path:
    """D_t is large at "Wait" alone, where the efficient model would end its thinking."""
    place = TOKENS.index("Wait")
    rows = [
        {
            "problem_id": f"p-{n}",
            "sample_index": 0,
            "problem": f"What is p-{n}? {HARM}",
            "gold": "1",
            "outcome": "correct",
            "tokens": [*TOKENS, HARM],
            "kl": [2.0 + n if at == place else 0.001 * at for at in range(len(TOKENS) + 1)],
            "alternatives": [
                {
                    "position": place,
                    "probability": {"original": 0.75, "efficient": 0.1},
                    "preferred": [
                        {"token": "</think>", "original": 0.25, "efficient": 0.9},
                        {"token": "Wait", "original": 0.75, "efficient": 0.1},
                    ],
                }
            ],
        }
        for n in range(NUM_RESPONSES)
    ]
    write_rows(directory / "tokens.jsonl", rows)
    return directory


def write_diagnosis_page(
    page: Path, rows: Sequence[dict[str, Any]], original: str, efficient: str
) -> str:
    """Write the page; return what a terminal says."""
    contents = describe_divergence(rows, original, efficient)
    contents.write_page(page)
    return contents.text
