"""Settings of an evaluation: YAML file, key=value, shorthands, and options of old commands."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_opsft.config_file import load
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate import commands, early_checks, run
from megatron_opsft.evaluate.settings import EvalSettings


def settings_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> EvalSettings:
    """What `megatron-opsft eval WORDS` evaluates."""
    found: list[EvalSettings] = []

    def evaluate(settings: EvalSettings, *, overwrite: bool) -> str:
        found.append(settings)
        return ""

    monkeypatch.setattr(run, "evaluate", evaluate)
    monkeypatch.setattr(early_checks, "check_settings", lambda settings: None)
    app = typer.Typer()
    app.add_typer(commands.app, name="eval")
    ended = CliRunner().invoke(app, ["eval", "--out", "o", *words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return found[0]


def test_every_option_of_an_old_command_is_the_setting_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text("model: m\nseed: 4\nlimit: 9\ndeer: {max_trials: 3, threshold: 0.1}\n")
    old = [
        *("--config", str(config), "--engine", "vllm", "--template", "cod"),
        *("--deer-threshold", "0.9", "--deer-words", "Wait,But", "--temperature", "0.7"),
        *("--top-p=0.9", "--max-tokens", "100", "--samples", "2", "--seed", "3"),
        *("--budgets", "10,20", "--dtype", "bfloat16", "--device", "cpu", "--batch-size", "5"),
        *("--tp", "2", "--gpu-memory-fraction", "0.5", "--benchmarks", "a,b", "--data", "a=f"),
    ]
    new = [
        *(str(config), "engine=vllm", "template=cod", "deer.threshold=0.9"),
        *("deer.transition_words=Wait,But", "temperature=0.7", "top_p=0.9", "max_tokens=100"),
        *("samples=2", "seed=3", "budgets=[10, 20]", "dtype=bfloat16", "device=cpu"),
        *("batch_size=5", "tp=2", "gpu_memory_fraction=0.5", "benchmarks=[a, b]", "data.a=f"),
    ]
    settings = settings_of(monkeypatch, *old)
    assert settings == settings_of(monkeypatch, *new)
    assert settings.limit == 9 and settings.deer.max_trials == 3
    assert settings.deer.transition_words == ("Wait", "But")
    early = settings_of(monkeypatch, "--config", str(config), "--method", "deer")
    assert early == settings_of(monkeypatch, str(config), "method=deer")
    assert early.method == "deer"


def test_shorthands_win_over_the_file_and_are_taken_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text("model: m\nname: n\ndata: {a: f, b: g}\n")
    settings = settings_of(monkeypatch, "--name", "7", str(config), "--data", "b=h", "budgets=8")
    assert (settings.model, settings.name, settings.out) == ("m", "7", Path("o"))
    assert settings.data == {"b": "h"}
    assert settings.budgets == (8,)


def test_temperature_zero_has_one_sample_of_each_problem() -> None:
    words = ["model=m", "out=o", "temperature=0"]
    assert load(EvalSettings, None, words).samples is None  # and not the benchmark's 16 or 64
    assert load(EvalSettings, None, [*words, "samples=1"]).samples == 1
    with pytest.raises(UserError, match="samples=4 with temperature=0: all samples of a problem"):
        load(EvalSettings, None, [*words, "samples=4"])
