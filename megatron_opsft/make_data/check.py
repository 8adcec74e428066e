"""What can be known of making data before anything heavy is imported."""

from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.fixed_data import StepEntropySettings


def check_data(config: Config, out: Path) -> None:
    """Errors: `UserError` for a method without fixed data, and an output that is there."""
    method = config.method
    if not method.has_fixed_data:
        raise UserError(
            f"method.name={method.name} samples while it trains; data are made for crst, "
            "off_policy_sft, o1_pruner with method.form=fixed, step_entropy and tokenskip"
        )
    if isinstance(method, StepEntropySettings) and (
        method.answer_tokens >= config.rollout.max_response_tokens
    ):
        raise UserError(
            f"method.answer_tokens={method.answer_tokens} leaves no room for thinking within "
            f"rollout.max_response_tokens={config.rollout.max_response_tokens}; lower it"
        )
    if out.exists():
        raise UserError(f"--out {out} is there already; remove it, or name another file")
