"""`--help` of every command: one screen, with examples that the program takes."""

import re
from collections.abc import Sequence

import pytest
import typer
from commands import all_commands, calls_in, command_of
from forked_cli import ROOT
from typer.testing import CliRunner

from megatron_opsft.cli import app
from megatron_opsft.config import Config
from megatron_opsft.config_reference import reference_table
from megatron_opsft.evaluate import commands as eval_commands
from megatron_opsft.evaluate.settings import EvalSettings

LINES = 45
(UsageError,) = typer.BadParameter.__bases__  # typer does not export it


def check_example(words: Sequence[str]) -> None:
    """AssertionError or `UsageError` unless command, options, keys and files exist."""
    command, rest = command_of(words)
    assert not getattr(command, "commands", None), f"{words} names no command"
    parsed = command.make_context(command.name, rest).params
    is_eval = command.callback is not None and command.callback.__module__ == eval_commands.__name__
    keys = reference_table(EvalSettings if is_eval else Config)
    for word in [*(parsed.get("overrides") or ()), *(parsed.get("words") or ())]:
        key, equals, _ = word.partition("=")
        assert not equals or f"| `{key}` |" in keys, f"{words}: no key {key}"
    for file in re.findall(r"examples/[\w/.]+", " ".join(words)):
        assert (ROOT / file).is_file(), f"{words}: no file {file}"


@pytest.mark.parametrize("path", all_commands(), ids=lambda path: " ".join(path) or "(program)")
def test_help_is_one_screen_with_examples(path: tuple[str, ...]) -> None:
    ended = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert ended.exit_code == 0
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("Usage: ")
    assert len(lines) <= LINES and max(map(len, lines)) <= 80
    examples = calls_in(lines[lines.index("  Examples:") :])
    assert len(examples) >= 2
    for words in examples:
        check_example(words)
        name, *_ = path or words
        assert words[0] == name, f"{words} is no example of {path}"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "CONFIG", "--nodes", "2"],
        ["train", "CONFIG", "optimizer.rate=1"],
        ["train", "examples/configs/none.yaml"],
        ["eval", "--out", "o", "max_token=8"],
        ["convert", "to-numpy"],
    ],
)
def test_wrong_examples_are_found(words: list[str]) -> None:
    with pytest.raises((AssertionError, UsageError)):
        check_example(words)
