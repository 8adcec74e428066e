"""Tensors of other parts of a model than its language model, such as vision. They are not trained,
and every copy of the model has them bit for bit, in their own dtype.

A Hugging Face directory has them among the others, a Megatron checkpoint in a file of its own.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megatron_opsft.models.storage.hf_files import HfTensors, read_regions
from megatron_opsft.models.storage.hf_writer import Target, plan_safetensors
from megatron_opsft.models.storage.large_files import LargeFile, Region, copy_region
from megatron_opsft.models.storage.model_paths import CARRIED_NAME, is_dist_checkpoint
from megatron_opsft.models.storage.partial import PlannedFile
from megatron_opsft.models.weights.rules import WeightTable


def carried_regions(model_dir: Path, table: WeightTable) -> dict[str, Region]:
    """Return HF name -> region of the tensors that a directory carries; {} if there are none.

    model_dir: a Hugging Face directory, or a Megatron checkpoint. Errors: `UserError` for a file
    that is damaged.
    """
    if not table.architecture.carried:
        return {}
    if is_dist_checkpoint(model_dir):
        path = model_dir / CARRIED_NAME
        return read_regions(path) if path.is_file() else {}
    return HfTensors(model_dir).regions(table.is_carried)


def plan_carried(carried: Mapping[str, Region]) -> tuple[PlannedFile, list[Target]]:
    """Plan the file of a Megatron checkpoint."""
    shapes = {name: region.shape for name, region in carried.items()}
    dtypes = {name: region.dtype for name, region in carried.items()}
    return plan_safetensors(CARRIED_NAME, shapes, dtypes)


def write_carried(path: Path, carried: Mapping[str, Region]) -> None:
    """Write the file of a Megatron checkpoint, some rows at a time."""
    planned, targets = plan_carried(carried)
    file = LargeFile(path, planned.num_bytes)
    try:
        for offset, constant in planned.constants:
            file.write(constant, offset)
        for target in targets:
            copy_region(carried[target.name], target.region, file, target.name)
        file.sync()
    finally:
        file.close()


def repeat_carried(source: Path, path: Path) -> None:
    """Give a file of carried tensors a second name, or copy it where the disk has no links."""
    with suppress(OSError):
        os.link(source, path)
        return
    shutil.copyfile(source, path)
