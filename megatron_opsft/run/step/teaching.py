"""A step's responses as a teacher reads them: the same tokens under its own prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_opsft.records import Response, Sample
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.batch import JudgedBatch, PackedUpdate, pack_update
from megatron_opsft.runtime.phase import Stopwatch

Prompts = Mapping[str, tuple[int, ...]]


def teacher_prompts(s: Session, batch: JudgedBatch) -> Prompts:
    """The teacher's prompt of each problem, by problem id; the same on every rank."""
    assert s.teacher is not None
    return {problem.id: s.teacher.encode(problem) for problem in batch.problems}


def pair_lengths(
    batch: JudgedBatch, responses: Sequence[Response], prompts: Prompts
) -> list[int]:
    """Of each response the tokens of the longer sequence: the student's, or the teacher's."""
    return [
        response.num_tokens
        + max(
            response.num_prompt_tokens,
            len(prompts[batch.problems[response.problem_index].id]),
        )
        for response in responses
    ]


def without_long_pairs(s: Session, batch: JudgedBatch) -> JudgedBatch:
    """The batch, whose update does not learn from a response that, under either prompt, is longer
    than a micro-batch or than the model's positions: nothing is cut. How many there are is a
    metric.
    """
    most = min(
        s.config.train.max_tokens_per_microbatch * s.layout.cp_size,
        s.shards.table.shape.max_position_embeddings,
    )
    lengths = pair_lengths(batch, batch.responses, teacher_prompts(s, batch))
    weights = batch.weights
    kept = [
        (advantage, trained) if length <= most else (0.0, False)
        for length, advantage, trained in zip(
            lengths, weights.advantages, weights.trained, strict=True
        )
    ]
    advantages, trained = zip(*kept, strict=True)
    left_out = sum(weights.trained) - sum(trained)
    return replace(
        batch,
        weights=replace(weights, advantages=advantages, trained=trained),
        metrics={**batch.metrics, "num_pairs_left_out": left_out},
    )


def pack_taught(s: Session, batch: JudgedBatch, watch: Stopwatch) -> list[PackedUpdate]:
    """The one optimizer step on a batch, with the teacher's hidden states at every response token.
    Called by every rank.

    Micro-batches have room for the longer of the two prompts, so that both models see the same
    responses in the same packs, in the same order.
    """
    assert s.reference is not None, "a teacher is a frozen copy"
    (update,) = s.method.updates(batch.groups, batch.weights)
    prompts = teacher_prompts(s, batch)
    lengths = pair_lengths(batch, update.responses, prompts)
    held: dict[int, Sample] = {}

    def fetch(indices_of: Sequence[Sequence[int]]) -> Mapping[int, Sample]:
        held.update(
            s.fetch(batch.rollouts, batch.problems, update.responses, indices_of)
        )
        return held

    def prompted(indices_of: Sequence[Sequence[int]]) -> Mapping[int, Sample]:
        return {
            index: replace(sample, prompt_ids=prompts[sample.problem_id], routing=b"")
            for index, sample in held.items()
        }

    with watch.phase("train"):
        packed = pack_update(s, update, fetch, lengths)
        of_teacher = pack_update(s, update, prompted, lengths)
    with watch.phase("reference"):
        taught = s.reference.with_teacher(packed.microbatches, of_teacher.microbatches)
    return [replace(packed, microbatches=taught)]
