"""Names by which a model's files are known; reads none of them, and needs no torch."""

from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
METADATA_NAME = ".metadata"  # of a distributed checkpoint
COMMON_NAME = "common.pt"  # what is no tensor in one, as Megatron names it
FORMAT_NAME = "metadata.json"  # of one: Megatron's own record of its format
TORCH_DIST_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
RECORD_NAME = "conversion.json"  # of a converted checkpoint: its vocabulary, and a SHA-256
# In this order transformers' `from_pretrained` looks for weights; the first that is there counts.
WEIGHT_NAMES = (
    SINGLE_NAME,
    INDEX_NAME,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def is_dist_checkpoint(directory: Path) -> bool:
    """Whether a directory looks like Megatron's torch_dist format."""
    return (directory / METADATA_NAME).is_file() and (directory / FORMAT_NAME).is_file()
