"""One small file per method or family; a new one is a new file and a line here."""

import difflib
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.a_dlp import A_DLP
from megatron_opsft.methods.catalog.ddca import DDCA
from megatron_opsft.methods.catalog.dler import DLER
from megatron_opsft.methods.catalog.er_rl import ER_RL
from megatron_opsft.methods.catalog.fixed_data import CRST, OFF_POLICY_SFT, STEP_ENTROPY, TOKENSKIP
from megatron_opsft.methods.catalog.gdpo import GDPO
from megatron_opsft.methods.catalog.grpo import DR_GRPO, GRPO
from megatron_opsft.methods.catalog.kimi import KIMI
from megatron_opsft.methods.catalog.l1 import L1_EXACT, L1_MAX
from megatron_opsft.methods.catalog.laser import LASER, LASER_D, LASER_DE
from megatron_opsft.methods.catalog.linear import LINEAR
from megatron_opsft.methods.catalog.mastery_gated import MASTERY_GATED
from megatron_opsft.methods.catalog.o1_pruner import O1_PRUNER
from megatron_opsft.methods.catalog.on_policy_sft import ON_POLICY_SFT
from megatron_opsft.methods.catalog.short_rl import SHORT_RL
from megatron_opsft.methods.catalog.smart_thinker import SMART_THINKER
from megatron_opsft.methods.catalog.thinkprune import THINKPRUNE
from megatron_opsft.methods.method import Method
from megatron_opsft.methods.settings import MethodSettings

_BASIC = (ON_POLICY_SFT, GRPO, DR_GRPO)
_LENGTH = (THINKPRUNE, O1_PRUNER, L1_EXACT, L1_MAX, ER_RL, LASER, LASER_D, LASER_DE)
_LATER = (KIMI, MASTERY_GATED, DLER, GDPO, DDCA, SHORT_RL, A_DLP, SMART_THINKER, LINEAR)
_FIXED_DATA = (CRST, TOKENSKIP, STEP_ENTROPY, OFF_POLICY_SFT)
METHODS: dict[str, Method] = {m.name: m for m in (*_BASIC, *_LENGTH, *_LATER, *_FIXED_DATA)}


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
