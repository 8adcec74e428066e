"""The chunked gated delta rule and its convolution against the recurrence, token by token, and
transformers' own layer; nothing passes a border between packed sequences.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from megatron_opsft.models.architectures.shape import CHUNK_LENGTH
from megatron_opsft.trainer.model.delta_rule import causal_convolution, gated_delta_rule

LENGTHS = [5, 130, 1, 64, 65, 128]
HEADS, KEY, VALUE = 3, 16, 24


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Of a pack; the states fade by a few per cent a token."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_tokens, HEADS, *shape, generator=generator, dtype=dtype)

    values = {
        "q": draw(KEY),
        "k": draw(KEY),
        "v": draw(VALUE),
        "log_decay": -0.05 * draw().exp(),
        "beta": draw().sigmoid(),
    }
    return {name: value.requires_grad_() for name, value in values.items()}


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One sequence as the equations say it, in float64: S' = e^g S (1 - b k k^T) + b v k^T."""
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / KEY**0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    state = q.new_zeros(HEADS, KEY, VALUE)
    outputs = []
    for t in range(len(q)):
        state = state * log_decay[t].exp()[:, None, None]
        seen = (k[t, :, None] @ state)[:, 0]
        change = beta[t, :, None] * (v[t] - seen)
        state = state + k[t, :, :, None] * change[:, None]
        outputs.append((q[t, :, None] @ state)[:, 0])
    return torch.stack(outputs)


def one_by_one(values: dict[str, Tensor], lengths: list[int]) -> Tensor:
    parts = {name: value.split(lengths) for name, value in values.items()}
    sequences = [{name: part[i] for name, part in parts.items()} for i in range(len(lengths))]
    return torch.cat([recurrence(**sequence) for sequence in sequences])


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1], [1], [64], [1] * 9, [200]], ids=str)
def test_the_chunked_rule_and_its_gradient_equal_the_recurrence_of_each_sequence(
    lengths: list[int],
) -> None:
    values = inputs(sum(lengths))
    expected = one_by_one(values, lengths)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    wanted = torch.autograd.grad((expected * weights).sum(), list(values.values()))
    found = gated_delta_rule(**values, lengths=lengths)
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() < 2e-6 * expected.abs().max()  # it computes in float32
    gradients = torch.autograd.grad((found * weights).sum(), list(values.values()))
    for name, gradient, want in zip(values, gradients, wanted, strict=True):
        assert (gradient - want).abs().max() < 1e-5 * want.abs().max().clamp_min(1), name


def test_it_equals_the_recurrence_of_transformers() -> None:
    values = {name: value.detach() for name, value in inputs(130, torch.float32).items()}
    q, k, v, g, beta = (value[None] for value in values.values())
    expected, _ = torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True
    )
    assert (gated_delta_rule(**values, lengths=[130]) - expected[0]).abs().max() < 1e-5


def changed_before(border: int, lengths: list[int], values: dict[str, Tensor]) -> Tensor:
    """What the outputs change by if the tokens before `border` are other ones."""
    others = {name: value.detach().clone() for name, value in values.items()}
    for value in others.values():
        value[:border] = value[:border].flip(0)
    before, after = (gated_delta_rule(**v, lengths=lengths) for v in (values, others))
    return (before - after).abs().flatten(1).amax(1)


@pytest.mark.parametrize("length", [1, 5, CHUNK_LENGTH, 130])
def test_no_state_passes_a_border_between_sequences(length: int) -> None:
    values = inputs(length + 70)
    change = changed_before(length, [length, 70], values)
    assert not change[length:].any()
    joined = changed_before(length, [length + 70], values)
    assert length == 1 or joined[length:].amax() > 1e-3  # in one sequence it does pass


@pytest.mark.parametrize("lengths", [[7, 1, 2, 30], [1, 1, 1], [4]], ids=str)
def test_the_convolution_equals_that_of_each_sequence_by_itself(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(lengths), 10, generator=generator)
    weight = torch.randn(10, 4, generator=generator)
    expected = []
    for sequence in x.split(lengths):
        padded = F.pad(sequence.T, (3, 0))
        expected.append(F.conv1d(padded[None], weight[:, None], groups=10)[0].T)
    found = causal_convolution(x, weight, lengths)
    assert (found - torch.cat(expected)).abs().max() < 1e-6


def without_decay(values: dict[str, Tensor]) -> None:
    values["log_decay"] = torch.zeros_like(values["log_decay"])


def with_keys_as_queries(values: dict[str, Tensor]) -> None:
    values["q"], values["k"] = values["k"], values["q"]


def with_full_steps(values: dict[str, Tensor]) -> None:
    values["beta"] = torch.ones_like(values["beta"])


@pytest.mark.parametrize("spoil", [without_decay, with_keys_as_queries, with_full_steps])
def test_each_input_matters(spoil: Callable[[dict[str, Tensor]], None]) -> None:
    values = inputs(sum(LENGTHS))
    expected = gated_delta_rule(**values, lengths=LENGTHS)
    spoil(values)
    assert (gated_delta_rule(**values, lengths=LENGTHS) - expected).abs().max() > 0.1
