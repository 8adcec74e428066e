"""megatron_opsft: on-policy SFT for shorter reasoning, on Megatron-Core."""

__version__ = "0.1.0"
