"""TransformerEngine's layers on the meta device: every parameter and checkpoint key."""

from collections.abc import Callable
from typing import Any

import pytest
from model_cases import DENSE, EXPERTS


@pytest.mark.parametrize(("group", "cases"), [("dense", DENSE), ("experts", EXPERTS)])
def test_parameters_and_checkpoint_keys_are_the_tables_and_the_plain_layers(
    ran: Callable[..., Any],
    group: str,
    cases: list[Any],
) -> None:
    told = ran("te_models.py", group)
    assert [found["case"] for found in told] == [str(case) for case in cases]
    assert {found["case"]: found["problems"] for found in told if found["problems"]} == {}
    assert all(found["parameters"] > 25 and found["keys"] >= 8 for found in told)
