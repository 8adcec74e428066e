"""Forward passes of the Hugging Face engine's model, and what is drawn from their logits.

What is decoded beside a response moves its logits by rounding, and that may move a border of the
distribution across the number that is drawn. In float32 the draws that are so close to a border are
found and taken from logits that are computed for the response alone, on one thread. So responses
are the same in every batch, as long as rounding moves no cumulative probability by more than is
allowed for.

Batches of a fixed number of rows would not do instead. A row's matrix products are the same to the
last bit in every batch of 12 rows or more (MKL, one thread or two), but its attention is not: the
longest prompt of the batch decides how the sums over the keys are rounded.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.sampling import largest_move, sample_tokens

_log = logging.getLogger(__name__)

# The composition of a batch moved cumulative probabilities by at most 4e-6 (0.7 M parameters) and
# 2e-5 (8 layers of hidden size 1,536), both in float32 at temperature 0.6.
ROUNDING = 5e-5


class ModelPasses:
    """noise: how far rounding may move a cumulative probability; 0 where draws are taken as they
    come, since rounding in bfloat16 is large.
    """

    def __init__(self, model: PreTrainedModel, *, notes_routing: bool = False) -> None:
        """notes_routing: whether `routing` is wanted; only of a mixture of experts."""
        self.model = model
        self.noise = ROUNDING if model.dtype == torch.float32 else 0.0
        self._notes_routing = notes_routing
        self._chosen: list[Tensor] = []
        for name, module in model.named_modules() if notes_routing else ():
            if name.endswith(".mlp.gate"):  # logits, weights, and the experts [tokens, top_k]
                module.register_forward_hook(lambda *call: self._chosen.append(call[2][2]))

    def forget_routing(self) -> None:
        """Before a pass whose routing is wanted."""
        self._chosen.clear()

    def routing(self, rows: int, tokens: int) -> Tensor | None:
        """The experts of the pass before, uint8 [rows, tokens, layers x top_k], if noted."""
        if not self._notes_routing:
            return None
        return torch.cat(self._chosen, dim=-1).to(torch.uint8).view(rows, tokens, -1)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits at the last position, [rows, V]; mask: of the tokens held and those given, by
        which the cache grows.
        """
        self.forget_routing()
        logits: Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits

    def draw_alone(
        self, ids: Sequence[int], logits_V: Tensor, uniform: Tensor, sampling: SamplingSettings
    ) -> int:
        """The next token from logits that depend on `ids` alone; logits_V: the batch's.

        The two show what rounding does here: what is allowed for it must be well above.
        """
        with _one_thread():
            alone_1V = self.model(
                input_ids=torch.tensor([ids], device=self.model.device),
                use_cache=False,
                logits_to_keep=1,
            ).logits[:, -1]
        moved = largest_move(alone_1V[0], logits_V, sampling.temperature)
        if moved > self.noise / 2:
            _log.warning(
                "rounding moved probabilities by %.1e, more than half of the %.1e allowed for: a "
                "response so far may depend on its batch; from here on %.1e is allowed for",
                *(moved, self.noise, 4 * moved),
            )
            self.noise = 4 * moved
        return int(sample_tokens(alone_1V, uniform[None], sampling.temperature, sampling.top_p))


def as_bytes(routing: Tensor) -> bytes:
    """As `Sample.routing` has it."""
    return routing.cpu().numpy().tobytes()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread of the CPU: sums are then made in one order, whatever machine it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
