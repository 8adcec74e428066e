"""Log-probabilities of a step's sampled tokens, for the rollouts that are saved."""

from collections import defaultdict

from megatron_opsft.methods.updates import Update
from megatron_opsft.records import TokenScores
from megatron_opsft.rollout.requests import split_text_by_token
from megatron_opsft.run.start.session import Session
from megatron_opsft.run.step.batch import JudgedBatch, pack_update
from megatron_opsft.runtime.distributed import deal, join_over_context
from megatron_opsft.runtime.phase import Stopwatch

_DECIMALS = 3


def score_sampled(
    s: Session, batch: JudgedBatch, watch: Stopwatch
) -> dict[int, TokenScores]:
    """Score the responses that this rank sampled; by index into `batch.rollouts`.

    The scores are the trainer's log-probs under softmax(logits / temperature) before the update,
    thus those of the policy that sampled; the nucleus (top_p) is not taken into account. Returns {}
    unless `run.save_logprobs` asks for them. Called by every rank.
    """
    run = s.config.run
    if not (run.save_rollouts and run.save_logprobs) or s.stored is not None:
        return {}
    with watch.phase("old_logprob"):
        tokenizer = s.sampler.encoder.tokenizer
        scores = {}
        for index, log_probs in _log_probs(s, batch).items():
            pieces = split_text_by_token(tokenizer, batch.rollouts[index].response_ids)
            scores[index] = TokenScores(
                log_probs=log_probs, piece_lengths=tuple(map(len, pieces))
            )
        return scores


def _log_probs(s: Session, batch: JudgedBatch) -> dict[int, tuple[float, ...]]:
    """Return the log-probs of this rank's responses, by index into `batch.rollouts`.

    A response is scored on the ranks that pack it; one of them sends its log-probs to the rank that
    sampled it. Called by every rank.
    """
    ones = (1.0,) * len(batch.responses)
    update = Update(
        responses=tuple(batch.responses),
        token_weights=ones,
        advantages=ones,
        factor=1.0,
    )
    packed, _ = pack_update(s, batch, update)
    temperature = s.settings.temperature
    scored = s.trainer.score_batches(packed.microbatches, temperature=temperature)
    rows_for: dict[int, list[tuple[int, tuple[float, ...]]]] = defaultdict(list)
    # Only ranks of the last pipeline stage have scores.
    for microbatch, indices, values_R in zip(
        packed.microbatches, packed.indices, scored, strict=False
    ):
        lengths = list(microbatch.response_lengths)
        whole = join_over_context(values_R, microbatch)
        for index, values in zip(indices, whole.cpu().split(lengths), strict=True):
            response = batch.responses[index]
            # Adding 0.0 makes -0.0 positive.
            rounded = tuple(round(value, _DECIMALS) + 0.0 for value in values.tolist())
            rows_for[response.rank].append((response.rollout_index, rounded))
    sends = s.layout.is_loss_rank and s.layout.cp_rank == 0
    return dict(deal(rows_for if sends else {}))
