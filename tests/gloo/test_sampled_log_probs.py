"""`run.save_logprobs`: what is kept beside the tokens is the log-probability that they had."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_cli import ROOT
from jobs import run_training
from small_run import QUICKSTART, SMALL_RUN
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import World

from megatron_opsft.config.load import load_config
from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.records import Problem
from megatron_opsft.report.sampling import rollouts_of, sample_responses

MODEL = ROOT / "megatron_opsft/assets/tiny_reasoner"
TEMPERATURE = 0.75


def responses_of(run_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted((run_dir / "rollouts").iterdir())
        for line in gzip.decompress(path.read_bytes()).decode().splitlines()
    ]


@pytest.mark.parametrize("layout", [("pp", "cp"), ("tp",)], ids=str)
def test_saved_log_probs_match_hf_in_layout(
    world: World, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """Two of each, with tensor parallelism alone two data-parallel replicas of them."""
    overrides = [
        *SMALL_RUN,
        "run.steps=1",
        "run.save_logprobs=true",
        "train.max_tokens_per_microbatch=500",
        f"rollout.temperature={TEMPERATURE}",
        f"run.dir={tmp_path}",
        *(f"parallel.{name}=2" for name in layout),
    ]
    assert world.run(run_training, 4, QUICKSTART, overrides) == [0] * 4
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rows = responses_of(tmp_path)
    assert len(rows) == 24
    template = load_config(tmp_path / "config.yaml").data.template
    encoder = PromptEncoder(tokenizer=tokenizer, template=template)
    for row in rows:
        problem = Problem(id=row["problem_id"], text=row["problem"], answer=row["gold"])
        prompt, ids = list(encoder.encode(problem)), row["response_ids"]
        assert len(prompt) == row["num_prompt_tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
        logs = (logits / TEMPERATURE).log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        found = torch.tensor(row["log_probs"], dtype=torch.float64)
        assert float((found - logs).abs().max()) < 6e-4  # half of the last decimal, and rounding
        assert len(row["piece_lengths"]) == len(ids)
        whole = row["text"] if row["finish_reason"] == "length" else tokenizer.decode(ids)
        assert sum(row["piece_lengths"]) == len(whole) and whole.startswith(row["text"])
    shown = sample_responses(rollouts_of(tmp_path), 10_000_000)
    place = shown["fields"].index("log_probs")
    saved = {(row["problem_id"], row["sample_index"]): row["log_probs"] for row in rows}
    assert {(row[1], row[2]): row[place] for row in shown["rows"]} == saved
