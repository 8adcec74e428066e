"""The samples that are still to be made, as requests in the order in which they should begin."""

from collections.abc import Mapping, Sequence

from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.rollout.requests import PromptRequest
from megatron_opsft.rollout.sampling import EVAL_STEP, response_seed

TICKET_SAMPLES = 16


def make_tickets(
    benchmarks: Sequence[Benchmark],
    prompts: Mapping[str, tuple[int, ...]],
    done: dict[str, set[tuple[str, int]]],
    seed: int,
    ticket_samples: int = TICKET_SAMPLES,
) -> list[PromptRequest]:
    """Requests for what is missing; the last benchmarks first: they have the longest answers.
    Within a benchmark by falling length of the prompts, so that a batch has little padding.

    prompts: key -> prompt ids. done: benchmark -> (problem id, sample index) that are there. The
    same on every rank.
    """
    tickets = []
    for benchmark in reversed(benchmarks):
        lengths = {p.id: len(prompts[benchmark.key(p.id)]) for p in benchmark.problems}
        for problem in sorted(benchmark.problems, key=lambda p: -lengths[p.id]):
            key = benchmark.key(problem.id)
            missing = [
                index
                for index in range(benchmark.samples)
                if (problem.id, index) not in done[benchmark.name]
            ]
            for start in range(0, len(missing), ticket_samples):
                indices = tuple(missing[start : start + ticket_samples])
                tickets.append(
                    PromptRequest(
                        problem_id=key,
                        prompt_ids=prompts[key],
                        sample_indices=indices,
                        seeds=tuple(response_seed(seed, EVAL_STEP, key, i) for i in indices),
                    )
                )
    return tickets
