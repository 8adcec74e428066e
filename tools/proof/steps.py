"""The stages `steps...`: gradients and updates of small models against Hugging Face's on the CPU.

The reference is float32 autograd of one response at a time and torch's AdamW, with nothing of
Megatron (tests/support/hf_reference.py). What is compared: the loss, every tensor of the gradient
under its Hugging Face name (|difference| / |expected| in the 2-norm), and the losses and gradient
norms of three updates (relative). Also run by torchrun, for layouts of its number of ranks.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hf_reference import hf_gradient, hf_training
from jobs import NUM_ROLLOUTS, OPTIMIZER, Case, build, gradient, train_steps
from megatron.core import parallel_state

from megatron_opsft.model.transformer_config import uses_transformer_engine
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.distributed import stop_distributed
from proof.report import publish

NUM_STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp2dp2": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "pp2dp2": {"pp": 2, "dp": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Largest relative errors: of losses, of gradient norms, of the worst tensor, of the median."""

    loss: float
    norm: float
    tensor: float
    median: float


BOUNDS = {
    "float32": Bounds(loss=1e-5, norm=1e-4, tensor=1e-4, median=1e-4),
    "bfloat16": Bounds(loss=1e-2, norm=3e-2, tensor=0.1, median=0.03),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """What `Bounds` bounds; losses, norms and every tensor's error for the record."""

    loss: float
    norm: float
    tensors: dict[str, float]
    losses: list[float]
    norms: list[float]

    def problems(self, bounds: Bounds) -> list[str]:
        """One line for each bound that is exceeded; an error that is no number exceeds any."""
        worst = max(self.tensors, key=lambda name: _size(self.tensors[name]))
        found = {
            "loss": (self.loss, bounds.loss),
            "gradient norm": (self.norm, bounds.norm),
            worst: (self.tensors[worst], bounds.tensor),
            "median of the tensors": (statistics.median(self.tensors.values()), bounds.median),
        }
        return [
            f"{name}: relative error {error:.2e}, bound {bound:g}"
            for name, (error, bound) in found.items()
            if not error <= bound
        ]


def _size(error: float) -> float:
    return error if error == error else float("inf")


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def _largest(errors: list[float]) -> float:
    return max(errors, key=_size)


def errors_of(case: Case) -> Errors | None:
    """Called by every rank; None on those other than rank 0."""
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
    losses, norms, _ = hf_training(case.model, case.num_samples, NUM_ROLLOUTS, OPTIMIZER, NUM_STEPS)
    assert found.keys() == expected.keys()
    loss_errors = [_relative(r.loss, want) for r, want in zip(results, losses, strict=True)]
    norm_errors = [_relative(r.grad_norm, want) for r, want in zip(results, norms, strict=True)]
    return Errors(
        loss=_largest([_relative(loss, expected_loss), *loss_errors]),
        norm=_largest(norm_errors),
        tensors={
            name: float((torch.from_numpy(found[name]) - want).norm() / want.norm())
            for name, want in expected.items()
        },
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
    )


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Each with its name."""
    for dtype in args.dtypes.split(","):
        for layout in args.layouts.split(","):
            for model in args.models.split(","):
                for loss in args.losses.split(","):
                    yield (
                        f"{dtype} {layout} {model} {loss}",
                        Case(
                            model=model,
                            dtype=dtype,
                            cross_entropy=loss,
                            device_name=args.device,
                            **LAYOUTS[layout],
                        ),
                    )


def summarize(found: dict[str, Errors]) -> tuple[dict[str, float], list[str]]:
    """The worst of each dtype's errors, and what is beyond its bounds."""
    figures: dict[str, float] = {}
    problems = []
    for dtype, bounds in BOUNDS.items():
        own = {name: errors for name, errors in found.items() if name.startswith(dtype)}
        if not own:
            continue
        figures |= {
            f"{dtype}_loss_error": _largest([e.loss for e in own.values()]),
            f"{dtype}_norm_error": _largest([e.norm for e in own.values()]),
            f"{dtype}_gradient_error": _largest(
                [error for e in own.values() for error in e.tensors.values()]
            ),
        }
        problems += [f"{name}: {line}" for name, e in own.items() for line in e.problems(bounds)]
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
    found = {name: errors for name, case in cases(args) if (errors := errors_of(case))}
    stop_distributed()
    if int(os.environ.get("RANK", "0")):
        return
    figures, problems = summarize(found)
    if args.with_te and not with_te:
        problems.append("bfloat16 layers are not TransformerEngine's")
    details = {
        "bfloat16_layers": "TransformerEngine" if with_te else "plain torch",
        "cases": {
            name: {
                "losses": errors.losses,
                "norms": errors.norms,
                "median_tensor_error": statistics.median(errors.tensors.values()),
                "tensor_errors": errors.tensors,
            }
            for name, errors in found.items()
        },
    }
    publish(figures, problems, details)


if __name__ == "__main__":
    main()
