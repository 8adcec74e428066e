"""The stages of the proof, each a test that runs one command in a process of its own.

In their order: what the later ones rest on comes first, and what may be left out for time last.
A docstring says what its stage proves.
"""

from typing import Any

import pytest
from proof.stage import Stage

# The packages that a stage's command imports; tests/unit/test_gpu_proof_runner.py compares.
# The trainer and its loss:
CORE = ("torch", "megatron", "numpy", "packaging", "pydantic", "pydantic_core", "psutil")
# Comparisons with Hugging Face:
REFERENCE = (*CORE, "ruamel.yaml", "transformers", "huggingface_hub", "safetensors")
# A session with rollouts:
JUDGE = ("math_verify", "latex2sympy2_extended", "antlr4")
DATA = ("filelock", "jinja2", "markupsafe", "pyarrow", "rich", "tabulate", "tqdm")
SESSION = (*REFERENCE, *JUDGE, *DATA)
# Commands, and conversions:
RUN = (*SESSION, "click")
CONVERTER = (
    *("torch", "numpy", "safetensors", "huggingface_hub", "filelock", "pydantic"),
    *("pydantic_core", "rich", "click", "ruamel.yaml", "tqdm"),
)
ALL_MODELS = "--models=qwen2,qwen2_tied,qwen3,qwen3_yarn,llama3"


def needs(
    seconds: float,
    *,
    limit: float = 180,
    modules: tuple[str, ...] = CORE,
    gpus: int = 1,
    gb: float = 0.0,
    cpu: bool = True,
    nodes: int = 1,
    quick: bool = False,
    fix: str = "send runs/gpu_proof to the project; the other stages do not rest on this one",
) -> Any:
    """The mark of a stage. seconds: what it probably takes; it is not begun with less left. limit:
    seconds after which it is killed. modules: packages that must be there. gpus, gb: how many GPUs,
    with how much memory each. cpu: whether `--device cpu` runs it. nodes: of the SLURM job. quick:
    whether `--quick` runs it. fix: what to do when it fails.
    """
    return pytest.mark.gpu(**locals())


@needs(0, modules=(), gpus=0, quick=True, fix="install what it names: tools/install_gpu.sh")
def test_environment(stage: Stage) -> None:
    """what this machine and its packages are, and that they can be imported"""
    stage.run(f"-m proof.environment --device {stage.device}")


TE_LOSS = "train with train.cross_entropy=te until it passes"


@needs(25, limit=240, modules=("torch", "triton"), cpu=False, quick=True, fix=TE_LOSS)
def test_triton_kernels(stage: Stage) -> None:
    """the Triton kernels of the loss give what the PyTorch ones do"""
    stage.run_tests("tests/gpu/test_logit_kernels.py")


@needs(25, limit=240, quick=True, fix=TE_LOSS)
def test_losses(stage: Stage) -> None:
    """losses and their gradients are those of float64 autograd, memory is the formula's"""
    on_cpu = "tests/unit/test_cross_entropy.py"
    stage.run_tests("tests/gpu/test_losses.py" if stage.on_gpu else on_cpu)


FLOAT32 = "if float32 passes, suspect the layers: train with model.dtype=float32 until it passes"
COMMUNICATION = "communication: run it again with --only NAME and NCCL_DEBUG=INFO, and read its log"


@needs(55, limit=240, modules=REFERENCE, quick=True, fix=FLOAT32)
def test_steps(stage: Stage) -> None:
    """gradients and three updates on one rank are Hugging Face's with torch's AdamW"""
    models = ALL_MODELS if stage.on_gpu else "--models=qwen2"
    stage.run(f"-m proof.steps --device {stage.device} {models}")


@needs(45, limit=240, modules=REFERENCE, fix="train no mixture of experts until it passes")
def test_moe_steps(stage: Stage) -> None:
    """the same of a mixture of experts, with bounds of its own in bfloat16"""
    models = "qwen3_moe,qwen3_moe_unnormalized" if stage.on_gpu else "qwen3_moe"
    stage.run(f"-m proof.steps --device {stage.device} --models={models}")


@needs(30, limit=240, modules=REFERENCE, fix="train no Qwen3.5 until it passes")
def test_delta_steps(stage: Stage) -> None:
    """the same of gated delta nets, with bounds of their own in bfloat16"""
    on_cpu = " --dtypes=float32" * (not stage.on_gpu)
    stage.run(f"-m proof.steps --device {stage.device} --models=qwen3_5{on_cpu}")


@needs(30, limit=240, modules=REFERENCE, cpu=False, fix="uninstall fla-core, and train without")
def test_delta_nets(stage: Stage) -> None:
    """gated delta nets on the GPU are the CPU's, flash-linear-attention's too"""
    stage.run_tests("tests/gpu/test_delta_net.py")


@needs(60, limit=300, modules=REFERENCE, cpu=False, fix="train with train.recompute=none")
def test_step_tests(stage: Stage) -> None:
    """the same with recomputation and another objective; the same bits when asked for"""
    stage.run_tests("tests/gpu/test_train_step.py")


@needs(60, limit=240, modules=REFERENCE, gpus=2, fix=COMMUNICATION)
def test_steps_on_2_ranks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """the same on two ranks: tensor, sequence, pipeline and data parallel, over NCCL"""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    on_cpu = "--layouts=tp2sp,pp2 --dtypes=float32"
    layouts = "--layouts=tp2,tp2sp,pp2,dp2" if stage.on_gpu else on_cpu
    stage.run(f"-m proof.steps --device {stage.device} {layouts}", ranks=2)


@needs(60, limit=240, modules=REFERENCE, gpus=2, fix=COMMUNICATION)
def test_moe_steps_on_2_ranks(stage: Stage) -> None:
    """experts parallel over two ranks"""
    words = "--models=qwen3_moe --layouts=ep2" + " --dtypes=float32" * (not stage.on_gpu)
    stage.run(f"-m proof.steps --device {stage.device} {words}", ranks=2)


@needs(90, limit=240, modules=REFERENCE, nodes=2, fix="set NCCL_SOCKET_IFNAME; docs/cluster.md")
def test_steps_on_2_nodes(stage: Stage) -> None:
    """the same with one rank on each of two nodes, started by srun"""
    words = "--layouts=dp2,pp2" + " --dtypes=float32" * (not stage.on_gpu)
    stage.run_on_2_nodes(f"-m proof.steps --device {stage.device} {words}")


@needs(60, limit=240, modules=REFERENCE, gpus=4, cpu=False, fix=COMMUNICATION)
def test_steps_on_4_ranks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """the same on four ranks, two kinds of parallelism at once"""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    stage.run("-m proof.steps --device cuda --layouts=tp2pp2,tp2dp2,pp2dp2", ranks=4)


@needs(30, cpu=False, quick=True, fix="train with checkpoint.asynchronous=false until it passes")
def test_checkpoint(stage: Stage) -> None:
    """a checkpoint written while training goes on holds what was there when it began"""
    stage.run_tests("tests/gpu/test_checkpoint_gpu.py")


def measure_loss(stage: Stage, method: str) -> None:
    """The figures of `train.cross_entropy=method` beside whole logits."""
    tiny = "--tokens 64 --vocab 1000 --hidden 64 --repeats 1"
    shape = "--dtype bfloat16 --tokens 8192" if stage.on_gpu else tiny
    words = f"--device {stage.device} {shape} --impl {method} eager"
    line, _ = stage.run(f"benchmarks/cross_entropy.py {words}")
    stage.show_of(line, "seconds mfu peak_gb seconds_to_eager peak_to_eager")


SLOW = "compare matmul_tflops of the stage environment with the card's data sheet first"


@needs(20, gb=40, fix=SLOW)
def test_loss_speed(stage: Stage) -> None:
    """time and memory of the fused linear loss against whole logits"""
    measure_loss(stage, "fused_linear")


@needs(40, limit=240, gb=75, quick=True, fix=SLOW)
def test_step_speed(stage: Stage) -> None:
    """seconds, MFU and memory of a training step at the 1.5B shape"""
    tiny = "--shape tiny --samples 4 --response 32 --repeats 1"
    large = "--shape 1.5b --dtype bfloat16 --tokens 8192 --samples 32 --prompt 128 --response 1024"
    shape = large if stage.on_gpu else tiny
    words = f"--device {stage.device} {shape} --acceptance 1 0.25"
    whole, quarter = stage.run(f"benchmarks/train_step.py {words}")
    stage.show_of(whole, "seconds tokens_per_second mfu peak_gb")
    stage.show(quarter_accepted_to_all=quarter["seconds_to_all_accepted"])


@needs(20, gb=22, fix=SLOW)
def test_push_speed(stage: Stage) -> None:
    """bytes a second of a push of 1.5B weights against a plain copy of them"""
    shape = "--shape 1.5b" if stage.on_gpu else "--shape tiny --repeats 1"
    (line,) = stage.run(f"benchmarks/push.py --device {stage.device} {shape}")
    stage.show_of(line, "in_place_gb_per_second copy_gb_per_second in_place_to_copy")
    stage.show_of(line, "stream_to_copy checksums_seconds")


@needs(30, fix="a faster disk for run.dir, or a larger checkpoint.every")
def test_save_speed(stage: Stage) -> None:
    """how long a checkpoint in the background keeps a run waiting"""
    shape = "--shape 46m --repeats 3" if stage.on_gpu else "--repeats 1"
    (line,) = stage.run(f"benchmarks/checkpoint.py --device {stage.device} {shape}")
    stage.show_of(line, "stall_seconds at_once_seconds checkpoint_mib")


@needs(60, gb=40, fix="train with train.offload=none; plan says what that takes")
def test_offload_speed(stage: Stage) -> None:
    """GB of the trainer that stay while an engine samples, and seconds of the copies, by
    train.offload"""
    shape = "--shape 1.5b" if stage.on_gpu else "--shape tiny --repeats 1"
    lines = stage.run(f"benchmarks/offload.py --device {stage.device} {shape}")
    stage.show(**{f"asleep_gb_{line['offload']}": line["asleep_gb"] for line in lines})
    stage.show_of(lines[-1], "awake_gb sleep_seconds wake_seconds gb_per_second")


@needs(25, limit=240, modules=SESSION, cpu=False)
def test_push_and_rollouts(stage: Stage) -> None:
    """checksums are the CPU's; a Hugging Face engine is written in place on the GPU"""
    stage.run_tests("tests/gpu/test_push.py -m 'not vllm'")


@needs(50, limit=240, modules=SESSION, quick=True, fix=FLOAT32)
def test_quickstart(stage: Stage) -> None:
    """whole steps of on-policy SFT, the rollouts by Hugging Face's engine"""
    steps = 4 if stage.on_gpu else 2
    stage.run(f"-m proof.quickstart --device {stage.device} --engine hf --steps {steps}")


@needs(165, limit=400, modules=RUN, fix="read its log; the checkpoints of a run stay usable")
def test_kill_and_resume(stage: Stage) -> None:
    """a run under torchrun whose ranks are killed goes on from its checkpoint"""
    stage.run_tests("tests/gpu/test_runs_gpu.py -k killed")


@needs(90, limit=500, modules=RUN, fix=FLOAT32)
def test_shorter_answers(stage: Stage) -> None:
    """the method works: the quickstart to its end, tokens and accuracy before and after"""
    stage.run_tests("tests/gpu/test_runs_gpu.py -k shorter")


WITHOUT_VLLM = (
    "leave rollout.deep_sleep=false; VLLM_USE_V2_MODEL_RUNNER=0 may help; train with "
    "rollout.engine=hf until it passes"
)
VLLM = (*SESSION, "vllm")


@needs(90, limit=300, modules=VLLM, fix=WITHOUT_VLLM)
def test_vllm_quickstart(stage: Stage) -> None:
    """the same with vLLM in the trainer's process: in-place pushes, sleep and wake"""
    steps = 4 if stage.on_gpu else 2
    stage.run(f"-m proof.quickstart --device {stage.device} --engine vllm --steps {steps}")


def colocate(stage: Stage, tp: int) -> None:
    words = f"--engine vllm --steps 2 --rollout-tp {tp}"
    stage.run(f"-m proof.quickstart --device {stage.device} {words}", ranks=tp)


@needs(120, limit=300, modules=VLLM, gpus=2, fix=WITHOUT_VLLM)
def test_vllm_on_2_ranks(stage: Stage) -> None:
    """the same with one engine over two ranks"""
    colocate(stage, 2)


@needs(120, limit=300, modules=VLLM, gpus=4, cpu=False, fix=WITHOUT_VLLM)
def test_vllm_on_4_ranks(stage: Stage) -> None:
    """the same with one engine over four ranks"""
    colocate(stage, 4)


@needs(120, limit=500, modules=RUN, gb=75, fix="lower rollout.gpu_memory_fraction")
def test_preset(stage: Stage) -> None:
    """a paper's preset with random weights on all GPUs: two capped steps beside `plan`"""
    stage.run_tests("tests/gpu/test_runs_gpu.py -k preset")


@needs(310, limit=400, modules=VLLM, gb=40, fix="leave rollout.seeded=true")
def test_vllm_speed(stage: Stage) -> None:
    """rollout tokens a second, with and without seeds, beside bare vLLM"""
    stage.run_tests("tests/gpu/test_vllm_alone.py -k speed")


@needs(260, limit=400, modules=VLLM, gb=40, fix=WITHOUT_VLLM)
def test_vllm_sleeps(stage: Stage) -> None:
    """memory that stays while vLLM sleeps does not grow in 20 sleeps, and log-probs come back; both
    with and without rollout.deep_sleep"""
    stage.run_tests("tests/gpu/test_vllm_alone.py -k sleeps")


@needs(180, limit=360, modules=VLLM, cpu=False, fix=WITHOUT_VLLM)
def test_vllm_push(stage: Stage) -> None:
    """pushes into vLLM against Hugging Face, memory given back"""
    stage.run_tests("tests/gpu/test_push.py -m vllm")


TE = (*REFERENCE, "transformer_engine")
WITHOUT_TE = "train with train.cross_entropy=fused_linear; for its layers, model.dtype=float32"


@needs(60, limit=240, modules=TE, cpu=False, fix=WITHOUT_TE)
def test_te_steps(stage: Stage) -> None:
    """steps on TransformerEngine's layers, with its cross-entropy too"""
    losses = "--dtypes=bfloat16 --losses=fused_linear,te --with-te"
    stage.run(f"-m proof.steps --device cuda {ALL_MODELS} {losses}")


@needs(90, limit=300, modules=TE, gpus=4, cpu=False, fix="train with parallel.cp=1")
def test_te_steps_on_4_ranks(stage: Stage) -> None:
    """its attention over packed sequences with context and sequence parallelism at once"""
    words = "--dtypes=bfloat16 --layouts=tp2spcp2 --losses=fused_linear,te --with-te"
    stage.run(f"-m proof.steps --device cuda {words}", ranks=4)


@needs(40, modules=(*CORE, "transformer_engine"), gb=40, cpu=False, fix=SLOW)
def test_te_loss_speed(stage: Stage) -> None:
    """time and memory of TransformerEngine's cross-entropy against whole logits"""
    measure_loss(stage, "te")


@needs(110, limit=300, modules=RUN, cpu=False)
def test_evaluation(stage: Stage) -> None:
    """evaluation on the GPU: the same responses in any batch, as accurate in bfloat16"""
    stage.run_tests("tests/gpu/test_eval_gpu.py")


@needs(60, modules=CONVERTER, gpus=0)
def test_convert_speed(stage: Stage) -> None:
    """seconds of a conversion of a 1.5B model both ways (CPU and disk)"""
    tiny = "--config megatron_opsft/assets/tiny_reasoner/config.json"
    (line,) = stage.run(f"benchmarks/convert.py --repeats 1 {'' if stage.on_gpu else tiny}")
    stage.show_of(line, "to_megatron_seconds to_hf_seconds ratio peak_rss_mb")
