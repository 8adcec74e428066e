"""The identity of an evaluation: the settings that decide its samples, and the model itself."""

from dataclasses import asdict
from typing import Any

from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.evaluate.inputs import Inputs, Subject
from megatron_opsft.evaluate.model import EvalModel
from megatron_opsft.rollout.limits import engine_traits
from megatron_opsft.runtime.libraries import installed_versions
from megatron_opsft.verify.judge_source import describe_judge


def comparable_settings(inputs: Inputs) -> dict[str, Any]:
    """JSON of whatever two results may differ in, apart from model and size of the benchmarks."""
    settings, versions = inputs.settings, installed_versions()
    deer = settings.deer.model_dump(mode="json") if settings.method == "deer" else {}
    engine = engine_traits(settings.engine)
    engine_version = next(versions[name] for name in engine.packages if name in versions)
    return {
        "method": settings.method,
        **({"deer": deer} if deer else {}),
        "template": settings.template,
        **({"system_prompt": settings.system_prompt} if settings.system_prompt else {}),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": inputs.max_tokens,
        "seed": settings.seed,
        "engine": settings.engine,
        "engine_version": engine_version,
        "torch": versions["torch"],
        "dtype": inputs.dtype,
        "device": inputs.device.torch_device.type,
        **({"tp": settings.tp} if engine.tensor_parallel else {}),
        "verifier": describe_judge(settings.verify, f"math-verify {versions['math-verify']}"),
        "verify_timeout": settings.verify_timeout,
        "data": {benchmark.name: benchmark.data.sha256 for benchmark in inputs.benchmarks},
    }


def identity(inputs: Inputs, subject: Subject) -> dict[str, Any]:
    """All that decides a sample. Reads the whole model for its hash: rank 0 alone calls it."""
    return comparable_settings(inputs) | model_identity(subject.model)


def model_identity(model: EvalModel) -> dict[str, Any]:
    """JSON of the model's part: weights, what config.json makes of them, tokenizer, end tokens."""
    return {
        "model_sha256": model.weights_sha256(),
        "shape": asdict(model.table.shape),
        "tokenizer_sha256": model.tokenizer_sha256(),
        "end_tokens": sorted(model.end_tokens),
    }


def manifest(inputs: Inputs, subject: Subject, identified: dict[str, Any]) -> dict[str, Any]:
    """manifest.json but for its starts."""
    first = next(iter(subject.prompts.values()))
    return {
        "model": subject.model.name,
        "model_path": str(subject.model.directory),
        "identity": identified,
        "benchmarks": {b.name: _describe(b) for b in inputs.benchmarks},
        "settings": inputs.settings.model_dump(mode="json"),
        "versions": installed_versions(),
        "example_prompt": subject.model.tokenizer.decode(first),
    }


def _describe(benchmark: Benchmark) -> dict[str, Any]:
    return {
        "source": benchmark.data.name,
        "sha256": benchmark.data.sha256,
        "num_problems": len(benchmark.problems),
        "of_problems": len(benchmark.data.problems),
        "samples_per_problem": benchmark.samples,
    }
