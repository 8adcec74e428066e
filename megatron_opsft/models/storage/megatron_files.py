"""A Megatron distributed checkpoint, read under the Hugging Face names of its weights.

The same methods as `HfTensors`, so whatever loads from a Hugging Face directory loads from a
checkpoint too: any that Megatron-Core wrote, at any TP x PP x VPP x EP, with or without optimizer.
"""

import json
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from pathlib import Path

import torch
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.template import ShardKind
from megatron_opsft.models.storage.dist_metadata import Chunk, locate, read_metadata
from megatron_opsft.models.storage.hf_files import HfTensors, check_checkpoint
from megatron_opsft.models.storage.model_paths import RECORD_NAME, is_dist_checkpoint
from megatron_opsft.models.storage.regions import Region
from megatron_opsft.models.weights.checkpoint_keys import (
    Entry,
    entry_of,
    other_entries,
)
from megatron_opsft.models.weights.rectangles import Copy, Rect
from megatron_opsft.models.weights.rules import Rule, WeightTable
from megatron_opsft.models.weights.slicing import shard_parameter

_NOT_WEIGHTS = (
    "optimizer",
    "reference.",
    "rng_state",
    "rerun_state",
    "opt_param_scheduler",
)


class MegatronTensors:
    """The weights of a checkpoint; metadata and archive headers are read, data when it is asked."""

    def __init__(self, directory: Path, table: WeightTable) -> None:
        """table: of the model, with TransformerEngine's names. Strict: `UserError` for a weight
        that is missing, unexpected, or of another shape, and for another vocabulary.
        """
        self.model_dir = Path(directory)
        self._table = table
        self._stored = read_metadata(self.model_dir)
        self._entries: dict[str, Entry] = {}
        self._chunks: dict[Entry, list[Chunk]] = {}
        self._locate = lru_cache(maxsize=None)(locate)
        self._check_vocabulary()
        self._match()

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[
            self._entries[self._table.by_hf_name[name].mcore_name].key
        ].dtype

    def files(self) -> tuple[Path, ...]:
        """The files of the weights, each once."""
        return tuple(
            sorted({c.path for chunks in self._chunks.values() for c in chunks})
        )

    def read(self, rect: Rect) -> Tensor:
        """A rectangle of an HF tensor; stored dtype, CPU."""
        rule = self._table.by_hf_name[rect.tensor]
        shape = rule.hf_shapes[rule.hf_names.index(rect.tensor)]
        out = torch.empty(
            (rect.row1 - rect.row0, *shape[1:]), dtype=self.dtype(rect.tensor)
        )
        self.copy_rows(rect.tensor, rect.row0, rect.row1, out)
        return out if out.dim() == 1 else out[:, rect.col0 : rect.col1]

    def copy_rows(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """`tensor[start:stop]`, read from disk and cast into `out`, which has that shape."""
        rule = self._table.by_hf_name[name]
        wanted = Rect(name, start, stop, 0, out.shape[1] if out.dim() == 2 else 1)
        for part in shard_parameter(rule, 0, 1).parts:
            rows = part.cut(wanted)
            if rows is not None:
                self._copy(rule, rows, out, wanted)

    def _match(self) -> None:
        """Find the entry of every parameter; strict both ways."""
        for rule in self._table.exported:
            candidates = (entry_of(rule.mcore_name), *other_entries(rule.mcore_name))
            entry = next((p for p in candidates if p.key in self._stored), None)
            if entry is None:
                raise UserError(
                    f"{self.model_dir} holds no {candidates[0].key}, which a "
                    f"{self._table.shape.architecture} has"
                )
            self._check_shape(rule, entry)
            self._entries[rule.mcore_name] = entry
        leads = {entry.key: len(entry.lead) for entry in self._entries.values()}
        for key, num_leads in leads.items():
            self._index(key, num_leads)
        unexpected = [
            key
            for key in self._stored
            if key not in leads and not key.startswith(_NOT_WEIGHTS)
        ]
        if unexpected:
            raise UserError(
                f"{self.model_dir} holds {', '.join(sorted(unexpected)[:4])}, which is not part of "
                f"a {self._table.shape.architecture} as config.json describes it"
            )

    def _check_vocabulary(self) -> None:
        """Errors: `UserError` where the converted model had another vocabulary. The tensors
        cannot tell: how far a vocabulary is padded is up to who writes it.
        """
        try:
            record = json.loads((self.model_dir / RECORD_NAME).read_bytes())
        except (OSError, ValueError):  # of another writer
            return
        size = record.get("vocab_size") if isinstance(record, dict) else None
        if size is not None and size != self._table.shape.vocab_size:
            raise UserError(
                f"{self.model_dir} was converted from a model with vocab_size={size}, but "
                f"config.json says {self._table.shape.vocab_size}; give that model's config.json"
            )

    def _index(self, key: str, num_leads: int) -> None:
        """Chunks by their indices on the prepended axes."""
        for chunk in self._stored[key].chunks:
            bounds = zip(chunk.offsets, chunk.sizes, strict=True)
            for lead in product(
                *(range(o, o + n) for o, n in islice(bounds, num_leads))
            ):
                self._chunks.setdefault(Entry(key, lead), []).append(chunk)

    def _check_shape(self, rule: Rule, entry: Entry) -> None:
        stored, lead = self._stored[entry.key].shape, len(entry.lead)
        fits = len(stored) == lead + len(rule.mcore_shape)
        fits = fits and all(
            i < n for i, n in zip(entry.lead, stored[:lead], strict=True)
        )
        inner, wanted = stored[lead:], rule.mcore_shape
        if (
            rule.kind is ShardKind.VOCABULARY
        ):  # other writers pad the vocabulary to other multiples
            fits = fits and inner[0] >= rule.hf_shapes[0][0]
            inner, wanted = inner[1:], wanted[1:]
        if not fits or inner != wanted:
            raise UserError(
                f"{self.model_dir}: tensor {entry.key} has shape {list(stored)}, but config.json "
                f"means {list(rule.mcore_shape)} for each layer"
            )

    def _copy(self, rule: Rule, part: Copy, out: Tensor, wanted: Rect) -> None:
        """Part of an HF tensor, from all chunks that hold some of it in the Megatron parameter.

        out: what `wanted` holds, a rectangle around the part.
        """
        entry = self._entries[rule.mcore_name]
        for chunk in self._chunks[entry]:
            offsets, sizes = (
                values[len(entry.lead) :] for values in (chunk.offsets, chunk.sizes)
            )
            height, width = (*sizes, 1)[:2]
            row, column = (*offsets, 0)[:2]
            in_parameter = Rect(
                rule.mcore_name, row, row + height, column, column + width
            )
            copy = part.then(Copy(in_parameter, Rect("", 0, height, 0, width)))
            if copy is not None:
                region, target = (
                    self._region(chunk, entry),
                    copy.source.relative_to(wanted),
                )
                rows = copy.target.row0, copy.target.row1
                region.copy_rows(*rows, target.view(out), part.source.tensor)

    def _region(self, chunk: Chunk, entry: Entry) -> Region:
        """The part of a chunk that belongs to one layer (and expert)."""
        region = self._locate(chunk)
        index = 0
        for position, offset, size in zip(
            entry.lead, chunk.offsets, chunk.sizes, strict=False
        ):
            index = index * size + position - offset
        one = replace(region, shape=chunk.sizes[len(entry.lead) :])
        return replace(one, offset=one.offset + index * one.num_bytes)


StoredWeights = HfTensors | MegatronTensors


def open_weights(
    model_dir: Path, table: WeightTable, *, check: bool = True
) -> StoredWeights:
    """Open a Hugging Face directory or a Megatron checkpoint; no weight is read yet.

    table: of the model, with TransformerEngine's names, which checkpoints use. check: compare names
    and shapes with it; one rank is enough. Errors: `UserError` naming file and tensor.
    """
    if is_dist_checkpoint(model_dir):
        return MegatronTensors(model_dir, table)
    tensors = HfTensors(model_dir)
    if check:
        check_checkpoint(tensors, table)
    return tensors
