"""Selects training problems by how hard they are for a model: by the share of its answers that were
right in an evaluation of these problems.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from megatron_opsft.config import DataConfig
from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError, looked_in

# True for each right sample, by (id, gold answer) of its problem.
_Verdicts = dict[tuple[str, str], list[bool]]


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
    verdicts = _read_verdicts(data.pass_rate_from)
    selected = []
    num_unknown = 0
    for problem in training.problems:
        of_problem = verdicts.get((problem.id, problem.answer))
        if of_problem is None:
            num_unknown += 1
        elif low <= sum(of_problem) / len(of_problem) <= high:
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
        f"{sum(map(len, verdicts.values())):,} samples of {data.pass_rate_from}; {left_out}"
    )
    return replace(training, problems=tuple(selected)), note


def _read_verdicts(evaluation: Path) -> _Verdicts:
    """Return whether each sample of an evaluation is right.

    Errors: `UserError` if it is no finished evaluation.
    """
    if not (evaluation / "results.json").is_file():
        raise UserError(
            f"data.pass_rate_from={evaluation} holds no finished evaluation"
            f"{looked_in(evaluation)}; name the --out of `megatron-opsft eval`"
        )
    files = SampleFiles(evaluation)
    verdicts: _Verdicts = defaultdict(list)
    for name in files.complete():
        for sample in files.read(name):
            verdicts[sample.problem_id, sample.gold].append(sample.correct)
    return verdicts
