"""Whether vLLM's responses have the same distribution with drafts and without.

    python benchmarks/vllm_speculation.py [section.key=value ...] [--responses N] [--seeds S ...]
        [--repeatable] [--draft-model DIRECTORY]

The engine of a configuration (the quickstart's) samples N responses with rollout.speculation=suffix
and N without, to the same 25 problems with the same weights, each in a process of its own and with
random numbers of its own. What is compared, by chi-square of two counts: the first token of each
response (no draft has touched it), the sixteenth (drafts have), and the length. Values that are
expected less than ten times are counted together. --repeatable: no clock decides how long drafts
are, so that there are many of them also where they do not pay. --draft-model: in place of
rollout.speculation=suffix; `random` makes an EAGLE-3 head with random weights that knows one
token, a space, and so is right as often as the model says one.

Prints a JSON line for every seed: the three p-values, seconds of both, and the counts of drafts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from megatron_opsft.config_file import load_config
from megatron_opsft.rollout.vllm.proposer import SuffixProposer
from megatron_opsft.session import open_session
from megatron_opsft.storage.model_paths import local_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from draft_heads import write_head  # noqa: E402

CONFIG = Path(__file__).parents[1] / "examples/configs/quickstart.yaml"
NUM_PROBLEMS, LATER, NUM_PARTS = 25, 15, 4
STEPS = {"drafts": 1, "off": 2}  # responses' seeds come from the step


def random_head(directory: Path, overrides: Sequence[str]) -> Path:
    """A head for the configuration's model."""
    model_dir = local_model(load_config(CONFIG, overrides).model.path)
    assert model_dir is not None
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    kept = tokenizer.encode(" ", add_special_tokens=False)
    return write_head(directory, model_dir, kept=kept)


def sample(side: str, drafts: str, num_responses: int, seed: int, overrides: Sequence[str]) -> None:
    """One side; prints its counts."""
    with tempfile.TemporaryDirectory() as directory:
        fixed = [
            "rollout.engine=vllm",
            *([drafts] if side == "drafts" else []),
            f"data.prompts_per_step={NUM_PROBLEMS}",
            f"run.dir={directory}",
        ]
        config = load_config(CONFIG, [*fixed, *overrides])
        with open_session(config) as s:
            s.sync.push(0, s.probes(0))
            engine = s.sampler.engine
            problems, each = s.problems_of(1), num_responses // NUM_PROBLEMS // NUM_PARTS
            responses, start = [], time.perf_counter()
            for part in range(NUM_PARTS):  # later parts find the earlier ones in the history
                step = 1000 * seed + 10 * part + STEPS[side]
                responses += s.sampler.sample(problems, s.settings, num_samples=each, step=step)
            seconds = time.perf_counter() - start
            figures = engine.take_draft_counts().figures()
    found = {
        "first": [r.response_ids[0] for r in responses],
        "later": [r.response_ids[LATER] if len(r.response_ids) > LATER else -1 for r in responses],
        "length": [len(r.response_ids) for r in responses],
        "seconds": seconds,
        "figures": figures,
    }
    print(json.dumps(found))


def p_value(one: Sequence[int], other: Sequence[int]) -> float:
    """That samples of one distribution differ as much or more, by chi-square."""
    counts = Counter(one), Counter(other)
    share = len(one) / (len(one) + len(other))
    cells, rest = [], [0, 0]
    for value in sorted(counts[0] | counts[1]):
        pair = [counts[0][value], counts[1][value]]
        rest = [a + b for a, b in zip(rest, pair, strict=True)]
        if sum(rest) * min(share, 1 - share) >= 10:
            cells.append(rest)
            rest = [0, 0]
    if cells:
        cells[-1] = [a + b for a, b in zip(cells[-1], rest, strict=True)]
    if len(cells) < 2:
        return 1.0
    statistic = sum(
        (pair[side] - sum(pair) * part) ** 2 / (sum(pair) * part)
        for pair in cells
        for side, part in enumerate((share, 1 - share))
    )
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def compare(
    drafts: str, num_responses: int, seed: int, overrides: Sequence[str], *, repeatable: bool
) -> dict[str, Any]:
    """Both sides of a seed."""
    sides = {}
    for side in STEPS:
        command = [sys.executable, __file__, "--responses", str(num_responses)]
        command += ["--seeds", str(seed), "--side", side, "--drafts", drafts, *overrides]
        command += ["--repeatable"] if repeatable else []
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        sides[side] = json.loads(ended.stdout.splitlines()[-1])
    with_drafts, without = sides["drafts"], sides["off"]
    return {
        "seed": seed,
        "responses": len(without["first"]),
        **{
            f"p_{name}": round(p_value(with_drafts[name], without[name]), 4)
            for name in ("first", "later", "length")
        },
        "seconds_with": round(with_drafts["seconds"], 1),
        "seconds_without": round(without["seconds"], 1),
        **{key: round(value, 3) for key, value in with_drafts["figures"].items()},
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--responses", type=int, default=5000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--repeatable", action="store_true", help="lengths of drafts by no clock")
    parser.add_argument("--draft-model", help="a directory, or `random`")
    parser.add_argument("--drafts", default="rollout.speculation=suffix", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=list(STEPS), help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as made:
        drafts, head = args.drafts, args.draft_model
        if head is not None:
            head = random_head(Path(made), args.overrides) if head == "random" else head
            drafts = f"rollout.draft_model={head}"
        for seed in args.seeds:
            if args.side:
                SuffixProposer.timed = not args.repeatable
                sample(args.side, drafts, args.responses, seed, args.overrides)
            else:
                found = compare(
                    drafts, args.responses, seed, args.overrides, repeatable=args.repeatable
                )
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
