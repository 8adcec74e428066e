"""D_t of every token of a response under two transformers models, and what the efficient model
prefers where it is large.

Suffixes: R tokens of the response, C those of a chunk, H hidden size, V vocabulary, K tokens
preferred at each.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.inputs import EvalModel
from megatron_opsft.loss.output_head import times_transposed
from megatron_opsft.records import Sample
from megatron_opsft.runtime.device import Device
from megatron_opsft.storage.model_paths import is_dist_checkpoint

NUM_PREFERRED = 3
CHUNK_LOGITS = 2**25  # of each model at a time: 128 MiB of float32
_SHARE, _AT_LEAST, _AT_MOST = 0.05, 32, 256  # tokens of a response with alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What the efficient model prefers at a token of large D_t.

    position: of the token in the response, from 0. p_original, p_efficient: its probabilities
    under the two models. preferred: the efficient model's likeliest tokens with its probabilities,
    falling; the token itself may be among them.
    """

    position: int
    p_original: float
    p_efficient: float
    preferred: tuple[tuple[str, float], ...]


def load_model(model: EvalModel, *, dtype: torch.dtype, device: Device) -> PreTrainedModel:
    """The model for reading, on the device, or over all GPUs where there are several.

    Errors: `UserError` where those GPUs are too small, or accelerate, which distributes it, is not
    installed.
    """
    several = device.is_cuda and torch.accelerator.device_count() > 1
    if several and importlib.util.find_spec("accelerate") is None:
        raise UserError(
            "diagnose distributes models over several GPUs with accelerate, which is not "
            "installed; pip install accelerate, or let it see one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    options: dict[str, Any] = {"dtype": dtype} | ({"device_map": "auto"} if several else {})
    if is_dist_checkpoint(model.directory):
        config = AutoConfig.from_pretrained(model.directory)
        kind = getattr(transformers, model.table.shape.architecture)
        weights = dict(model.tensors())
        loaded = kind.from_pretrained(None, config=config, state_dict=weights, **options)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model.directory, **options)
    if not several:
        return loaded.to(device.torch_device)
    if any(each.device.type != device.torch_device.type for each in loaded.parameters()):
        raise UserError(
            f"{model.directory} does not fit on the GPUs that diagnose sees; start it where it "
            "sees more"
        )
    return loaded


@torch.no_grad()
def diverge(
    original: PreTrainedModel, efficient: PreTrainedModel, tokenizer: Any, sample: Sample
) -> tuple[tuple[float, ...], tuple[Alternative, ...]]:
    """D_t = KL(p_original || p_efficient) of every token in nats, over the whole vocabulary; and
    alternatives by position, where D_t is largest. Numbers have the digits of a float32.

    Logits are float32 whatever the models' dtype, and made a few positions at a time.
    """
    head_p, head_q = (m.get_output_embeddings().weight for m in (original, efficient))
    chunk = max(1, CHUNK_LOGITS // len(head_p))
    hidden_p, hidden_q = (_hidden_states(m, sample).split(chunk) for m in (original, efficient))
    labels = torch.tensor(sample.response_ids, device=head_p.device).split(chunk)
    parts = [
        _compare(p_CH, head_p, q_CH, head_q, labels_C)
        for p_CH, q_CH, labels_C in zip(hidden_p, hidden_q, labels, strict=True)
    ]
    columns = zip(*parts, strict=True)
    kl_R, p_R, q_R, ids_RK, preferred_RK = (torch.cat(column).cpu() for column in columns)
    alternatives = tuple(
        Alternative(
            position=at,
            p_original=_short(p_R[at]),
            p_efficient=_short(q_R[at]),
            preferred=tuple(
                (tokenizer.decode([token]), _short(p))
                for token, p in zip(ids_RK[at].tolist(), preferred_RK[at], strict=True)
            ),
        )
        for at in _largest(kl_R)
    )
    return tuple(map(_short, kl_R)), alternatives


def _short(value: Tensor) -> float:
    """As many digits as a float32 has."""
    return float(f"{value.item():.7g}")


def _hidden_states(model: PreTrainedModel, sample: Sample) -> Tensor:
    """[R, H]: those that the response's tokens were sampled from."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids], device=model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0, len(sample.prompt_ids) - 1 : -1]


def _compare(
    p_CH: Tensor, head_p_VH: Tensor, q_CH: Tensor, head_q_VH: Tensor, labels_C: Tensor
) -> tuple[Tensor, ...]:
    """D_t and both models' probabilities of the labels, [C]; ids of the tokens that the efficient
    model finds likeliest and their probabilities, [C, K], falling.
    """
    log_p_CV = times_transposed(p_CH, head_p_VH).log_softmax(-1)
    log_q_CV = times_transposed(q_CH, head_q_VH).log_softmax(-1).to(log_p_CV.device)
    kl_C = kl_div(log_q_CV, log_p_CV, reduction="none", log_target=True).sum(-1).clamp_min(0.0)
    of_labels = [log.gather(1, labels_C[:, None])[:, 0].exp() for log in (log_p_CV, log_q_CV)]
    preferred = log_q_CV.topk(min(NUM_PREFERRED, log_q_CV.shape[1]))
    return kl_C, *of_labels, preferred.indices, preferred.values.exp()


def _largest(kl_R: Tensor) -> list[int]:
    """Positions of the largest that are not 0, ascending."""
    count = min(max(_AT_LEAST, int(_SHARE * len(kl_R))), _AT_MOST, len(kl_R))
    found = kl_R.topk(count)
    return sorted(found.indices[found.values > 0].tolist())
