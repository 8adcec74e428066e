"""The shipped tiny reasoner: its prompt, its tokens, its skill at the task."""

import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import megatron_opsft
from megatron_opsft.data.arithmetic import draw_problems, load_arithmetic
from megatron_opsft.data.arithmetic_solutions import minimal_response

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


def test_prompt_has_the_paper_s_format(tokenizer: PreTrainedTokenizerBase) -> None:
    expected = (
        "<｜begin▁of▁sentence｜><｜User｜>Tom has 3 pens and buys 4. How many are there in the end?"
        f"{INSTRUCTION}<｜Assistant｜><think>\n"
    )
    prompt = prompt_of(tokenizer, "Tom has 3 pens and buys 4. How many are there in the end?")
    assert prompt == expected


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
    problems = load_arithmetic("test", num_problems=96)
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
