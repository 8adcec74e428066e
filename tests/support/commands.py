"""Commands that texts name, as words of a command line, and what of the program they call."""

import re
import shlex
from collections.abc import Sequence

import click

from megatron_opsft.commands.cli import PROGRAM
from megatron_opsft.commands.command_line import Command, Program


def calls_in(lines: Sequence[str]) -> list[list[str]]:
    """The words behind `megatron-opsft` in every line that calls it."""
    found = []
    for line in lines:
        if call := re.search(r"(?:^|\s)(?:megatron-opsft|-m megatron_opsft)\s+(\S.*)", line):
            found.append(shlex.split(call[1], comments=True))
    return found


def command_of(words: Sequence[str]) -> tuple[click.Command, list[str]]:
    """The command that they call, and the words behind its name."""
    command: click.Command = PROGRAM
    rest = list(words)
    while isinstance(command, click.Group):
        if rest and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        elif "run" in command.commands and rest:  # `plan CONFIG` is `plan run CONFIG`
            command = command.commands["run"]
        else:
            break
    return command, rest


def read_command(words: Sequence[str]) -> Command:
    """The command as the words set it; nothing is run."""
    program, rest = command_of(words)
    assert isinstance(program, Program), f"{words} names no command"
    return program.build(**program.make_context(program.name, rest).params)


def all_commands() -> list[tuple[str, ...]]:
    """The names of every command and group, the program itself first."""
    names: list[tuple[str, ...]] = [()]
    for path in names:
        command, _ = command_of(path)
        names += [(*path, name) for name in getattr(command, "commands", {})]
    return names
