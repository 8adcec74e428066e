"""Build the shipped tiny reasoner: its tokenizer, then plain SFT on generated verbose responses.

    python tools/build_tiny_reasoner.py --out megatron_opsft/assets/tiny_reasoner
    python tools/build_tiny_reasoner.py --concise --out runs/tiny_concise
    python tools/build_tiny_reasoner.py --family qwen3_5 --out runs/tiny_qwen3_5

Ten minutes on one CPU core. The seed fixes everything that is drawn; a directory that exists is
replaced file by file. Training sees bare equations (addition and subtraction), then minimal
responses (what to add up), then verbose ones (the habit of checking).

With `--concise`, two minutes: the shipped model learns to answer minimally under the prompt
template `concise`, as large models do of themselves, and stays verbose under its own. So it can be
the teacher of self-distillation, which the shipped one cannot.

With `--family qwen3_5` the model is of that family: three gated delta nets and one attention layer,
of sizes that vLLM's kernels for CPUs accept. It takes about twice as long.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from arithmetic_solutions import equation, minimal_response, verbose_response
from tokenizers import models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    TokenizersBackend,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from megatron_opsft.data.arithmetic import LARGEST, SMALLEST, draw_problems
from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.records import Problem

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + eos_token }}"
    "{%- else %}{{ message['content'] }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{%- endif %}"
)
INSTRUCTIONS = (
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "\nPlease reason step by step, but only keep a minimum draft for each thinking step, with 5"
    " words at most, and put your final answer within \\boxed{}.",
)


class Phase(NamedTuple):
    """A stretch of training on one kind of sequence: equations, minimal, verbose or both."""

    kind: str
    steps: int
    batch_size: int


Example = tuple[list[int], list[float]]  # tokens, and what each counts in the loss
PHASES = {
    "qwen2": (Phase("equations", 150, 24), Phase("minimal", 600, 48), Phase("verbose", 900, 24)),
    # A step takes four times as long.
    "qwen3_5": (Phase("equations", 100, 24), Phase("minimal", 300, 48), Phase("verbose", 450, 24)),
}
MAX_LR, WARMUP_STEPS = 3e-3, 30
# Minimal responses under the concise prompt, and verbose ones, in turn.
CONCISE_PHASES = (Phase("both", 240, 24),)
CONCISE_LR = 1e-3
EQUATIONS_PER_EXAMPLE = 12
# A verbose response computes once and repeats ten times, mostly words: what has to be right, digits
# and the computation, gets more weight. The numbers before "=" cannot be known, and get little.
DECISIVE_WEIGHT, RANDOM_WEIGHT = 4.0, 0.05


TOKENIZERS = {"qwen2": Qwen2Tokenizer, "qwen3_5": Qwen3_5Tokenizer}


def build_tokenizer(family: str, seed: int) -> TokenizersBackend:
    """The family's own rules (NFC, its splitting, bytes), and one token for every word of the task.

    AutoTokenizer builds the family's class for every directory of the family, whatever class the
    directory names, and takes only vocabulary and merges from it: under other rules the ids would
    differ.
    """
    tokenizer_class = TOKENIZERS[family]
    rng = random.Random(seed)
    texts = list(INSTRUCTIONS)
    for problem, _ in zip(draw_problems("train", seed=seed), range(5000), strict=False):
        texts += [problem.text + "\n", verbose_response(rng, problem)]
    tokenizer = tokenizer_class(vocab={}, merges=[]).backend_tokenizer
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    pieces = sorted({piece for text in texts for piece, _ in split(text)})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = list(alphabet), []
    # Piece by piece, what is still apart is merged from the left. Later merges have lower priority,
    # so a piece that was whole stays whole.
    for piece in pieces:
        model = models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges)
        parts = [token.value for token in model.tokenize(piece)]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = ["".join(parts[:2]), *parts[2:]]
            if parts[0] not in vocabulary:
                vocabulary.append(parts[0])
    vocab = {token: index for index, token in enumerate([*vocabulary, EOS, BOS])}
    result = tokenizer_class(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    result.add_tokens([USER, ASSISTANT, THINK, END_THINK])
    return result


def build_model(family: str, tokenizer: TokenizersBackend) -> PreTrainedModel:
    """A Qwen2 of about 0.7 M parameters, or a Qwen3.5 of about 1 M; divisible by TP 2 and PP 2."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "dtype": "float32",
    }
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}
    model: PreTrainedModel
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, rope_parameters=rope))
    else:
        rope |= {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
        config = Qwen3_5TextConfig(
            **sizes,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            rope_parameters=rope,
        )
        model = Qwen3_5ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
    )
    return model


def draw_equations(tokenizer: TokenizersBackend, rng: random.Random) -> Iterator[Example]:
    """Endless rows of equations between one-digit numbers."""
    sums = [
        (left, term)
        for left in range(1, LARGEST + 1)
        for term in (*range(-LARGEST, 1 - SMALLEST), *range(SMALLEST, LARGEST + 1))
        if 1 <= left + term <= LARGEST
    ]
    while True:
        token_ids: list[int] = []
        weights: list[float] = []
        for left, term in rng.choices(sums, k=EQUATIONS_PER_EXAMPLE):
            question, result = equation(left, term, left + term).split("=")
            for text, weight in ((f"{question}=", RANDOM_WEIGHT), (f"{result}.", 1.0)):
                ids = tokenizer.encode(text)
                token_ids += ids
                weights += [weight] * len(ids)
        yield token_ids, weights


def draw_responses(
    tokenizer: TokenizersBackend, rng: random.Random, seed: int, kind: str
) -> Iterator[Example]:
    """Endless training problems with a response; the prompt has weight zero."""
    digits = {tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"}
    for number, problem in enumerate(draw_problems("train", seed=seed)):
        shortest = minimal_response(problem)
        verbose = kind == "verbose" or (kind == "both" and number % 2 == 0)
        response = verbose_response(rng, problem) if verbose else shortest
        template = "concise" if kind == "both" and not verbose else "r1"
        asked = Problem(id="", text=problem.text, answer="")
        prompt_ids = [*PromptEncoder(tokenizer=tokenizer, template=template).encode(asked)]
        response_ids = tokenizer.encode(response + EOS)
        num_computed = len(tokenizer.encode(shortest.split(END_THINK)[0]))
        weights = [
            DECISIVE_WEIGHT if position < num_computed or token in digits else 1.0
            for position, token in enumerate(response_ids)
        ]
        yield prompt_ids + response_ids, [0.0] * len(prompt_ids) + weights


def form_batches(
    tokenizer: TokenizersBackend, phase: Phase, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`phase.steps` batches (tokens [B, S], loss weights [B, S]) of examples of like length.

    Batches vary in length but every token counts alike: weights are scaled by the mean sum of eight
    neighbouring batches. Otherwise short batches would teach to stop early.
    """
    rng = random.Random(seed)
    if phase.kind == "equations":
        examples = draw_equations(tokenizer, rng)
    else:
        examples = draw_responses(tokenizer, rng, seed, phase.kind)
    num_left = phase.steps
    while num_left:
        num_batches = min(8, num_left)
        pool = sorted(
            islice(examples, num_batches * phase.batch_size), key=lambda example: len(example[0])
        )
        scale = num_batches / sum(sum(weights) for _, weights in pool)
        groups = [pool[i : i + phase.batch_size] for i in range(0, len(pool), phase.batch_size)]
        rng.shuffle(groups)
        for group in groups:
            tokens = torch.full((len(group), len(group[-1][0])), tokenizer.pad_token_id)
            weights = torch.zeros(tokens.shape)
            for row, (token_ids, counts) in enumerate(group):
                tokens[row, : len(token_ids)] = torch.tensor(token_ids)
                weights[row, : len(counts)] = scale * torch.tensor(counts)
            yield tokens, weights
        num_left -= num_batches


def train(
    model: PreTrainedModel,
    tokenizer: TokenizersBackend,
    seed: int,
    phases: Sequence[Phase],
    max_lr: float = MAX_LR,
) -> None:
    """All phases under one schedule: warm-up, constant, linear decay to zero over the second half.

    Prints a line every 25 steps.
    """
    num_steps = sum(phase.steps for phase in phases)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    batches = chain.from_iterable(
        form_batches(tokenizer, phase, seed + index) for index, phase in enumerate(phases)
    )
    for step, (tokens, weights) in enumerate(batches, start=1):
        decay = min(1.0, 2 * (1 - step / (num_steps + 1)))
        for group in optimizer.param_groups:
            group["lr"] = max_lr * min(step / WARMUP_STEPS, decay)
        logits = model(input_ids=tokens).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (losses * weights[:, 1:]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == num_steps:
            print(f"step {step}/{num_steps}  loss {loss.item():.4f}", flush=True)


def main(out: Path, seed: int, family: str, *, concise: bool) -> None:
    """Build the tokenizer, train the model, save both."""
    torch.set_num_threads(1)  # the order of float additions, and so the result, depends on it
    torch.manual_seed(seed)
    if concise:
        shipped = resolve_model("tiny_reasoner")
        tokenizer = Qwen2Tokenizer.from_pretrained(shipped)
        model = Qwen2ForCausalLM.from_pretrained(shipped, dtype=torch.float32)
        train(model, tokenizer, seed + 1, CONCISE_PHASES, CONCISE_LR)
    else:
        tokenizer = build_tokenizer(family, seed)
        model = build_model(family, tokenizer)
        print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters")
        train(model, tokenizer, seed + 1, PHASES[family])
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Directory to write.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of weights and training data.")
    parser.add_argument("--family", choices=TOKENIZERS, default="qwen2", help="Class of the model.")
    parser.add_argument(
        "--concise", action="store_true", help="Train the shipped model to obey a concise prompt."
    )
    options = parser.parse_args()
    if options.concise and options.family != "qwen2":
        parser.error("--concise trains the shipped model, which is a Qwen2: leave out --family")
    main(**vars(options))
