"""What the commands that plan and simulate have in common: options, and what these name."""

from pathlib import Path
from typing import Annotated, Any

import typer

GpusPerNode = Annotated[int, typer.Option(min=1, help="Devices, and ranks, of a node.")]
HardwareFile = Annotated[
    Path | None, typer.Option(help="Figures of devices, such as `plan calibrate` writes.")
]
NodeCores = Annotated[
    float | None,
    typer.Option(help="CPU cores that all ranks of a node share; by default cpu_cores of each."),
]


def load_device(name: str, path: Path | None, gpus_per_node: int, node_cores: float | None) -> Any:
    """The `Hardware` that the options name. Errors: `UserError`."""
    from megatron_opsft.plan.hardware import load_hardware

    return load_hardware(name, path, gpus_per_node=gpus_per_node, node_cores=node_cores)


def load_shape(model_path: str) -> Any:
    """The `ModelShape` of config.json: a directory's, the shipped one, or the hub's. Errors:
    `UserError`.
    """
    from megatron_opsft.architectures.config_from_hf import read_model_shape
    from megatron_opsft.storage.hf_files import resolve_config

    return read_model_shape(resolve_config(model_path))
