"""`megatron-opsft eval` on a GPU, and D_t of `diagnose`."""

import gzip
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import apart, skip_without_vllm

from megatron_opsft.commands.diagnose.divergence import diverge, load_model
from megatron_opsft.commands.evaluate.inputs import open_model
from megatron_opsft.commands.evaluate.run import evaluate
from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.runtime.device import select_device


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


@pytest.mark.parametrize("engine", [{}, {"engine": "vllm", "gpu_memory_fraction": 0.3}], ids=str)
def test_bfloat16_is_as_accurate(tmp_path: Path, engine: dict[str, object]) -> None:
    if engine:
        skip_without_vllm()
    _, metrics = apart(partial(run, tmp_path / "out", **engine))
    assert metrics["accuracy"] > 0.95
    assert 90 < metrics["mean_tokens"] < 150


def test_d_t_is_that_of_a_cpu_and_in_bfloat16_about_so() -> None:
    model = open_model("tiny_reasoner")
    p, q = (load_model(model, torch.float32, select_device("cpu")) for _ in range(2))
    torch.manual_seed(0)
    for weight in q.parameters():
        weight.data += 0.1 * weight.std() * torch.randn(weight.shape)
    encode = model.tokenizer.encode
    ids = encode("What is 8-6?"), encode("8-6=2. Wait, 8-6=2.\n</think>\n\\boxed{2}")
    expected, _ = diverge(p, q, model.tokenizer, *ids)
    assert max(expected) > 1e-3
    found, _ = diverge(p.to("cuda"), q.to("cuda"), model.tokenizer, *ids)
    assert found == pytest.approx(expected, abs=1e-5)
    low, _ = diverge(p.bfloat16(), q.bfloat16(), model.tokenizer, *ids)
    assert low == pytest.approx(expected, rel=0.5, abs=0.02)
    assert not any(diverge(p, p, model.tokenizer, *ids)[0])
