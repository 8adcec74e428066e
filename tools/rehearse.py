"""A rehearsal of scale: what one rank of a large job does in a step beside computing, for real.

    python tools/rehearse.py [CONFIG] [KEY=VALUE ...] --ranks 8 4096 [--json]

The project's own functions run on a few ranks of the job (the first, the last of the first node,
one in the middle, the last), each in turn, on fake process groups of the whole job. What the other
ranks would send is made up with the token counts that a plan assumes, and is what
`all_gather_bytes` and `route_bytes` return: time in the network is not in it. Without CONFIG:
R1-Distill-7B with B=1,024, G=16, L=8,192.

Printed for each part: seconds of CPU time, and bytes: received by the rank, and the peak of what
Python and numpy hold of it; of the slowest and of the fullest of the ranks.
"""

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_opsft.commands.plan.assumptions import load_hardware, make_workload
from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.architectures.shape import quadratic_at
from megatron_opsft.models.storage.model_paths import resolve_config
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.models.weights.schedule import make_schedule
from megatron_opsft.models.weights.vllm_layout import vllm_parameters
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, TokenUse, Verdict
from megatron_opsft.rollout.engine import EngineLayout
from megatron_opsft.run.sync.transfer import engine_placements, trainer_placements
from megatron_opsft.runtime import cpu_compat, distributed
from megatron_opsft.runtime.distributed import Layout, make_groups, stop_distributed
from megatron_opsft.runtime.exchange import digest_of, to_bytes
from megatron_opsft.trainer.batching import exchange
from megatron_opsft.trainer.batching.packing import plan_packing
from megatron_opsft.trainer.model.shards import ModelShards

CONFIG = Path(__file__).resolve().parents[1] / "examples/configs/r1_distill_7b_paper.yaml"
STEP = ["data.prompts_per_step=1024", "rollout.group_size=16", "rollout.max_response_tokens=8192"]
Gathers = Sequence[Sequence[Tensor]]
Parts = dict[int, Tensor]
PROMPT_TOKENS = 150
TOKEN = 123_456  # all the same: small integers are shared in Python, those of a vocabulary are not


@contextmanager
def fake_rank(job: PlannedRun, rank: int) -> Iterator[Layout]:
    """Inside, this process is one rank of the job's world, whose other ranks are not there."""
    dist.init_process_group("fake", rank=rank, world_size=job.world_size, store=FakeStore())
    try:
        yield make_groups(job.parallel)
    finally:
        stop_distributed()


class Rank:
    """One rank of a job: runs the parts and measures each. figures: part -> (seconds, bytes)."""

    def __init__(self, job: PlannedRun, layout: Layout) -> None:
        self.job, self.layout = job, layout
        self.figures: dict[str, tuple[float, int]] = {}

    def measure(
        self, part: str, act: Callable[[], Any], gathers: Gathers = (), came: Parts | None = None
    ) -> Any:
        """The result of `act`, which is run twice, since watching memory takes time.

        gathers: what each rank gives to the calls of `all_gather_bytes`, call by call. came: what
        each rank sends to this one in `route_bytes`, this one too.
        """
        told, came = cycle(gathers), came or {}
        fakes = {"all_gather_bytes": lambda _: [*next(told)], "route_bytes": lambda _: came}
        with patch.multiple(exchange, **fakes), patch.multiple(distributed, **fakes):
            begin = time.process_time()
            result = act()
            seconds = time.process_time() - begin
            tracemalloc.start()
            act()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        received = [*came.values(), *(vector for vectors in gathers for vector in vectors)]
        self.figures[part] = seconds, peak + sum(vector.nbytes for vector in received)
        return result

    def rehearse_step(self) -> None:
        """Facts of the responses, packing, tokens. All finished responses are accepted."""
        job, config, layout = self.job, self.job.config, self.layout
        # Of the responses, problem by problem: those of a plan, in an order that says nothing.
        lengths = list(make_workload(config).lengths)
        random.Random(0).shuffle(lengths)
        limit, group = config.rollout.max_response_tokens, config.rollout.group_size
        problems = [Problem(id=f"p{i}", text="", answer="") for i in range(len(lengths) // group)]

        starts = [rank * len(lengths) // job.world_size for rank in range(job.world_size + 1)]
        held = [range(first, stop) for first, stop in pairwise(starts)]  # by each rank

        def facts(numbers: range) -> Tensor:
            """What the rank that holds these tells in `share_facts`."""
            prompt, correct = PROMPT_TOKENS, list(Outcome).index(Outcome.CORRECT)
            token_use = (0,) * len(TokenUse._fields)
            rows = [
                (*divmod(n, group), prompt, lengths[n], correct, lengths[n] < limit, i, *token_use)
                for i, n in enumerate(numbers)
            ]
            return torch.tensor(rows, dtype=torch.int32).flatten().view(torch.uint8)

        rollouts = [
            Rollout(
                problem_id=problems[n // group].id,
                sample_index=n % group,
                prompt_ids=(TOKEN,) * PROMPT_TOKENS,
                response_ids=(TOKEN,) * lengths[n],
                text="",
                finish_reason=FinishReason.STOP,
                weight_version=0,
            )
            for n in held[layout.rank]
        ]
        verdicts = [Verdict(outcome=Outcome.CORRECT, answer="42")] * len(rollouts)
        token_uses = [TokenUse()] * len(rollouts)
        share = partial(exchange.share_facts, rollouts, verdicts, token_uses, problems)
        responses = self.measure("facts of responses", share, [[*map(facts, held)]])
        accepted = [response for response in responses if response.finished]
        pack = partial(
            plan_packing,
            [response.sequence_tokens for response in accepted],
            budget=config.train.max_tokens_per_microbatch * config.parallel.cp,
            dp_size=job.dp,
            quadratic_at=quadratic_at(job.shape),
        )
        plan = self.measure("packing", pack)
        indices_of = [[i for indices in bins for i in indices] for bins in plan]
        sizes: dict[int, int] = {}
        if layout.rank == layout.first_of_replica(layout.dp_rank):
            for i in indices_of[layout.dp_rank]:
                holder = accepted[i].rank
                sizes[holder] = sizes.get(holder, 0) + accepted[i].sequence_tokens
        came = {
            rank: torch.full((sizes[rank],), TOKEN, dtype=torch.int32).view(torch.uint8)
            for rank in sorted(sizes)
        }
        # Without the broadcast inside the replica, whose other ranks are not there.
        where = layout, torch.device("cpu")
        fetch = partial(exchange.fetch_samples, accepted, indices_of, rollouts, problems, *where)
        self.measure("tokens to the replica", fetch, came=came)

    def rehearse_push(self) -> None:
        """Once a run: who holds what, and which rectangle goes where."""
        job, layout, parallel = self.job, self.layout, self.job.parallel
        table = WeightTable(job.shape, "local", parallel.tp)
        num_layers, num_experts = (
            job.shape.num_layers // parallel.pp,
            table.num_experts // parallel.ep,
        )
        rules = {
            (stage, ep_rank): table.stage_rules(
                range(stage * num_layers, (stage + 1) * num_layers),
                has_embedding=stage == 0,
                has_output=stage == parallel.pp - 1,
                experts=range(ep_rank * num_experts, (ep_rank + 1) * num_experts),
            )
            for stage in range(parallel.pp)
            for ep_rank in range(parallel.ep)
        }
        nothing, own_rules = torch.empty(0, device="meta"), rules[layout.pp_rank, layout.ep_rank]
        parameters = tuple((rule, nothing) for rule in own_rules)
        shards = ModelShards(table=table, layout=layout, parameters=parameters)
        engine = EngineLayout(
            tp_size=job.config.rollout.tp,
            tp_rank=layout.rank % job.config.rollout.tp,
            parameters_of=lambda rank: vllm_parameters(table, rank, job.config.rollout.tp),
        )
        names = {at: tuple(rule.mcore_name for rule in held) for at, held in rules.items()}
        per_stage, etp = job.world_size // parallel.pp, parallel.expert_tp
        everyone = range(job.world_size)
        tp_ranks = [(rank % parallel.tp, rank % etp) for rank in everyone]
        stages = [(rank // per_stage, rank % per_stage // etp % parallel.ep) for rank in everyone]
        of_trainer = [(at, names[stage]) for at, stage in zip(tp_ranks, stages, strict=True)]
        of_engine = [rank % job.config.rollout.tp for rank in everyone]
        placements = self.measure(
            "who holds what",
            lambda: (trainer_placements(shards), engine_placements(engine)),
            [*told_by_value(of_trainer), *told_by_value(of_engine)],
        )
        sizes = {"itemsize": job.dtype_bytes, "bucket_bytes": job.config.sync.bucket_mb * 2**20}
        made = partial(make_schedule, *placements, rank=layout.rank, **sizes)
        self.measure("schedule of a push", made)


def told_by_value(values: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What the ranks tell in `ranks_by_value`: all a digest, the first with a value also that."""
    first_with = {value: rank for rank, value in reversed([*enumerate(values)])}
    digests = {value: digest_of(value) for value in first_with}
    whole = [to_bytes([v] if first_with[v] == rank else []) for rank, v in enumerate(values)]
    return [digests[value] for value in values], whole


def rehearse(job: PlannedRun) -> Iterator[dict[str, Any]]:
    """A row for each part."""
    last, ranks = job.world_size - 1, []
    for number in sorted({0, min(7, last), job.world_size // 2, last}):
        with fake_rank(job, number) as layout:
            ranks.append(Rank(job, layout))
            ranks[-1].rehearse_step()
            ranks[-1].rehearse_push()
    for part in ranks[0].figures:
        seconds, num_bytes = map(max, zip(*(rank.figures[part] for rank in ranks), strict=True))
        row = {"part": part, "ranks": job.world_size}
        yield row | {"seconds": round(seconds, 4), "bytes": num_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="a run's file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4096], help="of the job")
    parser.add_argument("--json", action="store_true", help="JSON lines in place of a table")
    args = parser.parse_intermixed_args()
    cpu_compat.install()
    step = [] if args.config else STEP
    config = load_config(args.config or CONFIG, [*step, *args.overrides])
    shape, h100 = read_model_shape(resolve_config(config.model.path)), load_hardware("h100")
    for size in args.ranks:
        for row in rehearse(PlannedRun(config=config, shape=shape, hardware=h100, world_size=size)):
            text = "{part:<24} {ranks:6,} ranks {seconds:9.3f} s {bytes:15,} bytes".format(**row)
            print(json.dumps(row) if args.json else text, flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
