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


def test_options_are_settings_and_win_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text(
        "model: m\nname: n\nseed: 4\nlimit: 9\ndata: {a: f, b: g}\n"
        "deer: {max_trials: 3, threshold: 0.1}\n"
    )
    given = {"engine": "vllm", "name": "07", "deer.threshold": 0.9, "temperature": 0.7}
    given |= {"deer.transition_words": "Wait,But", "max_tokens": 100, "budgets": "10,20"}
    given |= {"seed": 3, "dtype": "bfloat16", "tp": 2, "benchmarks": "a,b"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    keys = [f"{name}={value}" for name, value in given.items()]
    settings = settings_of(str(config), *options, "--data", "b=h", "--data", "c=i")
    assert settings == settings_of(*keys, "data.b=h", str(config), "data.c=i")
    assert (settings.model, settings.name, settings.out) == ("m", "07", Path("o"))
    assert settings.data == {"a": "f", "b": "h", "c": "i"}
    assert settings.limit == 9 and settings.deer.max_trials == 3
    assert settings.deer.transition_words == ("Wait", "But") and settings.budgets == (10, 20)
    with pytest.raises(UserError, match="samples=4 with temperature=0: all samples of a problem"):
        settings_of(str(config), "--temperature", "0", "samples=4")
