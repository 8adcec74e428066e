"""Fixed data to train on: responses that were chosen and weighed before the run, as token ids.

A Parquet file with one row for each response. Its metadata hold a manifest, which says of what and
how it was made.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_opsft.errors import UserError
from megatron_opsft.records import Sample, record
from megatron_opsft.runtime.durable import write_bytes

_MANIFEST = b"megatron_opsft"
_SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("advantage", pa.float64()),
        ("log_probs", pa.list_(pa.float32())),
    ]
)


@record
class StoredResponse(Sample):
    """A response chosen before the run; it has `log_probs` only if the method asks for them."""

    advantage: float = 1.0
    """Its weight in the loss."""


@record
class StoredResponses(Sequence[StoredResponse]):
    """The responses of a file, in its order; `problem_ids` to `num_response_tokens` have an entry
    for each of them.
    """

    manifest: Mapping[str, Any]
    """JSON that says of what and how the responses were made."""
    table: pa.Table
    problem_ids: Sequence[str]
    advantages: Sequence[float]
    num_prompt_tokens: Sequence[int]
    num_response_tokens: Sequence[int]
    largest_id: int
    """The largest id of all tokens, prompts included."""

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, number: Any) -> Any:
        row: dict[str, Any] = {}
        for name in _SCHEMA.names:
            value = self.table[name][number].as_py()
            row[name] = tuple(value) if isinstance(value, list) else value
        return StoredResponse(**row)


def write_stored_responses(
    path: Path, rows: Sequence[StoredResponse], manifest: Mapping[str, Any]
) -> None:
    """Write the file whole or not at all. manifest: JSON. Errors: `UserError` without a row."""
    if not rows:
        raise UserError(f"{path}: no response was chosen, so there is nothing to write")
    columns = {}
    for name in _SCHEMA.names:
        columns[name] = [getattr(row, name) for row in rows]
    metadata = {_MANIFEST: json.dumps(dict(manifest)).encode()}
    table = pa.table(columns, schema=_SCHEMA.with_metadata(metadata))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_bytes(path, sink.getvalue().to_pybytes())


def read_stored_responses(path: Path) -> StoredResponses:
    """Read a file of `write_stored_responses`; rows stay in their order.

    Errors: `UserError` for a file of another kind, and for one without rows.
    """
    how = "make it with `megatron-opsft data`"
    try:
        table = pq.read_table(path, memory_map=True)
        manifest = json.loads((table.schema.metadata or {})[_MANIFEST])
        table = table.select(_SCHEMA.names).cast(_SCHEMA)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"data.responses={path} cannot be read ({reason}); {how}"
        ) from None
    if not table.num_rows:
        raise UserError(f"data.responses={path} has no responses; {how}")
    prompts, responses = table["prompt_ids"], table["response_ids"]
    num_prompt_tokens = pc.list_value_length(prompts).to_pylist()
    num_response_tokens = pc.list_value_length(responses).to_pylist()
    if not all([*num_prompt_tokens, *num_response_tokens]):  # 0, or None for no list
        raise UserError(f"data.responses={path} has an empty prompt or response; {how}")
    largest_ids = [
        pc.max(pc.list_flatten(lists)).as_py() for lists in (prompts, responses)
    ]
    return StoredResponses(
        manifest=manifest,
        table=table,
        problem_ids=table["problem_id"].to_pylist(),
        advantages=table["advantage"].to_pylist(),
        num_prompt_tokens=num_prompt_tokens,
        num_response_tokens=num_response_tokens,
        largest_id=max(largest_ids),
    )
