"""What is rehearsed of a step: from the order of the problems to the records."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rehearsal.fake_world import FakeWorld
from torch import Tensor

from megatron_opsft.architectures.flops import quadratic_at
from megatron_opsft.batching.exchange import fetch_samples, share_facts
from megatron_opsft.batching.packing import describe_plan, plan_packing
from megatron_opsft.data.sampler import ProblemSampler
from megatron_opsft.methods.updates import MethodRun
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.workload import make_workload
from megatron_opsft.records import FinishReason, Outcome, Problem, Response, Rollout, Verdict
from megatron_opsft.rollout.requests import deal_evenly, make_requests
from megatron_opsft.run.rollout_log import RolloutLog, WrittenResponse
from megatron_opsft.runtime.distributed import Layout
from megatron_opsft.runtime.exchange import to_bytes
from megatron_opsft.step.batch import JudgedBatch

Measure = Callable[[str, Callable[[], Any]], Any]

NUM_PROBLEMS = 40_315  # of DeepScaleR
PROMPT_TOKENS = 150
NODE = 8
_TOKENS = tuple(i * 7919 % 150_000 for i in range(1 << 17))


class StepParts:
    """From the order of the problems to the records. Responses are those that `plan` assumes."""

    def __init__(self, job: TrainingJob, layout: Layout, world: FakeWorld, directory: Path) -> None:
        self._job, self._layout, self._world, self._directory = job, layout, world, directory
        # Of the responses, problem by problem: those of a plan, in an order that says nothing.
        self._lengths = list(make_workload(job.config).lengths)
        random.Random(0).shuffle(self._lengths)

    def run(self, measure: Measure) -> None:
        job, config = self._job, self._job.config
        order = ProblemSampler(
            num_problems=NUM_PROBLEMS, batch_size=config.data.prompts_per_step, seed=0
        )
        indices = measure("problem order", lambda: order.indices(1))
        problems = [Problem(id=f"p{i}", text="", answer="") for i in indices]
        group = config.rollout.group_size
        engine = self._layout.rank // job.engine_tp

        def deal() -> Any:
            prompt = range(PROMPT_TOKENS)
            groups = [make_requests(p.id, prompt, group, 0, 1) for p in problems]
            return deal_evenly(groups, job.num_engines)[engine]

        measure("dealing of requests", deal)
        rollouts = [self._rollout(problems, n) for n in self._numbers_of(self._layout.rank)]
        verdicts = [Verdict(outcome=Outcome.CORRECT, answer="42")] * len(rollouts)
        self._world.will_gather([self._facts(rank) for rank in range(job.world_size)])
        responses = measure("facts of responses", lambda: share_facts(rollouts, verdicts, problems))
        self._world.will_gather()

        method = MethodRun(config.method, seed=0)

        def weigh() -> Any:
            groups = method.groups(responses, problems, config.rollout.max_response_tokens)
            weights = method.weigh(groups)
            return groups, weights, method.updates(groups, weights)

        groups, weights, (update,) = measure("weights of samples", weigh)
        accepted = update.responses
        lengths = [response.sequence_tokens for response in accepted]
        budget = config.train.max_tokens_per_microbatch * config.parallel.cp
        quadratic = quadratic_at(job.shape)

        def pack() -> Any:
            plan = plan_packing(lengths, budget=budget, dp_size=job.dp, quadratic_at=quadratic)
            describe_plan(lengths, plan, budget=budget, quadratic_at=quadratic)
            return plan

        plan = measure("packing", pack)
        numbers = [[i for indices in bins for i in indices] for bins in plan]
        self._world.routed = self._tokens(accepted, numbers)
        cpu = torch.device("cpu")

        def fetch(responses: Sequence[Response], indices_of: Sequence[Sequence[int]]) -> Any:
            return fetch_samples(responses, indices_of, rollouts, problems, self._layout, cpu)

        # Without the broadcast inside the replica, whose other ranks are not there.
        measure("tokens to the replica", lambda: fetch(accepted, numbers))
        batch = JudgedBatch(
            problems=problems,
            rollouts=rollouts,
            verdicts=verdicts,
            responses=responses,
            groups=groups,
            weights=weights,
            fetch=fetch,
        )
        self._record(measure, batch)

    def _numbers_of(self, rank: int) -> list[int]:
        """The responses of a rank: its engine's, or its part where engines are fewer than ranks."""
        job, total = self._job, len(self._lengths)
        if job.engine_tp == 1:
            group = job.config.rollout.group_size
            places = range(rank, job.config.data.prompts_per_step, job.num_engines)
            return [place * group + i for place in places for i in range(group)]
        return list(
            range(-(-rank * total // job.world_size), -(-(rank + 1) * total // job.world_size))
        )

    def _rollout(self, problems: Sequence[Problem], number: int) -> Rollout:
        place, index = divmod(number, self._job.config.rollout.group_size)
        length = self._lengths[number]
        finish = (
            FinishReason.STOP
            if length < self._job.config.rollout.max_response_tokens
            else (FinishReason.LENGTH)
        )
        return Rollout(
            problem_id=problems[place].id,
            sample_index=index,
            prompt_ids=tuple(range(PROMPT_TOKENS)),
            response_ids=_TOKENS[:length],
            text="abc" * length,
            finish_reason=finish,
            weight_version=0,
        )

    def _facts(self, rank: int) -> Tensor:
        """What a rank sends in `share_facts`."""
        group = self._job.config.rollout.group_size
        limit = self._job.config.rollout.max_response_tokens
        correct = list(Outcome).index(Outcome.CORRECT)
        rows = [
            (*divmod(n, group), PROMPT_TOKENS, size, correct, size < limit, False, index)
            for index, n in enumerate(self._numbers_of(rank))
            for size in [self._lengths[n]]
        ]
        return torch.tensor(rows, dtype=torch.int32).flatten().view(torch.uint8)

    def _tokens(self, accepted: Sequence[Any], numbers: Sequence[Sequence[int]]) -> Any:
        """What every rank sends to the replicas that pack its samples."""
        routed: dict[int, dict[int, int]] = {}
        for dp_rank, mine in enumerate(numbers):
            to = self._layout.first_of_replica(dp_rank)
            for n in mine:
                parts = routed.setdefault(accepted[n].rank, {})
                parts[to] = parts.get(to, 0) + 4 * accepted[n].sequence_tokens
        # All one large token: small integers are shared in Python, those of a vocabulary are not.
        return {
            source: {
                to: torch.full((size // 4,), _TOKENS[-1], dtype=torch.int32).view(torch.uint8)
                for to, size in parts.items()
            }
            for source, parts in routed.items()
        }

    def _record(self, measure: Measure, batch: JudgedBatch) -> None:
        rank, world_size = self._layout.rank, self._layout.world_size
        first = rank // NODE * NODE
        writer = min(first + NODE, world_size) - 1
        os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(NODE), str(rank - first)
        self._world.routed = {}
        for other in range(first, writer):
            held = [
                (
                    n,
                    WrittenResponse(
                        rollout=self._rollout(batch.problems, n),
                        verdict=Verdict(outcome=Outcome.CORRECT, answer="42"),
                        reward=1.0,
                        advantage=1.0,
                    ),
                )
                for n in self._numbers_of(other)
            ]
            self._world.routed[other] = {writer: to_bytes(held)}
        (self._directory / "rollouts").mkdir()
        log = RolloutLog(self._directory, self._layout)

        def record() -> None:
            log.begin(1, batch)
            log.finish()

        measure("records", record)
