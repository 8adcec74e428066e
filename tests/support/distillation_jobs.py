"""What the workers run for a teacher's divergence: the step's own packing, pass and loss."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from groups import OUTCOMES
from jobs import (
    Built,
    Case,
    as_arrays,
    build,
    collect_reduced_parts,
    exported,
    finished,
    sampled_here,
    whole_gradient,
)
from tiny_models import samples

from megatron_opsft.config import TrainConfig
from megatron_opsft.methods.catalog.self_distillation import SelfDistillation
from megatron_opsft.methods.updates import MethodRun
from megatron_opsft.records import Problem, Sample, TokenUse, Verdict
from megatron_opsft.run.step.batch import JudgedBatch
from megatron_opsft.run.step.teaching import pack_taught, without_long_pairs
from megatron_opsft.runtime.phase import Stopwatch
from megatron_opsft.trainer.batching.exchange import fetch_samples, share_facts
from megatron_opsft.trainer.loss import loss_memory
from megatron_opsft.trainer.model.reference import ReferenceModel

DRIFT = 6e-4  # the learning rate that takes the policy away from its teacher
PLAIN, TAUGHT = 9, 15  # tokens of the longest prompt, of the policy and of its teacher


class Found(NamedTuple):
    """On rank 0; weights by HF name."""

    now: dict[str, Any]
    gradient: dict[str, Any]
    loss: float
    kl_mean: float | None
    left_out: int


def prompt_of(problem_id: str, longest: int) -> tuple[int, ...]:
    """The policy's, or that of its teacher."""
    draw = random.Random(f"{problem_id} {longest}")
    return tuple(draw.randrange(257) for _ in range(draw.randint(1, longest)))


def is_correct(sample: Sample) -> bool:
    """Of two in three."""
    return sum(sample.response_ids) % 3 > 0


def judged(case: Case, s: Any, seed: int) -> JudgedBatch:
    """A batch as the ranks have sampled and judged it: two responses to each problem."""
    mine = sampled_here(case, s.layout, samples(case.num_samples, seed=seed))
    rollouts = [finished(replace(r, prompt_ids=prompt_of(r.problem_id, PLAIN))) for r in mine]
    verdicts = [Verdict(outcome=OUTCOMES[is_correct(r)]) for r in rollouts]
    problems = [Problem(id=f"p{n}", text="", answer="") for n in range(-(-case.num_samples // 2))]
    uses = [TokenUse()] * len(rollouts)
    responses = share_facts(rollouts, verdicts, uses, problems)
    groups = s.method.groups(responses, problems, 100)
    return JudgedBatch(
        problems=problems,
        rollouts=rollouts,
        verdicts=verdicts,
        token_uses=uses,
        responses=responses,
        groups=groups,
        credits=s.method.credit(groups),
        sampled=responses,
    )


def session(case: Case, built: Built, method: SelfDistillation) -> Any:
    """As much of one as a step's packing takes."""
    layout, device = built.layout, case.device
    train = TrainConfig(max_tokens_per_microbatch=case.budget)
    return SimpleNamespace(
        config=SimpleNamespace(train=train, parallel=case.parallel),
        device=device,
        layout=layout,
        method=MethodRun(method, seed=0),
        teacher=SimpleNamespace(encode=lambda problem: prompt_of(problem.id, TAUGHT)),
        trainer=built.trainer,
        shards=built.shards,
        reference=ReferenceModel(built.trainer, device),
        fetch=lambda rollouts, problems, responses, indices_of: fetch_samples(
            responses, indices_of, rollouts, problems, layout, device.torch_device
        ),
    )


def refresh(s: Any) -> None:
    """The optimizer keeps what it has learned."""
    parts = s.trainer.optimizer.chained_optimizers
    states = [state for part in parts for state in part.optimizer.state.values()]
    before = [{key: value.clone() for key, value in state.items()} for state in states]
    s.reference.replace()
    for state, kept in zip(states, before, strict=True):
        assert state["exp_avg_sq"].any()
        assert all((state[key] == value).all() for key, value in kept.items())
    s.teacher.encode = lambda problem: prompt_of(problem.id, PLAIN)


def distilled_gradient(
    case: Case, method: SelfDistillation, chunk_tokens: int, alike: bool = False
) -> Found:
    """The gradient on a batch of a policy that has moved on from its teacher; or, if alike, when
    that has become the policy again and has the plain prompts.
    """
    chunk_bytes = chunk_tokens * 8 * 301  # of the models of one rank
    with patch.object(loss_memory, "_CPU_CHUNK_BYTES", chunk_bytes):
        built = build(replace(case, objective=method.objective(1.0)))
        s = session(case, built, method)
        watch = Stopwatch(case.device)
        (moved,) = pack_taught(s, judged(case, s, seed=1), watch)
        s.trainer.step(moved.microbatches, moved.factor, lr=DRIFT)
        if alike:
            refresh(s)
        batch = without_long_pairs(s, judged(case, s, seed=0))
        (update,) = pack_taught(s, batch, watch)
        now = as_arrays(exported(built))
        found = s.trainer.accumulate(update.microbatches, update.factor)
    collect_reduced_parts(s.trainer)
    left_out = int(batch.metrics["num_pairs_left_out"])
    return Found(now, whole_gradient(built), found.loss, found.kl_mean, left_out)
