"""How well the verifier agrees with labelled answers, beside plain math-verify.

    python tools/check_verifier.py FILE... [--disagreements]

FILE: JSONL(.gz) with `prediction`, `gold` (a string, or a list of equally good ones) and `label`
(true: correct). Both judges run in the same pool, under the same time limit.
"""

import argparse
import gzip
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.cores import share_of_cores
from megatron_opsft.verify.worker_pool import VerifierPool


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--disagreements", action="store_true", help="print each row it misjudges")
    parser.add_argument("--timeout-seconds", type=float, default=10.0)
    options = parser.parse_args()

    console = Console()
    table = Table("file", "rows", "agree", "plain math-verify", "timeouts", "errors", "seconds")
    workers = share_of_cores(1)
    plain_judge = "check_verifier:judge_plainly"
    with (
        VerifierPool(workers, options.timeout_seconds) as pool,
        VerifierPool(workers, options.timeout_seconds, judge=plain_judge) as plain_pool,
    ):
        for path in options.files:
            rows = read_rows(path)
            start = time.perf_counter()
            verdicts = score_rows(pool, rows)
            seconds = time.perf_counter() - start
            agree = [
                any(v.outcome is Outcome.CORRECT for v in group) == bool(row["label"])
                for row, group in zip(rows, verdicts, strict=True)
            ]
            plain = [
                any(v.outcome is Outcome.CORRECT for v in group) == bool(row["label"])
                for row, group in zip(rows, score_rows(plain_pool, rows), strict=True)
            ]
            outcomes = [v.outcome for group in verdicts for v in group]
            table.add_row(
                path.name,
                str(len(rows)),
                f"{sum(agree)} ({sum(agree) / len(rows):.1%})",
                f"{sum(plain)} ({sum(plain) / len(rows):.1%})",
                str(outcomes.count(Outcome.TIMEOUT)),
                str(outcomes.count(Outcome.ERROR)),
                f"{seconds:.2f}",
            )
            if options.disagreements:
                for row, group, fine in zip(rows, verdicts, agree, strict=True):
                    if not fine:
                        shown = {**row, "prediction": row["prediction"][-200:]}
                        console.print_json(data={**shown, "verdicts": [v.outcome for v in group]})
    console.print(table)


if __name__ == "__main__":
    main()
