"""Options of every command in one way: `COMMAND WORDS key=value`, with `--key value` for short.

A command is a pydantic model: its fields are the options, its docstring is the help. This file also
makes the table of all keys of a model, which `--reference` prints and docs/ has.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """Model of the keys that are not options; they are collected in the field `keys`."""

    def run(self) -> int | None:
        """Execute the command. Returns the exit code; None is 0. Errors: `UserError`."""
        raise NotImplementedError

    @classmethod
    def options(cls) -> dict[str, FieldInfo]:
        """Return the fields that can be given as key=value, by their key."""
        return {
            field.alias or name: field
            for name, field in cls.model_fields.items()
            if name not in (*cls.words, "keys")
        }


class RunCommand(Command):
    """A command on the configuration of a run."""

    words: ClassVar[tuple[str, ...]] = ("config",)
    keys_of = Config
    config: Path
    """YAML file of a run, such as examples/configs/*.yaml."""
    keys: tuple[str, ...] = ()

    def load(self) -> Config:
        """Read the file, with the keys of the command line on top. Errors: `UserError`."""
        return load_config(self.config, self.keys)


class StartCommand(RunCommand):
    """A command that starts a run or resumes one."""

    flags = {"resume": "yes"}
    resume: Literal["yes", "auto"] | None = None
    """Continue from the newest checkpoint in run.dir; auto: or start a new run."""
    overwrite: bool = False
    """Delete what run.dir holds and start anew."""

    @model_validator(mode="after")
    def _check_exclusive(self) -> Self:
        """Refuse both options at once. Errors: `UserError`."""
        if self.resume is not None and self.overwrite:
            raise UserError(
                "--resume and --overwrite exclude each other; give one of them"
            )
        return self


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of the command line, split at its first `=`."""

    typed: str
    key: str
    """Name before `=`, with underscores for dashes; the NAME of `data.NAME=FILE` stays as it is."""
    value: str | None
    """Text after `=`; None without `=`."""
    field: FieldInfo | None
    """Field of the configuration to which the key belongs, if there is one."""
    takes_name: bool
    """True if the key is a whole mapping: `--data NAME=FILE` is data.NAME=FILE."""


class Program(click.Command):
    """A command as click sees it: every option takes a text, which pydantic reads."""

    def __init__(self, name: str, command: type[Command]) -> None:
        words = [_argument(word, command) for word in command.words]
        options = [
            click.Option(
                [_dashed(key), f"option_{key}"],
                metavar=_metavar(command, key, field),
                multiple=_holds_several(field),
                required=field.is_required(),
                help=(field.description or "") + _default(field),
            )
            for key, field in command.options().items()
        ]
        super().__init__(
            name,
            params=[*words, *options],
            callback=lambda **values: self._build(**values).run(),
            help=inspect.getdoc(command),
            epilog=_epilog(command.examples),
        )
        self.examples = command.examples
        self.keys_of = command.keys_of
        self._command = command

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return what follows the name in the first line of the help."""
        arguments = [p for p in self.params if isinstance(p, click.Argument)]
        return [*(p.make_metavar(ctx) for p in arguments), "[KEY=VALUE]..."]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Rewrite options as --key=text for click, and collect keys of a configuration."""
        remaining = list(args)
        words: list[str] = []
        keys: list[str] = []
        while remaining:
            word = self._read_word(remaining.pop(0))
            if not self._is_option(word):
                if remaining and self._is_config_key(word):
                    raise click.UsageError(f"write {word.typed}={remaining[0]}", ctx)
                words.append(word.typed)
                continue
            value = word.value
            if value is None:
                value = self._take_value(word, remaining, ctx)
            if word.key in self._command.options():
                words.append(f"{_dashed(word.key)}={value}")
            elif word.typed.startswith("--") and word.takes_name:
                keys.append(f"{word.key}.{value}")
            else:
                keys.append(f"{word.key}={value}")
        unparsed = super().parse_args(ctx, words)
        if keys:
            ctx.params["keys"] = tuple(keys)
        return unparsed

    def _read_word(self, typed: str) -> _Word:
        key, equals, value = typed.removeprefix("--").partition("=")
        section, dot, name = key.partition(".")
        field = None
        if self.keys_of is not None:
            field = self.keys_of.model_fields.get(section)
        is_mapping = field is not None and get_origin(field.annotation) is dict
        if not is_mapping:
            name = name.replace("-", "_")
        return _Word(
            typed,
            key=section.replace("-", "_") + dot + name,
            value=value if equals else None,
            field=field,
            takes_name=is_mapping and not dot,
        )

    def _is_option(self, word: _Word) -> bool:
        """True if the word sets an option of the command or a key of its configuration."""
        is_assignment = word.value is not None and _KEY.fullmatch(word.key)
        if not word.typed.startswith("--") and not is_assignment:
            return False
        takes_keys = self.keys_of is not None and word.key != "help"
        return takes_keys or word.key in self._command.options()

    def _is_config_key(self, word: _Word) -> bool:
        """True if the word is a key such as `optimizer.lr`, without a value."""
        if word.field is None:
            return False
        section = section_class(word.field)
        name = word.typed.partition(".")[2]
        return section is not None and name in section.model_fields

    def _take_value(self, word: _Word, remaining: list[str], ctx: click.Context) -> str:
        """Return the value of an option without `=`: its flag's, or the next word."""
        option = self._command.options().get(word.key)
        value = self._command.flags.get(word.key)
        if option is not None and option.annotation is bool:
            value = "true"
        if value is None and not remaining:
            reason = "has no value"
            if option is None and word.field is None and "." not in word.key:
                reason = "is no option of this command"
            raise click.UsageError(f"{word.typed} {reason}", ctx)
        if value is None:
            value = remaining.pop(0)
        if word.takes_name and "=" not in value:
            raise click.UsageError(
                f"{word.typed} {value}: write {word.typed} NAME=FILE, "
                f"as in {word.typed} gsm8k=test.jsonl",
                ctx,
            )
        return value

    def read(self, words: Sequence[str]) -> Command:
        """Return the command as the words set it. Errors: `click.UsageError`, `UserError`."""
        return self._build(**self.make_context(self.name, list(words)).params)

    def _build(self, **values: Any) -> Command:
        fields = {
            name.removeprefix("option_"): value
            for name, value in values.items()
            if value not in (None, ())
        }
        try:
            return self._command.model_validate(fields)
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
    programs: dict[str, click.Command] = {}
    for key, command in commands.items():
        if isinstance(command, click.Group):
            programs[key] = command
        else:
            programs[key] = Program(key, command)
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


def _argument(word: str, command: type[Command]) -> click.Argument:
    field = command.model_fields[word]
    required = field.is_required()
    nargs, metavar = 1, word.upper()
    if _holds_several(field):
        nargs, metavar = -1, f"{metavar}..."
    if not required:
        metavar = f"[{metavar}]"
    return click.Argument([word], nargs=nargs, required=required, metavar=metavar)


def _metavar(command: type[Command], key: str, field: FieldInfo) -> str:
    kinds = [field.annotation, *get_args(field.annotation)]
    shown = next((text for kind, text in _METAVARS.items() if kind in kinds), "TEXT")
    for kind in kinds:
        if get_origin(kind) is Literal:
            shown = "|".join(get_args(kind))
    if key in command.flags:
        return f"[={shown}]"
    return "" if field.annotation is bool else shown


def _default(field: FieldInfo) -> str:
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
    if isinstance(value, str | float | Path) and str(value).isprintable():
        return str(value)
    return json.dumps(value)
