"""Settings of a vLLM engine that is described but not started."""

from pathlib import Path

from megatron_opsft.rollout.engine import EngineSettings


def settings_in(
    directory: Path, *, is_cuda: bool, tp: int = 2, kv_cache_bytes: int | None = None
) -> EngineSettings:
    """An engine of `tp` ranks that decodes seven sequences of up to 300 tokens."""
    return EngineSettings(
        model_dir=directory,
        dtype="bfloat16",
        is_cuda=is_cuda,
        tp=tp,
        max_tokens=300,
        batch_size=7,
        gpu_memory_fraction=0.4,
        kv_cache_bytes=kv_cache_bytes,
        seed=3,
        collective_minutes=7.51,
        rank=0,
        world_size=tp,
        deep_sleep=True,
    )
