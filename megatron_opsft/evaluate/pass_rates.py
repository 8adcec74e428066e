"""How often each problem was solved in an evaluation."""

from collections import defaultdict
from pathlib import Path

from megatron_opsft.data.choices import PassRate
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.results import read_results
from megatron_opsft.evaluate.samples import SampleFiles
from megatron_opsft.records import Outcome


def read_pass_rates(directory: Path) -> dict[str, PassRate]:
    """Of every problem of all benchmarks of a finished evaluation, by its id. Errors: `UserError`,
    also where two benchmarks have different problems of one id.
    """
    try:
        benchmarks = read_results(directory).benchmarks
    except UserError as error:
        raise UserError(f"data.pass_rate_from={directory}: {error}") from None
    files = SampleFiles(directory)
    rates: dict[str, PassRate] = {}
    for benchmark in benchmarks:
        correct: defaultdict[str, list[bool]] = defaultdict(list)
        golds: dict[str, str] = {}
        for sample in files.read(benchmark):
            correct[sample.problem_id].append(sample.outcome is Outcome.CORRECT)
            golds[sample.problem_id] = sample.gold
        for problem_id, outcomes in correct.items():
            if problem_id in rates:
                raise UserError(
                    f"data.pass_rate_from={directory}: two of its benchmarks have a problem "
                    f"{problem_id}; give the problems ids of their own"
                )
            rate = sum(outcomes) / len(outcomes)
            rates[problem_id] = PassRate(rate=rate, gold=golds[problem_id])
    return rates
