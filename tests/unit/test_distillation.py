"""The divergence from a teacher over the whole vocabulary: golden values, autograd, memory; and
what the teacher is asked. Whole models: tests/gloo/test_distilled_gradient.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import group, update, weigh
from live_memory import LiveMemory
from test_prompts import write_model_dir
from torch import Tensor

from megatron_opsft.data.prompts import PromptEncoder, load_tokenizer, teacher_of
from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.self_distillation import SelfDistillation
from megatron_opsft.records import Problem
from megatron_opsft.trainer.loss.fused_linear import fused_linear_loss
from megatron_opsft.trainer.loss.logit_chunks import distillation_gradient_, divergences
from megatron_opsft.trainer.loss.loss_memory import choose_cross_entropy, fused_linear_bytes
from megatron_opsft.trainer.loss.output_head import OutputHead, Teacher
from megatron_opsft.trainer.loss.token_losses import WeightedLikelihood

# Two tokens over three words, policy and teacher; then by direction what each token's divergence
# is, and the gradient of their mean by the policy's logits.
POLICY = [[0.5, 0.3, 0.2], [0.25, 0.5, 0.25]]
TEACHER = [[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]
REVERSE = (0.092033, 0.173287)
REVERSE_GRADIENT = [[-0.107126, 0.047015, 0.060111], [-0.108304, 0.129965, -0.021661]]
FORWARD = (0.085123, 0.173287)
FORWARD_GRADIENT = [[-0.1, 0.05, 0.05], [-0.125, 0.125, 0.0]]


@pytest.mark.parametrize(
    ("forward", "values", "gradient"),
    [(False, REVERSE, REVERSE_GRADIENT), (True, FORWARD, FORWARD_GRADIENT)],
)
def test_golden_divergences_and_gradients_of_two_halves_of_the_vocabulary(
    forward: bool, values: tuple[float, float], gradient: list[list[float]]
) -> None:
    """Columns {0} and {1, 2}, as two ranks have them; logits are shifted, which changes nothing."""
    logits, teacher = torch.tensor(POLICY).log() + 3, torch.tensor(TEACHER).log() - 2
    lse, teacher_lse = logits.logsumexp(1), teacher.logsumexp(1)
    halves = [(logits[:, at].clone(), teacher[:, at].clone()) for at in ([0], [1, 2])]
    found = sum(divergences(*half, lse, teacher_lse, forward=forward) for half in halves)
    torch.testing.assert_close(found, torch.tensor(values), rtol=0, atol=1e-6)
    nowhere, zero, mean = torch.tensor([-1, -1]), torch.zeros(2), torch.full((2,), 0.5)
    more = (nowhere, lse, teacher_lse, found, zero, mean, torch.float32)
    parts = [distillation_gradient_(*half, *more, forward=forward) for half in halves]
    torch.testing.assert_close(torch.cat(parts, 1), torch.tensor(gradient), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"responses": "all", "aggregation": "all_tokens"}, 0.146202),
        ({"responses": "all", "aggregation": "sequence"}, 0.132660),
        ({"aggregation": "accepted_tokens"}, 0.092033),
    ],
)
def test_golden_aggregations(keys: dict[str, Any], expected: float) -> None:
    """Responses of one token, which is correct, and of two, with the divergences of above."""
    found = update("self_distillation", group((1, 2), (1, 0)), **keys)
    sums = [
        w * r.num_tokens * REVERSE[r.num_tokens - 1]
        for r, w in zip(found.responses, found.token_weights, strict=True)
    ]
    assert found.factor * sum(sums) == pytest.approx(expected, abs=1e-6)


def test_responses_that_are_learned_from() -> None:
    assert weigh("self_distillation", group()).trained == (True, True, False, True)
    every = weigh("self_distillation", group(), responses="all")
    assert (every.trained, every.rewards) == ((True,) * 4, (1, 1, 0, 1))


@pytest.mark.parametrize(("every", "steps"), [(50, [51, 101]), (1, [*range(2, 103)]), (0, [])])
def test_the_teacher_is_the_model_again_after_so_many_steps(every: int, steps: list[int]) -> None:
    method = SelfDistillation(refresh_every=every)
    states = [method.first_state().model_copy(update={"step": n}) for n in range(1, 103)]
    assert [state.step for state in states if method.refreshes_teacher(state)] == steps


@pytest.fixture
def group_of_one() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def fused(
    weight: Tensor,
    of_teacher: Tensor,
    hidden: Tensor,
    group: Any,
    chunk_tokens: int,
    temperature: float = 1.0,
) -> Tensor:
    """The mean divergence from a teacher with other hidden states."""
    num = len(hidden)
    policy, teacher = (
        OutputHead(weight_VH=w, vocab_size=len(w), group=group, temperature=temperature)
        for w in (weight, of_teacher)
    )
    loss, _ = fused_linear_loss(
        hidden,
        policy,
        torch.arange(num),
        torch.zeros(num, dtype=torch.int64),
        WeightedLikelihood(torch.zeros(num)),
        teacher=Teacher(
            hidden_RH=hidden.detach() + 0.1, head=teacher, weights_R=torch.full((num,), 1 / num)
        ),
        chunk_tokens=chunk_tokens,
    )
    return loss


def eager(weight: Tensor, of_teacher: Tensor, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """As the authors' formula reads, on whole logits."""
    teacher = (hidden.detach() + 0.1) @ of_teacher.T
    log_p = ((hidden @ weight.T).float() / temperature).log_softmax(-1)
    log_q = (teacher.float() / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_gradient_equals_autograd_s_on_whole_logits(
    group_of_one: Any, dtype: torch.dtype, limit: float, temperature: float
) -> None:
    """Without a main gradient; eager's logits of bfloat16 are rounded, these are not."""
    torch.manual_seed(0)
    sizes = ((99, 1 / 3), (99, 1 / 3), (13, 1.0))
    weight, of_teacher, hidden = ((x * torch.randn(n, 32)).to(dtype) for n, x in sizes)
    given = (weight.requires_grad_(), of_teacher, hidden.requires_grad_())
    own, expected = fused(*given, group_of_one, 5, temperature), eager(*given, temperature)
    pairs = [(own, expected)]
    pairs += zip(*(torch.autograd.grad(x, (weight, hidden)) for x in (own, expected)), strict=True)
    for found, want in pairs:
        assert (found.float() - want.float()).abs().max() < limit * want.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [512, 2048])
def test_peak_memory_is_the_formula_s(
    group_of_one: Any, dtype: torch.dtype, num_tokens: int
) -> None:
    weight: Any = torch.nn.Parameter(torch.randn(30_000, 96, dtype=dtype))
    weight.main_grad = torch.zeros(30_000, 96)
    of_teacher = torch.randn(30_000, 96, dtype=dtype)
    hidden = torch.randn(num_tokens, 96, dtype=dtype, requires_grad=True)
    with LiveMemory() as memory:
        fused(weight, of_teacher, hidden, group_of_one, 256)
    sizes: dict[str, Any] = {"dtype_bytes": dtype.itemsize, "on_cuda": False, "chunk_tokens": 256}
    expected = fused_linear_bytes(num_tokens, 96, 30_000, with_teacher=True, **sizes)
    assert expected - 20 * 2**20 < memory.peak_bytes < expected * 1.05


@pytest.mark.parametrize("on_cuda", [False, True])
def test_memory_at_8192_tokens_and_152_thousand_words_is_at_most_8_percent_of_eager_s(
    on_cuda: bool,
) -> None:
    """Eager's counted, on a device without memory, beside hidden states and weights."""
    tokens, hidden_size, rows = 8192, 3584, 152_064
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    weight = torch.empty(rows, hidden_size, requires_grad=True, **kind)
    hidden = torch.empty(tokens, hidden_size, requires_grad=True, **kind)
    of_teacher = torch.empty(rows, hidden_size, **kind)
    with LiveMemory() as memory:
        eager(weight, of_teacher, hidden).backward()
    sizes: dict[str, Any] = {"dtype_bytes": 2, "on_cuda": on_cuda, "with_teacher": True}
    own = fused_linear_bytes(tokens, hidden_size, rows, **sizes)
    assert own < 0.08 * memory.peak_bytes


def test_whole_logits_are_refused() -> None:
    sizes: dict[str, Any] = {"max_tokens": 10, "rows_per_rank": 10, "with_teacher": True}
    assert choose_cross_entropy("auto", "", **sizes).kind == "fused_linear"
    with pytest.raises(UserError, match=r"cross_entropy=te: .* a teacher .*use .*fused_linear"):
        choose_cross_entropy("te", "", **sizes)


def test_the_teacher_s_instruction_replaces_the_plain_one(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    tokenizer = load_tokenizer(write_model_dir(tmp_path / "model", chat_template=template))
    encoder = PromptEncoder(tokenizer=tokenizer, template="r1", system_prompt="Be good.")

    def asked(of: PromptEncoder) -> str:
        return str(tokenizer.decode(of.encode(Problem(id="1", text="1 + 1?", answer="2"))))

    plain, concise = asked(encoder), asked(teacher_of(encoder, "concise"))
    assert "step by step" in plain and "step by step" not in concise
    assert "concisely" in concise
    for text in ("Be good.", "1 + 1?", "final answer within \\boxed{}."):
        assert text in plain and text in concise
    assert asked(teacher_of(encoder, "r1")) == plain
    own = tmp_path / "own.jinja"
    own.write_text("In one line: {{ problem }}")
    assert "In one line: 1 + 1?;" in asked(teacher_of(encoder, str(own)))
    own.write_text("{{ row.topic }}")
    with pytest.raises(UserError, match=r"method.teacher_template=.*own.jinja .*`problem` alone"):
        asked(teacher_of(encoder, str(own)))
    of_file = PromptEncoder(tokenizer=tokenizer, template="own.jinja")
    with pytest.raises(UserError, match=r"data.template=own.jinja: method.teacher_template .*r1"):
        teacher_of(of_file, "concise")
