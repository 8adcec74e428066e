"""What a user should know of a run's data before anything is computed; pure."""

from collections import Counter

from megatron_opsft.config import Config
from megatron_opsft.data.duplicates import count_duplicates, describe_duplicates
from megatron_opsft.data.problems import ProblemSet, describe_bad_rows


def describe_data(config: Config, problems: ProblemSet, held_out: ProblemSet | None) -> list[str]:
    """One entry a fact, none where all is as it should be."""
    said = [describe_bad_rows(problems)]
    said.append(describe_duplicates(count_duplicates(problems), config.data.duplicates))
    for name, num, wanted in _draws(config, problems):
        if wanted > num:
            said.append(
                f"data.prompts_per_step={wanted:g} is more than the {num} problems of {name}: "
                "every step has some of them twice or more"
            )
        elif wanted * config.run.steps > num:
            said.append(
                f"{config.run.steps} steps of {wanted:g} problems go through the {num} problems of "
                f"{name} {wanted * config.run.steps / num:.1f} times"
            )
    if held_out is None:
        said.append(
            f"nothing is evaluated: {config.data.name} has no held-out problems; set eval.data, "
            "or eval.holdout=N to take N of its problems out of training"
        )
    elif bad := describe_bad_rows(held_out):
        said.append(f"held out: {bad}")
    return [line for line in said if line]


def _draws(config: Config, problems: ProblemSet) -> list[tuple[str, int, float]]:
    """Of each source its name, its problems, and how many of them a step draws on average."""
    wanted = config.data.prompts_per_step
    if not problems.parts:
        return [(problems.name, len(problems.problems), wanted)]
    weights = [part.weight for part in config.data.parts]
    counts = Counter(problems.parts)
    return [
        (source, counts[number], round(wanted * weights[number] / sum(weights), 1))
        for number, source in enumerate(problems.sources)
    ]
