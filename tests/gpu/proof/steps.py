"""The stages `steps...`: gradients and updates of small models against Hugging Face's on the CPU.

The reference is float32 autograd of one response at a time and torch's AdamW, with nothing of
Megatron (tests/support/hf_reference.py). What is compared: the loss, every tensor of the gradient
under its Hugging Face name (|difference| / |expected| in the 2-norm), and the losses and gradient
norms of three updates (relative). Also run by torchrun, for layouts of its number of ranks.
"""

import argparse
import os
import statistics
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from hf_reference import hf_gradient, hf_training
from jobs import NUM_ROLLOUTS, OPTIMIZER, Case, build, gradient, train_steps
from megatron.core import parallel_state
from proof.stage import publish

from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.distributed import stop_distributed
from megatron_opsft.trainer.model.transformer_config import uses_transformer_engine

NUM_STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "cp2": {"cp": 2},
    "tp2spcp2": {"tp": 2, "cp": 2, "sequence_parallel": True},
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp2dp2": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "pp2dp2": {"pp": 2, "dp": 2},
}
# Largest relative errors: of losses, of gradient norms, of the worst tensor, of the median one.
# bfloat16_moe: rounding turns the order of two experts with nearly equal scores around, and a token
# goes to the other one; in these models an expert sees few tokens (on a CPU: 0.36 and 0.086).
# bfloat16_delta: transformers' own bfloat16 is as far from float32 (on a CPU, both: 2.1 and 0.36),
# so this says that it runs and learns; tests/gpu/test_delta_net.py says that it is right.
BOUNDS = {
    "float32": {"loss": 1e-5, "norm": 1e-4, "worst tensor": 1e-4, "median tensor": 1e-4},
    "bfloat16": {"loss": 1e-2, "norm": 3e-2, "worst tensor": 0.1, "median tensor": 0.03},
    "bfloat16_moe": {"loss": 1e-2, "norm": 3e-2, "worst tensor": 0.6, "median tensor": 0.15},
    "bfloat16_delta": {"loss": 2e-2, "norm": 0.6, "worst tensor": 4.0, "median tensor": 0.6},
}


def largest(errors: list[float]) -> float:
    """An error that is no number is larger than any."""
    return max(errors, key=lambda error: error if error == error else float("inf"))


def relative(found: list[float], expected: list[float]) -> float:
    return largest([abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True)])


def compare(case: Case) -> dict[str, Any] | None:
    """The errors that `BOUNDS` bounds, and what they are of; None on ranks other than the first.

    Called by every rank.
    """
    loss, _, found = gradient(case)
    parallel_state.destroy_model_parallel()
    built = build(case)
    results = train_steps(built, case, range(NUM_STEPS))
    is_main = built.layout.is_main
    del built
    parallel_state.destroy_model_parallel()
    if not is_main:
        return None
    expected_loss, expected = hf_gradient(case.model, case.num_samples, NUM_ROLLOUTS)
    expected_losses, expected_norms, _ = hf_training(
        case.model, case.num_samples, NUM_ROLLOUTS, OPTIMIZER, NUM_STEPS
    )
    assert found.keys() == expected.keys()
    tensors = {
        name: float((torch.from_numpy(found[name]) - want).norm() / want.norm())
        for name, want in expected.items()
    }
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    return {
        "loss": relative([loss, *losses], [expected_loss, *expected_losses]),
        "norm": relative(norms, expected_norms),
        "worst tensor": largest([*tensors.values()]),
        "median tensor": statistics.median(tensors.values()),
        "losses": losses,
        "norms": norms,
        "tensor_errors": tensors,
    }


def summarize(cases: dict[str, dict[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """The worst of each dtype's errors, and a line for each error beyond its bound."""
    figures: dict[str, float] = {}
    problems = []
    for dtype, bounds in BOUNDS.items():
        own = {name: found for name, found in cases.items() if name.split()[0] == dtype}
        shown = {"loss": "loss", "norm": "norm", "gradient": "worst tensor"}
        if own:
            figures |= {
                f"{dtype}_{name}_error": largest([found[key] for found in own.values()])
                for name, key in shown.items()
            }
        problems += [
            f"{name}: relative error of the {key} {found[key]:.2e}, bound {bound:g}"
            for name, found in own.items()
            for key, bound in bounds.items()
            if not found[key] <= bound
        ]
    return figures, problems


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--models", default="qwen2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--layouts", default="one")
    parser.add_argument("--losses", default="fused_linear")
    parser.add_argument("--with-te", action="store_true", help="fail unless layers are its own")
    args = parser.parse_args()
    device = select_device(args.device)
    if not device.is_cuda:
        from megatron_opsft.runtime import cpu_compat

        cpu_compat.install()
    with_te = uses_transformer_engine(device, "bfloat16")
    cases = {}
    for dtype, layout, model, loss in product(
        *(words.split(",") for words in (args.dtypes, args.layouts, args.models, args.losses))
    ):
        case = Case(model=model, dtype=dtype, cross_entropy=loss, device_name=args.device)
        if found := compare(replace(case, **LAYOUTS[layout])):
            kind = dtype
            if dtype == "bfloat16":
                kind += "_delta" * ("qwen3_5" in model) or "_moe" * ("moe" in model)
            cases[f"{kind} {layout} {model} {loss}"] = found
    stop_distributed()
    if int(os.environ.get("RANK", "0")):
        return
    figures, problems = summarize(cases)
    if args.with_te and not with_te:
        problems.append("bfloat16 layers are not TransformerEngine's")
    layers = "TransformerEngine" if with_te else "plain torch"
    publish(figures, problems, {"bfloat16_layers": layers, "cases": cases})


if __name__ == "__main__":
    main()
