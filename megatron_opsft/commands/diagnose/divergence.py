"""D_t of every token of a response under two transformers models, and what the efficient model
prefers where it is large.

Suffixes: R tokens of the response, C those of a chunk, H hidden size, V vocabulary, K tokens
preferred at each.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoConfig, PreTrainedModel

from megatron_opsft.commands.evaluate.inputs import EvalModel
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import is_dist_checkpoint
from megatron_opsft.runtime.device import Device
from megatron_opsft.trainer.loss.output_head import times_transposed

NUM_PREFERRED = 3
CHUNK_LOGITS = 2**25  # of each model at a time: 128 MiB of float32
_SHARE, _AT_LEAST, _AT_MOST = 0.05, 32, 256  # tokens of a response with alternatives


def load_model(model: EvalModel, dtype: torch.dtype, device: Device) -> PreTrainedModel:
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
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    if several:
        options["device_map"] = "auto"
    is_megatron = is_dist_checkpoint(model.directory)
    if is_megatron:
        options["config"] = AutoConfig.from_pretrained(
            model.directory, trust_remote_code=False
        )
        options["state_dict"] = dict(model.tensors())
    kind = getattr(transformers, model.table.shape.architecture)
    loaded = kind.from_pretrained(None if is_megatron else model.directory, **options)
    if not several:
        return loaded.to(device.torch_device)
    if any(
        each.device.type != device.torch_device.type for each in loaded.parameters()
    ):
        raise UserError(
            f"{model.directory} does not fit on the GPUs that diagnose sees; start it where it "
            "sees more"
        )
    return loaded


@torch.no_grad()
def diverge(
    original: PreTrainedModel,
    efficient: PreTrainedModel,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
) -> tuple[list[float], list[dict[str, Any]]]:
    """D_t = KL(p_original || p_efficient) of every token in nats, over the whole vocabulary; and
    alternatives by position, where D_t is largest. Numbers have the digits of a float32.

    An alternative has position: of the token in the response, from 0; probability: of that token
    under the original and under the efficient model; preferred: the efficient model's likeliest
    tokens, falling, each with its probability there and under the original; the token itself may be
    among them.

    Logits are float32 whatever the models' dtype, and made a few positions at a time.
    """
    head_p, head_q = (m.get_output_embeddings().weight for m in (original, efficient))
    chunk = max(1, CHUNK_LOGITS // len(head_p))
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    sampled = torch.tensor(response_ids).split(chunk)
    hidden_p, hidden_q = (
        model.base_model(input_ids=ids.to(model.device), use_cache=False)
        .last_hidden_state[
            0, len(prompt_ids) - 1 : -1
        ]  # what the tokens were sampled from
        .split(chunk)
        for model in (original, efficient)
    )
    parts = [
        _compare(p_CH, head_p, q_CH, head_q, sampled_C)
        for p_CH, q_CH, sampled_C in zip(hidden_p, hidden_q, sampled, strict=True)
    ]
    kl_R, of_sampled_R2, ids_RK, preferred_RK2 = map(
        torch.cat, zip(*parts, strict=True)
    )
    kl, of_sampled, preferred = map(_short, (kl_R, of_sampled_R2, preferred_RK2))
    count = min(max(_AT_LEAST, int(_SHARE * len(kl))), _AT_MOST, len(kl))
    return kl, [
        {
            "position": at,
            "probability": dict(
                zip(("original", "efficient"), of_sampled[at], strict=True)
            ),
            "preferred": [
                {
                    "token": tokenizer.decode([token]),
                    "original": in_p,
                    "efficient": in_q,
                }
                for token, (in_p, in_q) in zip(
                    ids_RK[at].tolist(), preferred[at], strict=True
                )
            ],
        }
        for at in sorted(kl_R.topk(count).indices.tolist())
        if kl[at] > 0
    ]


def _short(values: Tensor) -> Any:
    """As lists, with as many digits as a float32 has."""
    if values.dim():
        return [_short(value) for value in values]
    return float(f"{values.item():.7g}")


def _compare(
    p_CH: Tensor, head_p_VH: Tensor, q_CH: Tensor, head_q_VH: Tensor, sampled_C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """D_t, [C]; probabilities of the sampled tokens under the original and the efficient model,
    [C, 2]; ids of the tokens that the efficient model finds likeliest, falling, [C, K]; and their
    probabilities under both, [C, K, 2].
    """
    log_p_CV = times_transposed(p_CH, head_p_VH).log_softmax(-1)
    log_q_CV = times_transposed(q_CH, head_q_VH).log_softmax(-1).to(log_p_CV.device)
    kl_C = (
        kl_div(log_q_CV, log_p_CV, reduction="none", log_target=True)
        .sum(-1)
        .clamp_min(0.0)
    )
    preferred_CK = log_q_CV.topk(min(NUM_PREFERRED, log_q_CV.shape[1])).indices

    def of_both(ids_CK: Tensor) -> Tensor:
        return torch.stack(
            [log.gather(1, ids_CK).exp() for log in (log_p_CV, log_q_CV)], dim=-1
        )

    of_sampled_C2 = of_both(sampled_C.to(log_p_CV.device)[:, None])[:, 0]
    return kl_C, of_sampled_C2, preferred_CK, of_both(preferred_CK)
