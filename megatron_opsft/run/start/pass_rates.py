"""Training problems by how hard they are for a model: the share of its answers that were right in
an evaluation of them.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from megatron_opsft.config import DataConfig
from megatron_opsft.data.problems import ProblemSet
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError

_Counts = Counter[tuple[str, str]]  # of samples by the problem's id and its gold answer


def keep_by_pass_rate(training: ProblemSet, data: DataConfig) -> tuple[ProblemSet, str]:
    """The training problems whose pass rate `data.pass_rate` has, and a line that counts them; all
    problems and "" where the configuration asks for none.

    Errors: `UserError` where the evaluation is not finished, or is of other problems, and where no
    problem is left.
    """
    if data.pass_rate is None or data.pass_rate_from is None:
        return training, ""
    low, high = data.pass_rate
    asked = f"data.pass_rate={low:g} to {high:g}"
    total, right = _count_samples(data.pass_rate_from)
    kept, unknown = [], 0
    for problem in training.problems:
        key = problem.id, problem.answer
        if not total[key]:
            unknown += 1
        elif low <= right[key] / total[key] <= high:
            kept.append(problem)
    num_problems = len(training.problems)
    if unknown == num_problems:
        raise UserError(
            f"data.pass_rate_from={data.pass_rate_from}: its samples are of other problems than "
            f"data.train={training.name}; evaluate these with `megatron-opsft eval --data "
            "train=FILE`"
        )
    others = num_problems - unknown - len(kept)
    left_out = f"{others:,} have another pass rate, {unknown:,} no sample"
    if not kept:
        raise UserError(
            f"{asked}: none of the {num_problems:,} problems is left ({left_out}); widen it"
        )
    note = (
        f"{asked}: {len(kept):,} of {num_problems:,} problems are trained on, by "
        f"{total.total():,} samples of {data.pass_rate_from}; {left_out}"
    )
    return replace(training, problems=tuple(kept)), note


def _count_samples(evaluation: Path) -> tuple[_Counts, _Counts]:
    """How many samples each problem of an evaluation has, and how many of them are right."""
    if not (evaluation / "results.json").is_file():
        raise UserError(
            f"data.pass_rate_from={evaluation} holds no finished evaluation; name the --out of "
            "`megatron-opsft eval`"
        )
    files, total, right = SampleFiles(evaluation), _Counts(), _Counts()
    for name in files.complete():
        for sample in files.read(name):
            key = sample.problem_id, sample.gold
            total[key] += 1
            right[key] += sample.correct
    return total, right
