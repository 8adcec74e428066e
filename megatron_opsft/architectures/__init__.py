"""One small file per architecture; a new one is a new file and a line here."""

from megatron_opsft.architectures.llama import LLAMA
from megatron_opsft.architectures.mistral import MISTRAL
from megatron_opsft.architectures.qwen2 import QWEN2
from megatron_opsft.architectures.qwen3 import QWEN3
from megatron_opsft.architectures.qwen3_moe import QWEN3_MOE
from megatron_opsft.architectures.template import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    a.hf_name: a for a in (QWEN2, QWEN3, LLAMA, MISTRAL, QWEN3_MOE)
}
