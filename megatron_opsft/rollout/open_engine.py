"""Builds a rollout engine. A new kind needs a row in `limits.ENGINES` and a case here."""

from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.rollout.engine import EngineSettings, RolloutEngine
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.rollout.requests import Decoder
from megatron_opsft.rollout.vllm.engine import VllmEngine
from megatron_opsft.runtime.device import Device


def build_engine(
    name: str,
    settings: EngineSettings,
    table: WeightTable,
    tokenizer: Decoder,
    device: Device,
) -> RolloutEngine:
    """Build an engine on the ranks of this job, without weights; called by every rank.

    Errors: `UserError` for a model that the engine refuses.
    """
    if name == "vllm":
        return VllmEngine(settings, table, tokenizer)
    return HfEngine.from_settings(settings, table, tokenizer, device.torch_device)
