"""The embedded task: what it promises of its problems and of its reference responses; and the
shipped tiny reasoner: its tokens, its skill at the task.
"""

import json
import random
import re
from itertools import islice
from statistics import fmean

import pytest
import torch
from arithmetic_solutions import minimal_response, verbose_response
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatron_opsft.data.arithmetic import NUM_PROBLEMS, draw_problems, load_arithmetic
from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER

DIRECTORY = ASSETS / TINY_REASONER
SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]


@pytest.mark.slow
def test_splits_share_no_problem_and_no_terms() -> None:
    train, test = load_arithmetic("train"), load_arithmetic("test")
    assert (len(train), len(test)) == (NUM_PROBLEMS["train"], NUM_PROBLEMS["test"])
    assert len({problem.text for problem in train + test}) == len(train) + len(test)
    train_terms, test_terms = (
        {problem.terms for problem in islice(draw_problems(split, seed=0), num)}
        for split, num in (("train", 20_000), ("test", 6000))
    )
    assert train_terms.isdisjoint(test_terms)
    assert len(train_terms) > 1000 and len(test_terms) > 200


def test_answer_is_the_sum_and_is_not_in_the_prompt() -> None:
    for problem in islice(draw_problems("train", seed=1), 2000):
        numbers = [int(number) for number in re.findall(r"\d+", problem.text)]
        assert numbers == [abs(term) for term in problem.terms]
        assert sum(problem.terms) == problem.answer and problem.answer not in numbers
        assert min(problem.partials) >= 1


def test_every_equation_of_a_response_holds_and_the_number_of_checks_varies() -> None:
    rng, counts = random.Random(0), []
    for problem in islice(draw_problems("train", seed=2), 1000):
        response, least = verbose_response(rng, problem), minimal_response(problem)
        assert response.startswith(least.split("\n</think>")[0])
        assert response.endswith(f"\n</think>\n\\boxed{{{problem.answer}}}")
        for left, right, result in re.findall(r"(\d+)([+-]\d+)=(\d+)", response):
            assert int(left) + int(right) == int(result)
        counts.append(response.count("\n") - least.count("\n"))
    assert min(counts) == 0 and max(counts) == 16
    assert 40 <= counts.count(0) <= 120


def test_problems_never_change_and_an_unknown_split_is_a_user_error() -> None:
    problem = load_arithmetic("test")[17]
    text = "Max starts with 7 pens. Then Max sells 6. How many are there in the end?"
    assert (problem.id, problem.answer, problem.text) == ("arithmetic-test-17", "1", text)
    with pytest.raises(UserError, match="no split 'validation'"):
        load_arithmetic("validation")  # type: ignore[arg-type]


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
