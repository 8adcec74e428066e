"""Fixed data: what is written is read back, and what cannot be trained on is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.data.stored_responses import (
    StoredResponse,
    read_stored_responses,
    write_stored_responses,
)
from megatron_opsft.errors import UserError

ONE = StoredResponse(problem_id="ä/1", prompt_ids=(1, 150_000), response_ids=(3, 4, 5))
OTHER = replace(ONE, response_ids=(8,), advantage=-0.3, log_probs=(-0.5,))


def test_rows_and_manifest_read_back(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    write_stored_responses(path, [ONE, OTHER], {"method": "crst", "samples": 16})
    stored = read_stored_responses(path)
    assert [stored[n] for n in range(len(stored))] == [ONE, OTHER]
    assert (stored.num_prompt_tokens, stored.num_response_tokens) == ([2, 2], [3, 1])
    assert stored.manifest == {"method": "crst", "samples": 16}


def test_no_row_and_no_such_file_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no response was chosen"):
        write_stored_responses(tmp_path / "data.parquet", [], {})
    (tmp_path / "text.parquet").write_text("x")
    said = "cannot be read .*; make it with `megatron-opsft data`"
    for name in ("missing.parquet", "text.parquet"):
        with pytest.raises(UserError, match=said):
            read_stored_responses(tmp_path / name)


def test_log_probs_of_all_samples_are_old_ones_of_the_micro_batch() -> None:
    three = replace(ONE, log_probs=(-3.0,) * 3)
    for other, expected in ((three, [-0.5, *[-3.0] * 3]), (ONE, None)):
        batch = build_microbatch([OTHER, other], [1.0, 1.0], align=8, device=torch.device("cpu"))
        found = batch.old_log_probs_R
        assert (None if found is None else found.tolist()) == expected
