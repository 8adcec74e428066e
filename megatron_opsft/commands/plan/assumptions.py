"""What a plan counts on: the figures of a device, from one small YAML file, and the responses of a
step, whose lengths are a log-normal that is cut at the limit; pure.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

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

SHIPPED = Path(__file__).with_name("hardware.yaml")
PHASES = ("rollout", "verify", "train", "sync")  # of metrics.jsonl, with a factor each
# What on-policy SFT ends at with R1-Distill-1.5B: mean tokens and accuracy over five benchmarks
# (the paper's main table); it starts at 10,178 tokens, most of them cut off by the limit.
PAPER_MEAN_TOKENS = 2186.0
PAPER_LIMIT = 3500
PAPER_ACCEPTANCE = 0.599
# Standard deviation of the logarithm, of 20 published responses of R1-Distill-7B to MATH-500.
SIGMA = 0.94
# Mean of a prompt, template included. Assumption.
PROMPT_TOKENS = 150


class Hardware(BaseModel):
    """One device and its share of the node; `hardware.yaml` says what each figure means.

    Not in the file are its name, and gpus_per_node: devices that share the fast links.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    gpus_per_node: int = 8
    memory_bytes: PositiveFloat
    reserved_bytes: NonNegativeFloat
    peak_flops: PositiveFloat
    memory_bandwidth: PositiveFloat
    link_bandwidth: PositiveFloat
    network_bandwidth: PositiveFloat
    host_bandwidth: PositiveFloat
    storage_bandwidth: PositiveFloat
    host_memory_bytes: PositiveFloat
    cpu_cores: PositiveFloat
    engine_batch_tokens: PositiveFloat
    price_per_hour: NonNegativeFloat
    token_seconds: NonNegativeFloat
    verify_seconds: NonNegativeFloat
    microbatch_seconds: NonNegativeFloat
    sync_seconds: NonNegativeFloat
    rollout_factor: PositiveFloat
    verify_factor: PositiveFloat
    train_factor: PositiveFloat
    sync_factor: PositiveFloat

    @property
    def is_cuda(self) -> bool:
        """Whether the trainer takes the fast parts that only a GPU has."""
        return self.name != "cpu"

    def bandwidth(self, num_ranks: int) -> float:
        """Bytes a second between this many consecutive ranks: within a node or beyond."""
        inside = num_ranks <= self.gpus_per_node
        return self.link_bandwidth if inside else self.network_bandwidth


def load_hardware(
    name: str, path: Path | None = None, *, gpus_per_node: int = 8
) -> Hardware:
    """Entry `name` of the shipped file, with what the file at `path` says otherwise.

    Errors: `UserError` for a missing or broken file, an unknown device, a missing, unknown or
    impossible figure.
    """
    entries, where = read_yaml(SHIPPED), path or SHIPPED
    for device, entry in (read_yaml(path) if path else {}).items():
        if not isinstance(entry, dict):
            raise UserError(
                f"--hardware={path}: {device} must hold figures, not {entry!r}"
            )
        entries[device] = entries.get(device, {}) | entry
    if name not in entries:
        raise UserError(
            f"--gpu={name} is not in {where}; there are: {', '.join(entries)}"
        )
    try:
        return Hardware(
            **{**entries[name], "name": name, "gpus_per_node": gpus_per_node}
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *map(str, first["loc"])])
        given = "" if first["type"] == "missing" else f"={first['input']!r}"
        raise UserError(f"{where}: {key}{given}: {first['msg']}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The responses of one step of all ranks, in ascending order.

    lengths: sampled tokens; trained: tokens of the responses that are trained on. prompt_tokens:
    mean of a prompt.
    """

    lengths: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()
    prompt_tokens: int = PROMPT_TOKENS

    @property
    def mean_tokens(self) -> float:
        """Of a sampled response; 0 where none is sampled."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    @property
    def sequences(self) -> list[int]:
        """Tokens of what is trained on, prompts included."""
        return [self.prompt_tokens + n for n in self.trained]


def quantiles(count: int, mean_tokens: float, limit: int) -> list[int]:
    """`count` evenly spaced quantiles of a log-normal in ascending order, each from 1 to `limit`.
    mean_tokens: of the log-normal before it is cut.
    """
    normal, middle = NormalDist(), math.log(mean_tokens) - SIGMA * SIGMA / 2
    deviations = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    return [max(1, min(limit, round(math.exp(middle + SIGMA * d)))) for d in deviations]


def mean_before_the_cut(measured: float, limit: int) -> float:
    """The mean of the log-normal whose mean after the cut at `limit` is `measured` (at most just
    below the limit).
    """
    low, high = 1.0, 100.0 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        mean = sum(quantiles(200, middle, limit)) / 200
        low, high = (middle, high) if mean < measured else (low, middle)
    return high


def make_workload(
    config: Config,
    *,
    mean_tokens: float | None = None,
    acceptance: float = PAPER_ACCEPTANCE,
) -> Workload:
    """One step of a run. mean_tokens: of the log-normal before it is cut, by default the paper's
    end, and below the paper's limit as far below it; acceptance: share of all responses that is
    correct and finished. No more are accepted than finish, and their lengths are spread over those
    of all that do.
    """
    limit = config.rollout.max_response_tokens
    count = config.data.prompts_per_step * config.rollout.group_size
    mean_tokens = mean_tokens or PAPER_MEAN_TOKENS * min(1.0, limit / PAPER_LIMIT)
    lengths = quantiles(count, mean_tokens, limit)
    finished = [n for n in lengths if n < limit]
    accepted = min(len(finished), round(acceptance * count))
    spread = [
        finished[int((i + 0.5) * len(finished) / accepted)] for i in range(accepted)
    ]
    return learned_by(config, lengths, spread)


def measured_workload(config: Config, line: dict[str, Any]) -> Workload:
    """The responses that a line of metrics.jsonl describes by their means."""
    limit = config.rollout.max_response_tokens
    mean = mean_before_the_cut(line["mean_response_tokens"], limit)
    lengths = quantiles(int(line["num_rollouts"]), mean, limit)
    # Fixed data have no such keys: nobody has accepted them.
    mean_accepted, accepted = (
        line.get("mean_accepted_tokens", 0),
        line.get("num_accepted", 0),
    )
    return learned_by(config, lengths, [max(1, round(mean_accepted))] * int(accepted))


def learned_by(config: Config, lengths: list[int], accepted: list[int]) -> Workload:
    """What the run's method samples and trains on; accepted: what on-policy SFT would train on.

    A policy gradient trains on all responses, at most: without a divergence groups of equal rewards
    are left out. What a method samples beyond a batch, in place of groups that it drops, it does
    not train on. With fixed data none is sampled, and as many finished ones are trained on.
    """
    trained = accepted
    if config.method.has_fixed_data:
        finished = [
            n for n in lengths if n < config.rollout.max_response_tokens
        ] or lengths
        trained = [
            finished[i * len(finished) // len(lengths)] for i in range(len(lengths))
        ]
        lengths = []
    elif config.method.learns_from_rejected:
        trained = lengths
    batch = config.data.prompts_per_step * config.rollout.group_size
    if len(trained) > batch:
        trained = [trained[i * len(trained) // batch] for i in range(batch)]
    return Workload(
        lengths=tuple(lengths),
        trained=tuple(trained),
        prompt_tokens=min(PROMPT_TOKENS, config.data.max_prompt_tokens),
    )
