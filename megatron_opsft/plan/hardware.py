"""The figures of a device that a plan counts on, from one small YAML file; pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_opsft.config_yaml import parse_yaml
from megatron_opsft.errors import UserError

SHIPPED = Path(__file__).with_name("hardware.yaml")
_MAY_BE_ZERO = (
    *("reserved_bytes", "price_per_hour"),
    *("token_seconds", "verify_seconds", "microbatch_seconds", "push_seconds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and its share of the node; `hardware.yaml` says what each figure means.

    gpus_per_node is the cluster's and not in the file: devices that share the fast links.
    """

    name: str
    memory_bytes: float
    reserved_bytes: float
    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    storage_bandwidth: float
    host_memory_bytes: float
    cpu_cores: float
    engine_batch_tokens: float
    price_per_hour: float
    token_seconds: float
    verify_seconds: float
    microbatch_seconds: float
    push_seconds: float
    rollout_factor: float
    verify_factor: float
    train_factor: float
    push_factor: float
    gpus_per_node: int = 8

    @property
    def is_cuda(self) -> bool:
        """Whether the trainer takes the fast parts that only a GPU has."""
        return self.name != "cpu"

    def bandwidth(self, num_ranks: int) -> float:
        """Bytes a second between so many ranks in a row: within a node or beyond."""
        inside = num_ranks <= self.gpus_per_node
        return self.link_bandwidth if inside else self.network_bandwidth


FIGURES = tuple(f.name for f in fields(Hardware) if f.name not in ("name", "gpus_per_node"))


def load_hardware(name: str, path: Path | None = None, *, gpus_per_node: int = 8) -> Hardware:
    """Entry `name` of the shipped file, with what the file at `path` says otherwise.

    Errors: `UserError` for a missing or broken file, an unknown device, a missing, unknown or
    impossible figure.
    """
    entries = _read_entries(SHIPPED)
    where = path or SHIPPED
    if path is not None:
        for device, entry in _read_entries(path).items():
            entries[device] = {**entries.get(device, {}), **entry}
    if name not in entries:
        raise UserError(f"--gpu={name} is not in {where}; there are: {', '.join(entries)}")
    entry = entries[name]
    if missing := [key for key in FIGURES if key not in entry]:
        raise UserError(f"{where}: {name} has no {missing[0]}; add it")
    if unknown := [key for key in entry if key not in FIGURES]:
        raise UserError(f"{where}: {name}.{unknown[0]} is unknown; there are: {', '.join(FIGURES)}")
    figures = {key: _number(value, f"{where}: {name}.{key}") for key, value in entry.items()}
    for key, value in figures.items():
        if value == 0 and key not in _MAY_BE_ZERO:
            raise UserError(f"{where}: {name}.{key}=0 must be positive")
    return Hardware(name=name, gpus_per_node=gpus_per_node, **figures)


def figures_of(hardware: Hardware) -> Mapping[str, float]:
    """The figures as the file has them."""
    return {key: value for key, value in asdict(hardware).items() if key in FIGURES}


def _read_entries(path: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--hardware={path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--hardware={path} cannot be read: {error}") from None
    if not isinstance(entries, dict) or not all(isinstance(v, dict) for v in entries.values()):
        raise UserError(f"--hardware={path} must hold one section of figures for each device")
    return entries


def _number(value: object, what: str) -> float:
    """YAML 1.1 reads 1e12 as a string."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UserError(f"{what}={value!r} must be a number") from None
    if not 0 <= number < float("inf"):
        raise UserError(f"{what}={value!r} must be a finite number, at least 0")
    return number
