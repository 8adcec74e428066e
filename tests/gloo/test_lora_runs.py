"""Runs that train LoRA adapters: resumed, exported, merged, evaluated, and trained further."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_cli import ForkedCli
from run_differences import compare_runs, read_lines
from safetensors.torch import load_file, save_file
from small_run import FOUR_STEPS, QUICKSTART
from transformers import AutoModelForCausalLM

import megatron_opsft

TINY_REASONER = Path(megatron_opsft.__file__).parent / "assets/tiny_reasoner"
LORA = ["lora.rank=4", "optimizer.lr=5e-3", "checkpoint.every=2"]


def run(cli: ForkedCli, *words: object, exit_code: int = 0) -> str:
    ended = cli.run([str(word) for word in words])
    assert ended.exit_code == exit_code, ended.stderr
    return ended.stdout + ended.stderr


def train(cli: ForkedCli, run_dir: Path, *more: object, exit_code: int = 0) -> str:
    words = ["train", QUICKSTART, *FOUR_STEPS, *LORA, f"run.dir={run_dir}", *more]
    return run(cli, *words, exit_code=exit_code)


@pytest.fixture(scope="module")
def trained(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    train(cli, run_dir)
    return run_dir


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def logits(model: Callable[..., object]) -> torch.Tensor:
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        return model(input_ids=ids).logits  # type: ignore[attr-defined, no-any-return]


def test_only_the_adapted_layers_change_and_peft_reads_the_adapter(trained: Path) -> None:
    from peft import PeftModel

    base, merged = weights(TINY_REASONER), weights(trained / "hf")
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if "_proj.weight" in name}
    model = AutoModelForCausalLM.from_pretrained(TINY_REASONER)
    adapted = PeftModel.from_pretrained(model, str(trained / "adapter"))
    expected = logits(AutoModelForCausalLM.from_pretrained(trained / "hf"))
    assert expected.std() > 1
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=1e-4)
    card = (trained / "adapter/README.md").read_text("utf-8")
    assert f'base_model: "{TINY_REASONER.resolve()}"\nlibrary_name: peft\n' in card
    code = card.partition("```python\n")[2].partition("answer = ")[0]
    loaded: dict[str, Any] = {}
    exec(code, loaded)  # up to where it asks the model
    torch.testing.assert_close(logits(loaded["model"]), expected, rtol=0, atol=1e-4)
    merged_by_peft = adapted.merge_and_unload().state_dict()
    for name in sorted(changed):
        torch.testing.assert_close(merged_by_peft[name], merged[name], rtol=1e-6, atol=1e-7)


def test_resumed_run_is_the_same(cli: ForkedCli, trained: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(trained, resumed)
    shutil.rmtree(resumed / "checkpoints/step_000004")
    train(cli, resumed, "--resume")
    for name in ("hf/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (resumed / name).read_bytes() == (trained / name).read_bytes()
    losses = [line["loss"] for line in read_lines(trained / "metrics.jsonl")]
    assert [line["loss"] for line in read_lines(resumed / "metrics.jsonl")] == losses
    assert len(set(losses)) == 4
    refusal = train(cli, resumed, "--resume", "lora.rank=8", exit_code=2)
    assert "lora.rank" in refusal


def test_a_sleeping_trainer_gives_up_frozen_weights_too(
    cli: ForkedCli, trained: Path, tmp_path: Path
) -> None:
    """And exports from host memory what it would from the device."""
    train(cli, tmp_path / "run", "train.offload=all")
    assert compare_runs(trained, tmp_path / "run") == []
    for name in ("hf/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (trained / name).read_bytes()


def test_checkpoint_holds_the_adapter_alone_and_is_a_model(
    cli: ForkedCli, trained: Path, tmp_path: Path
) -> None:
    checkpoint = trained / "checkpoints/step_000004"
    size = sum(file.stat().st_size for file in checkpoint.glob("*.distcp"))
    assert size < (trained / "hf/model.safetensors").stat().st_size
    run(cli, "convert", "to-hf", "--megatron", checkpoint, "--out", tmp_path / "hf")
    run(cli, "convert", "check", trained / "hf", tmp_path / "hf")
    run(cli, "convert", "check", trained / "hf", checkpoint)
    keys = ["limit=2", "samples=1", "judge=math"]
    run(cli, "eval", "--model", checkpoint, "--out", tmp_path / "eval", *keys)


def test_merged_adapter_is_the_runs_model(cli: ForkedCli, trained: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    told = run(cli, "convert", "merge", trained / "adapter", "--out", merged, "--verify")
    assert "verified" in told
    run(cli, "convert", "check", trained / "hf", merged)
    words = ["eval", "--model", trained / "adapter", "--out", tmp_path / "e", "judge=math"]
    refusal = run(cli, *words, exit_code=2)
    assert "convert merge" in refusal


def test_checkpoint_of_another_base_is_refused(
    cli: ForkedCli, trained: Path, tmp_path: Path
) -> None:
    """Its complete.json has the hash of the model that the adapter was trained on."""
    checkpoint, base = tmp_path / "step_000004", tmp_path / "base"
    shutil.copytree(trained / "checkpoints/step_000004", checkpoint)
    shutil.copytree(TINY_REASONER, base)
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (checkpoint / "adapter_config.json").write_text(json.dumps(config))
    run(cli, "convert", "check", trained / "hf", checkpoint)  # the same model in another place
    values = weights(base)
    values["model.norm.weight"][0] += 1
    save_file(values, base / "model.safetensors", metadata={"format": "pt"})
    refusal = run(cli, "convert", "check", trained / "hf", checkpoint, exit_code=2)
    assert "is not the model that the adapter was trained on" in refusal


def test_training_goes_on_from_an_adapter(cli: ForkedCli, trained: Path, tmp_path: Path) -> None:
    """Of this project, or written by PEFT; its rank must be the run's."""
    adapter = tmp_path / "adapter"
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(TINY_REASONER)
    PeftModel.from_pretrained(model, str(trained / "adapter")).save_pretrained(str(adapter))
    further = tmp_path / "further"
    train(cli, further, f"model.adapter={adapter}")
    (before,) = (line for line in read_lines(trained / "evals.jsonl") if line["step"] == 4)
    (start,) = (line for line in read_lines(further / "evals.jsonl") if line["step"] == 0)
    names = ("eval_accuracy", "eval_mean_response_tokens")
    assert [start[name] for name in names] == [before[name] for name in names]
    other = tmp_path / "other"
    refusal = train(cli, other, f"model.adapter={adapter}", "lora.rank=8", exit_code=2)
    assert "set lora.rank=4" in refusal
    refusal = train(cli, other, f"model.adapter={adapter}", "lora.rank=0", exit_code=2)
    assert "set lora.rank=4" in refusal
    assert not other.exists()


@pytest.mark.parametrize(
    "keys",
    [
        ["method.name=grpo", "method.beta=0.04", "method.updates_per_batch=2"],
        ["method.name=self_distillation", "method.refresh_every=1"],
    ],
    ids=lambda keys: keys[0].partition("=")[2],
)
def test_methods_with_a_frozen_model_take_adapters(
    cli: ForkedCli, tmp_path: Path, keys: list[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(cli, whole, *keys)
    train(cli, parts, *keys, "run.max_minutes=1e-9", exit_code=75)
    train(cli, parts, *keys, "--resume")
    assert compare_runs(whole, parts) == []
    kl = [line["kl_mean"] for line in read_lines(whole / "metrics.jsonl")]
    assert kl[-1] != 0


def test_overwrite_spares_what_the_run_starts_from(
    cli: ForkedCli, trained: Path, tmp_path: Path
) -> None:
    """The adapter, and the base model of a checkpoint that is the run's model."""
    run_dir, second = tmp_path / "run", tmp_path / "second"
    shutil.copytree(trained, run_dir)
    before = sorted(run_dir.rglob("*"))
    told = train(cli, run_dir, "--overwrite", f"model.adapter={run_dir}/adapter", exit_code=2)
    assert "--overwrite would delete it" in told
    train(cli, second, "run.steps=2", f"model.path={run_dir}/hf")
    checkpoint = second / "checkpoints/step_000002"
    told = train(cli, run_dir, "--overwrite", f"model.path={checkpoint}", exit_code=2)
    assert f"{run_dir}/hf, which this run reads" in told
    assert sorted(run_dir.rglob("*")) == before


def test_a_checkpoint_is_an_adapter_too_and_its_settings_are_sealed(
    cli: ForkedCli, trained: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "step_000004"
    shutil.copytree(trained / "checkpoints/step_000004", checkpoint)
    train(cli, tmp_path / "further", "run.steps=1", f"model.adapter={checkpoint}")
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    altered = json.dumps({**config, "lora_alpha": 3.0})
    (checkpoint / "adapter_config.json").write_text(altered)
    refusal = run(cli, "convert", "check", trained / "hf", checkpoint, exit_code=2)
    assert "has other settings than the run that wrote the checkpoint" in refusal
    (checkpoint / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(checkpoint)})
    )
    refusal = run(cli, "convert", "check", trained / "hf", checkpoint, exit_code=2)
    assert "names the adapter itself" in refusal
    refusal = run(cli, "convert", "merge", checkpoint, "--out", tmp_path / "m", exit_code=2)
    assert "give `convert to-hf --megatron" in refusal
