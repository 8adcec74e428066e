"""YAML and dotted overrides -> `Config`; a mistake is one line that names key, value and fix."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_opsft.config import Config
from megatron_opsft.config_section import Section
from megatron_opsft.config_yaml import find_yaml, parse_yaml, parse_yaml_value
from megatron_opsft.errors import UserError
from megatron_opsft.methods.aggregation import EARLIER_NAMES
from megatron_opsft.methods.catalog import METHODS, settings_class
from megatron_opsft.methods.catalog.on_policy_sft import ON_POLICY_SFT
from megatron_opsft.methods.settings import MethodSettings

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
    """The configuration of a run; see `load`."""
    return load(Config, path, overrides)


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
    has_plain_keys = any(_section_of(field) is None for field in model.model_fields.values())
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
        if section := _section_of(fields[key]):
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
        if (part := _section_of(field)) is not None
        for name in part.model_fields
    ]
    short = "".join(word[0] for word in key.split("_") if word) if "_" in key else key
    last = {name: name.rpartition(".")[2] for name in names}
    same = [name for name in names if last[name] in (key, short)]
    near = difflib.get_close_matches(key, last.values(), n=1)
    return same or [name for name in names if last[name] in near]


def _section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a key holds; None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def to_yaml(config: Config) -> str:
    """The resolved configuration, every key of it; loading it again gives the same one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


_NOT_HASHED = (
    "dir",
    "tensorboard",
    "wandb",
    "wandb_project",
    "export_every",
    "show_samples",
    "save_rollouts",
    "max_minutes",
    "hang_minutes",
    "silence_seconds",
)


_LATER_KEYS: tuple[tuple[str, str, object], ...] = (
    ("data", "duplicates", "keep"),
    ("data", "pass_rate", None),
    ("data", "pass_rate_from", None),
    ("data", "responses", None),
    ("data", "system_prompt", ""),
    ("eval", "best_within", 0.01),
    ("eval", "export_best", False),
    ("eval", "holdout", 0),
    ("eval", "more", []),
    ("eval", "patience", 0),
    ("verify", "judge", "math"),
    ("verify", "judge_field", None),
)


def config_hash(config: Config) -> str:
    """A hash of what decides a run's numbers: all but where it is written and logged."""
    tree = config.model_dump(mode="json")
    for key in _NOT_HASHED:
        del tree["run"][key]
    del tree["checkpoint"], tree["model"]["load"]
    for section, key, default in _LATER_KEYS:  # at their defaults a run is what it was without
        if tree[section][key] == default:
            del tree[section][key]
    if config.method.name == ON_POLICY_SFT.name:  # as it was when there was no other
        earlier = {name: given for given, name in EARLIER_NAMES.items()}
        tree["train"]["normalization"] = earlier[tree.pop("method")["aggregation"]]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def reference_table(model: type[BaseModel] = Config) -> str:
    """All keys with defaults and meaning as a Markdown table; those of docs/."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default, meaning in _rows(model):
        escaped = default.replace("|", r"\|")
        lines.append(f"| `{key}` | {escaped} | {meaning} |")
    return "\n".join(lines)


def _rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for key, field in model.model_fields.items():
        section = _section_of(field)
        if section is MethodSettings:
            yield from _method_rows()
        elif section:
            yield from _rows(section, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _default_of(field), str(field.description)


def _method_rows() -> Iterator[tuple[str, str, str]]:
    """Keys of all methods; one row where several have a key with the same default and meaning."""
    name = MethodSettings.model_fields["name"]
    yield "method.name", _default_of(name), str(name.description)
    owners: dict[str, dict[tuple[str, str], list[str]]] = {}
    for method in METHODS.values():
        for key, field in method.settings.model_fields.items():
            if key != "name":
                row = (_default_of(field), str(field.description))
                owners.setdefault(key, {}).setdefault(row, []).append(method.name)
    for key, rows in owners.items():
        for (default, meaning), names in rows.items():
            many = "the others" if len(rows) > 1 else "most methods"
            whose = ", ".join(names) if len(names) <= 9 else many
            yield f"method.{key}", default, f"{meaning} ({whose})"


def _default_of(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{_show(field.default)}`"


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    plain = isinstance(value, str | float | Path) and str(value).isprintable()
    return str(value) if plain else json.dumps(value)


# What may change when a run is resumed: where and how it runs, not what it computes.
_FREE_ON_RESUME = (
    "run.dir",
    "run.steps",
    "run.eval_every",
    "run.export_every",
    "run.show_samples",
    "run.save_rollouts",
    "run.tensorboard",
    "run.wandb",
    "run.wandb_project",
    "run.max_minutes",
    "run.hang_minutes",
    "run.silence_seconds",
    "model.load",
    "parallel.",
    "checkpoint.",
    "eval.export_best",
    "eval.patience",
    "verify.workers",
    "train.max_tokens_per_microbatch",
    "train.recompute",
)

# ... but for `run.steps` where every learning rate depends on it.
_LAST_STEP = "optimizer.schedule=cosine reaches min_lr at the last step, so the rate would jump"


def check_resumable(before: Config, now: Config, directory: Path) -> None:
    """Errors: `UserError` naming a key whose change would make the resumed run another one."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    free = tuple(
        key for key in _FREE_ON_RESUME if key != "run.steps" or now.optimizer.schedule == "constant"
    )
    for section, values in new.items():
        for key, value in values.items():
            name, started = f"{section}.{key}", old[section].get(key)
            chosen = name == "data.max_prompt_tokens" and key not in now.data.model_fields_set
            if value != started and not name.startswith(free) and not chosen:
                why = f" ({_LAST_STEP})" if name == "run.steps" else ""
                raise UserError(
                    f"{directory} was started with {name}={started!r}, not {value!r}: a "
                    f"resumed run must keep it{why}; set it back, or start a new run in "
                    "another run.dir"
                )
