"""Names by which a model's files are known; reads none of them, and needs no torch."""

from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
METADATA_NAME = ".metadata"  # of a distributed checkpoint
RECORD_NAME = "conversion.json"  # of a converted checkpoint: how it was made, and SHA-256s
# In this order transformers' `from_pretrained` looks for weights; the first that is there counts.
WEIGHT_NAMES = (
    SINGLE_NAME,
    INDEX_NAME,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def is_dist_checkpoint(directory: Path) -> bool:
    """Whether a directory looks like Megatron's torch_dist format."""
    return (directory / METADATA_NAME).is_file() and (directory / "metadata.json").is_file()
