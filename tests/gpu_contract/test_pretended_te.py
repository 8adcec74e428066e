"""TransformerEngine's layers on a pretended GPU compute what the plain layers and Hugging Face do.

Its Python modules run; stand-ins for its C++ extension are bound to the extension's signatures.
"""

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from proof import stages

Ran = Callable[..., Any]


@pytest.mark.parametrize(
    ("num_gpus", "cases"),
    [
        (1, ["moe", "dense", "lora-moe", "lora-dense"]),
        (1, ["delta", "core-delta", "lora-delta", "core-lora-delta"]),
        (2, ["ep2", "etp1", "moe-tp2", "tp2", "cp2", "yarn-cp2", "vpp2"]),
        (2, ["delta-tp2", "delta-tp2sp", "delta-vpp2", "core-delta-tp2", "core-delta-tp2sp"]),
        (2, ["delta-moe-ep2", "lora-delta-moe-ep2", "core-delta-moe-ep2"]),
        (2, ["lora-ep2", "lora-etp1", "lora-moe-tp2", "lora-tp2", "lora-cp2", "lora-vpp2"]),
    ],
)
def test_layers_in_float32_are_the_plain_ones(ran: Ran, num_gpus: int, cases: list[str]) -> None:
    """And write the same into checkpoints."""
    told = ran("pretended_te.py", *cases, num_gpus=num_gpus, te=True)
    assert [*told] == cases
    for case, (logit, gradient, steps) in told.items():
        limit = 1e-4 if "delta" in case else 1e-5  # logits of that model repeat rounding
        assert logit < limit and gradient < 1e-4 and steps < 1e-5, (case, logit, gradient, steps)


def test_each_planted_fault_is_found(ran: Ran) -> None:
    told = ran("pretended_te.py", "faults", num_gpus=1, te=True)
    *differing, left_out, no_tensor = told.values()
    assert left_out == "missing a required argument: 'arg5'"
    assert no_tensor == "rmsnorm_bwd: 1.0 is no arg2: torch.Tensor"
    assert len(differing) == 2
    assert all(gradient > 1e-2 for _, gradient, _ in differing), differing


@pytest.mark.parametrize(
    ("name", "num_cases"), [("te_steps_on_4_ranks", 2), ("steps_on_4_ranks", 6)]
)
def test_a_stage_of_the_proof_on_4_ranks_passes(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, name: str, num_cases: int
) -> None:
    """By its own command; TransformerEngine's cross-entropy and context parallelism among it."""
    told = []

    def run(words: str, ranks: int) -> None:
        told.append(ran(*words.split(), num_gpus=ranks, te=True))

    given = {"stage": SimpleNamespace(run=run), "monkeypatch": monkeypatch}
    test = getattr(stages, f"test_{name}")
    test(**{each: given[each] for each in signature(test).parameters})
    (found,) = told
    assert found["problems"] == [] and len(found["details"]["cases"]) == num_cases
