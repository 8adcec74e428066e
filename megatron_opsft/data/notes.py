"""What a user should know of a run's data before anything is computed; pure."""

from collections import Counter

from megatron_opsft.config import Config
from megatron_opsft.data.choices import find_duplicates
from megatron_opsft.data.problems import ProblemSet


def describe_data(config: Config, problems: ProblemSet, held_out: ProblemSet | None) -> list[str]:
    """One entry a fact, none where all is as it should be."""
    said = [describe_bad_rows(problems)]
    if config.data.duplicates == "keep" and (found := find_duplicates(problems)):
        said.append(
            f"{sum(len(same.indices) - 1 for same in found)} rows repeat a problem of an earlier "
            f"row, {sum(same.contradicts for same in found)} problems have rows with different "
            "answers; data.duplicates=first keeps the first row, drop leaves out the contradicting "
            "ones as well"
        )
    counts, weights = Counter(problems.parts), [part.weight for part in config.data.parts]
    for number, source in enumerate(problems.sources):
        num, per_step = counts[number], config.data.prompts_per_step
        wanted = round(per_step * weights[number] / sum(weights), 1)
        if wanted > num:
            said.append(
                f"data.prompts_per_step={wanted:g} is more than the {num} problems of {source}: "
                "every step has some of them twice or more"
            )
        elif wanted * config.run.steps > num:
            said.append(
                f"{config.run.steps} steps of {wanted:g} problems go through the {num} problems of "
                f"{source} {wanted * config.run.steps / num:.1f} times"
            )
    if held_out is None:
        said.append(
            f"nothing is evaluated: {config.data.name} has no held-out problems; set eval.data, "
            "or eval.holdout=N to take N of its problems out of training"
        )
    elif bad := describe_bad_rows(held_out):
        said.append(f"held out: {bad}")
    return [line for line in said if line]


def describe_bad_rows(problem_set: ProblemSet, limit: int = 5) -> str:
    """How many rows were left out, the first of them, how many more; "" if none."""
    bad_rows = sorted(problem_set.bad_rows, key=lambda bad: bad.row)
    if not bad_rows:
        return ""
    num_rows = len(problem_set.problems) + len(bad_rows)
    lines = [f"{problem_set.name}: {len(bad_rows)} of {num_rows} rows left out"]
    lines += [f"  {bad.source}:{bad.row}: {bad.reason}" for bad in bad_rows[:limit]]
    if len(bad_rows) > limit:
        lines.append(f"  ... and {len(bad_rows) - limit} more")
    return "\n".join(lines)
