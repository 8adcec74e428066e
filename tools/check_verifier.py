"""How well the judge of mathematics agrees with gold answers respelled.

    python tools/check_verifier.py FILE... [--disagreements] [--golds N]

FILE: JSONL(.gz) of rows with `answer`, as data sets have them. Every gold answer is written in all
the ways of tests/support/answer_spellings.py: those that keep it must be accepted, those that
change it not.
"""

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_opsft.data.answers import read_answer
from megatron_opsft.errors import RowError
from megatron_opsft.records import Outcome
from megatron_opsft.verify.verifier import share_of_cores
from megatron_opsft.verify.worker_pool import VerifierPool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from answer_spellings import EQUIVALENT, INEQUIVALENT  # noqa: E402

CHUNK = 20_000  # responses judged between two lines of progress


def read_rows(path: Path) -> list[dict]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def read_golds(rows: list[dict], limit: int) -> list[str]:
    """The distinct gold answers that the data reader takes, without those that lack a brace and so
    fit in no box; `limit` of them at random, 0: all.
    """
    golds = {}
    for row in rows:
        with suppress(RowError):
            golds[read_answer(row["answer"], "answer")] = None
    found = [gold for gold in golds if gold.count("{") == gold.count("}")]
    return random.Random(0).sample(found, limit) if 0 < limit < len(found) else found


def check_spellings(console: Console, pool: VerifierPool, golds: list[str]) -> Table:
    """Each rule with the number of gold answers it applies to, and how many were judged wrongly."""
    table = Table("rule", "wanted", "responses", "judged wrongly")
    tried: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    items = [
        (name, response, gold)
        for name, rule in (EQUIVALENT | INEQUIVALENT).items()
        for gold in golds
        if (response := rule(gold, random.Random(f"{name}, {gold}"))) is not None
    ]
    for first in range(0, len(items), CHUNK):
        chunk = items[first : first + CHUNK]
        verdicts = pool.score([(response, gold) for _, response, gold in chunk])
        for (name, response, gold), verdict in zip(chunk, verdicts, strict=True):
            tried[name] += 1
            if (verdict.outcome is Outcome.CORRECT) != (name in EQUIVALENT):
                failed[name] += 1
                console.print_json(data={"rule": name, "gold": gold, "response": response[-200:]})
        print(f"{first + len(chunk):,} of {len(items):,} responses", file=sys.stderr, flush=True)
    for name in EQUIVALENT | INEQUIVALENT:
        wanted = "accepted" if name in EQUIVALENT else "refused"
        table.add_row(name, wanted, f"{tried[name]:,}", f"{failed[name]:,}")
    table.add_row("all", "", f"{tried.total():,}", f"{failed.total():,}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--disagreements", action="store_true", help="print each row it misjudges")
    parser.add_argument("--golds", type=int, default=0, help="gold answers of a file (0: all)")
    parser.add_argument("--timeout-seconds", type=float, default=10.0)
    options = parser.parse_args()
    golds = dict.fromkeys(
        gold for path in options.files for gold in read_golds(read_rows(path), options.golds)
    )
    details = Console(quiet=not options.disagreements)
    with VerifierPool(share_of_cores(1), options.timeout_seconds) as pool:
        Console().print(check_spellings(details, pool, [*golds]))


if __name__ == "__main__":
    main()
