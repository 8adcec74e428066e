"""YAML and dotted overrides -> `Config`; a mistake is one line that names key, value and fix.

Also what a resumed run must not change, and the hash of that: every key without a mark
(section.py) that says otherwise.
"""

import difflib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_opsft.config import Config
from megatron_opsft.config.run_prompt import SECTIONS, settings_of_run
from megatron_opsft.config.yaml_text import (
    dump_yaml,
    find_yaml,
    parse_yaml,
    parse_yaml_value,
)
from megatron_opsft.errors import UserError, looked_in, remember_config_file
from megatron_opsft.methods.catalog import settings_class
from megatron_opsft.methods.settings import MethodSettings
from megatron_opsft.section import (
    ADJUSTABLE,
    BY_CONTENT,
    FREE,
    is_other_json,
    section_class,
)

M = TypeVar("M", bound=BaseModel)
_Keys = dict[str, Mapping[str, FieldInfo]]
# A run chooses these values itself, unless the user sets them.
_CHOSEN_BY_RUN = ("data.max_prompt_tokens", "eval.max_response_tokens")


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of a run; see `load`.

    If its model is another run's, the keys of prompt and judge that it does not set have that run's
    values.
    """
    config = load(Config, path, overrides)
    data, verify = config.data, config.verify
    values = settings_of_run(
        config.model.path,
        data.model_dump() | verify.model_dump(),
        data.model_fields_set | verify.model_fields_set,
    )
    for key, value in values.items():
        section = getattr(config, SECTIONS[key]).model_copy(update={key: value})
        config = config.model_copy(update={SECTIONS[key]: section})
    return config


def load(
    model: type[M],
    path: Path | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> M:
    """Read a YAML file as a `model`.

    overrides: `key=value` or `section.key=value`, where values are YAML; they replace the file's.
    options: top-level keys and their values; they replace both.
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
        unknown_keys = [e for e in errors if e["type"] == "extra_forbidden"]
        worst = [*unknown_keys, *errors][0]
        keys = _keys_by_section(model, tree)
        typed = [override.partition("=")[0] for override in overrides]
        typed += options or {}
        raise UserError(_describe(worst, keys, path, typed)) from None


def _describe(
    error: ErrorDetails, keys: _Keys, path: Path | None, typed_keys: Sequence[str]
) -> str:
    """Return pydantic's error as one line with the key, its value and the fix.

    typed_keys: those that do not come from the file `path`.
    """
    key = ".".join(map(str, error["loc"]))
    value = error["input"]
    match error["type"]:
        case "extra_forbidden":
            # A section is typed if one of its keys is.
            is_typed = any(f"{typed}.".startswith(f"{key}.") for typed in typed_keys)
            origin = "" if path is None or is_typed else f" in {path}"
            return f"unknown config key {key}{origin}; {_advise(key, keys)}"
        case "missing":
            for name, field in keys.get(key, {}).items():
                if field.is_required():
                    key += f".{name}"
                    break
            return f"config key {key} is missing: set it in the file or as {key}=..."
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"config section {key} must hold keys, not {value!r}"
        case "value_error":
            return f"config key {key}={value!r}: {error['ctx']['error']}"
    return f"config key {key}={value!r}: {error['msg']}"


def _keys_by_section(model: type[BaseModel], tree: Mapping[str, Any]) -> _Keys:
    """Return section -> its keys; "" -> the model's own keys.

    Section `method` has the keys of the method that it names in `tree`.
    """
    keys: _Keys = {"": model.model_fields}
    for name, field in model.model_fields.items():
        section = section_class(field)
        if section is None:
            continue
        values = tree.get(name, {})
        if section is MethodSettings and isinstance(values, dict):
            section = settings_class(values)
        keys[name] = section.model_fields
    return keys


def _advise(unknown: str, keys: _Keys) -> str:
    """Suggest a similar key of the same section; else the keys with the most similar name, in
    whatever section; else name all keys of the section.
    """
    section, _, name = unknown.rpartition(".")
    names_here = keys.get(section, {}) if section else {}
    if similar := difflib.get_close_matches(name, names_here, n=1):
        return f"did you mean {section}.{similar[0]}?"
    full_names: dict[str, list[str]] = {}
    for holder, fields in keys.items():
        if holder or not section:
            for key in fields:
                full_names.setdefault(key, []).append(f"{holder}.{key}".lstrip("."))
    if similar := difflib.get_close_matches(name, full_names, n=1):
        return f"did you mean {' or '.join(full_names[similar[0]])}?"
    top, _, plain = section.partition(".")
    field = keys.get(top, {}).get(plain)
    if field is not None and dict in [
        get_origin(kind) for kind in get_args(field.annotation)
    ]:
        return f"write {section}='{{{name}: ...}}'"
    if section not in keys:  # such as `rollout.a` of the key `rollout.a.b`
        section, _, _ = unknown.partition(".")
    return f"choose one of {', '.join(keys.get(section, {}))}"


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the mapping of a YAML file. The file that its key `base` names is read first, and the
    file's keys replace those of it.

    above: the files whose `base` led to this one. Errors: `UserError`.
    """
    if path in above:
        raise UserError(
            f"config file {path} is a base of itself; change one key `base`"
        )
    try:
        file = find_yaml(path)
        tree = parse_yaml(file.read_text(encoding="utf-8")) or {}
        remember_config_file(file)
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist{looked_in(path)}") from None
    except IsADirectoryError:
        advice = "give a file"
        if (path / "config.yaml").is_file():
            advice = f"to continue that run give {path / 'config.yaml'} --resume"
        raise UserError(f"config file {path} is a directory; {advice}") from None
    except UnicodeDecodeError:
        raise UserError(
            f"config file {path} is not UTF-8; convert it, for example with iconv"
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
    merged = read_yaml(Path(os.path.normpath(path.parent / base)), (*above, path))
    for name, value in tree.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            value = merged[name] | value
        merged[name] = value
    return merged


def _apply(tree: dict[str, Any], override: str, model: type[BaseModel]) -> None:
    """Set in `tree` what an override `key=value` sets. Errors: `UserError`."""
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    if not dot:
        section, name = "", key
    field = _keys_by_section(model, tree).get(section, {}).get(name)
    is_section = field is not None and section_class(field) is not None
    is_assignment = equals and all(key.split("."))
    if is_section or not is_assignment:
        advice = _how_to_write(key, text, field, model)
        raise UserError(f"override {override!r}: {advice}")
    try:
        value = parse_yaml_value(text)
    except ValueError as error:
        raise UserError(f"override {override!r}: {error}") from None
    is_number_or_bool = isinstance(value, int | float)
    if is_number_or_bool and field is not None and _is_text(field):
        value = text.strip()
    values = tree.setdefault(section, {}) if dot else tree
    if not isinstance(values, dict):
        raise UserError(f"config section {section} must hold keys, not {values!r}")
    values[name] = value


def _how_to_write(
    key: str, text: str, field: FieldInfo | None, model: type[BaseModel]
) -> str:
    """Return the advice for an override that is no `key=value`, or that sets a whole section
    (`field`) to `text`.
    """
    section = None if field is None else section_class(field)
    if section is None:
        example = "optimizer.lr=1e-6" if model is Config else "limit=8"
        return f"write key=value, for example {example}"
    if section is MethodSettings and text:
        return f"{key} is a section: write {key}.name={text}"
    first = next(iter(section.model_fields))
    return f"{key} is a section: write a key of it, such as {key}.{first}=..."


def _is_text(field: FieldInfo) -> bool:
    """True if the key holds a text or a path, never a number."""
    kinds = set(get_args(field.annotation)) or {field.annotation}
    return kinds <= {str, Path, NoneType}


def to_yaml(config: Config) -> str:
    """Return the resolved configuration with every key; loading it again gives the same one."""
    return dump_yaml(config.model_dump(mode="json"))


def config_hash(config: Config) -> str:
    """Return a hash of `decisive_settings`."""
    text = json.dumps(decisive_settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_resumable(before: Config, now: Config, directory: Path) -> None:
    """Errors: `UserError` naming a key that a resumed run must not change."""
    old_values = decisive_settings(before, with_locations=True)
    new_values = decisive_settings(now, with_locations=True)
    adjustable = adjustable_keys(now)
    for key in find_changes(before, now):
        if key in adjustable:
            continue
        why = ""
        if key == "run.steps":
            why = (
                " (optimizer.schedule=cosine reaches min_lr at the last step, so the rate would "
                "jump)"
            )
        raise UserError(
            f"{directory} was started with {key}={old_values.get(key)!r}, not "
            f"{new_values[key]!r}: a resumed run must keep it{why}; set it back, or start a new "
            "run in another run.dir"
        )


def find_changes(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Return `section.key` -> (value before, value now) of the `decisive_settings` that differ.

    A value that the run chose itself before, and that the user does not set now, is no change.
    """
    old, new = decisive_settings(before), decisive_settings(now)
    changes = {}
    for key, value in new.items():
        section, name = key.split(".")
        keys = getattr(now, section)
        is_set = name in keys.model_fields_set and getattr(keys, name) is not None
        is_left_to_run = key in _CHOSEN_BY_RUN and not is_set
        if is_other_json(value, old.get(key)) and not is_left_to_run:
            changes[key] = old.get(key), value
    return changes


def decisive_settings(
    config: Config, *, with_locations: bool = False
) -> dict[str, Any]:
    """Return `section.key` -> value of every key that decides the run's numbers.

    How long, where and on what a run goes does not decide them; but a cosine schedule makes every
    learning rate depend on `run.steps`.
    with_locations: include the keys that say where data is. Without it such a key has only what it
    says besides: a mixture's weights, and the names of evaluation sets.
    """
    settings = {}
    for key, value, marks in _marked_values(config):
        if FREE in marks:
            continue
        if BY_CONTENT in marks and not with_locations:
            value = _without_locations(value)
            if not value:
                continue
        settings[key] = value
    if config.optimizer.schedule == "cosine":
        settings["run.steps"] = config.run.steps
    return settings


def adjustable_keys(config: Config) -> list[str]:
    """Return the keys that change numbers, and that a resumed run may change: it is recorded."""
    return [key for key, _, marks in _marked_values(config) if ADJUSTABLE in marks]


def _marked_values(config: Config) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield `section.key`, its value as JSON, and the marks of the key and of its section."""
    for section, values in config.model_dump(mode="json").items():
        section_marks = type(config).model_fields[section].metadata
        fields = type(getattr(config, section)).model_fields
        for name, value in values.items():
            yield f"{section}.{name}", value, [*section_marks, *fields[name].metadata]


def _without_locations(value: Any) -> list[dict[str, Any]] | None:
    """Return the sources of a list without `path` and `data`, which say where they are; None for a
    single source, which is a location alone.
    """
    if not isinstance(value, list):
        return None
    sources = []
    for source in value:
        sources.append({k: v for k, v in source.items() if k not in ("path", "data")})
    return sources
