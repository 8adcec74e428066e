"""How well the judge of mathematics agrees with labelled answers, and with gold answers respelled.

    python tools/check_verifier.py FILE... [--disagreements] [--golds N]

FILE: JSONL(.gz). Rows with `prediction`, `gold` (a string, or a list of equally good ones) and
`label` (true: correct) are judged as they are. Of rows with `answer`, as data sets have them, every
gold answer is written in all the ways of tests/support/answer_spellings.py and
olympiad_spellings.py: those that keep it must be accepted, those that change it not.
"""

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megatron_opsft.data.answers import read_answer
from megatron_opsft.errors import RowError
from megatron_opsft.records import Outcome
from megatron_opsft.verify.verifier import share_of_cores
from megatron_opsft.verify.worker_pool import VerifierPool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from answer_spellings import EQUIVALENT, INEQUIVALENT  # noqa: E402
from olympiad_spellings import OLYMPIAD_EQUIVALENT, OLYMPIAD_INEQUIVALENT  # noqa: E402

KEEPING = EQUIVALENT | OLYMPIAD_EQUIVALENT
CHANGING = INEQUIVALENT | OLYMPIAD_INEQUIVALENT
CHUNK = 20_000  # responses judged between two lines of progress
TIMEOUT_SECONDS = 10.0  # of a response


class Case(NamedTuple):
    """wanted: whether the response should be accepted, for one of the golds."""

    name: str
    response: str
    golds: list[str]
    wanted: bool


def read_rows(path: Path) -> list[dict]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def labelled(name: str, rows: list[dict]) -> Iterator[Case]:
    for row in rows:
        golds = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
        yield Case(name, row["prediction"] or "", list(map(str, golds)), bool(row["label"]))


def respelled(rows: list[dict], limit: int) -> Iterator[Case]:
    """Of the distinct gold answers that the data reader takes, without those that lack a brace and
    so fit in no box; of `limit` of them at random, 0: of all.
    """
    golds = {}
    for row in rows:
        with suppress(RowError):
            golds[read_answer(row["answer"], "answer")] = None
    found = [gold for gold in golds if gold.count("{") == gold.count("}")]
    if 0 < limit < len(found):
        found = random.Random(0).sample(found, limit)
    for name, rule in (KEEPING | CHANGING).items():
        for gold in found:
            response = rule(gold, random.Random(f"{name}, {gold}"))
            if response is not None:
                yield Case(name, response, [gold], name in KEEPING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--disagreements", action="store_true", help="print each row it misjudges")
    parser.add_argument("--golds", type=int, default=0, help="gold answers of a file (0: all)")
    options = parser.parse_args()
    cases: list[Case] = []
    for path in options.files:
        rows = read_rows(path)
        is_labelled = "label" in rows[0]
        cases += labelled(path.name, rows) if is_labelled else respelled(rows, options.golds)
    tried, failed = Counter(case.name for case in cases), Counter[str]()
    console = Console()
    with VerifierPool(share_of_cores(), TIMEOUT_SECONDS) as pool:
        for first in range(0, len(cases), CHUNK):
            chunk = cases[first : first + CHUNK]
            verdicts = iter(pool.judge([(case.response, g) for case in chunk for g in case.golds]))
            for case in chunk:
                outcomes = [next(verdicts).outcome for _ in case.golds]
                if (Outcome.CORRECT in outcomes) != case.wanted:
                    failed[case.name] += 1
                    if options.disagreements:
                        console.print_json(data={**case._asdict(), "outcomes": outcomes})
            print(f"{first + len(chunk):,} of {len(cases):,}", file=sys.stderr, flush=True)
    table = Table("file or rule", "responses", "judged wrongly")
    for name in tried:
        table.add_row(name, f"{tried[name]:,}", f"{failed[name]:,}")
    table.add_row("all", f"{tried.total():,}", f"{failed.total():,}")
    console.print(table)


if __name__ == "__main__":
    main()
