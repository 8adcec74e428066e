"""Proof that vLLM's draft model is the one of `rollout.draft_model`, after every push.

What a draft shares with the model that is trained must be that model's own modules, which the
checksums of a push prove. What is its own must be what its files hold: compared once, when it has
been loaded, as a bag of numbers, because vLLM fuses tensors and pads vocabularies; from then on by
checksums over every element and its place, as nothing may change it any more.

A worker imports it: what it imports must leave torch as it is (see `cpu_worker`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size

from megatron_opsft.rollout.vllm.engine_tensors import EngineTensors
from megatron_opsft.weights.bag_sum import bag_sum
from megatron_opsft.weights.checksum import checksum
from megatron_opsft.weights.rectangles import Rect

# Of a draft's files: what vLLM drops, and what it leaves out where the draft has no such parameter
# of its own, because it shares the model's or is configured without.
_DROPPED = ("t2d", "rotary_emb")
_OPTIONAL = {
    "embed_tokens": "embed_tokens",
    "lm_head": "lm_head",
    "fc": "fc",
    "input_norm": "input_norm",
    "d2t": "draft_id_to_target_id",
}


class DraftProof:
    """What a draft model consists of, as it was when it had been loaded."""

    def __init__(self, draft: torch.nn.Module, model: torch.nn.Module) -> None:
        self._draft, self._model = draft, model
        self._tensors = EngineTensors(draft)
        self._shared = self._find_shared()
        self._noted = dict(self._checksums())

    def why_not_loaded(self, files: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str:
        """Why the draft's own weights are not those of its files; "" where they are.

        files: every tensor of them; dtype: the engine's. Of a draft that one worker holds whole.
        """
        own = list(self._own_parameters())
        parts = {part for name in own for part in name.split(".")}
        left_out = {part for part, its_name in _OPTIONAL.items() if its_name not in parts}
        left_out |= {*_DROPPED}
        stored = sum(
            bag_sum(_in_dtype(tensor, dtype))
            for name, tensor in files
            if not left_out & {*name.split(".")}
        )
        held = sum(bag_sum(_in_dtype(self._tensors[name], dtype)) for name in own)
        return "" if (held - stored) % 2**64 == 0 else "vLLM did not load what its files hold"

    def why_not_shared(self) -> str:
        """Why a part that the draft's files lack is not the model's either; "" where it is."""
        own = {part for name in self._own_parameters() for part in name.split(".")}
        for part in ("embed_tokens", "lm_head"):
            # As vLLM's loader has noted it.
            if part in own and not getattr(self._draft, f"has_own_{part}", False):
                return f"its files hold no {part}, and vLLM did not give it the model's"
        return ""

    def fault(self) -> str:
        """What is not as it was any more; "" where all is."""
        self._tensors.forget()
        if lost := sorted(self._find_shared() ^ self._shared):
            return f"its {lost[0]} is not the model's own any more"
        for name, value in self._checksums():
            if value != self._noted.get(name):
                return f"its {name} is not what was loaded from its files"
        return ""

    def _find_shared(self) -> frozenset[str]:
        """Names of the draft's modules that are the model's own."""
        held = {id(module) for module in self._model.modules()}
        return frozenset(n for n, module in self._draft.named_modules() if id(module) in held)

    def _own_parameters(self) -> Iterator[str]:
        for name in self._tensors:
            if name.rpartition(".")[0] not in self._shared:
                yield name

    def _checksums(self) -> Iterator[tuple[str, int]]:
        """Of the draft's own parameters, and of its buffers, such as the table of rotations."""
        for name in self._own_parameters():
            # The sign of a zero does not survive unpacking.
            yield name, _checksum(self._tensors[name], signed_zeros=not self._tensors.packs)
        for name, buffer in self._draft.named_buffers():
            yield name, _checksum(buffer, signed_zeros=True)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype if tensor.is_floating_point() else torch.int64)


def _checksum(tensor: Tensor, *, signed_zeros: bool) -> int:
    view = tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
    if not view.numel():
        return 0
    whole = Rect("", 0, view.shape[0], 0, view.shape[1])
    unit = view.itemsize
    return int(checksum(view, whole, salt=0, unit_bytes=unit, signed_zeros=signed_zeros))


class DraftWorker:
    """What `OpsftWorker` adds for a draft model."""

    model_runner: Any
    opsft_read_files: Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]

    def opsft_open_draft(self, directory: str) -> str:
        """Note the draft model that vLLM has loaded; why it is not what its files hold, else "".

        With several tensor-parallel ranks no worker holds it whole, and vLLM's loader is trusted.
        """
        draft = self.model_runner.get_draft_model()
        self._opsft_draft = DraftProof(draft, self.model_runner.get_model())
        reason = self._opsft_draft.why_not_shared()
        if reason or get_tensor_model_parallel_world_size() > 1:
            return reason
        dtype = self.model_runner.model_config.dtype
        tensors = self.opsft_read_files(_weight_files(Path(directory)))
        return self._opsft_draft.why_not_loaded(tensors, dtype)

    def opsft_draft_fault(self) -> str:
        """See `DraftProof.fault`."""
        return self._opsft_draft.fault()


def _weight_files(directory: Path) -> list[str]:
    """Of the format that vLLM prefers; it has loaded them, so there are some."""
    found = (sorted(map(str, directory.glob(f"*.{kind}"))) for kind in ("safetensors", "bin"))
    return next(filter(None, found))
