"""`megatron-opsft eval` on a model whose weights are damaged."""

import shutil
from pathlib import Path

from forked_cli import ROOT, ForkedCli
from safetensors.torch import load_file, save_file

ASSET = ROOT / "megatron_opsft/assets/tiny_reasoner"


def test_nan_weights_end_an_evaluation_in_one_line(cli: ForkedCli, tmp_path: Path) -> None:
    """Instead of an accuracy of responses that mean nothing, and exit code 0."""
    model = tmp_path / "model"
    shutil.copytree(ASSET, model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    small = ["--benchmarks", "arithmetic", "limit=2", "samples=2", "max_tokens=20"]
    args = ["eval", "--model", model, "--out", tmp_path / "out", *small, "device=cpu"]
    ended = cli.run([str(arg) for arg in args])
    assert ended.exit_code == 3
    assert "error: rollout: the model's logits are NaN or infinite" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out" / "results.json").exists()
