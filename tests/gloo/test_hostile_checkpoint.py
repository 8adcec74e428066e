"""A checkpoint whose files would run code when they are unpickled: an error, and nothing is run."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Case, build
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from world import World

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.dist_metadata import METADATA_NAME
from megatron_opsft.runtime.durable import COMPLETE
from megatron_opsft.trainer.model.checkpoint import Checkpointer
from megatron_opsft.trainer.model.checkpoint_write import sealed, size_and_crc

CASE = Case(dp=2)


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def in_metadata(path: Path, trace: Path) -> str:
    (path / METADATA_NAME).write_bytes(pickle.dumps(Hostile(trace)))
    return METADATA_NAME


def in_common(path: Path, trace: Path) -> str:
    torch.save({"optimizer": Hostile(trace)}, path / "common.pt")
    return "common.pt"


def in_a_tensor(path: Path, trace: Path) -> str:
    file = sorted(path.glob("*.distcp"))[-1]
    with open(file, "r+b") as stream:
        torch.save(Hostile(trace), stream)
    return file.name


def in_an_object(path: Path, trace: Path) -> str:
    """A tensor of the model that the metadata calls an object."""
    name = in_a_tensor(path, trace)
    metadata = pickle.loads((path / METADATA_NAME).read_bytes())
    index, stored = next(iter(metadata.storage_data.items()))
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    stored.relative_path, stored.offset, stored.length = name, 0, (path / name).stat().st_size
    metadata.storage_data[type(index)(index.fqn)] = stored
    (path / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    return name


def settings_of_another_kind(path: Path, trace: Path) -> str:
    torch.save({"optimizer": {"optimizer": [1, 2]}}, path / "common.pt")
    return "common.pt"


def load_changed(path: Path, change: Callable[[Path, Path], str], trace: Path) -> tuple[str, str]:
    """The file that was changed, with checksums that agree, and the error."""
    built = build(CASE)
    saver = Checkpointer(path.parent, built.trainer.models, built.trainer.optimizer, keep=1)
    saver.save(1, {})
    names = [""]
    if built.layout.is_main:
        names = [change(path, trace)]
        manifest = json.loads((path / COMPLETE).read_text())
        del manifest["checksum"]
        manifest["files"] = {name: size_and_crc(path / name) for name in manifest["files"]}
        (path / COMPLETE).write_bytes(sealed(manifest))
    dist.broadcast_object_list(names)
    with pytest.raises(UserError) as caught:
        saver.load_newest()
    return names[0], str(caught.value)


@pytest.mark.parametrize(
    "change",
    [in_metadata, in_common, in_a_tensor, in_an_object, settings_of_another_kind],
    ids=lambda change: change.__name__,
)
def test_it_is_refused_on_every_rank_and_runs_nothing(
    world: World, tmp_path: Path, change: Callable[[Path, Path], str]
) -> None:
    path, trace = tmp_path / "step_000001", tmp_path / "it_ran"
    for name, message in world.run(load_changed, 2, path, change, trace):
        assert message.startswith(f"{path / name} is damaged: ") and "\n" not in message
    assert not trace.exists()
