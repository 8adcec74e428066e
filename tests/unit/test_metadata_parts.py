"""Metadata joined of all ranks' pickles, against what torch's planner makes of all ranks' plans."""

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_opsft.storage.dist_metadata import METADATA_NAME, read_metadata
from megatron_opsft.storage.metadata_parts import MetadataPart, metadata_part, write_metadata

SHAPE = torch.Size((12, 5))


def rows(key: str, first: int, last: int) -> WriteItem:
    """Some rows of a tensor, to be written."""
    chunk = ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((last - first, 5)))
    data = TensorWriteData(chunk=chunk, properties=Properties(dtype=torch.bfloat16), size=SHAPE)
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def written(items: list[WriteItem], rank: int) -> list[WriteResult]:
    """As if every item took 600 bytes of the rank's file."""
    return [
        WriteResult(item.index, 600, _StorageInfo(f"__{rank}_0.distcp", 600 * place, 600))
        for place, item in enumerate(items)
    ]


def test_joined_metadata_is_that_of_torchs_planner(tmp_path: Path) -> None:
    plans = [
        [rows("a", 0, 4), rows("b", 0, 12), WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO)],
        [],
        [rows("a", 4, 5), rows("a", 5, 12)],
    ]
    whole, storage = MetadataPart(), {}
    for rank, items in enumerate(plans):
        results = written(items, rank)
        whole.add(pickle.loads(pickle.dumps(metadata_part(items, results))))
        storage |= {result.index: result.storage_data for result in results}
        (tmp_path / f"__{rank}_0.distcp").write_bytes(bytes(1800))
    assert whole.missing() == []
    write_metadata(whole, tmp_path / METADATA_NAME)
    found = pickle.loads((tmp_path / METADATA_NAME).read_bytes())
    _, expected = create_default_global_save_plan([SavePlan(items) for items in plans])
    assert isinstance(found, Metadata)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == storage
    assert (found.planner_data, found.version) == (None, "1.0.0")
    assert [len(t.chunks) for t in read_metadata(tmp_path).values()] == [3, 1]


def test_what_was_not_written_once_is_named() -> None:
    part = metadata_part([rows("a", 0, 12), rows("b", 0, 11)], [])
    assert part.missing() == ["b"]
    part.add(metadata_part([rows("a", 3, 4), rows("b", 11, 12)], []))
    assert part.missing() == ["a"]
