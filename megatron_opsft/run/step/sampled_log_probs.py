"""Log-probabilities of a step's sampled tokens, for the rollouts that are saved."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice

from megatron_opsft.methods.updates import Update
from megatron_opsft.records import Sample, TokenScores
from megatron_opsft.rollout.requests import split_text_by_token
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.batch import JudgedBatch, pack_update
from megatron_opsft.runtime.distributed import deal, join_over_context
from megatron_opsft.runtime.phase import Stopwatch

_DECIMALS = 3


def score_sampled(
    s: Session, batch: JudgedBatch, watch: Stopwatch
) -> dict[int, TokenScores]:
    """Of this rank's responses, by their index; none unless `run.save_logprobs` asks for them.

    The trainer's log-probs under softmax(logits / temperature), before the update and thus of the
    policy that sampled; the nucleus is left out of account. Called by every rank.
    """
    run = s.config.run
    if not (run.save_rollouts and run.save_logprobs) or s.stored is not None:
        return {}
    with watch.phase("old_logprob"):
        tokenizer = s.sampler.encoder.tokenizer
        return {
            index: TokenScores(
                log_probs=log_probs,
                piece_lengths=tuple(
                    map(
                        len,
                        split_text_by_token(
                            tokenizer, batch.rollouts[index].response_ids
                        ),
                    )
                ),
            )
            for index, log_probs in _log_probs(s, batch).items()
        }


def _log_probs(s: Session, batch: JudgedBatch) -> dict[int, tuple[float, ...]]:
    """By index, of the responses that this rank holds: scored where they are packed, sent back."""
    packed: list[
        int
    ] = []  # indices of the responses in this rank's packs, pack by pack

    def noting(indices_of: Sequence[Sequence[int]]) -> Mapping[int, Sample]:
        packed.extend(indices_of[s.layout.dp_rank])
        return s.fetch(batch.rollouts, batch.problems, batch.responses, indices_of)

    ones = (1.0,) * len(batch.responses)
    update = Update(
        responses=tuple(batch.responses),
        token_weights=ones,
        advantages=ones,
        factor=1.0,
    )
    batches = pack_update(s, update, noting).microbatches
    found = s.trainer.score_batches(batches, temperature=s.settings.temperature)
    rows_for: dict[int, list[tuple[int, tuple[float, ...]]]] = defaultdict(list)
    rest = iter(packed)
    for scored, values_R in zip(
        batches, found, strict=False
    ):  # none but on the last stage
        lengths = list(scored.response_lengths)
        whole = join_over_context(values_R, scored.response_indices_R, sum(lengths))
        indices = sorted(islice(rest, len(lengths)))  # as `pack` has them
        for index, values in zip(indices, whole.cpu().split(lengths), strict=True):
            response = batch.responses[index]
            rounded = tuple(round(value, _DECIMALS) + 0.0 for value in values.tolist())
            rows_for[response.rank].append((response.rollout_index, rounded))
    sends = s.layout.is_loss_rank and s.layout.cp_rank == 0
    return dict(deal(rows_for if sends else {}))
