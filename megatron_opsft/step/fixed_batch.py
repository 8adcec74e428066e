"""The batch of a step from fixed data: nothing is sampled, and every rank reads what it packs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_opsft.batching.exchange import Fetch
from megatron_opsft.data.sampler import ProblemSampler
from megatron_opsft.data.stored_responses import StoredResponses
from megatron_opsft.records import NO_RANK, Outcome, Problem, ResponseFacts, Sample
from megatron_opsft.session import Session
from megatron_opsft.step.batch import JudgedBatch


def stored_batch(s: Session, stored: StoredResponses, step: int) -> JudgedBatch:
    """The step's responses: as many as another method would sample, epoch after epoch in a new
    order.
    """
    order = ProblemSampler(
        num_problems=len(stored),
        batch_size=s.config.data.prompts_per_step * s.config.rollout.group_size,
        seed=s.config.run.seed,
    )
    numbers = order.indices(s.method.first_draw(step))
    responses = [_facts(stored, place, number) for place, number in enumerate(numbers)]
    problems = [Problem(id=stored.problem_id(number), text="", answer="") for number in numbers]
    limit = max(response.num_response_tokens for response in responses)
    groups = [
        replace(group, responses=[replace(r, stored=stored.advantage(n)) for r in group.responses])
        for group, n in zip(s.method.groups(responses, problems, limit), numbers, strict=True)
    ]
    return JudgedBatch(
        problems=problems,
        rollouts=[],
        verdicts=[],
        responses=responses,
        groups=groups,
        weights=s.method.weigh(groups),
        fetcher=lambda trained: _fetch_from_file(s, stored, trained),
    )


def _facts(stored: StoredResponses, place: int, number: int) -> ResponseFacts:
    return ResponseFacts(
        place=place,
        sample_index=0,
        num_prompt_tokens=stored.num_prompt_tokens(number),
        num_response_tokens=stored.num_response_tokens(number),
        outcome=Outcome.CORRECT,
        finished=True,
        unclosed_think=False,
        rank=NO_RANK,
        slot=number,
    )


def _fetch_from_file(
    s: Session, stored: StoredResponses, trained: Sequence[ResponseFacts]
) -> Fetch:
    def fetch(numbers_of: Sequence[Sequence[int]]) -> Mapping[int, Sample]:
        return {n: _sample(stored, trained[n].slot) for n in numbers_of[s.layout.dp_rank]}

    return fetch


def _sample(stored: StoredResponses, number: int) -> Sample:
    row = stored[number]
    return Sample(
        problem_id=row.problem_id,
        sample_index=0,
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        log_probs=row.log_probs,
    )
