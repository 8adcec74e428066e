"""The batch of a step from fixed data: nothing is sampled, and every rank reads what it packs."""

from megatron_opsft.data.mixture import ProblemSampler
from megatron_opsft.data.stored_responses import StoredResponses
from megatron_opsft.records import NO_RANK, Outcome, Problem, Response
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

    return JudgedBatch(
        problems=problems,
        rollouts=[],
        verdicts=[],
        responses=responses,
        groups=groups,
        weights=s.method.weigh(groups),
    )
