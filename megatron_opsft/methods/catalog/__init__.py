"""The methods, one small file for each or for a family, and their table.

To add a method, add its class here, in a file of its own or of its family, and to `_CLASSES`.
"""

import difflib
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.by_accuracy import ADlp, ShortRl
from megatron_opsft.methods.catalog.fixed_data import (
    Crst,
    OffPolicySft,
    StepEntropy,
    Stop,
    TokenSkip,
)
from megatron_opsft.methods.catalog.grpo import DrGrpo, Gfpo, Grpo
from megatron_opsft.methods.catalog.l1 import L1Exact, L1Max
from megatron_opsft.methods.catalog.laser import Laser, LaserD, LaserDe
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySft
from megatron_opsft.methods.catalog.relative_length import (
    Ddca,
    ErRl,
    Gr3,
    Hmpo,
    Kimi,
    Linear,
    MasteryGated,
    SmartThinker,
)
from megatron_opsft.methods.catalog.self_distillation import SelfDistillation
from megatron_opsft.methods.catalog.thinkprune import ThinkPrune
from megatron_opsft.methods.catalog.whitened import Dler, Gdpo
from megatron_opsft.methods.settings import MethodSettings

_CLASSES: tuple[type[MethodSettings], ...] = (  # in the order of the table
    OnPolicySft,
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
    Hmpo,
    SelfDistillation,
    Crst,
    TokenSkip,
    StepEntropy,
    Stop,
    OffPolicySft,
)
METHODS = {method.model_fields["name"].default: method for method in _CLASSES}


def settings_class(values: dict[str, Any]) -> type[MethodSettings]:
    """Return the class of the method that `values`, the keys of `method`, choose by name.

    Errors: `UserError` that lists the names.
    """
    name = values.get("name", "on_policy_sft")
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    hint = ""
    if near := difflib.get_close_matches(str(name), METHODS, n=1):
        hint = f"did you mean {near[0]}? "
    raise UserError(
        f"unknown method {name!r}; {hint}choose one of {', '.join(METHODS)}"
    )


def with_class(values: Any) -> Any:
    """Make the keys of `method` an instance of the method that they name."""
    if isinstance(values, dict):
        return settings_class(values).model_validate(values)
    return values


def show_methods(width: int) -> str:
    """Return the table of methods, at most `width` characters wide.

    Where a formula names no A, the advantage is GRPO's.
    """
    from rich.box import SIMPLE_HEAD  # not needed to read a configuration
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "formula", "paper", "needs", box=SIMPLE_HEAD, pad_edge=False)
    for name, method in METHODS.items():
        needs = list(method.needs)
        if method().objective(1.0).needs_reference:  # by its default settings
            needs.append("the reference model (method.beta > 0)")
        table.add_row(name, method.formula, method.paper, ", ".join(needs) or "-")
    console = Console(width=width, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
