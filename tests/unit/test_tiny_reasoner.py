"""The shipped tiny reasoner: its prompt, its tokens, its skill at the task."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from arithmetic_solutions import minimal_response
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import megatron_opsft
from megatron_opsft.data.arithmetic import draw_problems, load_arithmetic

DIRECTORY = Path(megatron_opsft.__file__).parent / "assets" / "tiny_reasoner"
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MAX_TOKENS = 256


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()


def prompt_of(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    messages = [{"role": "user", "content": text + INSTRUCTION}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_directory_is_small_and_splits_over_tp2_and_pp2() -> None:
    files = [path for path in DIRECTORY.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4 * 2**20
    config = json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers"):
        assert config[key] % 2 == 0


def test_auto_tokenizer_and_plain_file_agree_on_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    literal = PreTrainedTokenizerFast.from_pretrained(DIRECTORY)
    assert literal.get_vocab() == tokenizer.get_vocab()
    texts = [prompt_of(tokenizer, problem.text) for problem in load_arithmetic("test")[:200]]
    texts += [minimal_response(problem) for problem in islice(draw_problems("test", seed=0), 200)]
    texts += ['Grüße, 你好! "x" \t\n\n x^2 + \\frac{1}{2}y <think>12345</think>']
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == literal.encode(text)
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_single_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    names = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
    for token in (*names, "<think>", "</think>"):
        assert len(tokenizer.encode(token)) == 1
    assert tokenizer.eos_token == names[1] == tokenizer.pad_token
    assert tokenizer.decode(tokenizer.encode("</think>" + names[1]), skip_special_tokens=True) == (
        "</think>"
    )


@pytest.mark.slow
@torch.no_grad()
def test_base_is_right_and_wordy_on_held_out_problems(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    problems = load_arithmetic("test")[:96]
    prompts = [prompt_of(tokenizer, problem.text) for problem in problems]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(0)
    output = model.generate(
        **batch, do_sample=True, temperature=1.0, top_p=0.95, top_k=0, max_new_tokens=MAX_TOKENS
    )
    num_correct, num_tokens = 0, 0
    for problem, row in zip(problems, output[:, batch["input_ids"].shape[1] :], strict=True):
        text = tokenizer.decode(row, skip_special_tokens=True)
        num_correct += re.findall(r"\\boxed\{(\d+)\}", text)[-1:] == [problem.answer]
        num_tokens += len(tokenizer.encode(text)) + 1
    shortest = [
        len(tokenizer.encode(minimal_response(problem))) + 1
        for problem in islice(draw_problems("test", seed=0), 96)
    ]
    assert num_correct / len(problems) >= 0.93
    assert sum(shortest) / len(shortest) <= 0.2 * num_tokens / len(problems)
