"""TransformerEngine's cross-entropy where there is none: Megatron's, under its name."""

import sys
from types import ModuleType

from torch import Tensor
from torch.distributed import ProcessGroup


def install_stand_in() -> None:
    """For this process. It overwrites the logits in a float32 model, as the kernel does."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def parallel_cross_entropy(
        inp: Tensor, target: Tensor, *, dist_process_group: ProcessGroup, overwrite_input: bool
    ) -> Tensor:
        assert overwrite_input
        return vocab_parallel_cross_entropy(inp.float(), target)

    name = "transformer_engine.pytorch.cross_entropy"
    module = ModuleType(name)
    module.parallel_cross_entropy = parallel_cross_entropy  # type: ignore[attr-defined]
    sys.modules[name] = module
