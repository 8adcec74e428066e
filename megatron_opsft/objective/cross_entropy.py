"""Token losses from tensor-parallel logits.

TransformerEngine's fused kernel where the model config says so (CUDA, bfloat16), Megatron's
vocabulary-parallel cross-entropy elsewhere; both compute in float32. Megatron's own fused variant
is not used: it rounds every gradient to bfloat16. Columns that only pad the vocabulary get no
probability and no gradient, so the loss is the one of the unpadded Hugging Face model.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig
from torch import Tensor


def mask_vocabulary_padding(logits_1TV: Tensor, vocab_size: int, tp_rank: int) -> Tensor:
    """Push the columns at or beyond `vocab_size` out of the softmax, in place.

    logits_1TV: [1, T, V], this tensor-parallel rank's columns of the padded vocabulary.
    """
    columns = logits_1TV.shape[-1]
    valid = max(0, min(columns, vocab_size - tp_rank * columns))
    if valid < columns:
        # Not -inf: a rank whose columns are all padding would compute inf - inf.
        logits_1TV[..., valid:] = torch.finfo(logits_1TV.dtype).min
    return logits_1TV


def token_losses(
    logits_1TV: Tensor, labels_1T: Tensor, vocab_size: int, config: TransformerConfig
) -> Tensor:
    """-log p(label) of each position, float32 [1, T], equal on all ranks of the tensor-parallel
    group.

    Called by all of them, on the last pipeline stage. Overwrites the logits.
    """
    tp_group = parallel_state.get_tensor_model_parallel_group()
    logits_1TV = mask_vocabulary_padding(logits_1TV, vocab_size, tp_group.rank())
    if config.cross_entropy_loss_fusion:
        from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy

        return te_parallel_cross_entropy(logits_1TV, labels_1T, tp_group)
    return vocab_parallel_cross_entropy(logits_1TV.float(), labels_1T)
