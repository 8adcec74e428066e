"""What the commands have in common: arguments, a group's default command, help with examples."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

ConfigPath = Annotated[Path, typer.Argument(help="YAML file of a run, such as examples/configs/*.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, on top of the file.")
]


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
