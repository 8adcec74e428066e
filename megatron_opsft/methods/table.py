"""The table of methods: what each computes, where it comes from, what a run of it needs."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.settings import MethodSettings

COLUMNS = ("name", "formula", "paper", "needs")


def describe_methods() -> list[dict[str, Any]]:
    """One record a method; settings: the defaults of its keys, or null where one must be given."""
    return [
        {
            "name": name,
            "formula": method.formula,
            "paper": method.paper,
            "needs": _needs(method),
            "settings": {
                key: None if field.is_required() else field.default
                for key, field in method.model_fields.items()
                if key != "name"
            },
        }
        for name, method in METHODS.items()
    ]


def _needs(method: type[MethodSettings]) -> list[str]:
    """By its default settings."""
    diverges = method().objective(1.0).needs_reference
    return [*method.needs, *["the reference model (method.beta > 0)"] * diverges]


def show_methods(width: int) -> str:
    """The table, at most `width` characters wide. A method whose formula has no A has GRPO's."""
    table = Table(*COLUMNS, box=SIMPLE_HEAD, pad_edge=False)
    for row in describe_methods():
        table.add_row(row["name"], row["formula"], row["paper"], ", ".join(row["needs"]) or "-")
    console = Console(width=width, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
