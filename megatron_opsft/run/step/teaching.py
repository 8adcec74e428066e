"""Packs a step's responses for a teacher, which reads the same tokens under its own prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_opsft.records import Response, TokenIds
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.batch import (
    JudgedBatch,
    PackedUpdate,
    build_microbatches,
    pack_update,
)
from megatron_opsft.runtime.phase import Stopwatch

# Problem id -> token ids of a prompt.
Prompts = Mapping[str, TokenIds]


def teacher_prompts(s: Session, batch: JudgedBatch) -> Prompts:
    """Return the teacher's prompts of the batch's problems; the same on every rank."""
    assert s.teacher is not None
    return {problem.id: s.teacher.encode(problem) for problem in batch.problems}


def pair_lengths(
    batch: JudgedBatch, responses: Sequence[Response], prompts: Prompts
) -> list[int]:
    """Return the number of tokens of each response together with the longer of its two prompts.

    responses: some of the batch's. prompts: the teacher's, by problem id.
    """
    lengths = []
    for response in responses:
        prompt = prompts[batch.problems[response.problem_index].id]
        num_prompt_tokens = max(response.num_prompt_tokens, len(prompt))
        lengths.append(num_prompt_tokens + response.num_tokens)
    return lengths


def without_long_pairs(s: Session, batch: JudgedBatch) -> JudgedBatch:
    """Return the batch without training on responses that are too long under one of the prompts.

    Too long: for a micro-batch, or for the model's positions; no sequence is cut. Their number
    becomes the metric `num_pairs_left_out`.
    """
    max_tokens = min(
        s.config.train.max_tokens_per_microbatch * s.layout.cp_size,
        s.shards.table.shape.max_position_embeddings,
    )
    prompts = teacher_prompts(s, batch)
    credits = []
    num_left_out = 0
    for group in batch.credits:
        lengths = pair_lengths(batch, [credit.response for credit in group], prompts)
        fitting = []
        for credit, length in zip(group, lengths, strict=True):
            if length > max_tokens:
                num_left_out += credit.is_trained
                credit = replace(credit, advantage=0.0, is_trained=False)
            fitting.append(credit)
        credits.append(fitting)
    metrics = {**batch.metrics, "num_pairs_left_out": num_left_out}
    return replace(batch, credits=credits, metrics=metrics)


def pack_taught(s: Session, batch: JudgedBatch, watch: Stopwatch) -> list[PackedUpdate]:
    """Pack the one optimizer step on a batch, with the teacher's hidden states at every response
    token. Called by every rank.

    Micro-batches have room for the longer of the two prompts, so that both models see the same
    responses in the same packs, in the same order.
    """
    assert s.reference is not None, "a teacher is a frozen copy"
    (update,) = s.method.updates(batch.groups, batch.credits)
    prompts = teacher_prompts(s, batch)
    lengths = pair_lengths(batch, update.responses, prompts)
    with watch.phase("train"):
        packed, samples = pack_update(s, batch, update, lengths)
        # The same responses behind the teacher's prompts.
        teacher_samples = {
            index: replace(sample, prompt_ids=prompts[sample.problem_id], routing=b"")
            for index, sample in samples.items()
        }
        teacher_batches = build_microbatches(s, update, packed.indices, teacher_samples)
    with watch.phase("reference"):
        taught = s.reference.with_teacher(packed.microbatches, teacher_batches)
    return [replace(packed, microbatches=taught)]
