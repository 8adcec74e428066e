"""The factor and the weights of the three losses, by hand."""

import pytest

from megatron_opsft.methods.normalization import Mode, normalize

LOSSES = {3: 2.0, 5: 0.5}  # length -> the loss of each token of that response
NUM_ROLLOUTS = 8


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("batch_max", (3 * 2.0 + 5 * 0.5) / (8 * 5)),
        ("response", (2.0 + 0.5) / 8),
        ("token_mean", (3 * 2.0 + 5 * 0.5) / (3 + 5)),
    ],
)
def test_loss_of_two_responses_by_hand(mode: Mode, expected: float) -> None:
    normalization = normalize([3, 5], NUM_ROLLOUTS, mode)
    sums = [
        weight * length * LOSSES[length]
        for weight, length in zip(normalization.token_weights, LOSSES, strict=True)
    ]
    assert normalization.factor * sum(sums) == pytest.approx(expected, rel=1e-12)


def test_paper_factor_counts_rejected_responses_too() -> None:
    assert normalize([5], 64 * 8, "batch_max").factor == 1 / (64 * 8 * 5)


@pytest.mark.parametrize("mode", ["batch_max", "response", "token_mean"])
def test_nothing_accepted_has_factor_zero(mode: Mode) -> None:
    assert normalize([], NUM_ROLLOUTS, mode).factor == 0.0


@pytest.mark.parametrize("mode", ["batch_max", "token_mean"])
def test_every_token_weighs_the_same_but_for_response(mode: Mode) -> None:
    assert normalize([3, 5], 8, mode).token_weights == (1.0, 1.0)
    assert normalize([3, 5], 8, "response").token_weights == (1 / 3, 1 / 5)
