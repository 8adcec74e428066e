"""YAML and dotted overrides -> `Config`; a mistake is one line that names key, value and fix. And
what a resumed run must keep, with its hash: every key that is not marked otherwise
(section.py).
"""

import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_opsft.config import Config
from megatron_opsft.config.run_prompt import settings_of_run
from megatron_opsft.config.yaml_text import (
    dump_yaml,
    find_yaml,
    parse_yaml,
    parse_yaml_value,
)
from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog import settings_class
from megatron_opsft.methods.settings import MethodSettings
from megatron_opsft.section import ADJUSTABLE, BY_CONTENT, FREE, section_of

M = TypeVar("M", bound=BaseModel)
_Keys = dict[str, Mapping[str, FieldInfo]]
_LAST_STEP = (
    "optimizer.schedule=cosine reaches min_lr at the last step, so the rate would jump"
)
# A run chooses these itself unless the user sets them.
_CHOSEN = ("data.max_prompt_tokens", "eval.max_response_tokens")


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run; see `load`. Where its model is another run's, what it does not
    set of prompt and judge is that run's.
    """
    config = load(Config, path, overrides)
    data, verify = config.data, config.verify
    taken = settings_of_run(
        config.model.path,
        data.model_dump() | verify.model_dump(),
        data.model_fields_set | verify.model_fields_set,
    )
    parts = {
        name: part.model_copy(
            update={k: v for k, v in taken.items() if k in type(part).model_fields}
        )
        for name, part in (("data", data), ("verify", verify))
    }
    return config.model_copy(update=parts) if taken else config


def load(
    model: type[M],
    path: Path | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> M:
    """A YAML file; on top of it overrides, `key=value` or `section.key=value` (values are YAML); on
    top of these `options`, key by key.

    Errors: `UserError` for a missing or malformed file, an unknown key, a wrong value, a missing
    key.
    """
    tree = read_yaml(path) if path is not None else {}
    for override in overrides:
        _apply(tree, override, model)
    tree |= options or {}
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        errors = error.errors()
        wrong = next(
            (each for each in errors if each["type"] == "extra_forbidden"), errors[0]
        )
        keys = _keys_by_section(model, tree)
        raise UserError(_in_one_line(wrong, keys, path, overrides)) from None


def _in_one_line(
    wrong: ErrorDetails, keys: _Keys, path: Path | None, overrides: Sequence[str]
) -> str:
    key = ".".join(str(part) for part in wrong["loc"])
    if wrong["type"] == "extra_forbidden":
        # On the command line, where the key or one of its section was typed there.
        typed = [override.partition("=")[0] for override in overrides]
        is_typed = any(f"{name}.".startswith(f"{key}.") for name in typed)
        origin = "the command line" if path is None or is_typed else path
        inside = keys.get(key.rpartition(".")[0]) or keys.get(key.partition(".")[0], {})
        there = ", ".join(inside)
        meant = _meant(key, keys)
        hint = f"did you mean {' or '.join(meant)}?" if meant else f"there are: {there}"
        return f"unknown config key {key} in {origin}: {hint}"
    if wrong["type"] == "missing":
        key = next(
            (f"{key}.{n}" for n, f in keys.get(key, {}).items() if f.is_required()), key
        )
        return f"config key {key} is missing: set it in the file or as {key}=..."
    if wrong["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"config section {key} must hold keys, not {wrong['input']!r}"
    reason = wrong["ctx"]["error"] if wrong["type"] == "value_error" else wrong["msg"]
    return f"config key {key}={wrong['input']!r}: {reason}"


def _keys_by_section(model: type[BaseModel], tree: Mapping[str, Any]) -> _Keys:
    """Section -> its keys; "" -> the model's own. A method's keys are those of the one it names."""
    keys: _Keys = {"": model.model_fields}
    for name, field in model.model_fields.items():
        if section := section_of(field):
            if section is MethodSettings and isinstance(
                given := tree.get(name, {}), dict
            ):
                section = settings_class(given)
            keys[name] = section.model_fields
    return keys


def _meant(key: str, keys: _Keys) -> list[str]:
    """What a key that does not exist may mean: a similar key of its section; else a key of another
    section with the same name, or with a similar one.
    """
    section, _, name = key.rpartition(".")
    if near := difflib.get_close_matches(name, keys.get(section, []), n=1):
        return [f"{section}.{near[0]}".lstrip(".")]
    others = [(f"{other}.{key}", key) for other in keys if other for key in keys[other]]
    near = difflib.get_close_matches(name, [key for _, key in others], n=1)
    return [full for full, key in others if key in near]


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping that a YAML file holds, on top of the file that its key `base` names.

    above: the files that led to this one. Errors: `UserError`.
    """
    if path in above:
        raise UserError(
            f"config file {path} is a base of itself; change one key `base`"
        )
    try:
        tree = parse_yaml(find_yaml(path).read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except IsADirectoryError:
        there = path / "config.yaml"
        more = (
            f"; to continue that run give {there} --resume" if there.is_file() else ""
        )
        raise UserError(
            f"config file {path} is a directory{more or '; give a file'}"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"config file {path} must hold sections such as `run:`, not {tree!r}"
        )
    if (base := tree.pop("base", None)) is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"config file {path}: base={base!r} must be the path of a file")
    below = read_yaml(Path(os.path.normpath(path.parent / base)), (*above, path))
    for name, given in tree.items():
        both = isinstance(given, dict) and isinstance(below.get(name), dict)
        below[name] = {**below[name], **given} if both else given
    return below


def _apply(tree: dict[str, Any], override: str, model: type[BaseModel]) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    if not dot:
        section, name = "", key
    field = _keys_by_section(model, tree).get(section, {}).get(name)
    if (
        not equals
        or not all(key.split("."))
        or (field is not None and section_of(field))
    ):
        raise UserError(
            f"override {override!r}: {_how_to_write(key, text, field, model)}"
        )
    try:
        value = parse_yaml_value(text)
    except ValueError as error:
        raise UserError(f"override {override!r}: {error}") from None
    if isinstance(value, int | float) and field is not None and _is_text(field):
        value = text.strip()
    given = tree.setdefault(section, {}) if dot else tree
    if not isinstance(given, dict):
        raise UserError(f"config section {section} must hold keys, not {given!r}")
    given[name] = value


def _how_to_write(
    key: str, text: str, field: FieldInfo | None, model: type[BaseModel]
) -> str:
    if field is not None and section_of(field) is MethodSettings and text:
        return f"write {key}.name={text}"
    if field is not None and (section := section_of(field)):
        first = next(iter(section.model_fields))
        return f"{key} is a section: write a key of it, such as {key}.{first}=..."
    example = "optimizer.lr=1e-6" if model is Config else "limit=8"
    return f"write key=value, for example {example}"


def _is_text(field: FieldInfo) -> bool:
    kinds = set(get_args(field.annotation)) or {field.annotation}
    return kinds <= {str, Path, NoneType}


def to_yaml(config: Config) -> str:
    """The resolved configuration, every key of it; loading it again gives the same one."""
    return dump_yaml(config.model_dump(mode="json"))


def config_hash(config: Config) -> str:
    """A hash of what decides a run's numbers: all but how long, where and on what it runs."""
    return hashlib.sha256(
        json.dumps(kept(config), sort_keys=True).encode()
    ).hexdigest()[:16]


def check_resumable(before: Config, now: Config, directory: Path) -> None:
    """Errors: `UserError` naming a key that a resumed run must not change."""
    was, is_now = before.model_dump(mode="json"), now.model_dump(mode="json")
    for key in changed(before, now):
        if ADJUSTABLE in _marks(now, key):
            continue
        section, name = key.split(".")
        old, new = was[section].get(name), is_now[section][name]
        why = f" ({_LAST_STEP})" if key == "run.steps" else ""
        raise UserError(
            f"{directory} was started with {key}={old!r}, not {new!r}: a resumed run must keep "
            f"it{why}; set it back, or start a new run in another run.dir"
        )


def changed(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """`section.key` -> its value before and now, of keys that decide numbers and differ."""
    old, new = kept(before), kept(now)
    found = {}
    for key, value in new.items():
        section, name = key.split(".")
        keys = getattr(now, section)
        is_set = getattr(keys, name) is not None and name in keys.model_fields_set
        if value != old.get(key) and (is_set or key not in _CHOSEN):
            found[key] = old.get(key), value
    return found


def kept(config: Config, *, places: bool = False) -> dict[str, Any]:
    """`section.key` -> value, of every key that decides numbers. A cosine schedule makes every
    learning rate depend on `run.steps`.

    places: with the keys that say where something is. Without, what these have besides: a mixture's
    weights, and the names of sets.
    """
    found = {}
    for section, values in config.model_dump(mode="json").items():
        for key, value in values.items():
            marks = _marks(config, f"{section}.{key}")
            if BY_CONTENT in marks and not places:
                value = _without_places(value)
            if FREE not in marks and (places or BY_CONTENT not in marks or value):
                found[f"{section}.{key}"] = value
    if config.optimizer.schedule == "cosine":
        found["run.steps"] = config.run.steps
    return found


def _marks(config: Config, key: str) -> list[Any]:
    """The metadata of a key's annotation and of its section's."""
    section, name = key.split(".")
    of_section = type(config).model_fields[section].metadata
    return [*of_section, *type(getattr(config, section)).model_fields[name].metadata]


def _without_places(value: Any) -> Any:
    """None for a place; a list of parts without theirs."""
    if not isinstance(value, list):
        return None
    return [
        {k: v for k, v in part.items() if k not in ("path", "data")} for part in value
    ]
