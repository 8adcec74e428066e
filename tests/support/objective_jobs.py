"""What the workers run for objectives with an old policy and a reference model."""

from typing import Any, NamedTuple

from jobs import Case, as_arrays, batches_of, build, collect_reduced_parts, exported, whole_gradient

from megatron_opsft.run.step.token_penalty import with_token_penalty
from megatron_opsft.trainer.model.passes import with_log_probs
from megatron_opsft.trainer.model.reference import ReferenceModel

DRIFT = 6e-4  # the learning rate that takes the policy away from reference and old one


class Found(NamedTuple):
    """On rank 0; weights by HF name: of the reference, when the batch was sampled, and now.

    gradient, loss, clip_share, kl_mean: of the update that comes now.
    """

    reference: dict[str, Any]
    sampled_from: dict[str, Any]
    now: dict[str, Any]
    gradient: dict[str, Any]
    loss: float
    clip_share: float | None
    kl_mean: float | None


def objective_gradient(case: Case, updates: int) -> Found:
    """The gradient of the last of `updates` on one batch, whose micro-batches all share here.

    The reference is the model at first; the policy that samples has had an update since.
    """
    built = build(case)
    trainer = built.trainer
    reference = ReferenceModel(trainer, case.device)
    start = as_arrays(exported(built))
    drift, factor = batches_of(case, built.layout, seed=1)
    trainer.step(reference.with_log_probs(drift), factor, lr=DRIFT)
    sampled_from = as_arrays(exported(built))
    batches, factor = batches_of(case, built.layout)
    if case.objective.needs_reference:
        batches = reference.with_log_probs(batches)
        for name, values in as_arrays(exported(built)).items():
            assert (values == sampled_from[name]).all(), f"{name} is not what it was before"
    penalty = case.objective.token_penalty
    if updates > 1 or penalty is not None:
        batches = with_log_probs(batches, trainer.score_batches(batches), "old_log_probs_R")
    if penalty is not None:
        (batches,) = with_token_penalty([batches], penalty, built.layout)
    for _ in range(updates - 1):
        trainer.step(batches, factor, lr=DRIFT)
    now = as_arrays(exported(built))
    result = trainer.accumulate(batches, factor)
    collect_reduced_parts(trainer)
    statistics = (result.loss, result.clip_share, result.kl_mean)
    return Found(start, sampled_from, now, whole_gradient(built), *statistics)
