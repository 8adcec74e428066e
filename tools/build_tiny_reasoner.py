"""Build the shipped tiny reasoner: its tokenizer, then plain SFT on generated verbose responses.

    python tools/build_tiny_reasoner.py --out megatron_opsft/assets/tiny_reasoner

Some minutes on a CPU core. The seed fixes everything that is drawn; a directory that exists is
replaced file by file. Training first sees minimal responses (sums are learnt from many short
sequences), then verbose ones (the habit of checking).
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from tokenizers import models, pre_tokenizers
from transformers import (
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from megatron_opsft.data.arithmetic import draw_problems
from megatron_opsft.data.arithmetic_solutions import (
    Redundancy,
    minimal_response,
    verbose_response,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of training on minimal or on verbose responses."""

    steps: int
    batch_size: int
    verbose: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and its response as token ids.

    The first `num_computed` tokens of the response do the sums, the last `num_final` answer.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    num_computed: int
    num_final: int

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


REDUNDANCY = Redundancy(stop_probability=0.07, max_checks=16, slip_probability=0.0)
PHASES = (
    Phase(steps=400, batch_size=32, verbose=False),
    Phase(steps=800, batch_size=24, verbose=True),
)
NUM_STEPS = sum(phase.steps for phase in PHASES)
WARMUP_STEPS = 20
# A verbose response computes once and repeats ten times: its few decisive tokens get more weight.
DECISIVE_WEIGHT = 3.0


def build_tokenizer(seed: int) -> Qwen2Tokenizer:
    """Qwen2's own rules (NFC, its splitting, bytes), and one token for every word of the task.

    AutoTokenizer builds Qwen2Tokenizer for every Qwen2 directory, whatever class the directory
    names, and takes only vocabulary and merges from it: under other rules the ids would differ.
    """
    rng = random.Random(seed)
    texts = list(INSTRUCTIONS)
    for problem, _ in zip(draw_problems("train", seed=seed), range(5000), strict=False):
        texts += [problem.text + "\n", verbose_response(rng, problem, REDUNDANCY)]
    tokenizer = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
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
    result = Qwen2Tokenizer(
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


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """A Qwen2 of about 0.7 M parameters; head size 32, divisible by TP 2 and PP 2."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
    )
    return model


def encode_examples(tokenizer: Qwen2Tokenizer, phase: Phase, seed: int) -> Iterator[Example]:
    """An endless stream of training examples of the phase."""
    rng = random.Random(seed)
    for problem in draw_problems("train", seed=seed):
        shortest = minimal_response(problem)
        response = verbose_response(rng, problem, REDUNDANCY) if phase.verbose else shortest
        computed, final = shortest.split(END_THINK)
        prompt = f"{BOS}{USER}{problem.text}{INSTRUCTIONS[0]}{ASSISTANT}{THINK}\n"
        yield Example(
            prompt_ids=tokenizer.encode(prompt),
            response_ids=tokenizer.encode(response + EOS),
            num_computed=len(tokenizer.encode(computed)),
            num_final=len(tokenizer.encode(final + EOS)),
        )


def form_batches(
    tokenizer: Qwen2Tokenizer, phase: Phase, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`phase.steps` batches (tokens [B, S], loss weights [B, S]) of examples of like length.

    Batches vary in length but every token counts alike: the weights are scaled by the mean number
    of response tokens of neighbouring batches. Otherwise short batches would teach to stop early.
    """
    examples = encode_examples(tokenizer, phase, seed)
    rng = random.Random(seed)
    num_left = phase.steps
    while num_left:
        num_batches = min(16, num_left)
        pool = sorted(islice(examples, num_batches * phase.batch_size), key=len)
        scale = num_batches / sum(len(example.response_ids) for example in pool)
        groups = [pool[i : i + phase.batch_size] for i in range(0, len(pool), phase.batch_size)]
        rng.shuffle(groups)
        for group in groups:
            tokens = torch.full((len(group), len(group[-1])), tokenizer.pad_token_id)
            weights = torch.zeros(tokens.shape)
            for row, example in enumerate(group):
                start, end = len(example.prompt_ids), len(example)
                tokens[row, :end] = torch.tensor(example.prompt_ids + example.response_ids)
                weights[row, start:end] = scale
                weights[row, start : start + example.num_computed] *= DECISIVE_WEIGHT
                weights[row, end - example.num_final : end] *= DECISIVE_WEIGHT
            yield tokens, weights
        num_left -= num_batches


def build_optimizers(model: Qwen2ForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices, AdamW for embedding, norms and biases.

    With AdamW alone the sums take several times as many steps.
    """
    parameters = list(model.parameters())
    embedding = model.get_input_embeddings().weight
    matrices = [value for value in parameters if value.ndim == 2 and value is not embedding]
    others = [value for value in parameters if value.ndim == 1 or value is embedding]
    return (
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    )


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, seed: int) -> None:
    """All phases under one schedule: warm-up, constant, linear decay to zero over the second half.

    Prints a line every 25 steps.
    """
    optimizers = build_optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    max_lrs = [group["lr"] for group in groups]
    batches = chain.from_iterable(
        form_batches(tokenizer, phase, seed + index) for index, phase in enumerate(PHASES)
    )
    started = time.monotonic()
    for step, (tokens, weights) in enumerate(batches, start=1):
        decay = min(1.0, 2 * (1 - step / (NUM_STEPS + 1)))
        for group, max_lr in zip(groups, max_lrs, strict=True):
            group["lr"] = max_lr * min(step / WARMUP_STEPS, decay)
        logits = model(input_ids=tokens).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (losses * weights[:, 1:]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == NUM_STEPS:
            rate = step / (time.monotonic() - started)
            typer.echo(
                f"step {step}/{NUM_STEPS}  loss {loss.item():.4f}  {rate:.1f} steps/s"
                f"  {(NUM_STEPS - step) / rate:.0f} s left"
            )


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Write the Hugging Face directory."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and training data.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Build the tokenizer, train the model, save both."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer)
    typer.echo(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters")
    train(model, tokenizer, seed + 1)
    save(model, tokenizer, out)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
