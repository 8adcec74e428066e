"""Options of every command in one way: `COMMAND WORDS key=value`, with `--key value` for short.

A command is a pydantic model: its fields are the options, its docstring is the help. This file also
makes the table of all keys of a model, which `--reference` prints and docs/ has.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import click
from pydantic import BaseModel, ValidationError, model_validator
from pydantic.fields import FieldInfo

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.methods.policy import GroupNormalizedSettings
from megatron_opsft.methods.settings import MethodSettings
from megatron_opsft.runtime.console import say
from megatron_opsft.section import Section, section_class

_KEY = re.compile(r"[A-Za-z][\w.-]*")
_METAVARS = {Path: "PATH", int: "N", float: "X"}


class Command(Section):
    """A command of the program; `run` executes it."""

    examples: ClassVar[tuple[str, ...]]
    """Command lines without the program's name."""
    words: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that take words without a key, in order; the last may take several."""
    flags: ClassVar[Mapping[str, str]] = {}
    """Option -> its value if it stands without one. A bool's is true."""
    keys_of: ClassVar[type[Section] | None] = None
    """Model of the keys that are not options, if the command takes any."""
    keys: tuple[str, ...] = ()
    """Keys of the command line that are not options, as key=value."""

    def run(self) -> int | None:
        """Execute the command. Returns the exit code; None is 0. Errors: `UserError`."""
        raise NotImplementedError


class RunCommand(Command):
    """A command on the configuration of a run."""

    words: ClassVar[tuple[str, ...]] = ("config",)
    keys_of = Config
    config: Path
    """YAML file of a run, such as examples/configs/*.yaml."""

    def load(self) -> Config:
        """Read the file, with the keys of the command line on top. Errors: `UserError`."""
        return load_config(self.config, self.keys)


class StartCommand(RunCommand):
    """A command that starts a run or resumes one."""

    flags = {"resume": "yes"}
    resume: Literal["yes", "auto"] | None = None
    """Continue from the newest checkpoint in run.dir; auto: or start a new run."""
    overwrite: bool = False
    """Delete the run's files in run.dir, none but these, and start anew."""

    @model_validator(mode="after")
    def _check_exclusive(self) -> Self:
        """Refuse both options at once. Errors: `UserError`."""
        if self.resume is not None and self.overwrite:
            raise UserError(
                "--resume and --overwrite exclude each other; give one of them"
            )
        return self


class Program(click.Command):
    """A command as click sees it: every option takes a text, which pydantic reads."""

    def __init__(self, name: str, command: type[Command]) -> None:
        self.examples = command.examples
        self.keys_of = command.keys_of
        self._command = command
        # The fields that can be given as key=value, by their key.
        self._options = {
            field.alias or field_name: field
            for field_name, field in command.model_fields.items()
            if field_name not in (*command.words, "keys")
        }
        self._key_fields = command.keys_of.model_fields if command.keys_of else {}
        # `--data NAME=FILE` is data.NAME=FILE.
        self._mappings = {
            key
            for key, field in self._key_fields.items()
            if get_origin(field.annotation) is dict
        }
        params: list[click.Parameter] = []
        for word in command.words:
            field = command.model_fields[word]
            nargs = -1 if _holds_several(field) else 1
            required = field.is_required()
            params.append(click.Argument([word], nargs=nargs, required=required))
        for key, field in self._options.items():
            option = click.Option(
                [_dashed(key), key],
                metavar=_metavar(command, key, field),
                multiple=_holds_several(field),
                required=field.is_required(),
                help=(field.description or "") + _default(field),
            )
            params.append(option)
        super().__init__(
            name,
            params=params,
            callback=lambda **values: self.build(**values).run(),
            help=inspect.getdoc(command),
            epilog=_epilog(command.examples),
            options_metavar=None,
        )

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return what follows the name in the first line of the help."""
        return [*super().collect_usage_pieces(ctx), "[KEY=VALUE]..."]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite options as --key=text for click, and collect keys of a configuration."""
        remaining = list(args)
        words: list[str] = []
        keys: list[str] = []
        while remaining:
            typed = remaining.pop(0)
            name, equals, value = typed.removeprefix("--").partition("=")
            key = self._key_of(name)
            if not self._is_option(typed, key):
                # A mistake that is common: `optimizer.lr 1e-6`.
                if remaining and self._is_config_key(typed):
                    raise click.UsageError(f"write {typed}={remaining[0]}", ctx)
                words.append(typed)
                continue
            if not equals:
                value = self._take_value(typed, key, remaining, ctx)
            if key in self._options:
                words.append(f"{_dashed(key)}={value}")
            elif typed.startswith("--") and key in self._mappings:
                keys.append(f"{key}.{value}")  # the value is NAME=FILE
            else:
                keys.append(f"{key}={value}")
        unparsed = super().parse_args(ctx, words)
        ctx.params["keys"] = tuple(keys)
        return unparsed

    def _key_of(self, name: str) -> str:
        """Return the name with underscores instead of dashes; in `data.NAME`, NAME keeps its
        dashes.
        """
        section, dot, name_in_section = name.partition(".")
        if section not in self._mappings:
            name_in_section = name_in_section.replace("-", "_")
        return section.replace("-", "_") + dot + name_in_section

    def _is_option(self, typed: str, key: str) -> bool:
        """True if the word sets an option of the command or a key of its configuration."""
        is_assignment = "=" in typed and _KEY.fullmatch(key)
        if not typed.startswith("--") and not is_assignment:
            return False
        takes_keys = self.keys_of is not None and key != "help"
        return takes_keys or key in self._options

    def _is_config_key(self, typed: str) -> bool:
        """True if the word is a key such as `optimizer.lr`, without a value."""
        section, _, name = typed.partition(".")
        if section not in self._key_fields:
            return False
        kind = section_class(self._key_fields[section])
        return kind is not None and name in kind.model_fields

    def _take_value(
        self, typed: str, key: str, remaining: list[str], ctx: click.Context
    ) -> str:
        """Return the value of an option without `=`: its flag's, or the next word."""
        if key in self._command.flags:
            return self._command.flags[key]
        option = self._options.get(key)
        if option is not None and option.annotation is bool:
            return "true"
        if not remaining:
            reason = "has no value"
            if option is None and key not in self._key_fields and "." not in key:
                reason = "is no option of this command"
            raise click.UsageError(f"{typed} {reason}", ctx)
        value = remaining.pop(0)
        if key in self._mappings and "=" not in value:
            raise click.UsageError(
                f"{typed} {value}: write {typed} NAME=FILE, "
                f"as in {typed} gsm8k=test.jsonl",
                ctx,
            )
        return value

    def build(self, **values: Any) -> Command:
        """Make the command of what click has read. Errors: `click.UsageError`, `UserError`."""
        # click has None or () for what was not typed.
        typed = {key: value for key, value in values.items() if value not in (None, ())}
        try:
            return self._command.model_validate(typed)
        except ValidationError as error:
            first = error.errors()[0]
            reason = first["msg"]
            if first["type"] == "value_error":  # the message without pydantic's prefix
                reason = first["ctx"]["error"]
            option = _dashed(str(first["loc"][0]))
            raise click.UsageError(f"{option}={first['input']}: {reason}") from None


class _Group(click.Group):
    """Several commands; `GROUP WORDS` means `GROUP run WORDS` if it has a command `run`."""

    examples: Sequence[str]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `run` if the first word names no command."""
        known = (*self.commands, "--help")
        if "run" in self.commands and args and args[0] not in known:
            args = ["run", *args]
        return super().parse_args(ctx, args)


def group(
    name: str,
    text: str,
    commands: Mapping[str, type[Command] | click.Group],
    examples: Sequence[str],
) -> click.Group:
    """Join several commands under one name."""
    programs: dict[str, click.Command] = {
        key: command if isinstance(command, click.Group) else Program(key, command)
        for key, command in commands.items()
    }
    joined = _Group(name, programs, help=text, epilog=_epilog(examples))
    joined.examples = examples
    return joined


def invoke(program: click.Command, words: Sequence[str] | None = None) -> int | None:
    """Call the command that the words name (default: `sys.argv`); return its exit code.

    Errors: `UserError` with an example, for words that are not accepted.
    """
    try:
        return program.main(words, standalone_mode=False)
    except click.Abort:
        return 130  # as a shell reports a Ctrl-C
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message(), error=True)
        return 2
    except click.UsageError as error:
        context = error.ctx or click.Context(program)
        assert isinstance(context.command, Program | _Group)
        root = context.find_root().command_path
        message = " ".join(error.format_message().split()).rstrip(".")
        if name := context.command_path.removeprefix(root).strip():
            message = f"{name}: {message}"
        example = f"megatron-opsft {context.command.examples[0]}"
        raise UserError(f"{message}; for example: {example}") from None


def _epilog(examples: Sequence[str]) -> str:
    """Return the end of a help text; click keeps the lines of a paragraph that begins with \\b."""
    lines = [f"  megatron-opsft {example}" for example in examples]
    return "\n".join(["\b", "Examples:", *lines])


def _dashed(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _holds_several(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (tuple, dict)


def _metavar(command: type[Command], key: str, field: FieldInfo) -> str:
    """Return what the help shows behind an option as its value, such as N; "" for a bool."""
    kinds = [field.annotation, *get_args(field.annotation)]
    shown = next((text for kind, text in _METAVARS.items() if kind in kinds), "TEXT")
    for kind in kinds:
        if get_origin(kind) is Literal:
            shown = "|".join(get_args(kind))
    if key in command.flags:
        return f"[={shown}]"
    return "" if field.annotation is bool else shown


def _default(field: FieldInfo) -> str:
    """Return the default as the help shows it; "" if there is none worth showing."""
    if field.is_required() or field.default in (None, False, "", ()):
        return ""
    return f" [{field.default}]"


def reference_table(model: type[BaseModel] = Config, *, prefix: str = "") -> str:
    """Return all keys as a Markdown table; for `method`, the keys that most methods have."""
    head = ["| key | default | meaning |", "|---|---|---|"]
    return "\n".join([*head, *_rows(model, prefix)])


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for key, field in model.model_fields.items():
        section = section_class(field)
        if section is MethodSettings:
            section = GroupNormalizedSettings
        if section:
            yield from _rows(section, f"{prefix}{key}.")
        elif field.description is not None:
            default = "required"
            if not field.is_required():
                default = f"`{_show(field.default)}`"
            meaning = " ".join(field.description.split())
            yield f"| `{prefix}{key}` | {_escape(default)} | {_escape(meaning)} |"


def _escape(cell: str) -> str:
    return cell.replace("|", r"\|")


def _show(value: Any) -> str:
    """Return a default as the table of keys shows it: as it is typed, or as JSON."""
    if isinstance(value, str | float | Path) and str(value).isprintable():
        return str(value)
    return json.dumps(value)
