"""YAML and dotted overrides -> `Config`; a mistake is one line that names key, value and fix."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from megatron_opsft.config import Config
from megatron_opsft.config_section import section_of
from megatron_opsft.config_yaml import find_yaml, parse_yaml, parse_yaml_value
from megatron_opsft.errors import UserError
from megatron_opsft.methods.aggregation import EARLIER_NAMES
from megatron_opsft.methods.catalog import settings_class
from megatron_opsft.methods.catalog.on_policy_sft import ON_POLICY_SFT
from megatron_opsft.methods.settings import MethodSettings
from megatron_opsft.run_prompt import settings_of_run

M = TypeVar("M", bound=BaseModel)
_EXAMPLE = "section.key=value, for example optimizer.lr=1e-6"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where the keys of a configuration come from."""

    model: type[BaseModel]
    path: Path | None
    overrides: tuple[str, ...]

    def of(self, key: str) -> str:
        """The command line where a key, or one of its section, was typed there; else the file."""
        typed = [override.partition("=")[0] for override in self.overrides]
        if self.path is None or any(f"{name}.".startswith(f"{key}.") for name in typed):
            return "the command line"
        return str(self.path)


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
    if issubclass(model, Config):
        _rename_normalization(tree)
    _check_keys(tree, model, "", _Origin(model=model, path=path, overrides=tuple(overrides)))
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(
                f"config key {key} is missing: set it in the file or as {key}=..."
            ) from None
        reason = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"]
        raise UserError(f"config key {key}={first['input']!r}: {reason}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. Errors: `UserError`."""
    try:
        tree = parse_yaml(find_yaml(path).read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"config file {path} must hold sections such as `run:`, not {tree!r}")
    return tree


def _apply(tree: dict[str, Any], override: str, model: type[BaseModel]) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    has_plain_keys = any(section_of(field) is None for field in model.model_fields.values())
    if equals and not dot and not has_plain_keys and (near := _nearest_keys(key, {}, model)):
        raise UserError(
            f"override {override!r} names no section: did you mean "
            f"{' or '.join(f'{name}={text}' for name in near)}?"
        )
    if not equals or not all(key.split(".")) or not (dot or has_plain_keys):
        example = "key=value, for example limit=8" if has_plain_keys else _EXAMPLE
        raise UserError(f"override {override!r}: write {example}")
    try:
        value = parse_yaml_value(text)
    except ValueError as error:
        raise UserError(f"override {override!r}: {error}") from None
    if not dot:
        tree[key] = value
        return
    keys = tree.setdefault(section, {})
    if not isinstance(keys, dict):
        raise UserError(f"config section {section} must hold keys, not {keys!r}")
    keys[name] = value


def _rename_normalization(tree: dict[str, Any]) -> None:
    """`train.normalization` of earlier files: on-policy SFT's aggregation, under another name."""
    train, method = tree.get("train"), tree.get("method", {})
    if not isinstance(train, dict) or not isinstance(method, dict) or "normalization" not in train:
        return
    given = train["normalization"]
    name = EARLIER_NAMES.get(given) if isinstance(given, str) else None
    if name is None:
        words = ", ".join(map(repr, EARLIER_NAMES))
        raise UserError(f"config key train.normalization={given!r}: there are {words}")
    if method.get("name", ON_POLICY_SFT.name) != ON_POLICY_SFT.name:
        raise UserError(
            f"config key train.normalization={given} is on_policy_sft's, not method.name="
            f"{method['name']}'s: leave it out, and set method.aggregation"
        )
    if method.get("aggregation", name) != name:
        raise UserError(
            f"config key train.normalization={given} means method.aggregation={name}, not "
            f"{method['aggregation']}: leave train.normalization out"
        )
    tree["train"] = {key: value for key, value in train.items() if key != "normalization"}
    tree["method"] = {**method, "aggregation": name}


def _check_keys(tree: dict[str, Any], part: type[BaseModel], prefix: str, origin: _Origin) -> None:
    """part: of `origin.model`, what `tree` is for. Errors: `UserError` for a key that is not
    there.
    """
    fields = part.model_fields
    for key, value in tree.items():
        if key not in fields:
            near = _nearest_keys(str(key), {name: prefix + name for name in fields}, origin.model)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(fields)}"
            )
            raise UserError(
                f"unknown config key {prefix}{key} in {origin.of(prefix + str(key))}: {hint}"
            )
        if section := section_of(fields[key]):
            if not isinstance(value, dict):
                raise UserError(f"config section {prefix}{key} must hold keys, not {value!r}")
            if section is MethodSettings:
                section = settings_class(value)
            _check_keys(value, section, f"{prefix}{key}.", origin)


def _nearest_keys(key: str, own: dict[str, str], model: type[BaseModel]) -> list[str]:
    """What a wrong key may have meant: a near one of its section; one of the same name, or whose
    name is short for it, of another section; a near one of any.

    own: the keys of its section, in full.
    """
    if near := difflib.get_close_matches(key, own, n=1):
        return [own[near[0]]]
    names = [
        f"{section}.{name}"
        for section, field in model.model_fields.items()
        if (part := section_of(field)) is not None
        for name in part.model_fields
    ]
    short = "".join(word[0] for word in key.split("_") if word) if "_" in key else key
    last = {name: name.rpartition(".")[2] for name in names}
    same = [name for name in names if last[name] in (key, short)]
    near = difflib.get_close_matches(key, last.values(), n=1)
    return same or [name for name in names if last[name] in near]


def to_yaml(config: Config) -> str:
    """The resolved configuration, every key of it; loading it again gives the same one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
