"""One small file per method or family; a new one is a new file and a line here."""

import difflib
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.grpo import DR_GRPO, GRPO
from megatron_opsft.methods.catalog.on_policy_sft import ON_POLICY_SFT
from megatron_opsft.methods.method import Method
from megatron_opsft.methods.settings import MethodSettings

METHODS: dict[str, Method] = {m.name: m for m in (ON_POLICY_SFT, GRPO, DR_GRPO)}


def method_named(name: Any) -> Method:
    """Errors: `UserError` that lists the names."""
    if not isinstance(name, str) or name not in METHODS:
        near = difflib.get_close_matches(str(name), METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"config key method.name={name!r}: {hint}there are: {', '.join(METHODS)}")
    return METHODS[name]


def settings_class(values: dict[str, Any]) -> type[MethodSettings]:
    """Of the method that the keys of a configuration's `method` name."""
    return method_named(values.get("name", ON_POLICY_SFT.name)).settings


def with_class(values: Any) -> Any:
    """Keys of a configuration's `method` as settings of the method they name."""
    return settings_class(values).model_validate(values) if isinstance(values, dict) else values
