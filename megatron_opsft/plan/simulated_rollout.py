"""The first half of a step as a simulation: every engine samples its share, every rank verifies."""

from dataclasses import dataclass

from megatron_opsft.plan.engines import engine_seconds, engine_shares
from megatron_opsft.plan.events import Clock, Cores, Process, Signal, Work
from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.seconds import verify_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRollout:
    """By global rank, in seconds from the start of the step: when it had its responses, when it had
    begun and ended to verify them.
    """

    sampled: list[float]
    verify_begun: list[float]
    verified: list[float]

    @property
    def seconds(self) -> float:
        """Until the slowest rank has its responses."""
        return max(self.sampled)

    @property
    def end(self) -> float:
        """Of both phases, on the slowest rank."""
        return max(self.verified)


def node_cores(clock: Clock, job: Job) -> list[Cores] | None:
    """Of every node, where the ranks compute on them; None: each rank has a device of its own."""
    if job.hardware.is_cuda:
        return None
    nodes = -(-job.world_size // job.hardware.gpus_per_node)
    return [Cores(clock, job.cores_per_node) for _ in range(nodes)]


def cores_of(cores: list[Cores] | None, job: Job, rank: int) -> Cores | None:
    """What a rank computes on; see `Work.cores`."""
    return None if cores is None else cores[rank // job.hardware.gpus_per_node]


def simulate_rollout(job: Job, workload: Workload, slots: int) -> SimulatedRollout:
    """slots: responses that an engine decodes at once."""
    clock = Clock()
    cores = node_cores(clock, job)
    world = job.world_size
    shares = engine_shares(job, workload)
    # With an engine for every rank each goes on by itself, else all exchange the responses first.
    alone = job.num_engines == world
    to_verify = _to_verify(shares, workload.limit, world, alone=alone)
    per_engine = job.engine_tp if job.config.rollout.placement == "colocated" else 1
    all_sampled = Signal(len(shares))
    sampled, begun, verified = [0.0] * world, [0.0] * world, [0.0] * world

    def engine(index: int) -> Process:
        ranks = range(index * per_engine, (index + 1) * per_engine)
        seconds = engine_seconds(job, workload, shares[index], slots).total
        yield Work(seconds, cores_of(cores, job, ranks[0]), job.engine_tp)
        for rank in ranks:
            sampled[rank] = clock.now
        clock.arrive(all_sampled)
        if alone:
            yield from verify(ranks[0])

    def verify(rank: int) -> Process:
        if not alone:
            yield all_sampled
        begun[rank] = clock.now
        yield _verification(job, to_verify[rank], cores_of(cores, job, rank))
        verified[rank] = clock.now

    for index in range(len(shares)):
        clock.start(engine(index))
    for rank in range(0 if alone else world):
        clock.start(verify(rank))
    clock.run()
    return SimulatedRollout(sampled=sampled, verify_begun=begun, verified=verified)


def _to_verify(
    shares: list[tuple[int, ...]], limit: int, world_size: int, *, alone: bool
) -> list[int]:
    """Finished responses that each rank verifies: its own, or its part of all
    (`rollout.sample.Sampler`). Those that hit the limit are not verified.
    """
    if alone:
        return [sum(n < limit for n in share) for share in shares]
    finished = [n < limit for share in shares for n in share]
    return [sum(finished[rank::world_size]) for rank in range(world_size)]


def _verification(job: Job, num_responses: int, cores: Cores | None) -> Work:
    hardware, mine = job.hardware, job.cores_per_node / job.ranks_per_node
    if cores is None:
        return Work(verify_seconds(num_responses, mine, hardware))
    # As `verify.worker_pool.share_of_cores`: at least one process for each rank.
    workers = job.config.verify.workers or max(1, int(mine))
    width = max(1, min(workers, num_responses))
    return Work(verify_seconds(num_responses, width, hardware), cores, width)
