"""`megatron-opsft eval` with vLLM: complete, on one rank and on two that share an engine. vLLM
promises the same responses for the same seeds, but not over batches of other composition: on a CPU
in float32 they were all the same, and nearly all must be.
"""

import gzip
import json
from pathlib import Path
from unittest.mock import patch

import pytest
from forked_cli import ForkedCli
from world import World

from megatron_opsft.commands.evaluate.run import evaluate
from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.config.load import load
from megatron_opsft.runtime.job import current_job

pytestmark = pytest.mark.vllm
SMALL = ["limit=8", "samples=4", "max_tokens=120", "device=cpu"]
Samples = dict[tuple[str, int], str]


def words_of(out: Path, *more: str) -> list[str]:
    return ["engine=vllm", "model=tiny_reasoner", f"out={out}", *SMALL, *more]


def evaluate_here(words: list[str]) -> None:
    """On every rank of the process group that this process is in."""
    module = "megatron_opsft.commands.evaluate.run"
    with patch(f"{module}.join_job", lambda *_: current_job()), patch(f"{module}.leave_job"):
        evaluate(load(EvalSettings, None, words))


def samples_of(out: Path) -> Samples:
    text = gzip.decompress((out / "samples/arithmetic.jsonl.gz").read_bytes())
    rows = [json.loads(line) for line in text.splitlines()]
    return {(row["problem_id"], row["sample_index"]): row["text"] for row in rows}


def num_equal(one: Samples, other: Samples) -> int:
    assert one.keys() == other.keys()
    return sum(one[key] == other[key] for key in one)


def test_two_ranks_that_share_an_engine(cli: ForkedCli, vllm_world: World, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    ended = cli.run(["eval", *words_of(alone, "batch_size=32")])
    assert ended.exit_code == 0, ended.stderr
    vllm_world.run(evaluate_here, 2, words_of(shared, "batch_size=11", "tp=2"))
    assert len(samples_of(shared)) == 32
    assert num_equal(samples_of(shared), samples_of(alone)) >= 28


def test_greedy_responses_are_those_of_the_other_engine(vllm_world: World, tmp_path: Path) -> None:
    """Temperature 0: the most probable token each time, of the same weights in float32."""
    greedy = ["temperature=0", "max_tokens=120", "limit=16", "device=cpu", "dtype=float32"]
    found = []
    for engine in ("hf", "vllm"):
        out = tmp_path / engine
        words = [f"engine={engine}", "model=tiny_reasoner", f"out={out}", *greedy]
        vllm_world.run(evaluate_here, 1, words)
        found.append(samples_of(out))
    assert len(found[0]) == 16 and num_equal(*found) == 16
