"""One small file per architecture; a new one is a new file and a line here."""

from megatron_opsft.weights.architectures.llama import LLAMA
from megatron_opsft.weights.architectures.mistral import MISTRAL
from megatron_opsft.weights.architectures.qwen2 import QWEN2
from megatron_opsft.weights.architectures.qwen3 import QWEN3
from megatron_opsft.weights.architectures.qwen3_moe import QWEN3_MOE
from megatron_opsft.weights.architectures.template import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    a.hf_name: a for a in (QWEN2, QWEN3, LLAMA, MISTRAL, QWEN3_MOE)
}
