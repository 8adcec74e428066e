"""One small file per method or family; a new one is a new file and a line here. The table of
methods: what each computes, where it comes from, what a run of it needs.
"""

import difflib
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.a_dlp import ADlp
from megatron_opsft.methods.catalog.ddca import Ddca
from megatron_opsft.methods.catalog.dler import Dler
from megatron_opsft.methods.catalog.er_rl import ErRl
from megatron_opsft.methods.catalog.fixed_data import (
    Crst,
    OffPolicySft,
    StepEntropy,
    TokenSkip,
)
from megatron_opsft.methods.catalog.gdpo import Gdpo
from megatron_opsft.methods.catalog.gfpo import Gfpo
from megatron_opsft.methods.catalog.gr3 import Gr3
from megatron_opsft.methods.catalog.grpo import DrGrpo, Grpo
from megatron_opsft.methods.catalog.kimi import Kimi
from megatron_opsft.methods.catalog.l1 import L1Exact, L1Max
from megatron_opsft.methods.catalog.laser import Laser, LaserD, LaserDe
from megatron_opsft.methods.catalog.linear import Linear
from megatron_opsft.methods.catalog.mastery_gated import MasteryGated
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySft
from megatron_opsft.methods.catalog.self_distillation import SelfDistillation
from megatron_opsft.methods.catalog.short_rl import ShortRl
from megatron_opsft.methods.catalog.smart_thinker import SmartThinker
from megatron_opsft.methods.catalog.thinkprune import ThinkPrune
from megatron_opsft.methods.settings import MethodSettings

_RL = (
    Grpo,
    DrGrpo,
    ThinkPrune,
    O1Pruner,
    L1Exact,
    L1Max,
    ErRl,
    Laser,
    LaserD,
    LaserDe,
    Kimi,
)
_LATER = (
    MasteryGated,
    Dler,
    Gdpo,
    Ddca,
    ShortRl,
    ADlp,
    SmartThinker,
    Linear,
    Gr3,
    Gfpo,
)
_OTHERS = (SelfDistillation, Crst, TokenSkip, StepEntropy, OffPolicySft)
METHODS: dict[str, type[MethodSettings]] = {
    method.model_fields["name"].default: method
    for method in (OnPolicySft, *_RL, *_LATER, *_OTHERS)
}


def settings_class(values: dict[str, Any]) -> type[MethodSettings]:
    """The method that the keys of a configuration's `method` name.

    Errors: `UserError` that lists the names.
    """
    name = values.get("name", "on_policy_sft")
    if not isinstance(name, str) or name not in METHODS:
        near = difflib.get_close_matches(str(name), METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"unknown method {name!r}; {hint}choose one of {', '.join(METHODS)}"
        )
    return METHODS[name]


def with_class(values: Any) -> Any:
    """Keys of a configuration's `method` as settings of the method they name."""
    return (
        settings_class(values).model_validate(values)
        if isinstance(values, dict)
        else values
    )


def show_methods(width: int) -> str:
    """The table, at most `width` characters wide. A method whose formula has no A has GRPO's."""
    from rich.box import SIMPLE_HEAD  # not needed to read a configuration
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "formula", "paper", "needs", box=SIMPLE_HEAD, pad_edge=False)
    for name, method in METHODS.items():
        reference = ["the reference model (method.beta > 0)"]  # by its default settings
        needs = [*method.needs, *reference * method().objective(1.0).needs_reference]
        table.add_row(name, method.formula, method.paper, ", ".join(needs) or "-")
    console = Console(width=width, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
