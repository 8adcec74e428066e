"""Kinds of tokens, their text, and the memory that D_t takes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_cli import ROOT
from live_memory import LiveMemory
from tiny_models import samples
from transformers import AutoTokenizer

from megatron_opsft.diagnose.divergence import diverge
from megatron_opsft.diagnose.kinds import kinds_of
from megatron_opsft.diagnose.vocabulary import kl_divergence
from megatron_opsft.loss.loss_memory import Chunks
from megatron_opsft.loss.output_head import OutputHead
from megatron_opsft.rollout.pieces import pieces_of

HIDDEN = 8


@pytest.mark.parametrize(
    ("tokens", "kinds"),
    [
        (
            ["Wait", ",", " I", " think", "\n"],
            "transition word|punctuation|pronoun|word|line break",
        ),
        (["Al", "tern", "atively"], "transition word|transition word|transition word"),
        (["Wait", "ing"], "word|word"),
        (["So", " 12", "+", "=", "."], "word|number|mathematics|mathematics|punctuation"),
        (["</think>", "<|im_end|>", "</s>"], "end of thinking|end of response|end of response"),
        (["", " "], "punctuation|punctuation"),
    ],
)
def test_kinds_of_tokens(tokens: list[str], kinds: str) -> None:
    assert "|".join(kinds_of(tokens)) == kinds


@pytest.mark.parametrize(
    "text", ["8-6=2. Wait, 8-6=2.\n</think>\n\\boxed{2}", "ein Öl, 数 und 🙂 x"]
)
def test_pieces_make_up_the_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "megatron_opsft/assets/tiny_reasoner")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.fixture
def _one_rank() -> Iterator[None]:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def stand_in(vocab_size: int, seed: int) -> Any:
    """A model that has an output layer and nothing before it."""
    draw = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(HIDDEN, vocab_size, bias=False)
    layer.weight.data.normal_(generator=draw)
    head = OutputHead(weight_VH=layer.weight, vocab_size=vocab_size, group=dist.group.WORLD)

    @torch.no_grad()
    def hidden_states(batch: Any) -> Any:
        return torch.randn(len(batch.tokens_T), HIDDEN, generator=draw), head

    return SimpleNamespace(model=layer, hidden_states=hidden_states)


def peak_bytes(vocab_size: int, num_samples: int) -> int:
    p, q = (stand_in(vocab_size, seed) for seed in (0, 1))
    with LiveMemory() as memory:
        diverge(p, q, samples(num_samples), align=1, chunks=Chunks(tokens=16, rows=512))
    return memory.peak_bytes


@pytest.mark.usefixtures("_one_rank")
def test_memory_does_not_grow_with_the_vocabulary_and_by_no_logits_with_tokens() -> None:
    small, wide = peak_bytes(4096, 15), peak_bytes(16384, 15)
    assert wide < 1.05 * small
    more_tokens = sum(len(s.response_ids) for s in samples(60)) - sum(
        len(s.response_ids) for s in samples(15)
    )
    grown = peak_bytes(4096, 60) - small
    assert more_tokens > 1000
    assert grown < 4 * 256 * more_tokens  # a sixteenth of their logits


@pytest.mark.usefixtures("_one_rank")
def test_divergence_holds_two_chunks_of_logits_at_a_time() -> None:
    weight = torch.randn(30_000, 8)
    head = OutputHead(weight_VH=weight, vocab_size=30_000, group=dist.group.WORLD)
    hidden, positions = torch.randn(900, 8), torch.arange(900)
    with LiveMemory() as memory:
        kl_divergence(hidden, head, hidden, head, positions, chunks=Chunks(tokens=400, rows=7000))
    assert memory.peak_bytes < 2 * 400 * 7000 * 4 + 5 * 2**20
