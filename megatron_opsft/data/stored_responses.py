"""Fixed data to train on: responses that were chosen and weighed before the run, as token ids.

A Parquet file with a row a response; what it was made of is in the file's metadata.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_opsft.errors import UserError
from megatron_opsft.records import Sample
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse(Sample):
    """A response chosen before the run. advantage: its weight in the loss; log_probs: only where
    the method asks for them.
    """

    advantage: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponses(Sequence[StoredResponse]):
    """The responses of a file, in its order. manifest: what they were made of; problem_ids,
    advantages, num_prompt_tokens, num_response_tokens: of each row. largest_id: of all tokens.
    """

    manifest: Mapping[str, Any]
    table: pa.Table
    problem_ids: Sequence[str]
    advantages: Sequence[float]
    num_prompt_tokens: Sequence[int]
    num_response_tokens: Sequence[int]
    largest_id: int

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, number: Any) -> Any:
        row = {name: self.table[name][number].as_py() for name in _SCHEMA.names}
        lists = {
            name: tuple(value) for name, value in row.items() if isinstance(value, list)
        }
        return StoredResponse(**row | lists)


def write_stored_responses(
    path: Path, rows: Sequence[StoredResponse], manifest: Mapping[str, Any]
) -> None:
    """Write the file whole or not at all. manifest: JSON. Errors: `UserError` without a row."""
    if not rows:
        raise UserError(f"{path}: no response was chosen, so there is nothing to write")
    columns = {
        name: pa.array(
            [getattr(row, name) for row in rows], type=_SCHEMA.field(name).type
        )
        for name in _SCHEMA.names
    }
    table = pa.table(columns, schema=_SCHEMA).replace_schema_metadata(
        {_MANIFEST: json.dumps(dict(manifest)).encode()}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_bytes(path, sink.getvalue().to_pybytes())


def read_stored_responses(path: Path) -> StoredResponses:
    """Read a file of `write_stored_responses`, whose rows are taken as they are.

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
    prompts, responses = (
        pc.list_value_length(table[name]).to_pylist()
        for name in ("prompt_ids", "response_ids")
    )
    if not min([*prompts, *responses]):
        raise UserError(f"data.responses={path} has an empty prompt or response; {how}")
    largest = (
        pc.max(pc.list_flatten(table[name])) for name in ("prompt_ids", "response_ids")
    )
    return StoredResponses(
        manifest=manifest,
        table=table,
        problem_ids=table["problem_id"].to_pylist(),
        advantages=table["advantage"].to_pylist(),
        num_prompt_tokens=prompts,
        num_response_tokens=responses,
        largest_id=max(each.as_py() for each in largest),
    )
