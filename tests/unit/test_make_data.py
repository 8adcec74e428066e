"""`data METHOD`: what is chosen from hand-made responses, and a whole run on the tiny reasoner; and
the file of it: what is written is read back.
"""

import gzip
import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev
from unittest.mock import MagicMock

import pytest
import torch
from forked_cli import ROOT, ForkedCli
from responses import facts
from small_run import QUICKSTART, SMALL_RUN
from tiny_models import samples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForTokenClassification,
)

from megatron_opsft.commands.make_data.samples import find_thinking, o1_choice, scores_of
from megatron_opsft.commands.make_data.step_entropy import masked, skipped_steps, steps_of
from megatron_opsft.commands.make_data.tokenskip import split
from megatron_opsft.data import stored_responses as stores
from megatron_opsft.data.stored_responses import StoredResponse, StoredResponses
from megatron_opsft.errors import NonFiniteError, UserError
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.records import Outcome
from megatron_opsft.runtime.device import select_device
from megatron_opsft.trainer.batching.microbatch import build_microbatch

TRAIN = ROOT / "tests/data/train.jsonl"
TOKENIZER = AutoTokenizer.from_pretrained(ASSETS / TINY_REASONER)
SMALL = [QUICKSTART, *SMALL_RUN, "rollout.max_response_tokens=128"]


def made(cli: ForkedCli, out: Path, *words: object, prelude: str = "") -> StoredResponses:
    """The file of `data WORDS`."""
    ended = cli.run(["data", *words, "--out", out], prelude=prelude)
    assert ended.exit_code == 0, ended.stderr
    return stores.read_stored_responses(out)


def test_o1_pruner_compares_with_all_samples_and_keeps_some() -> None:
    """Lref 2200, Aref 0.75, lambda 2."""
    verdicts = {800: "correct", 1600: "correct", 2400: "wrong", 4000: "correct"}
    found = [facts(num_tokens=n, outcome=Outcome(said)) for n, said in verdicts.items()]
    rewards = (2.25, 0.875, -1.5833, 0.05)
    settings = O1Pruner(form="fixed", samples_kept=4)
    assert [r for _, r in o1_choice("p", found, settings, 0)] == pytest.approx(rewards, abs=5.1e-5)
    two = O1Pruner(form="fixed", clip_rewards=True, accuracy_weight=10)
    drawn = [o1_choice(f"p{n}", found, two, seed=0) for n in range(200)]
    kept = {tuple(found.index(response) for response, _ in pair) for pair in drawn}
    assert kept == {*combinations(range(4), 2)}  # every pair, in order
    clipped = {reward for pair in drawn for _, reward in pair}
    assert min(clipped) == -2 and max(clipped) == 4


def test_thinking_is_found_by_texts_of_tokens() -> None:
    assert find_thinking(["a", " b", "</think>", "c"]) == slice(0, 2)
    texts = ["<", "think", ">\n", "a", ".\n</", "think", ">\n", "c"]
    assert find_thinking(texts) == slice(3, 4)
    assert find_thinking(["a", "b"]) is None


def test_step_entropy_masks_the_steps_of_least_entropy_without_separators() -> None:
    ids = [1, 2, 0, 3, 0, 4, 5]
    steps = steps_of(["\n" if token == 0 else "x" for token in ids], "\n")
    skipped = skipped_steps(steps, [0.9, 0.9, 0.0, 0.1, 0.0, 0.4, 0.4], 0.67)
    assert skipped == {1, 2}
    assert masked(ids, steps, skipped, (90, 91)) == (1, 2, 90, 91, 90, 91)
    assert steps_of(["\n", "\n"], "\n") == []
    for num_steps, num_skipped in [(0, 0), (1, 0), (4, 3), (9, 7)]:  # 0.8, rounded down
        flat = [range(i, i + 1) for i in range(num_steps)]
        assert skipped_steps(flat, [1.0] * num_steps) == set(range(num_skipped))


def test_tokenskip_keeps_the_answer_whole() -> None:
    tokenize = {"\n\nThe final answer is: \\boxed{4}": [70, 71]}.__getitem__
    texts, ids = ["so", " 4", " is", "</think>", " \\boxed{4}", "<end>"], [1, 2, 3, 4, 5, 6]
    assert split(ids, texts, tokenize) == (slice(0, 3), (4, 5, 6))
    texts[3] = " or"
    assert split(ids, texts, tokenize) == (slice(0, 5), (70, 71, 6))
    assert split(ids[:3], texts[:3], tokenize) is None


def test_scores_that_are_nan_choose_nothing() -> None:
    """They come back from no sort in an order that means anything."""
    session = MagicMock(device=select_device("cpu"))
    session.config.train.max_tokens_per_microbatch, session.layout.cp_size = 8, 1
    session.trainer.score = lambda part, **how: [(-0.5, math.nan) for _ in part]
    with pytest.raises(NonFiniteError, match="own responses are NaN"):
        scores_of(session, samples(2, seed=0))


KILLED = """
import os
import megatron_opsft.commands.make_data.run as run
ends = [run.shortest, run.shortest, lambda *drawn: os._exit(9)]
run.shortest = lambda *drawn: ends.pop(0)(*drawn)
"""


def test_data_of_crst_are_the_shortest_of_what_training_samples_and_continue_after_a_kill(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """Compared with `rollouts/` of a run's first step; killed before the last of three chunks, a
    problem each, and trained on.
    """
    problems = tmp_path / "three.jsonl"
    problems.write_text("".join(TRAIN.read_text().splitlines(keepends=True)[:3]))
    given = [*SMALL, "run.steps=1", "data.prompts_per_step=3", f"data.train={problems}"]
    given += ["eval.num_problems=1", "rollout.batch_size=1"]
    out, killed = tmp_path / "new" / "crst.parquet", tmp_path / "new" / "killed.parquet"
    stored = made(cli, out, "crst", *given, "method.samples=4")
    words = ["data", "crst", *given, "method.samples=4", "--out", killed]
    assert cli.run(words, prelude=KILLED).exit_code == 9
    partial = killed.with_name("killed.parquet.partial.jsonl")
    with partial.open("ab") as file:
        file.write(b'{"num_problems": 1, "ro')  # torn
    assert (
        f"{partial} was begun with other settings; remove" in cli.run([*words, "run.seed=7"]).error
    )
    ended = cli.run(words)
    assert "3 of 3 problems" in ended.stderr and "2 of 3 problems" not in ended.stderr
    assert killed.read_bytes() == out.read_bytes()
    assert {*out.parent.iterdir()} == {out, killed}

    assert cli.run(["train", *given, f"run.dir={tmp_path / 'run'}"]).exit_code == 0
    (rollouts,) = (tmp_path / "run/rollouts").glob("*.jsonl.gz")
    sampled = [json.loads(line) for line in gzip.decompress(rollouts.read_bytes()).splitlines()]
    assert len(sampled) == 12
    shortest: dict[str, list[int]] = {}
    for row in sorted(sampled, key=lambda row: row["num_tokens"]):  # of equal ones the first
        if row["outcome"] == "correct":
            shortest.setdefault(row["problem_id"], row["response_ids"])
    assert {row.problem_id: list(row.response_ids) for row in stored} == shortest
    assert stored.manifest["method"]["name"] == "crst" and stored.manifest["num_problems"] == 3

    assert "already exists" in cli.run(["data", "crst", *given, "--out", out]).error
    data = ["method.name=crst", f"data.responses={out}", "rollout.group_size=1"]
    trained = cli.run(["train", *given, *data, f"run.dir={tmp_path / 'trained'}"])
    assert trained.exit_code == 0, trained.stderr
    metrics = json.loads((tmp_path / "trained/metrics.jsonl").read_text().splitlines()[0])
    assert len(stored) == 3 and metrics["trained_tokens"] == sum(map(len, shortest.values()))
    data[0] = "method.name=off_policy_sft"
    error = cli.run(["train", *given, *data, f"run.dir={tmp_path / 'other'}"]).error
    assert "were made for method.name=crst, not off_policy_sft" in error


def test_data_of_o1_pruner_hold_rewards_and_log_probs(cli: ForkedCli, tmp_path: Path) -> None:
    keys = ["method.form=fixed", "method.samples=4", "method.z_score=true", "--limit", "6"]
    stored = list(made(cli, tmp_path / "data.parquet", "o1_pruner", *SMALL, *keys))
    advantages = [row.advantage for row in stored]
    assert len(advantages) == 12
    assert (fmean(advantages), pstdev(advantages)) == pytest.approx((0, 1), abs=1e-9)
    for row in stored:
        assert row.log_probs is not None and max(row.log_probs) <= 0
        assert len(row.log_probs) == len(row.response_ids)


def test_data_of_step_entropy_skip_steps_and_answer_rightly(cli: ForkedCli, tmp_path: Path) -> None:
    keys = ["method.share=0.5", 'method.separator=".\\n"', "method.answer_tokens=32"]
    out = tmp_path / "data.parquet"
    stored = list(made(cli, out, "step_entropy", *SMALL, *keys, "--limit", "6"))
    problems = {row["id"]: row for row in map(json.loads, TRAIN.read_text().splitlines())}
    texts = [TOKENIZER.decode(row.response_ids) for row in stored]
    for row, text in zip(stored, texts, strict=True):
        boxed = f"\\boxed{{{problems[row.problem_id]['answer']}}}"
        assert text.partition("</think>")[2].strip().startswith(boxed)
    assert any("[SKIP]" in text for text in texts)


# The package counts tokens with a vocabulary that it downloads; here a byte is a token.
BYTES = """
import tiktoken
ranks = {bytes([value]): value for value in range(256)}
made = tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={})
tiktoken.encoding_for_model = lambda name: made
"""


def save_scorer(directory: Path) -> None:
    """A token classifier of random weights, of the kind that LLMLingua-2 uses; a word's pieces are
    its characters.
    """
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *map(chr, range(33, 127))]
    vocabulary = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=3))
    vocabulary.pre_tokenizer = pre_tokenizers.Metaspace()
    vocabulary.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(
        tokenizer_object=vocabulary,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
    ).save_pretrained(directory)
    torch.manual_seed(0)
    settings = XLMRobertaConfig(
        vocab_size=len(pieces),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=520,
        pad_token_id=1,
    )
    XLMRobertaForTokenClassification(settings).save_pretrained(directory)


def test_llmlingua_shortens_the_reasoning(cli: ForkedCli, tmp_path: Path) -> None:
    """The package itself, beside the untouched responses: those that a ratio of 1 keeps."""
    scorer = tmp_path / "xlm-roberta-large-tiny"
    save_scorer(scorer)
    given = [*SMALL, f"method.scorer={scorer}", "data.max_prompt_tokens=160"]
    texts = []
    for ratio in (0.6, 1):
        words = ["tokenskip", *given, f"method.ratio={ratio}", "--limit", "6"]
        stored = list(made(cli, tmp_path / f"{ratio}.parquet", *words, prelude=BYTES))
        for row in stored:
            assert ("<|eot_id|>0.6<|eot_id|>" in TOKENIZER.decode(row.prompt_ids)) == (ratio < 1)
        texts.append([TOKENIZER.decode(row.response_ids) for row in stored])
    assert texts[0]
    kept = total = 0
    for short, whole in zip(*texts, strict=True):
        (thought, *behind), (before, *same) = short.split("</think>"), whole.split("</think>")
        assert behind == same
        left = iter(before)
        assert all(character in left for character in thought)  # in their order
        kept, total = kept + len(thought), total + len(before)
    assert kept / total == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("crst rollout.max_response_tokens=2 --limit 1", "of the responses to 1 "),
        ("grpo", "method.name=grpo samples while it trains and needs no data; these do: crst"),
        ("step_entropy", "method.answer_tokens=1024 leaves no room for thinking"),
        ("step_entropy method.answer_tokens=8", r"method.separator='\n\n' is not a token"),
        ("stop", "verify.judge=own_judges:last_box does not say where a right answer stands"),
        ("step_entropy method.length_of=thinking", "method.name=step_entropy, as it is set, has"),
        ("tokenskip", "needs the llmlingua package: pip install '.[tokenskip]'"),
    ],
)
def test_data_that_cannot_be_made_are_one_line(
    cli: ForkedCli, tmp_path: Path, words: str, said: str
) -> None:
    out = tmp_path / "data.parquet"
    method, *rest = words.split()
    command = ["data", method, QUICKSTART, *SMALL_RUN, *rest, "--out", out]
    without = "import sys; sys.modules['llmlingua'] = None"  # as if it were not installed
    assert said in cli.run(command, prelude=without).error
    assert not out.exists()


ONE = StoredResponse(problem_id="ä/1", prompt_ids=(1, 150_000), response_ids=(3, 4, 5))
OTHER = replace(ONE, response_ids=(8,), advantage=-0.3, log_probs=(-0.5,))


def test_rows_and_manifest_read_back_and_a_file_without_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    stores.write_stored_responses(path, [ONE, OTHER], {"method": "crst", "samples": 16})
    stored = stores.read_stored_responses(path)
    assert [stored[n] for n in range(len(stored))] == [ONE, OTHER]
    assert (stored.num_prompt_tokens, stored.num_response_tokens) == ([2, 2], [3, 1])
    assert stored.manifest == {"method": "crst", "samples": 16}
    with pytest.raises(UserError, match="no response was chosen"):
        stores.write_stored_responses(path, [], {})
    path.write_text("x")
    said = "cannot be read .*; make it with `megatron-opsft data`"
    for unreadable in (path, tmp_path / "missing.parquet"):
        with pytest.raises(UserError, match=said):
            stores.read_stored_responses(unreadable)


def test_log_probs_of_all_samples_are_old_ones_of_the_micro_batch() -> None:
    three = replace(ONE, log_probs=(-3.0,) * 3)
    for other, expected in ((three, [-0.5, *[-3.0] * 3]), (ONE, None)):
        batch = build_microbatch([OTHER, other], [1.0, 1.0], align=8, device=torch.device("cpu"))
        found = batch.old_log_probs_R
        assert (None if found is None else found.tolist()) == expected
