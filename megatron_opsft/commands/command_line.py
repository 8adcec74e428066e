"""One way of options for every command: `COMMAND WORDS key=value`, with `--key value` for short.

A command is a pydantic model: its fields are the options, its docstring is the help. And the table
of all keys of a model: what `--reference` prints and docs/ has.
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
from megatron_opsft.methods.settings import GroupNormalizedSettings, MethodSettings
from megatron_opsft.runtime.console import say
from megatron_opsft.section import Section, section_class

_KEY = re.compile(r"[A-Za-z][\w.-]*")
_METAVARS = {Path: "PATH", int: "N", float: "X"}


class Command(Section):
    """A command of the program; `run` does it.

    examples: command lines without the program's name. words: the fields that take words without a
    key, in order; the last one may hold several. flags: what an option means that stands without a
    value; a bool's is true. keys_of: keys that are not options belong to this model, and are
    collected in the field `keys`.
    """

    examples: ClassVar[tuple[str, ...]]
    words: ClassVar[tuple[str, ...]] = ()
    flags: ClassVar[Mapping[str, str]] = {}
    keys_of: ClassVar[type[Section] | None] = None

    def run(self) -> int | None:
        """Do it. Returns the exit code; None is 0. Errors: `UserError`."""
        raise NotImplementedError

    @classmethod
    def options(cls) -> dict[str, FieldInfo]:
        """What may be given as key=value."""
        fields = cls.model_fields.items()
        return {
            f.alias or name: f for name, f in fields if name not in (*cls.words, "keys")
        }


class RunCommand(Command):
    """A command on the configuration of a run."""

    words: ClassVar[tuple[str, ...]] = ("config",)
    keys_of: ClassVar[type[Section] | None] = Config
    config: Path
    """YAML file of a run, such as examples/configs/*.yaml."""
    keys: tuple[str, ...] = ()

    def load(self) -> Config:
        """The file, with the keys of the command line on top. Errors: `UserError`."""
        return load_config(self.config, self.keys)


class StartCommand(RunCommand):
    """A command that starts a run or resumes one."""

    flags: ClassVar[Mapping[str, str]] = {"resume": "yes"}
    resume: Literal["yes", "auto"] | None = None
    """Continue from the newest checkpoint in run.dir; auto: or start a new run."""
    overwrite: bool = False
    """Delete what run.dir holds and start anew."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        """Errors: `UserError` for both at once."""
        if self.resume is not None and self.overwrite:
            raise UserError(
                "--resume and --overwrite exclude each other; give one of them"
            )
        return self


class Program(click.Command):
    """One command as click sees it: every option takes a text, which pydantic reads."""

    def __init__(self, name: str, command: type[Command]) -> None:
        words = [
            click.Argument(
                [word],
                nargs=-1 if _holds_several(field) else 1,
                required=field.is_required(),
                metavar=_word(word, field),
            )
            for word in command.words
            for field in [command.model_fields[word]]
        ]
        options = [
            click.Option(
                [f"--{key.replace('_', '-')}", f"option_{key}"],
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
            epilog=_examples(command.examples),
        )
        self.keys_of = command.keys_of
        self._command = command

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """What stands behind the name in the first line of the help."""
        return [
            p.make_metavar(ctx) for p in self.params if isinstance(p, click.Argument)
        ] + ["[KEY=VALUE]..."]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Writes every option as --key=text, and puts the keys of a configuration aside."""
        options, rest = self._command.options(), list(args)
        words: list[str] = []
        keys: list[str] = []
        while rest:
            word = rest.pop(0)
            key, equals, text = word.removeprefix("--").partition("=")
            top, dot, name = key.partition(".")
            field = None if self.keys_of is None else self.keys_of.model_fields.get(top)
            # The name in data.my-set=FILE is left as it is.
            is_named = field is not None and get_origin(field.annotation) is dict
            key = (
                top.replace("-", "_")
                + dot
                + (name if is_named else name.replace("-", "_"))
            )
            dashed = word.startswith("--")
            is_key = self.keys_of is not None and key != "help"
            if not (dashed or (equals and _KEY.fullmatch(key))) or not (
                key in options or is_key
            ):
                if rest and self._has_key(word):
                    raise click.UsageError(f"write {word}={rest[0]}", ctx)
                words.append(word)
                continue
            if not equals:
                is_truth = key in options and options[key].annotation is bool
                flag = "true" if is_truth else self._command.flags.get(key)
                if flag is None and not rest:
                    is_known = key in options or "." in key or field is not None
                    lacks = (
                        "has no value" if is_known else "is no option of this command"
                    )
                    raise click.UsageError(f"{word} {lacks}", ctx)
                text = rest.pop(0) if flag is None else flag
                if is_named and "=" not in text and not dot:
                    example = f"{word} gsm8k=test.jsonl"
                    raise click.UsageError(
                        f"{word} {text}: write {word} NAME=FILE, as in {example}", ctx
                    )
            if key in options:
                words.append(f"--{key.replace('_', '-')}={text}")
            else:
                joint = "." if dashed and is_named and not dot else "="
                keys.append(f"{key}{joint}{text}")  # --data a=FILE is data.a=FILE
        rest = super().parse_args(ctx, words)
        ctx.params |= {"keys": tuple(keys)} if keys else {}
        return rest

    def _has_key(self, word: str) -> bool:
        """Whether it is a key of a section of the configuration, such as `optimizer.lr`."""
        top, _, name = word.partition(".")
        field = None if self.keys_of is None else self.keys_of.model_fields.get(top)
        section = None if field is None else section_class(field)
        return section is not None and name in section.model_fields

    def read(self, words: Sequence[str]) -> Command:
        """The command as the words set it. Errors: `click.UsageError`, `UserError`."""
        return self._build(**self.make_context(self.name, list(words)).params)

    def _build(self, **values: Any) -> Command:
        tree: dict[str, Any] = {
            name.removeprefix("option_"): value
            for name, value in values.items()
            if value not in (None, ())
        }
        try:
            return self._command.model_validate(tree)
        except ValidationError as error:
            first = error.errors()[0]
            reason = (
                first["ctx"]["error"]
                if first["type"] == "value_error"
                else first["msg"]
            )
            option = f"--{str(first['loc'][0]).replace('_', '-')}"
            raise click.UsageError(f"{option}={first['input']}: {reason}") from None


class _Group(click.Group):
    """`GROUP WORDS` means `GROUP run WORDS`, where the group has a command of that name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Names the command where only its words are given."""
        if (
            "run" in self.commands
            and args
            and args[0] not in (*self.commands, "--help")
        ):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def group(
    name: str,
    text: str,
    commands: Mapping[str, type[Command] | click.Group],
    examples: Sequence[str],
) -> click.Group:
    """Several commands under one name."""
    programs: dict[str, click.Command] = {
        key: each if isinstance(each, click.Group) else Program(key, each)
        for key, each in commands.items()
    }
    return _Group(name, programs, help=text, epilog=_examples(examples))


def invoke(program: click.Command, words: Sequence[str] | None = None) -> int | None:
    """Call the command that the words name, by default those of the command line; the exit code.

    Errors: `UserError` for words that it does not take, with an example.
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
        name = context.command_path.removeprefix(
            context.find_root().command_path
        ).strip()
        example = (context.command.epilog or "").splitlines()[2].strip()
        message = " ".join(error.format_message().split()).rstrip(".")
        raise UserError(
            f"{name and name + ': '}{message}; for example: {example}"
        ) from None


def _examples(examples: Sequence[str]) -> str:
    return "\n".join(
        ["\b", "Examples:", *(f"  megatron-opsft {each}" for each in examples)]
    )


def _holds_several(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (tuple, dict)


def _word(name: str, field: FieldInfo) -> str:
    shown = name.upper() + ("..." if _holds_several(field) else "")
    return shown if field.is_required() else f"[{shown}]"


def _metavar(command: type[Command], key: str, field: FieldInfo) -> str | None:
    kinds = [field.annotation, *get_args(field.annotation)]
    literal = next((kind for kind in kinds if get_origin(kind) is Literal), None)
    shown = "|".join(get_args(literal)) if literal else None
    shown = shown or next(
        (text for kind, text in _METAVARS.items() if kind in kinds), "TEXT"
    )
    return (
        f"[={shown}]"
        if key in command.flags
        else ""
        if field.annotation is bool
        else shown
    )


def _default(field: FieldInfo) -> str:
    is_told = field.is_required() or field.default in (None, False, "", ())
    return "" if is_told else f" [{field.default}]"


def reference_table(model: type[BaseModel] = Config, *, prefix: str = "") -> str:
    """All keys with defaults and meaning as a Markdown table; of a method those that most have."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for cells in _rows(model, prefix):
        key, default, meaning = (cell.replace("|", r"\|") for cell in cells)
        lines.append(f"| `{key}` | {default} | {meaning} |")
    return "\n".join(lines)


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for key, field in model.model_fields.items():
        section = section_class(field)
        if section:
            section = GroupNormalizedSettings if section is MethodSettings else section
            yield from _rows(section, f"{prefix}{key}.")
        elif field.description is not None:
            yield (
                f"{prefix}{key}",
                _default_of(field),
                " ".join(field.description.split()),
            )


def _default_of(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{_show(field.default)}`"


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    plain = isinstance(value, str | float | Path) and str(value).isprintable()
    return str(value) if plain else json.dumps(value)
