"""`--help` of every command: one screen, with examples that the program takes."""

import re
from collections.abc import Sequence

import pytest
from click.testing import CliRunner
from commands import all_commands, calls_in, command_of
from forked_cli import ROOT

from megatron_opsft.cli import PROGRAM
from megatron_opsft.command_line import reference_table
from megatron_opsft.methods.catalog import METHODS

LINES = 45


def check_example(words: Sequence[str]) -> None:
    """AssertionError or `UsageError` unless command, options, keys and files exist."""
    command, rest = command_of(words)
    assert not getattr(command, "commands", None), f"{words} names no command"
    read = command.read(rest)
    if read.keys_of is not None:
        methods = (reference_table(method, prefix="method.") for method in METHODS.values())
        table = "\n".join([reference_table(read.keys_of), *methods])
        for key in (word.partition("=")[0] for word in read.keys):
            known = f"| `{key}` |" in table or f"| `{key.partition('.')[0]}` |" in table
            assert known, f"{words}: no key {key}"
    for file in re.findall(r"examples/[\w/.]+", " ".join(words)):
        assert (ROOT / file).is_file(), f"{words}: no file {file}"


@pytest.mark.parametrize("path", all_commands(), ids=lambda path: " ".join(path) or "(program)")
def test_help_is_one_screen_with_examples(path: tuple[str, ...]) -> None:
    ended = CliRunner().invoke(PROGRAM, [*path, "--help"], env={"COLUMNS": "80"})
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
