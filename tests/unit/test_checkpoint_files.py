"""Own files of a checkpoint: which classes `.metadata` may name, what `complete.json` notices."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.dist_metadata import (
    METADATA_NAME,
    read_metadata,
    unpickle_metadata,
)
from megatron_opsft.trainer.model.checkpoint_write import read_manifest, sealed


def calling(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls a function, by its module and its dotted name in there."""
    texts = [text.encode() for text in (module, name, argument)]
    module_op, name_op, argument_op = (b"\x8c" + bytes([len(text)]) + text for text in texts)
    call = pickle.STACK_GLOBAL + argument_op + pickle.TUPLE1 + pickle.REDUCE
    return pickle.PROTO + b"\x04" + module_op + name_op + call + pickle.STOP


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch", "float32.__class__"),
        ("builtins", "list.__subclasses__"),
    ],
)
def test_metadata_that_calls_anything_is_refused(tmp_path: Path, module: str, name: str) -> None:
    path, trace = tmp_path / METADATA_NAME, tmp_path / "it_ran"
    path.write_bytes(calling(module, name, str(trace)))
    with pytest.raises(UserError, match=rf"{path} is damaged: Unpic.*{name} is not allowed"):
        read_metadata(tmp_path)
    assert not trace.exists()


def test_what_torch_saves_itself_is_read(tmp_path: Path) -> None:
    """It notes the path that it was given."""
    dcp.save({"a": torch.ones(3, 4), "b": {"c": 1}}, checkpoint_id=tmp_path, no_dist=True)
    ((key, tensor),) = read_metadata(tmp_path).items()
    assert (key, tensor.shape, tensor.dtype) == ("a", (3, 4), torch.float32)
    path = tmp_path / METADATA_NAME
    content = path.read_bytes()
    unframed = content[:2] + content[11:]  # a frame states its length
    names = [b"\x07pathlib", b"\x0epathlib._local"]  # the other is Python 3.13's
    own, other = names if names[0] in unframed else names[::-1]
    path.write_bytes(unframed.replace(own, other))
    assert own in unframed and read_metadata(tmp_path)["a"] == tensor


@pytest.mark.parametrize(
    "parts",
    [
        [((0,), (2,)), ((0,), (2,))],  # twice the same place: a hole at 2 and 3
        [((0,), (2,))],
        [((0,), (2,)), ((3,), (2,))],  # one that goes beyond the end
        [((0,), (3,)), ((2,), (2,))],
        [((-1,), (2,)), ((2,), (2,))],
    ],
)
def test_parts_that_leave_a_hole_or_lie_outside_are_damage(
    tmp_path: Path, parts: list[tuple[tuple[int], tuple[int]]]
) -> None:
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = unpickle_metadata(tmp_path)
    index, info = next(iter(metadata.storage_data.items()))
    entry = metadata.state_dict_metadata["a"]
    entry.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in parts]
    metadata.storage_data = {MetadataIndex(index.fqn, torch.Size(at)): info for at, _ in parts}
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"parts of tensor a do not make up its shape \[4\]"):
        read_metadata(tmp_path)


def test_complete_json_is_read_as_it_was_written_and_damaged_when_it_was_changed(
    tmp_path: Path,
) -> None:
    counted = {"step": 4, "levels": {7: 0.1}, "share": float("nan")}
    written = {"step": 3, "method_state": counted, "files": {"common.pt": [10, 5]}}
    directory = tmp_path / "step_000003"
    directory.mkdir()
    file = directory / "complete.json"
    file.write_bytes(sealed(written))
    assert json.dumps(read_manifest(directory)) == json.dumps(written)
    content = json.loads(file.read_text())
    unsealed = {key: value for key, value in content.items() if key != "checksum"}
    for changed in (content | {"method_state": {}}, content | {"added": 1}, unsealed):
        file.write_text(json.dumps(changed))
        assert read_manifest(directory) == f"checkpoint file {file} is damaged"
