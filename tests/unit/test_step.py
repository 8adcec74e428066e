"""A step's batch on one rank: what is drawn, drawn again, kept, weighed, left out and packed. The
parts that it asks (engine, trainer, other ranks) are stubs that answer with known numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from groups import columns
from responses import facts, rollout_of

from megatron_opsft.config.load import load_config
from megatron_opsft.methods.updates import MethodRun, Update
from megatron_opsft.records import NO_RANK, Outcome, Problem, Sample, StepResult
from megatron_opsft.run.step import batch as step_batch
from megatron_opsft.run.step.batch import (
    JudgedBatch,
    begin_stage,
    observe_monitor,
    pack_update,
    pack_updates,
    sample_batch,
    stored_batch,
    whole_result,
)
from megatron_opsft.run.step.judged_problems import JudgedProblems
from megatron_opsft.run.step.sampled_log_probs import score_sampled
from megatron_opsft.run.step.teaching import pack_taught, pair_lengths, without_long_pairs
from megatron_opsft.trainer.batching.packing import PackingReport

CORRECT, WRONG = Outcome.CORRECT, Outcome.WRONG
GROUP = 2


class Stopwatch:
    """Notes which phases a step enters."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, name: str) -> "Stopwatch":
        self.phases.append(name)
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Engine:
    """Counts its sleeps; `spec_counts` grows as vLLM's do."""

    def __init__(self) -> None:
        self.sleeps = 0
        self.drafts = 0

    def sleep(self) -> None:
        self.sleeps += 1

    def spec_counts(self) -> Counter[str]:
        self.drafts += 5
        return Counter(drafts=self.drafts, draft_tokens=4 * self.drafts, accepted=3 * self.drafts)


class Trainer:
    """Gives every token of a micro-batch the log-prob -1/2."""

    objective = SimpleNamespace(
        is_weighted_likelihood=True, keeps_frozen_model=False, token_penalty=None
    )

    def score_batches(self, batches: Sequence[Any], *, temperature: float = 1.0) -> list[Any]:
        return [torch.full((batch.num_loss_tokens,), -0.5 / temperature) for batch in batches]


def session(*overrides: str, **changes: Any) -> Any:
    """One rank's, with a problem per number and prompts of as many tokens as that number."""
    words = ["model.path=m", "data.train=d", "data.prompts_per_step=2"]
    words += [f"rollout.group_size={GROUP}", "rollout.max_response_tokens=8", *overrides]
    config = load_config(None, words)
    problems = [Problem(id=f"p{number}", text="?", answer="1") for number in range(40)]
    layout = SimpleNamespace(
        **{"dp_rank": 0, "dp_size": 1, "cp_rank": 0, "cp_size": 1, "pp_size": 1, "tp_size": 1},
        is_loss_rank=True,
    )
    shape = SimpleNamespace(max_position_embeddings=64, hidden_size=8, moe=None, num_layers=1)
    given = {
        "config": config,
        "method": MethodRun(config.method, seed=0),
        "settings": SimpleNamespace(max_response_tokens=8, temperature=1.0),
        "sampler": SimpleNamespace(
            engine=Engine(),
            encoder=SimpleNamespace(
                tokenizer=SimpleNamespace(decode=lambda ids, **_: "ab" * len(ids))
            ),
        ),
        "problems": SimpleNamespace(problems=problems),
        "problems_of_draw": lambda draw: problems[2 * draw : 2 * draw + 2],
        "layout": layout,
        "shards": SimpleNamespace(table=SimpleNamespace(shape=shape)),
        "device": SimpleNamespace(torch_device=torch.device("cpu")),
        "trainer": Trainer(),
        "reference": None,
        "stored": None,
        "teacher": None,
        "fetch": fetch_here,
    }
    return SimpleNamespace(**(given | changes))


def fetch_here(
    rollouts: Any, problems: Any, responses: Sequence[Any], indices_of: Sequence[Sequence[int]]
) -> Mapping[int, Sample]:
    return {
        index: Sample(
            problem_id="p",
            prompt_ids=(1,) * responses[index].num_prompt_tokens,
            response_ids=(2,) * responses[index].num_tokens,
        )
        for index in indices_of[0]
    }


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_batch, "gather_from_all", lambda mine: mine)
    monkeypatch.setattr(step_batch, "quadratic_at", lambda shape: 1000.0)


def judging(monkeypatch: pytest.MonkeyPatch, verdicts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Let problems be answered by these verdicts, a letter for each response (c or w), which are
    of three tokens if correct and of five if not. Returns what was asked.
    """
    asked: list[dict[str, Any]] = []

    def judge_problems(s: Any, problems: Sequence[Problem], watch: Any, **how: Any) -> Any:
        asked.append({"ids": [problem.id for problem in problems], **how})
        responses = [
            facts(
                problem_index=index,
                sample_index=number,
                rollout_index=GROUP * index + number,
                num_tokens=3 if letter == "c" else 5,
                outcome=CORRECT if letter == "c" else WRONG,
            )
            for index, problem in enumerate(problems)
            for number, letter in enumerate(verdicts.get(problem.id, "cw"))
        ]
        rollouts = [rollout_of("x", problem_id=problem.id) for problem in problems for _ in "ab"]
        return JudgedProblems(
            problems=problems, rollouts=rollouts, verdicts=[], token_uses=[], responses=responses
        )

    monkeypatch.setattr(step_batch, "judge_problems", judge_problems)
    return asked


def test_a_step_samples_its_problems_once_with_the_seed_of_its_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, s, watch = judging(monkeypatch, {"p4": "cc", "p5": "ww"}), session(), Stopwatch()
    batch = sample_batch(s, 3, watch)
    assert asked == [{"ids": ["p4", "p5"], "num_samples": 2, "limit": 8, "seed_step": 3}]
    assert (batch.refills, s.sampler.engine.sleeps) == (0, 1)
    assert len(batch.responses) == len(batch.sampled) == 4 and batch.metrics == {}
    assert [r.num_tokens for r in batch.trained] == [3, 3]  # on-policy SFT: the accepted ones
    told = batch.describe()
    assert (told["num_rollouts"], told["num_accepted"], told["accuracy"]) == (4, 2, 0.5)
    assert (told["refills"], told["length_limit"], told["zero_advantage_groups"]) == (0, 8, 1)


DLER = ("method.name=dler", "method.max_refills=3")


def test_groups_that_teach_nothing_are_drawn_again_until_the_batch_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All right and all wrong alike; of what is too much the first ones are kept."""
    dull = {"p0": "cc", "p1": "ww", "p2": "cc"}
    asked, s = judging(monkeypatch, dull), session(*DLER)
    batch = sample_batch(s, 1, Stopwatch())
    assert [each["ids"] for each in asked] == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
    assert [each["seed_step"] for each in asked] == [1, 2, 3]
    assert batch.refills == 2 and s.sampler.engine.sleeps == 1
    assert [group.problem_id for group in batch.groups] == ["p3", "p4"]
    # Indices count over all draws, as the problems and the rollouts do.
    assert [r.problem_index for r in batch.responses] == [3, 3, 4, 4]
    assert [batch.problems[r.problem_index].id for r in batch.responses] == ["p3"] * 2 + ["p4"] * 2
    assert [r.rollout_index for r in batch.responses] == [6, 7, 8, 9]
    assert len(batch.rollouts) == len(batch.sampled) == 12
    told = batch.describe()
    assert (told["num_rollouts"], told["refills"], told["accuracy"]) == (12, 2, 7 / 12)
    # The next step goes on behind what this one has taken.
    s.method.advance(batch.groups, batch.refills)
    sample_batch(s, 2, Stopwatch())
    assert asked[-1]["ids"] == ["p6", "p7"] and asked[-1]["seed_step"] == 4


def test_a_step_that_keeps_no_group_trains_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a divergence from the reference alone either."""
    judging(monkeypatch, {f"p{number}": "ww" for number in range(40)})
    s = session(*DLER, "method.beta=0.1")
    batch = sample_batch(s, 1, Stopwatch())
    assert batch.refills == 3 and len(batch.sampled) == 16
    assert [group.problem_id for group in batch.groups] == ["p0", "p1"]
    assert columns(batch.credits).trained == (False,) * 4 and batch.trained == []


def test_the_method_s_own_limit_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    s = session("method.name=thinkprune", "method.limits=[6,4]", "method.stage_steps=[1]")
    asked = judging(monkeypatch, {})
    batch = sample_batch(s, 1, Stopwatch())
    assert asked[0]["limit"] == 6 == batch.describe()["length_limit"]


def test_what_a_draft_model_got_right_is_counted_for_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judging(monkeypatch, {})
    draft = "rollout.speculative={method: ngram, num_speculative_tokens: 4}"
    s = session("rollout.engine=vllm", draft)
    s.sampler.engine.drafts = 100  # of the steps before
    metrics = sample_batch(s, 1, Stopwatch()).metrics
    assert metrics == {"spec_acceptance": 0.75, "spec_tokens_per_draft": 3.0}
    for counted, share in ((Counter(), 0.0), (Counter(drafts=1, draft_tokens=1, accepted=1), 1.0)):
        counts = iter((Counter(), counted))
        s.sampler.engine.spec_counts = lambda counts=counts: next(counts)
        metrics = sample_batch(s, 1, Stopwatch()).metrics
        assert metrics == {"spec_acceptance": share, "spec_tokens_per_draft": share}


def test_a_stage_begins_with_optimizer_and_reference_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(step_batch, "forget_moments", lambda *args: done.append(args))
    reference = SimpleNamespace(replace=lambda: done.append("replaced"))
    forgotten = ("moments", "where they are")
    for held, expected in ((reference, [forgotten, "replaced"]), (None, [forgotten])):
        done.clear()
        trainer = SimpleNamespace(optimizer="moments")
        offload = SimpleNamespace(stored="where they are")
        begin_stage(session(reference=held, trainer=trainer, offload=offload))
        assert done == expected


def test_monitor_problems_are_sampled_with_seeds_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = judging(monkeypatch, {})
    observe_monitor(session(), Stopwatch())
    assert asked == []  # on-policy SFT looks at none
    s, seen = session(), []
    s.method = SimpleNamespace(
        state=SimpleNamespace(step=5),
        groups=lambda *given: given,
        observe=seen.append,
        monitor_size=(3, 2),
    )
    observe_monitor(s, Stopwatch())
    (how,) = asked
    # Evaluations have step 0, and training draws count from 1.
    assert (how["num_samples"], how["limit"], how["seed_step"]) == (2, 8, -5)
    assert len(how["ids"]) == 3
    ((responses, problems, limit),) = seen
    assert (len(responses), [p.id for p in problems], limit) == (6, how["ids"], 8)


def judged(s: Any, lengths: Sequence[int], prompts: Sequence[int] | None = None) -> JudgedBatch:
    """Correct responses of these lengths, two to a problem."""
    prompts = prompts or [2] * len(lengths)
    responses = [
        facts(problem_index=i // 2, rollout_index=i, num_tokens=n, num_prompt_tokens=p)
        for i, (n, p) in enumerate(zip(lengths, prompts, strict=True))
    ]
    problems = [Problem(id=f"p{i}", text="", answer="") for i in range((len(lengths) + 1) // 2)]
    groups = s.method.groups(responses, problems, 8)
    rollouts = [rollout_of("x", (2,) * n) for n in lengths]
    return JudgedBatch(
        problems=problems,
        rollouts=rollouts,
        verdicts=[],
        token_uses=[],
        responses=responses,
        groups=groups,
        credits=s.method.credit(groups),
        sampled=responses,
    )


def test_a_batch_is_packed_once_for_one_update_and_scored_before_for_several() -> None:
    s, watch = session(), Stopwatch()
    (update,) = pack_updates(s, judged(s, [3, 5, 4, 6]), watch)
    (packed,) = update.microbatches
    assert watch.phases == ["train"] and packed.old_log_probs_R is None
    assert packed.num_loss_tokens == 18 and update.factor == pytest.approx(1 / (4 * 6))
    assert update.packing.num_tokens == 18 + 4 * 2
    words = ("method.name=grpo", "method.updates_per_batch=2", "method.beta=0")
    s, watch = session(*words), Stopwatch()
    s.trainer.objective = SimpleNamespace(
        is_weighted_likelihood=False, keeps_frozen_model=False, token_penalty=None
    )
    batch = judged(s, [3, 5, 4, 6])
    weights = columns(s.method.credit(batch.groups))
    assert not any(weights.advantages)  # all right alike: nothing is trained on
    assert [u.microbatches for u in pack_updates(s, batch, watch)] == [[], []]
    assert watch.phases == ["train", "old_logprob"]


def test_an_update_has_weights_times_advantages_or_both() -> None:
    responses = tuple(facts(num_tokens=n, num_prompt_tokens=1) for n in (1, 2))
    update = Update(
        responses=responses, token_weights=(0.5, 2.0), advantages=(3.0, -1.0), factor=0.25
    )
    s = session()
    batch = judged(s, [1, 2])
    packed, _ = pack_update(s, batch, update)
    (plain,) = packed.microbatches
    assert plain.weights_R.tolist() == [1.5, -2.0, -2.0] and plain.advantages_R is None
    assert packed.factor == 0.25
    s.trainer.objective = SimpleNamespace(is_weighted_likelihood=False)
    (both,) = pack_update(s, batch, update)[0].microbatches
    assert both.advantages_R is not None
    assert both.weights_R.tolist() == [0.5, 2.0, 2.0]
    assert both.advantages_R.tolist() == [3.0, -1.0, -1.0]
    empty = Update(responses=(), token_weights=(), advantages=(), factor=0.25)
    nothing, _ = pack_update(s, batch, empty)
    assert (nothing.microbatches, nothing.factor, nothing.packing) == ([], 0.0, PackingReport())


def result(tokens: int, *, applied: bool = True, **more: Any) -> StepResult:
    known = {"loss": float(tokens), "grad_norm": 2.0 * tokens, "lr": 0.1, "num_microbatches": 3}
    return StepResult(applied=applied, trained_tokens=tokens, **(known | more))


def test_of_several_updates_means_are_over_those_that_were_applied() -> None:
    skipped = result(0, applied=False, clip_share=None)
    assert whole_result([skipped, skipped]) == skipped
    assert whole_result([skipped, result(5)]) == result(5)
    one, other = result(2, clip_share=0.5, kl_mean=1.0), result(6, clip_share=0.1)
    both = whole_result([one, skipped, other])
    assert (both.loss, both.grad_norm, both.trained_tokens, both.num_microbatches) == (4, 8, 8, 6)
    assert both.clip_share == pytest.approx((2 * 0.5 + 6 * 0.1) / 8)
    assert both.kl_mean == pytest.approx(2 * 1.0 / 8)  # over all tokens that were trained on


class Stored:
    """Six rows of fixed data."""

    num_prompt_tokens = (1, 2, 3, 4, 5, 6)
    num_response_tokens = (7, 8, 9, 10, 11, 12)
    advantages = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    problem_ids = tuple(f"q{number}" for number in range(6))

    def __len__(self) -> int:
        return 6


def test_fixed_data_come_epoch_by_epoch_as_many_as_others_sample() -> None:
    stored: Any = Stored()
    words = ("method.name=o1_pruner", "method.form=fixed", "data.responses=d.parquet")
    s = session(*words, "data.prompts_per_step=3", "rollout.group_size=1")
    rows = []
    for step in (1, 2):
        batch = stored_batch(s, stored, step)
        assert s.sampler.engine.sleeps == step and len(batch.responses) == 3
        rows += [response.rollout_index for response in batch.responses]
        for response, problem in zip(batch.responses, batch.problems, strict=True):
            row = response.rollout_index
            assert (response.num_prompt_tokens, response.num_tokens) == (row + 1, row + 7)
            assert (response.rank, response.advantage) == (NO_RANK, row / 2)
            assert problem.id == f"q{row}" == batch.groups[response.problem_index].problem_id
            assert response.correct and response.finished and not response.unclosed_think
        assert batch.groups[0].limit == max(response.num_tokens for response in batch.responses)
        told = batch.describe()
        assert told["num_rollouts"] == 3 and "accuracy" not in told and "refills" not in told
        s.method.advance(batch.groups, 0)
    assert sorted(rows) == [0, 1, 2, 3, 4, 5] != rows


def taught(*overrides: str, prompt: int) -> Any:
    """A session whose teacher's prompts have so many tokens."""
    words = ("method.name=self_distillation", "method.responses=all")
    teacher = SimpleNamespace(encode=lambda problem: (1,) * prompt)
    return session(*words, *overrides, teacher=teacher)


def test_a_pair_has_room_for_the_longer_prompt_and_one_that_is_too_long_is_left_out() -> None:
    s = taught("train.max_tokens_per_microbatch=10", prompt=5)
    batch = judged(s, [3, 5, 6, 4], prompts=[2, 2, 2, 9])
    prompts = {problem.id: (1,) * 5 for problem in batch.problems}
    assert pair_lengths(batch, batch.responses, prompts) == [8, 10, 11, 13]
    kept = without_long_pairs(s, batch)
    credits = columns(kept.credits)
    assert credits.trained == (True, True, False, False)
    assert credits.advantages[2:] == (0.0, 0.0) and all(credits.advantages[:2])
    assert kept.metrics == {"num_pairs_left_out": 2}
    # Each rank of a context-parallel group has a part of a pack; the positions are the model's.
    s.layout.cp_size = 2
    assert without_long_pairs(s, batch).metrics == {"num_pairs_left_out": 0}
    s.shards.table.shape.max_position_embeddings = 12
    assert without_long_pairs(s, batch).metrics == {"num_pairs_left_out": 1}


def test_the_teacher_reads_the_same_responses_in_the_same_packs_under_its_own_prompts() -> None:
    def fetch(rollouts: Any, problems: Any, responses: Any, indices_of: Any) -> Any:
        samples = fetch_here(rollouts, problems, responses, indices_of)
        ids = {index: problems[responses[index].problem_index].id for index in samples}
        return {i: replace(sample, problem_id=ids[i]) for i, sample in samples.items()}

    # A sequence of 5 + 8 tokens fills a pack, so that the teacher's prompts decide on the packs.
    s = taught("train.max_tokens_per_microbatch=13", prompt=5)
    s.fetch = fetch
    s.reference = SimpleNamespace(with_teacher=lambda own, other: [*zip(own, other, strict=True)])
    watch = Stopwatch()
    (update,) = pack_taught(s, judged(s, [3, 8, 4, 7]), watch)
    assert watch.phases == ["train", "reference"]
    pairs: Any = update.microbatches
    for own, teachers in pairs:
        assert own.response_lengths == teachers.response_lengths
        assert own.labels_R.tolist() == teachers.labels_R.tolist()
        prompts = teachers.num_tokens - own.num_tokens
        assert prompts == (5 - 2) * len(own.response_lengths)
    assert sorted(n for own, _ in pairs for n in own.response_lengths) == [3, 4, 7, 8]
    assert len(pairs) == 4


@pytest.mark.parametrize("saved", [True, False])
def test_log_probs_are_computed_where_they_are_saved_and_rounded(
    saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_opsft.run.step import sampled_log_probs

    monkeypatch.setattr(sampled_log_probs, "deal", lambda rows_for: rows_for.get(0, []))
    monkeypatch.setattr(sampled_log_probs, "join_over_context", lambda values, batch: values)
    s = session(f"run.save_logprobs={str(saved).lower()}")
    s.settings.temperature = 0.7
    batch = judged(s, [3, 5])
    watch = Stopwatch()
    found = score_sampled(s, batch, watch)
    assert watch.phases == (["old_logprob"] if saved else [])
    if saved:
        assert {index: one.log_probs for index, one in found.items()} == {
            0: (-0.714,) * 3,
            1: (-0.714,) * 5,
        }
        assert [sum(one.piece_lengths) for one in found.values()] == [6, 10]
        s.stored = object()
        assert score_sampled(s, batch, watch) == {}
    else:
        assert found == {}
