"""What `megatron-opsft eval` costs beyond its engine: tokens per second with verification, storing
and progress, against the bare engine on the same prompts in the same process.

    python benchmarks/evaluation.py --engine hf
    python benchmarks/evaluation.py --engine vllm --repeats 5

One JSON line: medians over pairs of runs that change their order, and of the pairs' ratios. The
bare Hugging Face engine computes no near-ties again (`exact`), the one of the evaluation does, so
that is part of the price.
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from megatron_opsft.config import VerifyConfig
from megatron_opsft.evaluate.directory import read_manifest, write_manifest
from megatron_opsft.evaluate.engines import open_engine
from megatron_opsft.evaluate.inputs import Inputs, read_inputs
from megatron_opsft.evaluate.run import sample
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.evaluate.work import missing_requests
from megatron_opsft.rollout.engine import RolloutEngine
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.job import Job, join_job
from megatron_opsft.verify.verifier import Verifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny_reasoner")
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--benchmark", default="arithmetic")
    parser.add_argument("--file", help="local file of the benchmark")
    parser.add_argument("--limit", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = select_device("auto")
    job = join_job(device, timedelta(minutes=10))
    rates: dict[str, list[float]] = {"bare": [], "eval": []}
    engine: RolloutEngine | None = None
    with tempfile.TemporaryDirectory() as scratch, Verifier(VerifyConfig(workers=1)) as verifier:
        for repeat in range(options.repeats + 1):
            settings = EvalSettings(
                model=options.model,
                engine=options.engine,
                benchmarks=(options.benchmark,),
                data={options.benchmark: options.file} if options.file else {},
                limit=options.limit,
                samples=options.samples,
                max_tokens=options.max_tokens,
                batch_size=options.batch_size,
                out=Path(scratch) / str(repeat),
            )
            inputs = read_inputs(settings, device)
            if engine is None:
                engine = open_engine(inputs, inputs.model, job)
                engine.load_weights(inputs.model.model.tensors(), version=0)
            for name in ("bare", "eval") if repeat % 2 else ("eval", "bare"):
                if name == "bare":
                    rate = measure_bare(inputs, engine)
                else:
                    rate = measure_eval(inputs, engine, job, f"repeat{repeat}", verifier)
                if repeat:  # the first one warms up
                    rates[name].append(rate)
        figures = {name: statistics.median(values) for name, values in rates.items()}
        ratios = [a / b for a, b in zip(rates["eval"], rates["bare"], strict=True)]
        print(
            json.dumps(
                {
                    "engine": options.engine,
                    "device": device.torch_device.type,
                    "bare_tokens_per_second": round(figures["bare"]),
                    "eval_tokens_per_second": round(figures["eval"]),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
                }
            )
        )


def measure_bare(inputs: Inputs, engine: RolloutEngine) -> float:
    """Tokens per second of the engine alone, given all requests at once."""
    requests = missing_requests(
        inputs.benchmarks, inputs.model.prompts, {b.name: set() for b in inputs.benchmarks}, 0
    )
    sampling = inputs.sampling(inputs.model)
    if isinstance(engine, HfEngine):
        noise, engine.passes.noise = engine.passes.noise, 0.0
        start = time.perf_counter()
        num_tokens = sum(len(r.response_ids) for r in engine.generate(requests, sampling))
        seconds = time.perf_counter() - start
        engine.passes.noise = noise
        return num_tokens / seconds
    from vllm import SamplingParams

    llm = engine._llm
    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    params = [
        SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_response_tokens,
            seed=request.seed,
            stop_token_ids=list(sampling.end_token_ids),
            detokenize=False,
        )
        for request in requests
    ]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)


def measure_eval(
    inputs: Inputs, engine: RolloutEngine, job: Job, name: str, verifier: Verifier
) -> float:
    """Tokens per second from the first request to the last stored verdict."""
    out = inputs.settings.out
    out.mkdir(parents=True)
    write_manifest(out, {"identity": {"data": {}}})
    sample(inputs, inputs.model, job, name, verifier, engine)
    return read_manifest(out)["starts"][0]["tokens_per_second"]


if __name__ == "__main__":
    main()
