"""The assumptions of a plan: figures of a device, and the responses of a step; pure.

Figures of devices come from one small YAML file. Response lengths follow a log-normal distribution
that is cut at the limit.
"""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
)

from megatron_opsft.config import Config
from megatron_opsft.config.load import read_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject, record

SHIPPED = Path(__file__).with_name("hardware.yaml")
# The phases of metrics.jsonl; each has a factor in the figures of a device.
PHASES = ("rollout", "verify", "train", "sync")
# The end of on-policy SFT with R1-Distill-1.5B: mean tokens and accuracy over five benchmarks (the
# paper's main table). It starts at 10,178 tokens, and the limit cuts off most responses.
PAPER_MEAN_TOKENS = 2186.0
PAPER_LIMIT = 3500
PAPER_ACCEPTANCE = 0.599
# Standard deviation of the logarithm, of 20 published responses of R1-Distill-7B to MATH-500.
SIGMA = 0.94
# Mean of a prompt, template included. Assumption.
PROMPT_TOKENS = 150


class Hardware(BaseModel):
    """One device and its share of the node: an entry of `hardware.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    """Key of the entry; not a figure of the file."""
    gpus_per_node: int
    """Devices that share the fast links; not a figure of the file."""
    memory_bytes: PositiveFloat
    reserved_bytes: NonNegativeFloat
    """Memory taken before any tensor: CUDA context, NCCL, cuBLAS workspaces."""
    peak_flops: PositiveFloat
    """Dense bfloat16 operations a second."""
    memory_bandwidth: PositiveFloat
    """Bytes a second of the device's memory."""
    link_bandwidth: PositiveFloat
    """Bytes a second to another device of the node, in one direction."""
    network_bandwidth: PositiveFloat
    """Bytes a second to another node, in one direction, for each device."""
    host_bandwidth: PositiveFloat
    """Bytes a second between a device and the CPU's memory, in one direction."""
    storage_bandwidth: PositiveFloat
    """Bytes a second to and from the disks of checkpoints, for each device."""
    host_memory_bytes: PositiveFloat
    """CPU memory of a node for each device."""
    cpu_cores: PositiveFloat
    """CPU cores of a node for each device."""
    engine_batch_tokens: PositiveFloat
    """Tokens of vLLM's largest batch of prompts."""
    price_per_hour: NonNegativeFloat
    """Dollars for one device."""
    token_seconds: NonNegativeFloat
    """Fixed cost of a decoding step."""
    verify_seconds: NonNegativeFloat
    """Verification of one response on one CPU core."""
    microbatch_seconds: NonNegativeFloat
    """Fixed cost of a training micro-batch."""
    sync_seconds: NonNegativeFloat
    """Fixed cost of a weight sync."""
    rollout_factor: PositiveFloat
    """Real seconds of the phase over those that the other figures give; so for the next three."""
    verify_factor: PositiveFloat
    train_factor: PositiveFloat
    sync_factor: PositiveFloat

    @property
    def is_cuda(self) -> bool:
        """True if the trainer takes the fast parts that need a GPU."""
        return self.name != "cpu"

    def bandwidth(self, num_ranks: int) -> float:
        """Bytes a second between this many consecutive ranks, in one node or across nodes."""
        if num_ranks <= self.gpus_per_node:
            return self.link_bandwidth
        return self.network_bandwidth


def named_device(text: str) -> str | None:
    """Return the entry of the shipped file whose name is a word of `text`, such as what a driver or
    SLURM calls a GPU; None if there is none, or several.
    """
    words = set(re.split("[^a-z0-9]+", text.lower()))
    found = words & (read_yaml(SHIPPED).keys() - {"cpu"})
    return found.pop() if len(found) == 1 else None


def hardware_here(name: str, memory_bytes: float, num_ranks: int) -> Hardware:
    """Return a shipped entry for this machine, with the memory of one of its devices and the host
    memory that each of its ranks has. Errors: those of `load_hardware`.
    """
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    figures = {
        "memory_bytes": memory_bytes,
        "host_memory_bytes": host_bytes / num_ranks,
    }
    return load_hardware(name, gpus_per_node=num_ranks).model_copy(update=figures)


def load_hardware(
    name: str, path: Path | None = None, *, gpus_per_node: int = 8
) -> Hardware:
    """Read entry `name` of the shipped file, changed by what the file at `path` holds.

    Errors: `UserError` for a missing or broken file, an unknown device, a missing, unknown or
    impossible figure.
    """
    entries = read_yaml(SHIPPED)
    if path is not None:
        for device, figures in read_yaml(path).items():
            if not isinstance(figures, dict):
                raise UserError(
                    f"--hardware={path}: {device} must hold figures, not {figures!r}"
                )
            entries.setdefault(str(device), {}).update(figures)
    source = path or SHIPPED
    if name not in entries:
        raise UserError(
            f"--gpu={name} is not in {source}; there are: {', '.join(entries)}"
        )
    identity = {"name": name, "gpus_per_node": gpus_per_node}
    try:
        return Hardware.model_validate(entries[name] | identity)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *map(str, first["loc"])])
        if first["type"] != "missing":
            key += f"={first['input']!r}"
        raise UserError(f"{source}: {key}: {first['msg']}") from None


@record
class Workload:
    """The responses of one step on all ranks."""

    lengths: tuple[int, ...] = ()
    """Tokens of each sampled response, in ascending order."""
    trained: tuple[int, ...] = ()
    """Tokens of each response that is trained on, in ascending order."""
    prompt_tokens: int = PROMPT_TOKENS
    """Mean tokens of a prompt."""

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a sampled response; 0 if none is sampled."""
        if not self.lengths:
            return 0.0
        return sum(self.lengths) / len(self.lengths)

    @property
    def sequences(self) -> list[int]:
        """Tokens of each sequence that is trained on, its prompt included."""
        return [self.prompt_tokens + length for length in self.trained]


def quantiles(count: int, mean_tokens: float, limit: int) -> list[int]:
    """Return `count` evenly spaced quantiles of a log-normal, ascending, each from 1 to `limit`.

    mean_tokens: mean of the log-normal before it is cut at the limit.
    """
    logarithms = NormalDist(math.log(mean_tokens) - SIGMA * SIGMA / 2, SIGMA)
    lengths = []
    for index in range(count):
        length = round(math.exp(logarithms.inv_cdf((index + 0.5) / count)))
        lengths.append(max(1, min(limit, length)))
    return lengths


def mean_before_the_cut(measured: float, limit: int) -> float:
    """Return the mean of the log-normal whose mean after the cut at `limit` is `measured`.

    A `measured` at the limit gets the largest mean that is tried, 100 times the limit.
    """
    low, high = 1.0, 100.0 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        if sum(quantiles(200, middle, limit)) / 200 < measured:
            low = middle
        else:
            high = middle
    return high


def make_workload(
    config: Config,
    *,
    mean_tokens: float | None = None,
    acceptance: float = PAPER_ACCEPTANCE,
) -> Workload:
    """Assume the responses of one step of a run. Their lengths are log-normal, cut at the limit.

    mean_tokens: mean length before the cut; by default the mean at the end of the paper's training,
    scaled down if the limit is below the paper's. acceptance: share of all responses
    that are correct and finished. No more are accepted than finish, and the accepted ones are
    spread evenly over those that finish.
    """
    limit = config.rollout.max_response_tokens
    count = config.responses_per_step
    if mean_tokens is None:
        mean_tokens = PAPER_MEAN_TOKENS * min(1.0, limit / PAPER_LIMIT)
    lengths = quantiles(count, mean_tokens, limit)
    finished = [length for length in lengths if length < limit]
    num_accepted = min(len(finished), round(acceptance * count))
    accepted = [
        finished[int((index + 0.5) * len(finished) / num_accepted)]
        for index in range(num_accepted)
    ]
    return _choose_trained(config, lengths, accepted)


def measured_workload(config: Config, metrics: JsonObject) -> Workload:
    """Reconstruct a step's responses: log-normal lengths with the mean of a line of
    metrics.jsonl.
    """
    limit = config.rollout.max_response_tokens
    mean_tokens = mean_before_the_cut(metrics["mean_response_tokens"], limit)
    lengths = quantiles(int(metrics["num_rollouts"]), mean_tokens, limit)
    # Runs on fixed data lack both keys: nothing is accepted there.
    mean_accepted = max(1, round(metrics.get("mean_accepted_tokens", 0)))
    num_accepted = int(metrics.get("num_accepted", 0))
    return _choose_trained(config, lengths, [mean_accepted] * num_accepted)


def _choose_trained(
    config: Config, lengths: list[int], accepted: list[int]
) -> Workload:
    """Apply the run's method to responses of these `lengths`: what it samples and trains on.

    accepted: tokens of the responses that on-policy SFT would train on. A policy gradient trains on
    all responses; this is an upper bound, since without a divergence it leaves out groups of equal
    rewards. What a method samples in place of groups that it drops, it does not train on. A method
    on fixed data samples nothing and trains on as many finished responses.
    """
    trained = accepted
    if config.method.has_fixed_data:
        limit = config.rollout.max_response_tokens
        finished = [length for length in lengths if length < limit]
        trained = _spread_evenly(finished or lengths, len(lengths))
        lengths = []
    elif config.method.learns_from_rejected:
        trained = lengths
    if len(trained) > config.responses_per_step:
        trained = _spread_evenly(trained, config.responses_per_step)
    return Workload(
        lengths=tuple(lengths),
        trained=tuple(trained),
        prompt_tokens=min(PROMPT_TOKENS, config.data.max_prompt_tokens),
    )


def _spread_evenly(lengths: Sequence[int], count: int) -> list[int]:
    """Choose `count` of the lengths at even distances; some more than once if they are fewer."""
    return [lengths[index * len(lengths) // count] for index in range(count)]
