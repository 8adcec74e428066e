"""The weights of a model directory, whichever of the two formats it has."""

from pathlib import Path

from megatron_opsft.storage.hf_files import HfTensors, check_checkpoint
from megatron_opsft.storage.known_files import is_dist_checkpoint
from megatron_opsft.storage.megatron_files import MegatronTensors
from megatron_opsft.weights.rules import WeightTable

StoredWeights = HfTensors | MegatronTensors


def open_weights(model_dir: Path, table: WeightTable, *, check: bool = True) -> StoredWeights:
    """Open a Hugging Face directory or a Megatron checkpoint; no weight is read yet.

    table: of the model, with TransformerEngine's names, which checkpoints use. check: compare names
    and shapes with it; one rank is enough. Errors: `UserError` naming file and tensor.
    """
    if is_dist_checkpoint(model_dir):
        return MegatronTensors(model_dir, table)
    tensors = HfTensors(model_dir)
    if check:
        check_checkpoint(tensors, table)
    return tensors
