"""Read a Megatron distributed checkpoint under the Hugging Face names of its weights.

`MegatronTensors` has the methods of `HfTensors`, so whatever loads a Hugging Face directory can
load a checkpoint: any that Megatron-Core wrote, at any TP x PP x VPP x EP, with or without
optimizer.
"""

from functools import cache, reduce
from itertools import chain, product
from pathlib import Path

import torch
from torch import Tensor

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.template import ShardKind
from megatron_opsft.models.storage.dist_metadata import Chunk, locate, read_metadata
from megatron_opsft.models.storage.large_files import Region
from megatron_opsft.models.storage.model_paths import read_record
from megatron_opsft.models.weights.checkpoint_keys import (
    Entry,
    StoredPart,
    parts_in,
    possible_entries,
)
from megatron_opsft.models.weights.rectangles import Copy, Rect, whole
from megatron_opsft.models.weights.rules import WeightRule, WeightTable
from megatron_opsft.models.weights.slicing import shard_parameter

_NOT_WEIGHTS = (
    "optimizer",
    "reference.",
    "rng_state",
    "rerun_state",
    "opt_param_scheduler",
)


class MegatronTensors:
    """The weights of a checkpoint; only metadata and archive headers are read before they are
    asked for.
    """

    def __init__(self, directory: Path, table: WeightTable) -> None:
        """Read the metadata. table: the model's, with TransformerEngine's names.

        Errors: `UserError` for a weight that is missing, unexpected, or of another shape, and for
        another vocabulary.
        """
        self.model_dir = directory
        self._table = table
        self._stored = read_metadata(directory)
        self._parts: dict[str, list[StoredPart]] = {}
        self._chunks: dict[Entry, list[Chunk]] = {}
        self._locate = cache(locate)
        self._check_vocabulary()
        self._match()

    def dtype(self, name: str) -> torch.dtype:
        """Errors: `UserError` for a tensor whose sections are stored in several dtypes."""
        dtypes = {key: self._stored[key].dtype for key in self._keys(name)}
        first_key, first = next(iter(dtypes.items()))
        for key, dtype in dtypes.items():
            if dtype is not first:
                raise UserError(
                    f"{self.model_dir}: {key} is {dtype}, but {first_key} is {first}, and both are "
                    f"in {name}; give --dtype to convert all to one"
                )
        return first

    def _keys(self, name: str) -> list[str]:
        """Return the keys under which an HF tensor, or each of its sections, is stored."""
        rule = self._table.by_hf_name[name]
        parts = self._parts[rule.mcore_name]
        if not rule.stored_apart:
            return [parts[0].entry.key]
        sections = zip(rule.sections, parts, strict=True)
        return [part.entry.key for section, part in sections if section.hf_name == name]

    def files(self) -> tuple[Path, ...]:
        """Return the files of the weights, each once, in order."""
        chunks = chain.from_iterable(self._chunks.values())
        return tuple(sorted({chunk.path for chunk in chunks}))

    def read(self, rect: Rect) -> Tensor:
        """Read a rectangle of an HF tensor, on the CPU, in the stored dtype; if sections are stored
        in several, in one that holds the values of all.
        """
        rule = self._table.by_hf_name[rect.tensor]
        dtypes = [self._stored[key].dtype for key in self._keys(rect.tensor)]
        _, *columns = rule.hf_shapes[rect.tensor]
        num_rows = rect.row1 - rect.row0
        out = torch.empty(
            (num_rows, *columns), dtype=reduce(torch.promote_types, dtypes)
        )
        self.copy_rows(rect.tensor, rect.row0, out)
        return rect.shift(-rect.row0, 0).view(out)

    def copy_rows(self, name: str, start: int, out: Tensor) -> None:
        """Read as many rows as `out` has, from row `start` on, and cast them into it."""
        rule = self._table.by_hf_name[name]
        window = whole(name, tuple(out.shape)).shift(start, 0)
        for copy in shard_parameter(rule, 0, 1).copies:
            rows = copy.cut(window)
            if rows is not None:
                self._copy(rule, rows, out, window)

    def _match(self) -> None:
        """Choose the stored entry of each parameter, index the chunks, and refuse other tensors.

        Errors: `UserError` for missing and unknown tensors.
        """
        for rule in self._table.exported:
            candidates = [parts_in(entry, rule) for entry in possible_entries(rule)]
            parts = next(filter(self._has_any, candidates), candidates[0])
            for part in parts:
                if part.entry.key not in self._stored:
                    raise UserError(
                        f"{self.model_dir} holds no {part.entry.key}, which a "
                        f"{self._table.shape.architecture} has"
                    )
                self._check_shape(rule, part)
            self._parts[rule.mcore_name] = parts
        num_lead_axes = {
            part.entry.key: len(part.entry.lead)
            for parts in self._parts.values()
            for part in parts
        }
        for key, num_axes in num_lead_axes.items():
            self._index_chunks(key, num_axes)
        unexpected = [
            key
            for key in self._stored.keys() - num_lead_axes.keys()
            if not key.startswith(_NOT_WEIGHTS)
        ]
        if unexpected:
            raise UserError(
                f"{self.model_dir} holds {', '.join(sorted(unexpected)[:4])}, which is not part of "
                f"a {self._table.shape.architecture} as config.json describes it"
            )

    def _has_any(self, parts: list[StoredPart]) -> bool:
        return any(part.entry.key in self._stored for part in parts)

    def _check_vocabulary(self) -> None:
        """Check that a converted checkpoint's model had the same vocabulary. Errors: `UserError`.

        The shapes of the tensors do not say: writers pad the vocabulary differently.
        """
        size = read_record(self.model_dir).get("vocab_size")
        if size is not None and size != self._table.shape.vocab_size:
            raise UserError(
                f"{self.model_dir} was converted from a model with vocab_size={size}, but "
                f"config.json says {self._table.shape.vocab_size}; give that model's config.json"
            )

    def _index_chunks(self, key: str, num_lead_axes: int) -> None:
        """File the chunks of a tensor under the entries (layer, expert) that they hold some of."""
        for chunk in self._stored[key].chunks:
            axes = zip(chunk.offsets, chunk.sizes, strict=True)
            ranges = [range(start, start + size) for start, size in axes]
            for lead in product(*ranges[:num_lead_axes]):
                self._chunks.setdefault(Entry(key, lead), []).append(chunk)

    def _check_shape(self, rule: WeightRule, part: StoredPart) -> None:
        """Check that the stored tensor has the parameter's layer and expert, in its shape.

        Errors: `UserError`.
        """
        entry = part.entry
        wanted = (part.num_rows, *rule.mcore_shape[1:])
        stored = self._stored[entry.key].shape
        lead_sizes, shape = stored[: len(entry.lead)], stored[len(entry.lead) :]
        has_entry = all(
            index < size for index, size in zip(entry.lead, lead_sizes, strict=False)
        )
        has_shape = shape == wanted
        if rule.kind is ShardKind.VOCABULARY and len(shape) == len(rule.mcore_shape):
            # Other writers pad the vocabulary to other multiples.
            holds_tokens = shape[0] >= self._table.shape.vocab_size
            has_shape = holds_tokens and shape[1:] == rule.mcore_shape[1:]
        if not (has_entry and has_shape):
            raise UserError(
                f"{self.model_dir}: tensor {entry.key} has shape {list(stored)}, but config.json "
                f"means {list(wanted)} for each layer"
            )

    def _copy(self, rule: WeightRule, copy: Copy, out: Tensor, window: Rect) -> None:
        """Read the source of `copy`, a rectangle of an HF tensor, from all chunks that hold some of
        it in the Megatron parameter.

        out: receives the values of `window`, a rectangle of the HF tensor around the source.
        """
        for part in self._parts[rule.mcore_name]:
            for chunk in self._chunks[part.entry]:
                self._copy_chunk(part, chunk, rule, copy, out, window)

    def _copy_chunk(
        self,
        part: StoredPart,
        chunk: Chunk,
        rule: WeightRule,
        copy: Copy,
        out: Tensor,
        window: Rect,
    ) -> None:
        """Read the values that one chunk of the file holds into `out`.

        copy: from a rectangle of an HF tensor to the parameter. It is followed backwards: its
        target says where in the parameter, and so in which chunk, the values are stored; its
        source, where in the HF tensor they belong. window: the rectangle that `out` holds.
        """
        num_lead_axes = len(part.entry.lead)
        chunk_rect = whole("", chunk.sizes[num_lead_axes:])
        # Where the chunk begins in the parameter; a vector has no columns.
        row, *columns = chunk.offsets[num_lead_axes:]
        chunk_in_parameter = chunk_rect.shift(
            part.first_row + row, columns[-1] if columns else 0
        )._replace(tensor=rule.mcore_name)
        piece = copy.then(Copy(chunk_in_parameter, chunk_rect))
        if piece is None:
            return
        wanted, stored = piece.source, piece.target
        # `stored` spans the columns of its chunk: parameters are cut between rows only.
        self._slice(chunk, part.entry).copy_rows(
            stored.row0, wanted.relative_to(window).view(out), wanted.tensor
        )

    def _slice(self, chunk: Chunk, entry: Entry) -> Region:
        """Return the region of the entry's layer (and expert) in a chunk of several."""
        # How many layers (or experts of layers) of the chunk are stored before the entry's.
        num_before = 0
        for index, first, size in zip(
            entry.lead, chunk.offsets, chunk.sizes, strict=False
        ):
            num_before = num_before * size + index - first
        region = self._locate(chunk)._replace(shape=chunk.sizes[len(entry.lead) :])
        return region._replace(offset=region.offset + num_before * region.num_bytes)
