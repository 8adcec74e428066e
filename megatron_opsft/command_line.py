"""What the commands have in common: arguments, a group's default command, help with examples."""

from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megatron_opsft.errors import UserError

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it

ConfigPath = Annotated[Path, typer.Argument(help="YAML file of a run, such as examples/configs/*.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, on top of the file.")
]


class ResumeMode(StrEnum):
    """yes: the run must be there; auto: where it is not, a new one starts."""

    YES = "yes"
    AUTO = "auto"


Resume = Annotated[
    ResumeMode | None,
    typer.Option(
        "--resume",
        metavar="[=auto]",
        help="Continue from the newest checkpoint in run.dir; --resume=auto: or start a new run.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete what run.dir holds and start anew.")
]


def check_start(*, resume: ResumeMode | None, overwrite: bool) -> None:
    """Errors: `UserError` for both at once."""
    if resume is not None and overwrite:
        raise UserError("--resume and --overwrite exclude each other; give one of them")


class RunCommand(TyperCommand):
    """A command on a run: `--resume` may stand without a value and never takes the next word, and
    keys that are written as options are explained.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Errors: `UserError` for a key with dashes."""
        for word, behind in pairwise([*args, ""]):
            key, equals, value = word.partition("=")
            if key.startswith("--") and "." in key:
                raise UserError(
                    f"{word}: keys of the configuration have no dashes; write "
                    f"{key.lstrip('-')}={value if equals else behind or 'VALUE'}"
                )
        return super().parse_args(
            ctx, [f"--resume={ResumeMode.YES}" if word == "--resume" else word for word in args]
        )


class RunByDefault(TyperGroup):
    """`GROUP ARGUMENTS` means `GROUP run ARGUMENTS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Names the command where only its arguments are given."""
        if args and args[0] not in (*self.commands, "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def examples(*commands: str) -> str:
    """The end of a command's help; its lines stay as they are."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def invoke(commands: typer.Typer) -> int | None:
    """Call the commands; the exit code. Errors: `UserError` for words that a command does not take,
    in one line with an example of the command.
    """
    try:
        return commands(standalone_mode=False)  # type: ignore[no-any-return]
    except typer.Abort:
        return 130  # as a shell reports a Ctrl-C
    except _UsageError as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # a group without arguments: the whole help
            typer.echo(message, err=True)
            return 2
        name = error.ctx.command_path.removeprefix(error.ctx.find_root().command_path).strip()
        epilog = (error.ctx.command.epilog or "").splitlines()
        example = "".join(f"; for example: {line.strip()}" for line in epilog[2:3])
        words = " ".join(message.split()).rstrip(".")
        raise UserError(f"{name}: {words}{example}" if name else words + example) from None
