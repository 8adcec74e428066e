"""The teacher of a distillation: hidden states of the same response tokens under another prompt,
and the output layer that makes its distributions of them, a chunk at a time.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_opsft.loss.output_head import OutputHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """hidden_RH: where the teacher predicts the R response tokens; head: its output layer, of the
    same group and temperature as the student's; weights_R: float32, of each token's divergence;
    forward: KL(teacher || student) instead of KL(student || teacher).
    """

    hidden_RH: Tensor
    head: OutputHead
    weights_R: Tensor
    forward: bool = False
