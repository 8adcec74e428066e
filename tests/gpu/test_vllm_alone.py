"""vLLM without a trainer, at the 1.5B shape with random weights: speed beside vLLM as it is bare,
memory over 20 sleeps, and what it computes after each. On a CPU, tiny: PROOF_DEVICE=cpu.
"""

import os
import shutil
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from forked_cli import ROOT
from processes import apart, skip_without_vllm

from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.commands.plan.memory import GRAPH_BYTES
from megatron_opsft.config import ParallelConfig
from megatron_opsft.errors import first_line
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import Sample
from megatron_opsft.rollout.engine import EngineSettings, RolloutEngine, SamplingSettings
from megatron_opsft.rollout.open_engine import build_engine
from megatron_opsft.rollout.requests import ResponseRequest
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.distributed import start_distributed

DEVICE = os.environ.get("PROOF_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
ON_CPU = not ON_GPU
ASSETS = ROOT / "megatron_opsft/assets"
LARGE = ASSETS / "model_configs/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
MODEL = LARGE if ON_GPU else ASSETS / "tiny_reasoner"
BATCH, PROMPT, LENGTH = (256, 150, 512) if ON_GPU else (4, 20, 16)
DTYPE = "bfloat16" if ON_GPU else "float32"
CACHE_BYTES = 16_000_000_000 if ON_GPU else 2**28
PROMPTS = [tuple(range(1 + i, 1 + i + PROMPT)) for i in range(BATCH)]
SLEEPS, MOST_GROWTH, MOST_DIFFERENCE = 20, 250_000_000, 0.1


def can_compile() -> bool:
    """FlashInfer's sampler, which takes requests without seeds alone."""
    return ON_GPU and bool(shutil.which("nvcc") or os.environ.get("CUDA_HOME"))


def open_alone(*, seeded: bool, deep_sleep: bool = False) -> RolloutEngine:
    device = select_device(DEVICE)
    if not ON_GPU:
        from megatron_opsft.runtime import cpu_compat

        cpu_compat.install()
    start_distributed(device, ParallelConfig())
    settings = EngineSettings(
        model_dir=MODEL,
        dtype=DTYPE,
        is_cuda=ON_GPU,
        tp=1,
        max_tokens=PROMPT + LENGTH,
        batch_size=BATCH,
        gpu_memory_fraction=0.5,
        kv_cache_bytes=CACHE_BYTES,
        seed=0,
        collective_minutes=5,
        rank=0,
        world_size=1,
        seeded=seeded,
        deep_sleep=deep_sleep,
    )
    tokenizer: Any = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
    table = WeightTable(read_model_shape(MODEL))
    engine = build_engine("vllm", settings, table, tokenizer, device)
    engine.begin_update()
    engine.finish_update(1)
    return engine


def sample(engine: RolloutEngine, *, seeded: bool) -> int:
    """Tokens of one response to each prompt; random weights hardly ever end one."""
    requests = [
        ResponseRequest(problem_id=str(i), sample_index=0, prompt_ids=ids, seed=i)
        for i, ids in enumerate(PROMPTS)
    ]
    sampling = SamplingSettings(
        temperature=1.0,
        top_p=0.95,
        max_response_tokens=LENGTH,
        end_token_ids=(0,),
        seeded=seeded,
    )
    return sum(len(rollout.response_ids) for rollout in engine.generate(requests, sampling))


def tokens_per_second(make: Callable[[], int]) -> float:
    """Of the second call: the first compiles."""
    make()
    began = time.perf_counter()
    return make() / (time.perf_counter() - began)


def ours(seeded: bool) -> float:
    engine = open_alone(seeded=seeded)
    return tokens_per_second(lambda: sample(engine, seeded=seeded))


def bare() -> float:
    """vLLM by itself, as its documentation has it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not can_compile():
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(MODEL),
        load_format="dummy",
        dtype=DTYPE,
        skip_tokenizer_init=True,
        max_model_len=PROMPT + LENGTH,
        max_num_seqs=BATCH,
        kv_cache_memory_bytes=CACHE_BYTES,
        enforce_eager=not ON_GPU,
    )
    params = SamplingParams(
        temperature=1.0, top_p=0.95, max_tokens=LENGTH, ignore_eos=True, detokenize=False
    )
    prompts: Any = [{"prompt_token_ids": list(ids)} for ids in PROMPTS]

    def make() -> int:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return tokens_per_second(make)


def used_bytes() -> int:
    if not ON_GPU:
        return int(psutil.Process().memory_info().rss)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def sleep_and_wake(deep_sleep: bool) -> tuple[list[int], float]:
    """Bytes in use in each of the sleeps; and how far log-probs after a sleep, when the weights
    have come back, are from those before the first one.
    """
    engine = open_alone(seeded=True, deep_sleep=deep_sleep)
    weights = {name: weight.to("cpu", copy=True) for name, weight in engine.weights().items()}
    probe = Sample(problem_id="probe", prompt_ids=PROMPTS[0][:8], response_ids=PROMPTS[0][8:])
    (before,) = engine.score([probe]).log_probs
    used, differences = [], []
    for version in range(2, SLEEPS + 2):
        sample(engine, seeded=True)
        engine.sleep()
        used.append(used_bytes())
        engine.begin_update()
        for name, weight in engine.weights().items():
            weight.copy_(weights[name])
        engine.finish_update(version)
        (after,) = engine.score([probe]).log_probs
        differences += [abs(a - b) for a, b in zip(after, before, strict=True)]
    return used, max(differences)


def test_speed_is_near_that_of_bare_vllm(record_property: Any) -> None:
    skip_without_vllm()
    seeded, alone = apart(ours, True), apart(bare)
    record_property("tokens_per_second", seeded)
    record_property("bare_tokens_per_second", alone)
    fastest = seeded
    if can_compile() or not ON_GPU:
        fastest = apart(ours, False)
        record_property("unseeded_tokens_per_second", fastest)
    if ON_GPU:
        assert fastest > 0.7 * alone


def what_is_wrong(used: list[int], difference: float) -> str:
    """How an engine is not as it was before its sleeps; "" where it is."""
    growth = used[-1] - used[1]
    if growth >= MOST_GROWTH:
        return f"{growth / 1e9:.2f} GB more stay on the GPU after {SLEEPS} sleeps than after 2"
    if not difference < MOST_DIFFERENCE:
        return f"log-probs after a sleep differ by {difference:.3g}"
    return ""


def test_sleeps_leave_no_memory_behind_and_change_nothing(record_property: Any) -> None:
    """The default must pass; `rollout.deep_sleep=true` is tried, and the stage says whether it may
    be used here.
    """
    skip_without_vllm()
    used, difference = apart(sleep_and_wake, False)
    record_property("asleep_gb", used[-1] / 1e9)
    record_property("growth_gb", (used[-1] - used[1]) / 1e9)
    record_property("difference_after_sleep", difference)
    planned = load_hardware("h100" if ON_GPU else "cpu").reserved_bytes + GRAPH_BYTES * ON_GPU
    record_property("planned_gb", planned / 1e9)
    assert what_is_wrong(used, difference) == ""
    if not ON_GPU:  # where nothing sleeps
        return
    try:
        deep_used, deep_difference = apart(sleep_and_wake, True, seconds=150)
        fault = what_is_wrong(deep_used, deep_difference)
        record_property("deep_asleep_gb", deep_used[-1] / 1e9)
    except Exception as error:  # whatever vLLM's experiment ends with
        fault = first_line(error)
    if fault:
        record_property("says", f"leave rollout.deep_sleep=false: with true {fault}")
    else:
        saved = (used[-1] - deep_used[-1]) / 1e9
        record_property("says", f"rollout.deep_sleep=true works here and frees {saved:.2f} GB more")
