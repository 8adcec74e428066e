"""The batch of a step from fixed data: nothing is sampled, and every rank reads what it packs."""

from collections.abc import Mapping, Sequence

from megatron_opsft.data.sampler import ProblemSampler
from megatron_opsft.data.stored_responses import StoredResponses
from megatron_opsft.records import NO_RANK, Outcome, Problem, Response, Sample
from megatron_opsft.session import Session
from megatron_opsft.step.batch import JudgedBatch


def stored_batch(s: Session, stored: StoredResponses, step: int) -> JudgedBatch:
    """The step's responses: as many as another method would sample, epoch after epoch in a new
    order.
    """
    order = ProblemSampler(
        members=(range(len(stored)),),
        weights=(1.0,),
        batch_size=s.config.data.prompts_per_step * s.config.rollout.group_size,
        seed=s.config.run.seed,
    )
    rows = order.indices(s.method.first_draw(step))
    responses = [
        Response(
            problem_index=index,
            sample_index=0,
            num_prompt_tokens=stored.num_prompt_tokens[row],
            num_tokens=stored.num_response_tokens[row],
            outcome=Outcome.CORRECT,
            finished=True,
            unclosed_think=False,
            rank=NO_RANK,
            rollout_index=row,
            advantage=stored.advantage(row),
        )
        for index, row in enumerate(rows)
    ]
    problems = [Problem(id=stored.problem_id(row), text="", answer="") for row in rows]
    groups = s.method.groups(responses, problems, max(r.num_tokens for r in responses))

    def fetch(
        trained: Sequence[Response], indices_of: Sequence[Sequence[int]]
    ) -> Mapping[int, Sample]:
        return {i: _sample(stored, trained[i].rollout_index) for i in indices_of[s.layout.dp_rank]}

    return JudgedBatch(
        problems=problems,
        rollouts=[],
        verdicts=[],
        responses=responses,
        groups=groups,
        weights=s.method.weigh(groups),
        fetch=fetch,
    )


def _sample(stored: StoredResponses, row: int) -> Sample:
    found = stored[row]
    return Sample(
        problem_id=found.problem_id,
        sample_index=0,
        prompt_ids=found.prompt_ids,
        response_ids=found.response_ids,
        log_probs=found.log_probs,
    )
