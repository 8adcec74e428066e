"""What the losses keep of the rows of a chunk of logits."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """For each row, float32 [C]: log-sum-exp, the label's logit (0 if it lies elsewhere), and the
    mean of the given values under the row's softmax; mean_C: None where none were given.
    """

    lse_C: Tensor
    target_C: Tensor
    mean_C: Tensor | None
