"""vLLM's models, as it builds them for CUDA, have the parameters that a push writes in place."""

from collections.abc import Callable
from typing import Any

from model_cases import ENGINES


def test_parameters_are_the_layout_s(ran: Callable[..., Any]) -> None:
    told = ran("vllm_models.py")
    assert list(told) == [f"{name}-tp{tp}" for name, tp in ENGINES]
    assert {case: found["problems"] for case, found in told.items() if found["problems"]} == {}
