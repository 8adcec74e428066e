"""vLLM as it is joined on a borrowed card: what can be loaded and imported, and what it builds.

Prints JSON: `refused`, library -> why the linker does not take it; `loaded`, those that it takes
with every symbol found; `imported`, how many modules; `parameters`, model -> the parameters that
differ from those that a sync writes.
"""

import ctypes
import importlib
import json
import os
from dataclasses import replace
from pathlib import Path

import real_configs
import vllm_models
from pretend_cuda import pretend, pretend_to_vllm

# A run's engine, its worker, attention, models of dense families, and what a model imports when it
# is built; each imports many others.
MODULES = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.sample.sampler",
    "vllm.v1.structured_output",
    "vllm.device_allocator.cumem",
    "vllm.compilation.backends",
    "vllm.compilation.cuda_graph",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.mistral",
    "compressed_tensors",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
]
MODELS = [("R1-Distill-Qwen-1.5B", 1), ("Llama-3.1-8B", 4)]


def main() -> None:
    """Load, import, build, print."""
    pretend()
    os.environ.update(real_configs.LAUNCHED, WORLD_SIZE=str(vllm_models.WORLD_SIZE))
    pretend_to_vllm()
    import vllm

    root = Path(vllm.__file__).parent
    refused, loaded = {}, []
    for library in sorted(root.rglob("*.so")):
        try:
            ctypes.CDLL(str(library), mode=os.RTLD_NOW)  # finds each symbol, not only those called
            loaded.append(library.name)
        except OSError as error:
            refused[library.name] = str(error)
    for module in MODULES:
        importlib.import_module(module)
    shapes = {name: replace(vllm_models.SHAPES[name], num_layers=2) for name, _ in MODELS}
    told = {
        "refused": refused,
        "loaded": loaded,
        "imported": len(MODULES),
        "parameters": {name: vllm_models.compare(shapes[name], tp) for name, tp in MODELS},
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
