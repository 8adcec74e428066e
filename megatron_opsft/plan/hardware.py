"""The figures of a device that a plan counts on, from one small YAML file; pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_opsft.config_yaml import parse_yaml
from megatron_opsft.errors import UserError

SHIPPED = Path(__file__).with_name("hardware.yaml")
_FRACTIONS = tuple(
    f"{kind}_fraction" for kind in ("training", "prefill", "decode", "collective", "push")
)

_POSITIVE = (
    "memory_bytes",
    "peak_flops",
    "memory_bandwidth",
    "cpu_cores",
    "host_memory_bytes",
    "storage_bandwidth",
    "engine_batch_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and its share of the node; the units and what each means are in `hardware.yaml`.

    Two are the cluster's and not in the file. gpus_per_node: devices that share the fast links.
    node_cores: CPU cores of a node, for ranks that are more than the cores they compute on; None:
    every rank has its `cpu_cores`.
    """

    name: str
    memory_bytes: float
    reserved_bytes: float
    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    training_fraction: float
    prefill_fraction: float
    decode_fraction: float
    decode_overhead_seconds: float
    collective_fraction: float
    push_fraction: float
    push_overhead_seconds: float
    step_overhead_seconds: float
    verify_seconds: float
    cpu_cores: float
    host_memory_bytes: float
    storage_bandwidth: float
    engine_batch_tokens: float
    price_per_hour: float
    gpus_per_node: int = 8
    node_cores: float | None = None

    def cores_of_ranks(self, num_ranks: int) -> float:
        """CPU cores that so many ranks of one node share."""
        return self.cpu_cores * num_ranks if self.node_cores is None else self.node_cores

    @property
    def is_cuda(self) -> bool:
        """Whether the trainer takes the fast parts that only a GPU has."""
        return self.name != "cpu"

    def bandwidth(self, num_ranks: int) -> float:
        """Bytes a second between so many ranks in a row: within a node or beyond."""
        inside = num_ranks <= self.gpus_per_node
        return self.link_bandwidth if inside else self.network_bandwidth


_OF_THE_CLUSTER = ("name", "gpus_per_node", "node_cores")
_FIGURES = tuple(f.name for f in fields(Hardware) if f.name not in _OF_THE_CLUSTER)


def load_hardware(
    name: str,
    path: Path | None = None,
    *,
    gpus_per_node: int = 8,
    node_cores: float | None = None,
) -> Hardware:
    """Entry `name` of the file, by default of the shipped one.

    Errors: `UserError` for a missing or broken file, an unknown device, a missing, unknown or
    impossible figure.
    """
    where = path or SHIPPED
    entries = read_entries(where)
    if name not in entries:
        raise UserError(f"--gpu={name} is not in {where}; there are: {', '.join(entries)}")
    entry = {key: value for key, value in entries[name].items() if key != "sources"}
    if missing := [key for key in _FIGURES if key not in entry]:
        raise UserError(f"{where}: {name} has no {missing[0]}; add it")
    if unknown := [key for key in entry if key not in _FIGURES]:
        raise UserError(
            f"{where}: {name}.{unknown[0]} is unknown; there are: {', '.join(_FIGURES)}"
        )
    figures = {key: _number(value, f"{where}: {name}.{key}") for key, value in entry.items()}
    for key in _FRACTIONS:
        if not 0 < figures[key] <= 1:
            raise UserError(f"{where}: {name}.{key}={figures[key]} must be above 0, at most 1")
    for key in _POSITIVE:
        if figures[key] <= 0:
            raise UserError(f"{where}: {name}.{key}={figures[key]} must be positive")
    return Hardware(name=name, gpus_per_node=gpus_per_node, node_cores=node_cores, **figures)


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """The whole file: device -> its figures and their sources. Errors: `UserError`."""
    try:
        entries = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--hardware={path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--hardware={path} cannot be read: {error}") from None
    if not isinstance(entries, dict) or not all(isinstance(v, dict) for v in entries.values()):
        raise UserError(f"--hardware={path} must hold one section of figures for each device")
    return entries


def figures_of(hardware: Hardware) -> Mapping[str, float]:
    """The figures as the file has them, in its order."""
    return {key: value for key, value in asdict(hardware).items() if key in _FIGURES}


def _number(value: object, what: str) -> float:
    """YAML 1.1 reads 1e12 as a string."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UserError(f"{what}={value!r} must be a number") from None
    if not 0 <= number < float("inf"):
        raise UserError(f"{what}={value!r} must be a finite number, at least 0")
    return number
