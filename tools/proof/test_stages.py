"""The stages of the proof, each a test that runs one command in a process of its own.

In their order: what the later ones rest on comes first, and what may be left out for time last.
A docstring says what its stage proves.
"""

from typing import Any

import pytest
from proof.stage import Stage

# What megatron_opsft.model and .loss import; comparing with Hugging Face needs more, and whole
# steps with rollouts more again.
CORE = ("torch", "megatron", "numpy", "packaging", "pydantic", "psutil")
REFERENCE = (*CORE, "ruamel.yaml", "transformers", "safetensors")
SESSION = (*REFERENCE, "math_verify", "latex2sympy2_extended", "antlr4", "rich")
CONVERTER = ("torch", "numpy", "safetensors", "rich", "click", "ruamel.yaml")
ALL_MODELS = "--models=qwen2,qwen2_tied,qwen3,llama3"


def needs(
    seconds: float,
    *,
    limit: float = 180,
    modules: tuple[str, ...] = CORE,
    gpus: int = 1,
    gb: float = 0.0,
    cpu: bool = True,
) -> Any:
    """The mark of a stage. seconds: what it probably takes; it is not begun with less left. limit:
    seconds after which it is killed. modules: packages that must be there. gpus, gb: how many GPUs,
    with how much memory each. cpu: whether `--device cpu` runs it.
    """
    return pytest.mark.gpu(seconds=seconds, limit=limit, modules=modules, gpus=gpus, gb=gb, cpu=cpu)


@needs(0, modules=(), gpus=0)
def test_environment(stage: Stage) -> None:
    """what this machine and its packages are, and that they can be imported"""
    stage.run(f"-m proof.environment --device {stage.device}")


@needs(45, limit=240, modules=("torch", "triton"), cpu=False)
def test_triton_kernels(stage: Stage) -> None:
    """the Triton kernels of the loss give what the PyTorch ones do"""
    stage.run_tests("tests/gpu/test_logit_kernels.py")


@needs(45, limit=240)
def test_losses(stage: Stage) -> None:
    """losses and their gradients are those of float64 autograd, memory is the formula's"""
    on_cpu = "tests/unit/test_cross_entropy.py"
    stage.run_tests("tests/gpu/test_losses.py" if stage.on_gpu else on_cpu)


@needs(60, limit=240, modules=REFERENCE)
def test_steps(stage: Stage) -> None:
    """gradients and three updates on one rank are Hugging Face's with torch's AdamW"""
    models = ALL_MODELS if stage.on_gpu else "--models=qwen2"
    stage.run(f"-m proof.steps --device {stage.device} {models}")


@needs(60, limit=300, modules=REFERENCE, cpu=False)
def test_step_tests(stage: Stage) -> None:
    """the same for every recomputation and loss; the loss falls"""
    stage.run_tests("tests/gpu/test_train_step.py")


@needs(60, limit=240, modules=REFERENCE, gpus=2)
def test_steps_on_2_ranks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """the same on two ranks: tensor, sequence, pipeline and data parallel, over NCCL"""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    on_cpu = "--layouts=tp2sp,pp2 --dtypes=float32"
    layouts = "--layouts=tp2,tp2sp,pp2,dp2" if stage.on_gpu else on_cpu
    stage.run(f"-m proof.steps --device {stage.device} {layouts}", ranks=2)


@needs(60, limit=240, modules=REFERENCE, gpus=4, cpu=False)
def test_steps_on_4_ranks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """the same on four ranks, two kinds of parallelism at once"""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    stage.run("-m proof.steps --device cuda --layouts=tp2pp2,tp2dp2,pp2dp2", ranks=4)


@needs(30, cpu=False)
def test_checkpoint(stage: Stage) -> None:
    """a checkpoint written while training goes on holds what was there when it began"""
    stage.run_tests("tests/gpu/test_checkpoint_gpu.py")


def measure_loss(stage: Stage, method: str) -> None:
    """The figures of `train.cross_entropy=method` beside whole logits."""
    tiny = "--tokens 64 --vocab 1000 --hidden 64 --repeats 1"
    shape = "--dtype bfloat16 --tokens 8192" if stage.on_gpu else tiny
    words = f"--device {stage.device} {shape} --impl {method} eager"
    line, _ = stage.run(f"benchmarks/cross_entropy.py {words}")
    stage.show(
        ms=1e3 * line["seconds"],
        mfu=line.get("mfu"),
        peak_gb=line["peak_bytes"] / 1e9,
        time_to_whole_logits=line["seconds_to_eager"],
        memory_to_whole_logits=line["peak_to_eager"],
    )


@needs(40, gb=40)
def test_loss_speed(stage: Stage) -> None:
    """time and memory of the fused linear loss against whole logits"""
    measure_loss(stage, "fused_linear")


@needs(75, limit=240, gb=75)
def test_step_speed(stage: Stage) -> None:
    """seconds, MFU and memory of a training step at the 1.5B shape"""
    tiny = "--layers 2 --hidden 128 --vocab 1000 --samples 4 --response 32 --repeats 1"
    large = "--shape 1.5b --dtype bfloat16 --tokens 8192 --samples 32 --prompt 128 --response 1024"
    shape = large if stage.on_gpu else tiny
    words = f"--device {stage.device} {shape} --acceptance 1 0.25"
    whole, quarter = stage.run(f"benchmarks/train_step.py {words}")
    stage.show(
        seconds=whole["seconds"],
        tokens_per_second=whole["tokens_per_second"],
        mfu=whole.get("mfu"),
        peak_gb=whole["peak_bytes"] / 1e9,
        quarter_accepted_to_all=quarter["seconds_to_all_accepted"],
    )


@needs(30, gb=22)
def test_push_speed(stage: Stage) -> None:
    """bytes a second of a push of 1.5B weights against a plain copy of them"""
    shape = "--shape 1.5b" if stage.on_gpu else "--repeats 1"
    (line,) = stage.run(f"benchmarks/push.py --device {stage.device} {shape}")
    stage.show(
        gb_per_second=line["in_place_gb_per_second"],
        copy_gb_per_second=line["copy_gb_per_second"],
        share_of_copy=line["in_place_to_copy"],
        stream_share_of_copy=line["stream_to_copy"],
        checksums_seconds=line["checksums_seconds"],
    )


@needs(40)
def test_save_speed(stage: Stage) -> None:
    """how long a checkpoint in the background keeps a run waiting"""
    shape = "--shape 46m --repeats 3" if stage.on_gpu else "--repeats 1"
    (line,) = stage.run(f"benchmarks/checkpoint.py --device {stage.device} {shape}")
    stage.show(
        stall_seconds=line["stall_seconds"],
        at_once_seconds=line["at_once_seconds"],
        mib=line["checkpoint_mib"],
    )


@needs(45, limit=240, modules=SESSION, cpu=False)
def test_push_and_rollouts(stage: Stage) -> None:
    """checksums are the CPU's; a Hugging Face engine is written in place on the GPU"""
    stage.run_tests("tests/gpu/test_push.py -m 'not vllm'")


@needs(60, limit=240, modules=SESSION)
def test_quickstart(stage: Stage) -> None:
    """whole steps of on-policy SFT, the rollouts by Hugging Face's engine"""
    steps = 4 if stage.on_gpu else 2
    stage.run(f"-m proof.quickstart --device {stage.device} --engine hf --steps {steps}")


@needs(120, limit=300, modules=(*SESSION, "vllm"))
def test_vllm_quickstart(stage: Stage) -> None:
    """the same with vLLM in the trainer's process: in-place pushes, sleep and wake"""
    steps = 4 if stage.on_gpu else 2
    stage.run(f"-m proof.quickstart --device {stage.device} --engine vllm --steps {steps}")


@needs(150, limit=360, modules=(*SESSION, "vllm"), cpu=False)
def test_vllm_push(stage: Stage) -> None:
    """pushes into vLLM against Hugging Face, memory given back"""
    stage.run_tests("tests/gpu/test_push.py -m vllm")


@needs(60, limit=240, modules=(*REFERENCE, "transformer_engine"), cpu=False)
def test_te_steps(stage: Stage) -> None:
    """steps on TransformerEngine's layers, with its cross-entropy too"""
    losses = "--dtypes=bfloat16 --losses=fused_linear,te --with-te"
    stage.run(f"-m proof.steps --device cuda {ALL_MODELS} {losses}")


@needs(40, modules=(*CORE, "transformer_engine"), gb=40, cpu=False)
def test_te_loss_speed(stage: Stage) -> None:
    """time and memory of TransformerEngine's cross-entropy against whole logits"""
    measure_loss(stage, "te")


@needs(90, limit=300, modules=SESSION, cpu=False)
def test_evaluation(stage: Stage) -> None:
    """evaluation on the GPU: the same responses in any batch, as accurate in bfloat16"""
    stage.run_tests("tests/gpu/test_eval_gpu.py")


@needs(60, modules=CONVERTER, gpus=0)
def test_convert_speed(stage: Stage) -> None:
    """seconds of a conversion of a 1.5B model both ways (CPU and disk)"""
    tiny = "--config megatron_opsft/assets/tiny_reasoner/config.json"
    (line,) = stage.run(f"benchmarks/convert.py --repeats 1 {'' if stage.on_gpu else tiny}")
    stage.show(
        to_megatron_seconds=line["to_megatron_seconds"],
        to_hf_seconds=line["to_hf_seconds"],
        time_to_plain_copy=line["ratio"],
        peak_rss_mb=line["peak_rss_mb"],
    )
