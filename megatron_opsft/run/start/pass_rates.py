"""Selects training problems by how hard they are for a model: by the share of its answers that were
right in an evaluation of these problems.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from megatron_opsft.config import DataConfig
from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError

# Numbers of samples by (id, gold answer) of their problem.
_Counts = Counter[tuple[str, str]]


def keep_by_pass_rate(training: ProblemSet, data: DataConfig) -> tuple[ProblemSet, str]:
    """Select the training problems whose pass rate lies within `data.pass_rate`.

    Returns them and a line for the user that counts them; all problems and "" if the configuration
    selects none. Errors: `UserError` if the evaluation is not finished or is of other problems, and
    if no problem remains.
    """
    if data.pass_rate is None or data.pass_rate_from is None:
        return training, ""
    low, high = data.pass_rate
    option = f"data.pass_rate={low:g} to {high:g}"
    total, right = _count_samples(data.pass_rate_from)
    selected = []
    num_unknown = 0
    for problem in training.problems:
        key = problem.id, problem.answer
        if not total[key]:
            num_unknown += 1
        elif low <= right[key] / total[key] <= high:
            selected.append(problem)
    num_problems = len(training.problems)
    if num_unknown == num_problems:
        raise UserError(
            f"data.pass_rate_from={data.pass_rate_from}: its samples are of other problems than "
            f"data.train={training.name}; evaluate these with `megatron-opsft eval --data "
            "train=FILE`"
        )
    num_others = num_problems - num_unknown - len(selected)
    left_out = f"{num_others:,} have another pass rate, {num_unknown:,} no sample"
    if not selected:
        raise UserError(
            f"{option}: none of the {num_problems:,} problems is left ({left_out}); widen it"
        )
    note = (
        f"{option}: {len(selected):,} of {num_problems:,} problems are trained on, by "
        f"{total.total():,} samples of {data.pass_rate_from}; {left_out}"
    )
    return replace(training, problems=tuple(selected)), note


def _count_samples(evaluation: Path) -> tuple[_Counts, _Counts]:
    """Count the samples of each problem of an evaluation: (all of them, the right ones).

    Errors: `UserError` if it is no finished evaluation.
    """
    if not (evaluation / "results.json").is_file():
        raise UserError(
            f"data.pass_rate_from={evaluation} holds no finished evaluation; name the --out of "
            "`megatron-opsft eval`"
        )
    files = SampleFiles(evaluation)
    total, right = _Counts(), _Counts()
    for name in files.complete():
        for sample in files.read(name):
            key = sample.problem_id, sample.gold
            total[key] += 1
            right[key] += sample.correct
    return total, right
