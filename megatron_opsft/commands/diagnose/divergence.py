"""D_t of every token of a response under two transformers models, and what the efficient model
prefers where D_t is large.

Suffixes: R tokens of the response, C tokens of a chunk, H hidden size, V vocabulary, K preferred
tokens at each position, L the sampled one and these, 2 the original and the efficient model. p:
original; q: efficient.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from megatron_opsft.commands.evaluate.inputs import EvalModel
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import is_dist_checkpoint
from megatron_opsft.records import JsonObject
from megatron_opsft.rollout.hf.language_model import language_config
from megatron_opsft.runtime.device import Device
from megatron_opsft.trainer.loss.output_head import times_transposed

NUM_PREFERRED = 3
CHUNK_LOGITS = 2**25  # of each model at a time: 128 MiB of float32
# Tokens of a response with alternatives: a share of all, at least and at most so many.
_SHARE, _AT_LEAST, _AT_MOST = 0.05, 32, 256


def load_model(model: EvalModel, dtype: torch.dtype, device: Device) -> PreTrainedModel:
    """Load a language model for reading, on the device, or over all GPUs if there are several.

    Errors: `UserError` if those GPUs are too small, or accelerate, which distributes the model, is
    not installed.
    """
    is_distributed = device.is_cuda and torch.accelerator.device_count() > 1
    if is_distributed and importlib.util.find_spec("accelerate") is None:
        raise UserError(
            "diagnose distributes models over several GPUs with accelerate, which is not "
            "installed; pip install accelerate, or let it see one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    config = language_config(model.directory)
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "trust_remote_code": False,
        "device_map": "auto" if is_distributed else None,
    }
    directory: Path | None = model.directory
    if is_dist_checkpoint(model.directory):
        options["state_dict"] = dict(model.tensors())
        directory = None
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded = model_class.from_pretrained(directory, **options)
    if not is_distributed:
        return loaded.to(device.torch_device)
    device_types = {parameter.device.type for parameter in loaded.parameters()}
    if device_types != {device.torch_device.type}:
        raise UserError(
            f"{model.directory} does not fit on the GPUs that diagnose sees; start it where it "
            "sees more"
        )
    return loaded


class _Divergence(NamedTuple):
    """Two models at the tokens of a chunk, or of a whole response (then R stands for C)."""

    kl_C: Tensor
    """D_t in nats."""
    ids_CL: Tensor
    """Ids of the sampled token and of the efficient model's likeliest tokens, falling."""
    probabilities_CL2: Tensor
    """Probabilities of these tokens."""


@torch.no_grad()
def diverge(
    original: PreTrainedModel,
    efficient: PreTrainedModel,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
) -> tuple[list[float], list[JsonObject]]:
    """Return D_t = KL(p_original || p_efficient) of every token in nats, over the whole vocabulary;
    and alternatives by position, where D_t is largest. Numbers have the digits of a float32.

    An alternative has position: of the token in the response, from 0; probability: of that token
    under the original and under the efficient model; preferred: the efficient model's likeliest
    tokens, falling, each with its probability there and under the original; the token itself may be
    among them.

    Logits are float32 whatever the models' dtype, and made a few positions at a time.
    """
    head_p_VH = original.get_output_embeddings().weight
    head_q_VH = efficient.get_output_embeddings().weight
    chunk = max(1, CHUNK_LOGITS // len(head_p_VH))
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    hidden = []
    for model in (original, efficient):
        output = model.base_model(input_ids=ids.to(model.device), use_cache=False)
        # The states from which the tokens of the response were sampled.
        hidden_RH = output.last_hidden_state[0, len(prompt_ids) - 1 : -1]
        hidden.append(hidden_RH.split(chunk))
    sampled = torch.tensor(response_ids).split(chunk)
    chunks = [
        _compare(p_CH, head_p_VH, q_CH, head_q_VH, sampled_C)
        for p_CH, q_CH, sampled_C in zip(*hidden, sampled, strict=True)
    ]
    whole = _Divergence(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))
    kl = _to_lists(whole.kl_C)
    count = min(max(_AT_LEAST, int(_SHARE * len(kl))), _AT_MOST, len(kl))
    positions = sorted(whole.kl_C.topk(count).indices.tolist())
    return kl, [
        _alternative(whole, position, tokenizer)
        for position in positions
        if kl[position] > 0
    ]


def _alternative(whole: _Divergence, position: int, tokenizer: Any) -> JsonObject:
    """Return the alternative at a position of the response, see `diverge`."""
    _, *preferred_ids = whole.ids_CL[position].tolist()
    sampled, *preferred = [
        {"original": of_p, "efficient": of_q}
        for of_p, of_q in _to_lists(whole.probabilities_CL2[position])
    ]
    return {
        "position": position,
        "probability": sampled,
        "preferred": [
            {"token": tokenizer.decode([token_id]), **probabilities}
            for token_id, probabilities in zip(preferred_ids, preferred, strict=True)
        ],
    }


def _to_lists(values: Tensor) -> Any:
    """Return values as nested lists of floats with as many digits as a float32 has."""
    if values.dim():
        return [_to_lists(value) for value in values]
    return float(f"{values.item():.7g}")


def _compare(
    p_CH: Tensor, head_p_VH: Tensor, q_CH: Tensor, head_q_VH: Tensor, sampled_C: Tensor
) -> _Divergence:
    """Compare the models at a chunk, by their hidden states and output layers.

    sampled_C: ids of the sampled tokens.
    """
    log_p_CV = times_transposed(p_CH, head_p_VH).log_softmax(-1)
    log_q_CV = times_transposed(q_CH, head_q_VH).log_softmax(-1).to(log_p_CV.device)
    # No name for [C, V]: it is freed before the next ones are made.
    kl_C = kl_div(log_q_CV, log_p_CV, reduction="none", log_target=True).sum(-1)
    sampled_C1 = sampled_C.to(log_p_CV.device)[:, None]
    preferred_CK = log_q_CV.topk(min(NUM_PREFERRED, log_q_CV.shape[1])).indices
    ids_CL = torch.cat([sampled_C1, preferred_CK], dim=1)
    of_p_CL = log_p_CV.gather(1, ids_CL).exp()
    of_q_CL = log_q_CV.gather(1, ids_CL).exp()
    return _Divergence(
        kl_C.clamp_min(0.0), ids_CL, torch.stack([of_p_CL, of_q_CL], dim=-1)
    )
