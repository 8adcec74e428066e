"""The divergence from a teacher over the whole vocabulary: golden values, float64 autograd, memory;
and what the teacher is asked.
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
from megatron_opsft.loss.fused_linear import fused_linear_loss
from megatron_opsft.loss.logit_chunks import distillation_gradient_, divergences
from megatron_opsft.loss.loss_memory import choose_cross_entropy, fused_linear_bytes
from megatron_opsft.loss.output_head import OutputHead, Teacher
from megatron_opsft.loss.token_losses import WeightedLikelihood
from megatron_opsft.methods.catalog.self_distillation import SelfDistillation
from megatron_opsft.records import Problem

# Two tokens over three words, policy and teacher; then by direction what each token's divergence
# is, and the gradient of their mean by the policy's logits.
POLICY = [[0.5, 0.3, 0.2], [0.25, 0.5, 0.25]]
TEACHER = [[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]
GOLDEN: list[tuple[bool, list[float], list[list[float]]]] = [
    (
        False,
        [0.092033, 0.173287],
        [[-0.107126, 0.047015, 0.060111], [-0.108304, 0.129965, -0.021661]],
    ),
    (True, [0.085123, 0.173287], [[-0.1, 0.05, 0.05], [-0.125, 0.125, 0.0]]),
]


@pytest.mark.parametrize(("forward", "values", "gradient"), GOLDEN, ids=["reverse", "forward"])
def test_golden_divergences_and_gradients_of_two_halves_of_the_vocabulary(
    forward: bool, values: list[float], gradient: list[list[float]]
) -> None:
    """Columns {0} and {1, 2}, as two ranks have them; logits are shifted, which changes nothing."""
    logits, teacher = torch.tensor(POLICY).log() + 3, torch.tensor(TEACHER).log() - 2
    lse, teacher_lse = logits.logsumexp(1), teacher.logsumexp(1)
    found = torch.zeros(2)
    for columns in ([0], [1, 2]):
        found += divergences(
            logits[:, columns], teacher[:, columns], lse, teacher_lse, forward=forward
        )
    torch.testing.assert_close(found, torch.tensor(values), rtol=0, atol=1e-6)
    parts = [
        distillation_gradient_(
            logits[:, columns],
            teacher[:, columns],
            torch.tensor([-1, -1]),
            lse,
            teacher_lse,
            found,
            torch.zeros(2),
            torch.full((2,), 0.5),
            torch.float32,
            forward=forward,
        )
        for columns in ([0], [1, 2])
    ]
    torch.testing.assert_close(torch.cat(parts, 1), torch.tensor(gradient), rtol=0, atol=1e-6)


def test_golden_aggregations_and_responses() -> None:
    """Responses of one and of two tokens, whose divergences are the golden ones."""
    lengths, of_response = (1, 2), (0.092033, 2 * 0.173287)

    def loss(correct: tuple[int, ...], **keys: Any) -> float:
        given = group(lengths, correct)
        found = update("self_distillation", given, **keys)
        weighed = zip(found.responses, found.token_weights, strict=True)
        return found.factor * sum(w * of_response[r.num_tokens - 1] for r, w in weighed)

    of_all = {"responses": "all"}
    assert loss((1, 0), **of_all, aggregation="all_tokens") == pytest.approx(0.146202, abs=1e-6)
    assert loss((1, 0), **of_all, aggregation="sequence") == pytest.approx(0.132660, abs=1e-6)
    assert loss((1, 0), aggregation="accepted_tokens") == pytest.approx(0.092033, abs=1e-6)
    assert weigh("self_distillation", group()).trained == (True, True, False, True)
    assert weigh("self_distillation", group(), responses="all").trained == (True,) * 4
    assert weigh("self_distillation", group(), responses="all").rewards == (1, 1, 0, 1)


@pytest.mark.parametrize(("every", "steps"), [(50, [51, 101]), (1, [*range(2, 103)]), (0, [])])
def test_the_teacher_is_the_model_again_after_so_many_steps(every: int, steps: list[int]) -> None:
    method = SelfDistillation(refresh_every=every)
    state = method.first_state()
    refreshed = (
        step
        for step in range(1, 103)
        if method.refreshes_teacher(state.model_copy(update={"step": step}))
    )
    assert [*refreshed] == steps


@pytest.fixture
def group_of_one() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def fused(
    weight: Any,
    of_teacher: Tensor,
    hidden: Tensor,
    group_of_one: Any,
    tokens: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    heads = [
        OutputHead(
            weight_VH=each, vocab_size=len(each), group=group_of_one, temperature=temperature
        )
        for each in (weight, of_teacher)
    ]
    num = len(hidden)
    loss, _ = fused_linear_loss(
        hidden,
        heads[0],
        torch.arange(num),
        torch.zeros(num, dtype=torch.int64),
        WeightedLikelihood(torch.zeros(num)),
        teacher=Teacher(
            hidden_RH=hidden.detach() + 0.1, head=heads[1], weights_R=torch.ones(num) / num
        ),
        chunk_tokens=tokens,
    )
    return loss


def eager(weight: Any, of_teacher: Tensor, hidden: Tensor, temperature: float = 1.0) -> Tensor:
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
    found: list[Tensor] = []
    values = [torch.randn(n, 32).to(dtype) for n in (99, 99, 13)]
    for loss_of in (fused, eager):
        weight, hidden = (values[n].clone().requires_grad_() for n in (0, 2))
        more: dict[str, Any] = {"temperature": temperature}
        if loss_of is fused:
            more |= {"group_of_one": group_of_one, "tokens": 5}
        loss = loss_of(weight / 3, values[1] / 3, hidden, **more)
        loss.backward()
        found += [loss.detach(), weight.grad, hidden.grad]
    for own, expected in zip(found[:3], found[3:], strict=True):
        difference = (own.float() - expected.float()).abs().max()
        assert difference < limit * expected.float().abs().max()


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
    expected = fused_linear_bytes(
        num_tokens,
        num_tokens,
        96,
        30_000,
        dtype_bytes=dtype.itemsize,
        on_cuda=False,
        with_teacher=True,
        chunk_tokens=256,
    )
    assert expected - 20 * 2**20 < memory.peak_bytes < expected * 1.05


@pytest.mark.parametrize("on_cuda", [False, True])
def test_memory_at_8192_tokens_and_152_thousand_words_is_at_most_8_percent_of_eager_s(
    on_cuda: bool,
) -> None:
    """Eager's counted, on a device without memory, beside hidden states and weights."""
    hidden_size, vocab_size, tokens = 3584, 152_064, 8192
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    weight = torch.empty(vocab_size, hidden_size, requires_grad=True, **sizes)
    hidden = torch.empty(tokens, hidden_size, requires_grad=True, **sizes)
    with LiveMemory() as memory:
        eager(weight, torch.empty(vocab_size, hidden_size, **sizes), hidden).backward()
    of_teacher = vocab_size * hidden_size * 2
    own = fused_linear_bytes(
        tokens,
        tokens,
        hidden_size,
        vocab_size,
        dtype_bytes=2,
        on_cuda=on_cuda,
        with_teacher=True,
    )
    assert own < 0.08 * (memory.peak_bytes - of_teacher)


def test_whole_logits_are_refused() -> None:
    def choose(wanted: Any) -> Any:
        return choose_cross_entropy(
            wanted, "", max_tokens=10, rows_per_rank=10, with_teacher=True
        ).method

    assert choose("auto") == choose("fused_linear") == "fused_linear"
    with pytest.raises(UserError, match=r"cross_entropy=te: .* a teacher .*use .*fused_linear"):
        choose("te")


PROBLEM = Problem(id="1", text="1 + 1?", answer="2")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    path = tmp_path_factory.mktemp("model")
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    tokenizer = load_tokenizer(write_model_dir(path, chat_template=template))
    return PromptEncoder(tokenizer=tokenizer, template="r1", system_prompt="Be good.")


def asked(encoder: PromptEncoder, template: str) -> str:
    prompt = teacher_of(encoder, template).encode(PROBLEM)
    return str(encoder.tokenizer.decode(prompt))


def test_the_teacher_s_instruction_replaces_the_plain_one(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    plain = str(encoder.tokenizer.decode(encoder.encode(PROBLEM)))
    concise = asked(encoder, "concise")
    assert "step by step" in plain and "step by step" not in concise
    assert "concisely" in concise
    for text in ("Be good.", "1 + 1?", "final answer within \\boxed{}."):
        assert text in plain and text in concise
    assert asked(encoder, "r1") == plain
    own = tmp_path / "own.jinja"
    own.write_text("In one line: {{ problem }}")
    assert "In one line: 1 + 1?;" in asked(encoder, str(own))
    own.write_text("{{ row.topic }}")
    with pytest.raises(UserError, match=r"method.teacher_template=.*own.jinja .*`problem` alone"):
        asked(encoder, str(own))


def test_a_plain_prompt_of_a_file_is_refused(encoder: PromptEncoder) -> None:
    own = PromptEncoder(tokenizer=encoder.tokenizer, template="own.jinja")
    with pytest.raises(UserError, match=r"data.template=own.jinja: method.teacher_template .*r1"):
        teacher_of(own, "concise")
