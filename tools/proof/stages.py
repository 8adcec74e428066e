"""The stages of the proof, as data.

In their order: what the later ones rest on comes first, and what may be left out for time last.
"""

from proof.commands import CORE, REFERENCE, SESSION, Stage, benchmark, report, tests
from proof.headlines import (
    CONVERT_FIGURES,
    PUSH_FIGURES,
    SAVE_FIGURES,
    STEP_FIGURES,
    loss_figures,
)

LOSS_SHAPE = ("--device", "cuda", "--dtype", "bfloat16", "--tokens", "8192")

ENVIRONMENT = report("proof.environment", "--device", "{device}", modules=(), seconds=0, limit=180)
CONVERTER = ("torch", "numpy", "safetensors", "rich", "click", "ruamel.yaml")

STAGES = (
    Stage(
        name="environment",
        proves="what this machine and its packages are, and that they can be imported",
        on_gpu=ENVIRONMENT,
        on_cpu=ENVIRONMENT,
    ),
    Stage(
        name="triton_kernels",
        proves="the Triton kernels of the loss give what the PyTorch ones do",
        on_gpu=tests(
            "tests/gpu/test_logit_kernels.py",
            modules=("torch", "triton"),
            seconds=45,
            limit=240,
            gpus=1,
        ),
    ),
    Stage(
        name="losses",
        proves="losses and their gradients are those of float64 autograd, memory is the formula's",
        on_gpu=tests("tests/gpu/test_losses.py", modules=CORE, seconds=45, limit=240, gpus=1),
        on_cpu=tests("tests/unit/test_cross_entropy.py", modules=CORE, seconds=8, limit=120),
    ),
    Stage(
        name="steps",
        proves="gradients and three updates on one rank are Hugging Face's with torch's AdamW",
        on_gpu=report(
            *("proof.steps", "--device=cuda", "--models=qwen2,qwen2_tied,qwen3,llama3"),
            modules=REFERENCE,
            seconds=60,
            limit=240,
            gpus=1,
        ),
        on_cpu=report(
            *("proof.steps", "--device=cpu", "--models=qwen2"),
            modules=REFERENCE,
            seconds=10,
            limit=120,
        ),
    ),
    Stage(
        name="step_tests",
        proves="the same for every recomputation and loss; the loss falls",
        on_gpu=tests(
            "tests/gpu/test_train_step.py", modules=REFERENCE, seconds=60, limit=300, gpus=1
        ),
    ),
    Stage(
        name="steps_on_2_ranks",
        proves="the same on two ranks: tensor, sequence, pipeline and data parallel, over NCCL",
        on_gpu=report(
            *("proof.steps", "--device=cuda", "--layouts=tp2,tp2sp,pp2,dp2"),
            ranks=2,
            modules=REFERENCE,
            seconds=60,
            limit=240,
            gpus=2,
            env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        ),
        on_cpu=report(
            *("proof.steps", "--device=cpu", "--layouts=tp2sp,pp2", "--dtypes=float32"),
            ranks=2,
            modules=REFERENCE,
            seconds=15,
            limit=180,
        ),
    ),
    Stage(
        name="steps_on_4_ranks",
        proves="the same on four ranks, two kinds of parallelism at once",
        on_gpu=report(
            *("proof.steps", "--device=cuda", "--layouts=tp2pp2,tp2dp2,pp2dp2"),
            ranks=4,
            modules=REFERENCE,
            seconds=60,
            limit=240,
            gpus=4,
            env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        ),
    ),
    Stage(
        name="checkpoint",
        proves="a checkpoint written while training goes on holds what was there when it began",
        on_gpu=tests(
            "tests/gpu/test_checkpoint_gpu.py", modules=CORE, seconds=30, limit=180, gpus=1
        ),
    ),
    Stage(
        name="loss_speed",
        proves="time and memory of the fused linear loss against whole logits",
        on_gpu=benchmark(
            "cross_entropy",
            *LOSS_SHAPE,
            figures=loss_figures("fused_linear"),
            seconds=40,
            gpus=1,
            gpu_gb=40,
        ),
        on_cpu=benchmark(
            *("cross_entropy", "--device", "cpu", "--tokens", "64"),
            *("--vocab", "1000", "--hidden", "64", "--repeats", "1"),
            figures=loss_figures("fused_linear"),
            seconds=6,
        ),
    ),
    Stage(
        name="step_speed",
        proves="seconds, MFU and memory of a training step at the 1.5B shape",
        on_gpu=benchmark(
            *("train_step", "--device", "cuda", "--shape", "1.5b", "--dtype", "bfloat16"),
            *("--tokens", "8192", "--samples", "32", "--prompt", "128", "--response", "1024"),
            figures=STEP_FIGURES,
            seconds=75,
            limit=240,
            gpus=1,
            gpu_gb=75,
        ),
        on_cpu=benchmark(
            *("train_step", "--device", "cpu", "--layers", "2", "--hidden", "128", "--vocab"),
            *("1000", "--samples", "4", "--response", "32", "--repeats", "1"),
            figures=STEP_FIGURES,
            seconds=6,
        ),
    ),
    Stage(
        name="push_speed",
        proves="bytes a second of a push of 1.5B weights against a plain copy of them",
        on_gpu=benchmark(
            *("push", "--device", "cuda", "--shape", "1.5b"),
            figures=PUSH_FIGURES,
            seconds=30,
            gpus=1,
            gpu_gb=22,
        ),
        on_cpu=benchmark(
            *("push", "--device", "cpu", "--repeats", "1"), figures=PUSH_FIGURES, seconds=7
        ),
    ),
    Stage(
        name="save_speed",
        proves="how long a checkpoint in the background keeps a run waiting",
        on_gpu=benchmark(
            *("checkpoint", "--device", "cuda", "--shape", "46m", "--repeats", "3"),
            figures=SAVE_FIGURES,
            seconds=40,
            gpus=1,
        ),
        on_cpu=benchmark(
            *("checkpoint", "--device", "cpu", "--repeats", "1"), figures=SAVE_FIGURES, seconds=7
        ),
    ),
    Stage(
        name="push_and_rollouts",
        proves="checksums are the CPU's; a Hugging Face engine is written in place on the GPU",
        on_gpu=tests(
            *("tests/gpu/test_push.py", "-m", "not vllm"),
            modules=SESSION,
            seconds=45,
            limit=240,
            gpus=1,
        ),
    ),
    Stage(
        name="quickstart",
        proves="whole steps of on-policy SFT, the rollouts by Hugging Face's engine",
        on_gpu=report(
            *("proof.quickstart", "--device", "cuda", "--engine", "hf", "--steps", "4"),
            modules=SESSION,
            seconds=60,
            limit=240,
            gpus=1,
        ),
        on_cpu=report(
            *("proof.quickstart", "--device", "cpu", "--engine", "hf", "--steps", "2"),
            modules=SESSION,
            seconds=15,
            limit=120,
        ),
    ),
    Stage(
        name="vllm_quickstart",
        proves="the same with vLLM in the trainer's process: in-place pushes, sleep and wake",
        on_gpu=report(
            *("proof.quickstart", "--device", "cuda", "--engine", "vllm", "--steps", "4"),
            modules=(*SESSION, "vllm"),
            seconds=120,
            limit=300,
            gpus=1,
        ),
        on_cpu=report(
            *("proof.quickstart", "--device", "cpu", "--engine", "vllm", "--steps", "2"),
            modules=(*SESSION, "vllm"),
            seconds=20,
            limit=180,
        ),
    ),
    Stage(
        name="vllm_push",
        proves="pushes into vLLM against Hugging Face, memory given back",
        on_gpu=tests(
            *("tests/gpu/test_push.py", "-m", "vllm"),
            modules=(*SESSION, "vllm"),
            seconds=150,
            limit=360,
            gpus=1,
        ),
    ),
    Stage(
        name="te_steps",
        proves="steps on TransformerEngine's layers, with its cross-entropy too",
        on_gpu=report(
            *("proof.steps", "--device=cuda", "--models=qwen2,qwen2_tied,qwen3,llama3"),
            *("--dtypes=bfloat16", "--losses=fused_linear,te", "--with-te"),
            modules=(*REFERENCE, "transformer_engine"),
            seconds=60,
            limit=240,
            gpus=1,
        ),
    ),
    Stage(
        name="te_loss_speed",
        proves="time and memory of TransformerEngine's cross-entropy against whole logits",
        on_gpu=benchmark(
            *("cross_entropy", *LOSS_SHAPE, "--impl", "te", "eager"),
            figures=loss_figures("te"),
            modules=(*CORE, "transformer_engine"),
            seconds=40,
            gpus=1,
            gpu_gb=40,
        ),
    ),
    Stage(
        name="evaluation",
        proves="evaluation on the GPU: the same responses in any batch, as accurate in bfloat16",
        on_gpu=tests(
            "tests/gpu/test_eval_gpu.py",
            modules=(*SESSION, "tabulate"),
            seconds=90,
            limit=300,
            gpus=1,
        ),
    ),
    Stage(
        name="convert_speed",
        proves="seconds of a conversion of a 1.5B model both ways (CPU and disk)",
        on_gpu=benchmark(
            *("convert", "--repeats", "1"),
            figures=CONVERT_FIGURES,
            modules=CONVERTER,
            seconds=60,
        ),
        on_cpu=benchmark(
            *("convert", "--repeats", "1", "--skip-floor"),
            *("--config", "megatron_opsft/assets/tiny_reasoner/config.json"),
            figures=CONVERT_FIGURES,
            modules=CONVERTER,
            seconds=15,
        ),
    ),
)
