"""How well the judge of mathematics agrees with labelled answers, and with gold answers respelled.

    python tools/check_verifier.py FILE... [--disagreements] [--golds N]

FILE: JSONL(.gz). Rows with `prediction`, `gold` (a string, or a list of equally good ones) and
`label` (true: correct) are judged beside plain math-verify, under the same time limit. Of rows with
`answer`, as data sets have them, every gold answer is written in all the ways of
tests/support/answer_spellings.py: those that keep it must be accepted, those that change it not.
"""

import argparse
import gzip
import json
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_opsft.data.answers import read_answer
from megatron_opsft.errors import RowError
from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.verifier import share_of_cores
from megatron_opsft.verify.worker_pool import VerifierPool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from answer_spellings import EQUIVALENT, INEQUIVALENT  # noqa: E402

CHUNK = 20_000  # responses judged between two lines of progress


def judge_plainly(response_text: str, gold: str, fields: dict) -> Verdict:
    """math-verify as its own documentation uses it."""
    from math_verify import parse, verify

    correct = verify(
        parse(gold, parsing_timeout=None),
        parse(response_text, parsing_timeout=None),
        timeout_seconds=None,
    )
    return Verdict(outcome=Outcome.CORRECT if correct else Outcome.WRONG)


def read_rows(path: Path) -> list[dict]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def score_rows(pool: VerifierPool, rows: list[dict]) -> list[list[Verdict]]:
    """For each row the verdicts against each of its gold answers."""
    golds = [row["gold"] if isinstance(row["gold"], list) else [row["gold"]] for row in rows]
    items = [
        (row["prediction"] or "", str(gold))
        for row, answers in zip(rows, golds, strict=True)
        for gold in answers
    ]
    verdicts = iter(pool.score(items))
    return [[next(verdicts) for _ in answers] for answers in golds]


def check_labels(
    console: Console, pool: VerifierPool, plain_pool: VerifierPool, name: str, rows: list[dict]
) -> list[str]:
    """A row of the table of labelled files; prints disagreements."""
    start = time.perf_counter()
    verdicts = score_rows(pool, rows)
    seconds = time.perf_counter() - start
    agree, plain = (
        [
            any(v.outcome is Outcome.CORRECT for v in group) == bool(row["label"])
            for row, group in zip(rows, groups, strict=True)
        ]
        for groups in (verdicts, score_rows(plain_pool, rows))
    )
    outcomes = Counter(v.outcome for group in verdicts for v in group)
    for row, group, fine in zip(rows, verdicts, agree, strict=True):
        if not fine:
            shown = {**row, "prediction": row["prediction"][-200:]}
            console.print_json(data={**shown, "verdicts": [v.outcome for v in group]})
    return [
        name,
        str(len(rows)),
        f"{sum(agree)} ({sum(agree) / len(rows):.1%})",
        f"{sum(plain)} ({sum(plain) / len(rows):.1%})",
        str(outcomes[Outcome.TIMEOUT]),
        str(outcomes[Outcome.ERROR]),
        f"{seconds:.2f}",
    ]


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

    console, details = Console(), Console(quiet=not options.disagreements)
    labels = Table("file", "rows", "agree", "plain math-verify", "timeouts", "errors", "seconds")
    golds: dict[str, None] = {}
    workers = share_of_cores(1)
    with VerifierPool(workers, options.timeout_seconds) as pool:
        plain_judge = "check_verifier:judge_plainly"
        with VerifierPool(workers, options.timeout_seconds, judge=plain_judge) as plain_pool:
            for path in options.files:
                rows = read_rows(path)
                if "label" in rows[0]:
                    labels.add_row(*check_labels(details, pool, plain_pool, path.name, rows))
                else:
                    golds.update(dict.fromkeys(read_golds(rows, options.golds)))
        if labels.row_count:
            console.print(labels)
        if golds:
            console.print(check_spellings(details, pool, list(golds)))


if __name__ == "__main__":
    main()
