"""The shipped tiny reasoner: its tokens, its skill at the task."""

import json
import re
from itertools import islice
from statistics import fmean

import pytest
import torch
from arithmetic_solutions import minimal_response
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatron_opsft.data.arithmetic import draw_problems, load_arithmetic
from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.storage.model_paths import ASSETS, TINY_REASONER

DIRECTORY = ASSETS / TINY_REASONER
SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]


def test_directory_is_small_and_splits_over_tp2_and_pp2() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 4 * 2**20
    config = json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers"):
        assert config[key] % 2 == 0


def test_auto_tokenizer_and_plain_file_agree_on_ids() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    literal = PreTrainedTokenizerFast.from_pretrained(DIRECTORY)
    assert literal.get_vocab() == tokenizer.get_vocab()
    texts = [problem.text for problem in load_arithmetic("test")[:200]]
    texts += [minimal_response(problem) for problem in islice(draw_problems("test", seed=0), 200)]
    texts += ['Grüße, 你好! "x" \t\n\n x^2 + \\frac{1}{2}y <think>12345</think>']
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == literal.encode(text)
        assert tokenizer.decode(ids) == text
    assert all(len(tokenizer.encode(token)) == 1 for token in (*SPECIAL, "<think>", "</think>"))
    assert tokenizer.eos_token == SPECIAL[1] == tokenizer.pad_token
    ended = tokenizer.encode("</think>" + SPECIAL[1])
    assert tokenizer.decode(ended, skip_special_tokens=True) == "</think>"


@pytest.mark.slow
@torch.no_grad()
def test_base_is_right_and_wordy_on_held_out_problems() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    problems = load_arithmetic("test")[:96]
    encoder = PromptEncoder(tokenizer=tokenizer, template="r1")
    prompts = {"input_ids": [list(encoder.encode(problem)) for problem in problems]}
    batch = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(
        **batch, do_sample=True, temperature=1.0, top_p=0.95, top_k=0, max_new_tokens=256
    )
    found = output[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    boxed = [re.findall(r"\\boxed\{(\d+)\}", text)[-1:] for text in texts]
    assert fmean(b == [p.answer] for b, p in zip(boxed, problems, strict=True)) >= 0.93
    least = map(minimal_response, islice(draw_problems("test", seed=0), 96))
    shortest, wordy = (fmean(len(tokenizer.encode(t)) + 1 for t in side) for side in (least, texts))
    assert shortest <= 0.2 * wordy
