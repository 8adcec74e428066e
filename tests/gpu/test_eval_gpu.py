"""`megatron-opsft eval` on a GPU."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron_opsft.evaluate.run import evaluate
from megatron_opsft.evaluate.settings import EvalSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(out: Path, **changes: object) -> tuple[bytes, dict[str, float]]:
    """The stored samples and the overall metrics."""
    settings = {"limit": 32, "samples": 4, "max_tokens": 300, "device": "cuda", **changes}
    evaluate(EvalSettings(model="tiny_reasoner", out=out, **settings))
    results = json.loads((out / "results.json").read_text())
    metrics = {name: value["value"] for name, value in results["overall"]["metrics"].items()}
    return gzip.decompress((out / "samples/arithmetic.jsonl.gz").read_bytes()), metrics


def test_float32_responses_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    one, metrics = run(tmp_path / "one", dtype="float32", batch_size=64)
    other, _ = run(tmp_path / "other", dtype="float32", batch_size=9)
    assert one == other
    assert metrics["accuracy"] > 0.95


def test_bfloat16_is_as_accurate(tmp_path: Path) -> None:
    _, metrics = run(tmp_path / "out")
    assert metrics["accuracy"] > 0.95
    assert 90 < metrics["mean_tokens"] < 150


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_is_as_accurate(tmp_path: Path) -> None:
    _, metrics = run(tmp_path / "out", engine="vllm", gpu_memory_fraction=0.3)
    assert metrics["accuracy"] > 0.95
    assert 90 < metrics["mean_tokens"] < 150
