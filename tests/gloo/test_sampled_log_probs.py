"""`run.save_logprobs`: what is kept beside the tokens is the log-probability that they had."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from forked_cli import ROOT
from hf_objective import log_probs, of_labels
from jobs import run_training
from small_run import QUICKSTART, SMALL_RUN
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import World

from megatron_opsft.commands.report.sampling import rollouts_of, sample_responses
from megatron_opsft.config.load import load_config
from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.records import Problem

MODEL = ROOT / "megatron_opsft/assets/tiny_reasoner"
TEMPERATURE = 0.75


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
    (file,) = (tmp_path / "rollouts").iterdir()
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert len(rows) == 24
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = load_config(tmp_path / "config.yaml").data.template
    encoder = PromptEncoder(tokenizer=tokenizer, template=template)
    for row in rows:
        prompt = encoder.encode(Problem(id="", text=row["problem"], answer=row["gold"]))
        assert len(prompt) == row["num_prompt_tokens"]
        ids = row["response_ids"]
        with torch.no_grad():
            expected = of_labels(log_probs(model, prompt, ids, TEMPERATURE), ids)
        difference = (torch.tensor(row["log_probs"]) - expected).abs().max()
        assert float(difference) < 6e-4  # half of the last decimal, and rounding
        assert len(row["piece_lengths"]) == len(ids)
        whole = row["text"] if row["finish_reason"] == "length" else tokenizer.decode(ids)
        assert sum(row["piece_lengths"]) == len(whole) and whole.startswith(row["text"])
    shown = sample_responses(rollouts_of(tmp_path), 10_000_000)
    place = shown["fields"].index("log_probs")
    saved = {(row["problem_id"], row["sample_index"]): row["log_probs"] for row in rows}
    assert {(row[1], row[2]): row[place] for row in shown["rows"]} == saved
