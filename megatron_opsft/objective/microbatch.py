"""The tensors of a micro-batch: whole samples, packed one behind the other (THD)."""

from collections.abc import Sequence

import torch

from megatron_opsft.objective.normalization import Normalization
from megatron_opsft.objective.packing import plan_packing
from megatron_opsft.records import MicroBatch, Sample


def build_microbatch(
    samples: Sequence[Sample], token_weights: Sequence[float], *, align: int, device: torch.device
) -> MicroBatch:
    """Pack whole samples into one micro-batch, filled up to a multiple of `align` tokens.

    The label of position t is token t+1 of the same sequence; prompt positions before the last,
    the last token of each sequence and the filler have weight 0. No sample at all gives a filler
    of `align` tokens.
    """
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    weights: list[float] = []
    lengths: list[int] = []
    for sample, weight in zip(samples, token_weights, strict=True):
        sequence = (*sample.prompt_ids, *sample.response_ids)
        num_prompt, num_response = len(sample.prompt_ids), len(sample.response_ids)
        tokens += sequence
        labels += (*sequence[1:], 0)
        positions += range(len(sequence))
        weights += [0.0] * (num_prompt - 1) + [weight] * num_response + [0.0]
        lengths.append(len(sequence))
    filler = -len(tokens) % align if tokens else align
    if filler:
        tokens += [0] * filler
        labels += [0] * filler
        positions += range(filler)
        weights += [0.0] * filler
        lengths.append(filler)
    borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return MicroBatch(
        tokens_T=torch.tensor(tokens, device=device),
        labels_T=torch.tensor(labels, device=device),
        positions_T=torch.tensor(positions, device=device),
        weights_T=torch.tensor(weights, dtype=torch.float32, device=device),
        cu_seqlens=borders.to(device),
        max_seqlen=max(lengths),
        num_loss_tokens=sum(len(sample.response_ids) for sample in samples),
    )


def pack(
    samples: Sequence[Sample],
    normalization: Normalization,
    *,
    budget: int,
    dp_rank: int,
    dp_size: int,
    multiple: int = 1,
    align: int = 1,
    device: torch.device,
) -> list[MicroBatch]:
    """This rank's micro-batches of the global batch; every rank calls it with the same samples."""
    lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
    plan = plan_packing(lengths, budget=budget, dp_size=dp_size, multiple=multiple)
    weights = normalization.token_weights
    return [
        build_microbatch(
            [samples[i] for i in sorted(indices)],
            [weights[i] for i in sorted(indices)],
            align=align,
            device=device,
        )
        for indices in plan[dp_rank]
    ]
