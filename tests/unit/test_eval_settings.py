"""Settings of an evaluation: YAML file, key=value, and options."""

from pathlib import Path

import pytest
from commands import command_of

from megatron_opsft.command_line import Program
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.commands import Evaluate
from megatron_opsft.evaluate.settings import EvalSettings, load_settings


def settings_of(*words: str) -> EvalSettings:
    """What `megatron-opsft eval WORDS` evaluates."""
    command, rest = command_of(["eval", "--out", "o", *words])
    assert isinstance(command, Program)
    read = command.read(rest)
    assert isinstance(read, Evaluate)
    return load_settings(read.config, read.keys)


def test_an_option_is_the_setting_of_its_name(tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text("model: m\nseed: 4\nlimit: 9\ndeer: {max_trials: 3, threshold: 0.1}\n")
    given = {"engine": "vllm", "template": "cod", "deer.threshold": 0.9, "temperature": 0.7}
    given |= {"deer.transition_words": "Wait,But", "top_p": 0.9, "max_tokens": 100, "samples": 2}
    given |= {"seed": 3, "budgets": "10,20", "dtype": "bfloat16", "device": "cpu", "tp": 2}
    given |= {"batch_size": 5, "gpu_memory_fraction": 0.5, "benchmarks": "a,b"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    keys = [f"{name}={value}" for name, value in given.items()]
    settings = settings_of(str(config), *options, "--data", "a=f")
    assert settings == settings_of(str(config), *keys, "data.a=f")
    assert settings.limit == 9 and settings.deer.max_trials == 3
    assert settings.deer.transition_words == ("Wait", "But")
    assert settings_of(str(config), "--method", "deer").method == "deer"
    with pytest.raises(UserError, match="samples=4 with temperature=0: all samples of a problem"):
        settings_of(str(config), "--temperature", "0", "samples=4")


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text("model: m\nname: n\ndata: {a: f, b: g}\n")
    settings = settings_of(
        "--name", "07", str(config), "--data", "b=h", "--data", "c=i", "budgets=8"
    )
    assert (settings.model, settings.name, settings.out) == ("m", "07", Path("o"))
    assert settings.data == {"a": "f", "b": "h", "c": "i"}
    assert settings.budgets == (8,)
