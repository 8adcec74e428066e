"""The figures of a device that a plan counts on, from one small YAML file; pure."""

from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
)

from megatron_opsft.config.yaml_text import parse_yaml
from megatron_opsft.errors import UserError

SHIPPED = Path(__file__).with_name("hardware.yaml")
PHASES = ("rollout", "verify", "train", "sync")  # of a plan and of metrics.jsonl


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

    @property
    def figures(self) -> dict[str, float]:
        """As the file has them."""
        return self.model_dump(exclude={"name", "gpus_per_node"})

    def bandwidth(self, num_ranks: int) -> float:
        """Bytes a second between so many ranks in a row: within a node or beyond."""
        inside = num_ranks <= self.gpus_per_node
        return self.link_bandwidth if inside else self.network_bandwidth


def load_hardware(name: str, path: Path | None = None, *, gpus_per_node: int = 8) -> Hardware:
    """Entry `name` of the shipped file, with what the file at `path` says otherwise.

    Errors: `UserError` for a missing or broken file, an unknown device, a missing, unknown or
    impossible figure.
    """
    entries, where = _read_entries(SHIPPED), path or SHIPPED
    if path is not None:
        for device, entry in _read_entries(path).items():
            entries[device] = {**entries.get(device, {}), **entry}
    if name not in entries:
        raise UserError(f"--gpu={name} is not in {where}; there are: {', '.join(entries)}")
    try:
        return Hardware(**{**entries[name], "name": name, "gpus_per_node": gpus_per_node})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *map(str, first["loc"])])
        given = "" if first["type"] == "missing" else f"={first['input']!r}"
        raise UserError(f"{where}: {key}{given}: {first['msg']}") from None


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
