"""DEER on scripted engines, where every token is known, and on the shipped tiny reasoner."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_engines import engine_from_disk
from transformers import PreTrainedTokenizerBase

import megatron_opsft
from megatron_opsft.data.arithmetic import load_arithmetic
from megatron_opsft.data.boxed import find_boxes
from megatron_opsft.data.prompts import PromptEncoder, end_token_ids, load_tokenizer
from megatron_opsft.errors import NonFiniteError, UserError
from megatron_opsft.evaluate.deer import Deer, EarlyExit, geometric_mean
from megatron_opsft.evaluate.deer_settings import DeerSettings
from megatron_opsft.records import FinishReason, Rollout, Sample
from megatron_opsft.rollout.engine import EngineShare, SamplingSettings, Scores
from megatron_opsft.rollout.requests import ResponseRequest, make_requests

DIRECTORY = Path(megatron_opsft.__file__).parent / "assets" / "tiny_reasoner"
EXIT = "\n</think>\n\n"
INDUCER = "\n**Final Answer**\n\\boxed"


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(DIRECTORY)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


END = ids_of("<｜end▁of▁sentence｜>")[0]
WAIT = ids_of("Wait")[0]


@dataclass
class FakeEngine:
    """The engine's side of the protocol; subclasses say which token comes next, and how probable.

    calls: (what, number of requests, limit) of every call. seeds: of what was not greedy.
    """

    share: EngineShare = EngineShare(index=0, count=1)
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def generate(
        self, requests: Sequence[ResponseRequest], sampling: SamplingSettings
    ) -> list[Rollout]:
        greedy = sampling.temperature == 0
        limit = sampling.max_response_tokens
        assert limit >= 1
        assert requests
        self.calls.append(("trial" if greedy else "think", len(requests), limit))
        places = [(request.problem_id, request.sample_index) for request in requests]
        assert len(set(places)) == len(places)
        rollouts = []
        for request in requests:
            seed = request.seed
            self.seeds += [] if greedy else [seed]
            out: list[int] = []
            while len(out) < limit and not (out and out[-1] in sampling.end_token_ids):
                out.append(self.next_token(request.prompt_ids, out, None if greedy else seed))
            rollouts.append(
                Rollout(
                    problem_id=request.problem_id,
                    sample_index=request.sample_index,
                    prompt_ids=request.prompt_ids,
                    response_ids=tuple(out),
                    text="",
                    finish_reason=FinishReason.STOP,
                    weight_version=7,
                )
            )
        return rollouts

    def score(self, samples: Sequence[Sample]) -> Scores:
        self.calls.append(("score", len(samples), 0))
        log_probs = tuple(tuple(map(math.log, self.probabilities(sample))) for sample in samples)
        return Scores(log_probs=log_probs, stale_tokens=0)

    def next_token(self, prompt_ids: Sequence[int], out: Sequence[int], seed: int | None) -> int:
        raise NotImplementedError

    def probabilities(self, sample: Sample) -> list[float]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a model would say to one prompt, whatever the seed.

    thought: undisturbed, up to the end token. trials: (text, probability of each of its tokens) at
    each trial in turn. conclusion: after an exit.
    """

    thought: str
    trials: tuple[tuple[str, tuple[float, ...]], ...] = ()
    conclusion: str = ""


@dataclass
class ScriptedEngine(FakeEngine):
    """The first token of a prompt says which script it is."""

    scripts: Sequence[Script] = ()
    words: tuple[str, ...] = ("Wait",)

    def script_of(self, ids: Sequence[int]) -> Script:
        return self.scripts[ids[0]]

    def trial_at(self, context: Sequence[int]) -> int | None:
        """Where the inducer ends in `context`; None if it is not there."""
        inducer = ids_of(INDUCER)
        for start in range(len(context) - len(inducer) + 1):
            if list(context[start : start + len(inducer)]) == inducer:
                return start + len(inducer)
        return None

    def trial_of(self, ids: Sequence[int], start: int) -> tuple[str, tuple[float, ...]]:
        transitions = {ids_of(word)[0] for word in self.words}
        number = sum(token in transitions for token in ids[1 : 1 + start])
        return self.script_of(ids).trials[number]

    def next_token(self, prompt_ids: Sequence[int], out: Sequence[int], seed: int | None) -> int:
        context = [*prompt_ids[1:], *out]
        script = self.script_of(prompt_ids)
        start = self.trial_at(context)
        if start is not None:
            text, _ = self.trial_of(prompt_ids, start)
            return [*ids_of(text), END][len(context) - start]
        thought = [*ids_of(script.thought), END]
        if context == thought[: len(context)]:
            return thought[len(context)]
        closing = ids_of(EXIT)
        common = next(i for i, (a, b) in enumerate(zip(context, thought, strict=False)) if a != b)
        cut = max(c for c in range(common + 1) if context[c : c + len(closing)] == closing)
        rest = [*ids_of(script.conclusion), END]
        return rest[len(context) - cut - len(closing)]

    def probabilities(self, sample: Sample) -> list[float]:
        start = self.trial_at(sample.prompt_ids[1:])
        assert start is not None
        text, found = self.trial_of(sample.prompt_ids, start)
        assert len(found) == len(ids_of(text))
        return list(found[: len(sample.response_ids)])


def run(
    *scripts: Script, limit: int = 400, engine: FakeEngine | None = None, **settings: object
) -> list[EarlyExit]:
    words = settings.get("transition_words", ("Wait",))
    engine = engine or ScriptedEngine(scripts=scripts, words=words)
    deer = Deer(DeerSettings(**settings), engine, tokenizer())
    requests = [
        ResponseRequest(problem_id=f"p{n}", sample_index=0, prompt_ids=(n,), seed=100 + n)
        for n in range(len(scripts))
    ]
    return deer.generate(requests, sampling(limit))


def sampling(limit: int) -> SamplingSettings:
    return SamplingSettings(
        temperature=0.6, top_p=0.95, max_response_tokens=limit, end_token_ids=(END,)
    )


THOUGHT = "2+7=9.\nWait, 2+7=9.\nWait, it is 9.\nWait, 9.\n</think>\n\\boxed{9}"
DOUBT = ("{9}", (1.0, 0.5, 1.0))
SURE = ("{9}", (1.0, 0.99, 0.98))
SCRIPT = Script(thought=THOUGHT, trials=(DOUBT, SURE, SURE), conclusion="So \\boxed{9}")


def test_exit_at_the_first_transition_above_the_threshold() -> None:
    engine = ScriptedEngine(scripts=(SCRIPT,))
    (found,) = run(SCRIPT, engine=engine)
    text = "2+7=9.\nWait, 2+7=9.\n" + EXIT + "So \\boxed{9}"
    before = "2+7=9.\nWait, 2+7=9.\n"
    expected = (*ids_of(before), *ids_of(EXIT), *ids_of("So \\boxed{9}"), END)
    assert found.rollout == Rollout(
        problem_id="p0",
        sample_index=0,
        prompt_ids=(0,),
        response_ids=expected,
        text=text,
        finish_reason=FinishReason.STOP,
        weight_version=7,
    )
    assert found.exited
    assert found.num_trials == 2
    # Two trials of "{", "9", "}" and their end, and the dropped word.
    assert found.extra_tokens == 4 + 4 + 1
    assert [what for what, _, _ in engine.calls] == [
        *("think", "trial", "score"),
        *("think", "trial", "score"),
        "think",
    ]


def test_threshold_is_compared_with_the_answer_alone() -> None:
    """The opening brace is not part of the answer, the closing one is, what follows is not."""
    trial = ("{12}.\n", (0.1, 0.9, 0.8, 0.7, 0.2))
    assert len(ids_of(trial[0])) == len(trial[1])
    script = Script(thought=THOUGHT, trials=(trial, DOUBT, DOUBT), conclusion="9")
    confidence = float(np.prod([0.9, 0.8, 0.7]) ** (1 / 3))
    for threshold, trials in ((confidence - 1e-9, 1), (confidence + 1e-9, 3)):
        (found,) = run(script, threshold=threshold)
        assert (found.num_trials, found.exited) == (trials, trials == 1)


def test_geometric_mean_equals_numpy() -> None:
    values = np.random.default_rng(0).uniform(0.01, 1.0, size=17)
    assert geometric_mean(np.log(values).tolist()) == pytest.approx(
        np.prod(values) ** (1 / 17), rel=1e-12
    )
    assert geometric_mean([math.log(0.3)]) == pytest.approx(0.3)
    with pytest.raises(NonFiniteError, match="log-probs of a trial answer are NaN"):
        geometric_mean([-0.1, math.nan])


def test_no_exit_below_the_threshold_leaves_the_response_as_it_is() -> None:
    script = Script(thought=THOUGHT, trials=(DOUBT, DOUBT, DOUBT))
    (found,) = run(script)
    assert found.rollout.response_ids == (*ids_of(THOUGHT), END)
    assert found.rollout.text == THOUGHT
    assert (found.num_trials, found.extra_tokens, found.exited) == (3, 12, False)


def test_confidence_equal_to_the_threshold_is_no_exit() -> None:
    certain = ("{9}", (1.0, 1.0, 1.0))
    script = Script(thought=THOUGHT, trials=(certain, certain, certain))
    (found,) = run(script, threshold=1.0)
    assert (found.num_trials, found.exited) == (3, False)


@pytest.mark.parametrize(
    "trial",
    [
        ("{}", (1.0,)),  # empty
        ("9", (1.0,)),  # not opened
        ("{9", (1.0, 1.0)),  # not closed
        ("{\\frac{9}", (1.0,) * len(ids_of("{\\frac{9}"))),  # closed inside only
        ("So \\boxed{9}", (1.0,) * len(ids_of("So \\boxed{9}"))),  # another box
    ],
)
def test_trial_without_an_answer_is_no_exit(trial: tuple[str, tuple[float, ...]]) -> None:
    engine = ScriptedEngine(scripts=(Script(thought="1.\nWait, 2.\n</think>", trials=(trial,)),))
    (found,) = run(*engine.scripts, engine=engine, threshold=0.0)
    assert (found.num_trials, found.exited) == (1, False)
    assert "score" not in [what for what, _, _ in engine.calls]


def test_nested_braces_belong_to_the_answer() -> None:
    text = "{\\sqrt{9}}"
    count = len(ids_of(text))
    script = Script(
        thought="1.\nWait, 2.\n</think>",
        trials=((text, (*[1.0] * (count - 1), 0.5)),),
        conclusion="3",
    )
    confidence = 0.5 ** (1 / (count - 1))
    assert run(script, threshold=confidence - 1e-9)[0].exited
    assert not run(script, threshold=confidence + 1e-9)[0].exited


def test_longest_trial() -> None:
    script = Script(
        thought="1.\nWait, 2.\n</think>", trials=(("{123}", (1.0,) * 5),), conclusion="3"
    )
    assert run(script, max_trial_tokens=5)[0].exited
    (found,) = run(script, max_trial_tokens=4)
    assert (found.exited, found.num_trials, found.extra_tokens) == (False, 1, 4)


def test_thinking_that_ends_by_itself_needs_no_trial() -> None:
    text = "2+7=9.\n</think>\nWait, \\boxed{9}"  # a transition word in the conclusion
    engine = ScriptedEngine(scripts=(Script(thought=text),))
    (found,) = run(*engine.scripts, engine=engine)
    assert found.rollout.response_ids == (*ids_of(text), END)
    assert (found.num_trials, found.extra_tokens, found.exited) == (0, 0, False)
    assert [what for what, _, _ in engine.calls] == ["think", "think"]


def test_end_token_inside_the_thinking_ends_the_response() -> None:
    engine = ScriptedEngine(scripts=(Script(thought="2+7=9."),))
    (found,) = run(*engine.scripts, engine=engine)
    assert found.rollout.response_ids == (*ids_of("2+7=9."), END)
    assert found.rollout.finish_reason is FinishReason.STOP
    assert len(engine.calls) == 1


def test_after_the_last_trial_nothing_stops_the_thinking() -> None:
    script = Script(thought=THOUGHT, trials=(DOUBT, DOUBT, SURE))
    engine = ScriptedEngine(scripts=(script,))
    (found,) = run(script, engine=engine, max_trials=2)
    assert found.rollout.response_ids == (*ids_of(THOUGHT), END)
    assert (found.num_trials, found.exited) == (2, False)
    assert [what for what, _, _ in engine.calls][-2:] == ["score", "think"]


def test_several_words_and_several_tokens_of_a_word() -> None:
    """`think` and ` think` are two tokens of this tokenizer; a comma in the setting is nothing."""
    thought = "a think b think.\nHmm, c\n</think>"
    tokens = [token for token in ids_of(thought) if "think" in tokenizer().decode([token])]
    assert len(ids_of("think")) == len(ids_of(" think")) == 1
    assert ids_of("think") != ids_of(" think")
    assert tokens[:2] == [*ids_of(" think")] * 2
    words = (" think", "Hmm,")
    engine = ScriptedEngine(
        scripts=(Script(thought=thought, trials=(DOUBT,) * 3),), words=(" think", "Hmm")
    )
    (found,) = run(*engine.scripts, engine=engine, transition_words=words)
    assert (found.num_trials, found.rollout.text) == (3, thought)
    plain = "think b\n</think>"  # without the space in front
    engine = ScriptedEngine(
        scripts=(Script(thought=plain, trials=(SURE,), conclusion="9"),), words=("think",)
    )
    (found,) = run(*engine.scripts, engine=engine, transition_words=words)
    assert found.rollout.text == EXIT + "9"


BEFORE = len(ids_of("2+7=9.\n"))  # tokens before the first transition


@pytest.mark.parametrize("limit", range(1, len(ids_of(THOUGHT)) + 3))
def test_limit_inside_the_thinking(limit: int) -> None:
    """Whatever the limit, a response without exit is the undisturbed one, cut there."""
    script = Script(thought=THOUGHT, trials=(DOUBT, DOUBT, DOUBT))
    (found,) = run(script, limit=limit, max_trial_tokens=4)
    whole = (*ids_of(THOUGHT), END)
    assert found.rollout.response_ids == whole[:limit]
    finished = limit >= len(whole)
    assert found.rollout.finish_reason is (FinishReason.STOP if finished else FinishReason.LENGTH)


def test_limit_inside_the_conclusion() -> None:
    script = Script(thought=THOUGHT, trials=(SURE,), conclusion="It is so. " * 12 + "\\boxed{9}")
    conclusion = ids_of(script.conclusion)
    closed = BEFORE + len(ids_of(EXIT))
    whole = (*ids_of("2+7=9.\n"), *ids_of(EXIT), *conclusion, END)
    assert len(conclusion) > 45
    for limit in (closed + 40, len(whole) - 1, len(whole)):
        (found,) = run(script, limit=limit)
        assert found.exited
        assert found.rollout.response_ids == whole[:limit]
        stopped = limit == len(whole)
        assert found.rollout.finish_reason is (
            FinishReason.STOP if stopped else FinishReason.LENGTH
        )


def test_trial_needs_room() -> None:
    """For the inducer, the trial and the token that scoring may add, or for the closing text."""
    script = Script(thought=THOUGHT, trials=(SURE,), conclusion="9")
    needed = BEFORE + len(ids_of(INDUCER)) + 20 + 1
    (found,) = run(script, limit=needed)
    assert found.exited
    (found,) = run(script, limit=needed - 1)
    assert (found.num_trials, found.exited) == (0, False)
    assert found.rollout.response_ids == (*ids_of(THOUGHT), END)[: needed - 1]
    long = "So be it. " * 20 + "</think>"
    script = Script(thought=THOUGHT, trials=(DOUBT,) * 3)
    closed = BEFORE + len(ids_of(long))
    assert closed > needed
    for limit, num_trials in ((closed, 0), (closed + 1, 1)):
        (found,) = run(script, limit=limit, exit_text=long, max_trials=1)
        assert found.num_trials == num_trials


@dataclass
class RandomEngine(FakeEngine):
    """A random walk: a token depends on the seed, its position in the segment and what it follows.

    Greedy tokens and probabilities depend on what they follow alone.
    """

    alphabet: tuple[int, ...] = tuple(
        ids_of("9+{")
        + ids_of("}") * 2
        + ids_of("Wait") * 2
        + ids_of("Hmm")
        + ids_of("</think>")
        + [END]
        + ids_of(".") * 12
    )

    def next_token(self, prompt_ids: Sequence[int], out: Sequence[int], seed: int | None) -> int:
        if seed is None and not out:
            return ids_of("{")[0]
        if seed is None and len(out) == 3:
            return ids_of("}")[0]
        digest = hashlib.blake2b(repr((tuple(prompt_ids), tuple(out), seed)).encode()).digest()
        return self.alphabet[int.from_bytes(digest[:8], "big") % len(self.alphabet)]

    def probabilities(self, sample: Sample) -> list[float]:
        digest = hashlib.blake2b(repr((sample.prompt_ids, sample.response_ids)).encode()).digest()
        return [(digest[i] + 1) / 256 for i in range(len(sample.response_ids))]


WORDS = ("Wait", "Hmm")


def _random_requests(num_problems: int = 12, num_samples: int = 3) -> list[ResponseRequest]:
    return [
        request
        for n in range(num_problems)
        for request in make_requests(f"p{n}", (n, n + 1), num_samples, 0, 0)
    ]


def _random_deer(engine: FakeEngine | None = None) -> Deer:
    settings = DeerSettings(
        transition_words=WORDS, threshold=0.6, max_trial_tokens=6, trial_prompt="\\boxed"
    )
    return Deer(settings, engine or RandomEngine(), tokenizer())


def test_responses_do_not_depend_on_the_others() -> None:
    requests = _random_requests()
    together = _random_deer().generate(requests, sampling(40))
    assert {found.rollout.finish_reason for found in together} == set(FinishReason)
    assert {found.exited for found in together} == {True, False}
    assert max(found.num_trials for found in together) >= 2
    places = [(found.rollout.problem_id, found.rollout.sample_index) for found in together]
    assert places == [(r.problem_id, r.sample_index) for r in requests]
    alone = [found for r in requests for found in _random_deer().generate([r], sampling(40))]
    assert alone == together
    backwards = _random_deer().generate(requests[::-1], sampling(40))
    key = {(f.rollout.problem_id, f.rollout.sample_index): f for f in backwards}
    assert [key[place] for place in places] == together


def test_tokens_are_accounted_for() -> None:
    """Lengths, ends, texts, closing texts and extra tokens fit together."""
    engine = RandomEngine()
    found = _random_deer(engine).generate(_random_requests(), sampling(40))
    for one in found:
        ids = one.rollout.response_ids
        assert 1 <= len(ids) <= 40
        assert END not in ids[:-1]
        stopped = ids[-1] == END
        assert one.rollout.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(ids) == 40
        assert one.rollout.text == tokenizer().decode(ids[:-1] if stopped else ids)
        closing = ids_of(EXIT)
        places = [i for i in range(len(ids)) if list(ids[i : i + len(closing)]) == closing]
        assert bool(places) == one.exited
        transitions = sum(token in {WAIT, ids_of("Hmm")[0]} for token in ids)
        assert one.num_trials <= min(transitions + one.exited, 10)
        assert one.exited <= one.num_trials <= one.extra_tokens <= 6 * one.num_trials + one.exited
    # A response's segments have different seeds, the first of them its own.
    thinking = [request.seed for request in _random_requests()]
    assert engine.seeds[: len(thinking)] == thinking
    assert len(set(engine.seeds)) == len(engine.seeds) > 2 * len(thinking)


def test_rounds_are_batches_and_calls_overrun_by_less_than_twice() -> None:
    engine = RandomEngine()
    found = _random_deer(engine).generate(_random_requests(), sampling(40))
    thinks = [call for call in engine.calls if call[0] == "think"]
    trials = [call for call in engine.calls if call[0] == "trial"]
    assert thinks[0] == ("think", 36, 40)
    assert sum(count for _, count, _ in trials) == sum(one.num_trials for one in found)
    assert len(trials) == max(one.num_trials for one in found)
    limits = {limit for _, _, limit in thinks}
    assert {31, 15} < limits <= {40, 31, 15, 7, 3, 1}


def test_no_requests_no_calls() -> None:
    engine = RandomEngine()
    assert _random_deer(engine).generate([], sampling(40)) == []
    assert engine.calls == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(transition_words=("Wait", "Waitress")), "transition_words: 'Waitress' is not a"),
        (dict(transition_words=("...",)), r"transition_words: '\.\.\.' is not a single token"),
        (dict(think_end="</thought>"), "think_end: '</thought>' is not a single token"),
        (dict(exit_text="\n\n"), "exit_text: .* does not hold '</think>' once"),
        (dict(trial_prompt="The answer is"), "trial_prompt: .* does not end with an open box"),
        (dict(trial_prompt="\\boxed{9}"), "trial_prompt: .* does not end with an open box"),
    ],
)
def test_settings_that_do_not_fit_the_model(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Deer(DeerSettings(**settings), RandomEngine(), tokenizer())
    assert "\n" not in str(error.value)


def test_engine_that_answers_another_rank() -> None:
    engine = RandomEngine(share=EngineShare(index=0, count=1, answers=False))
    with pytest.raises(UserError, match="use engines of tensor-parallel size 1"):
        _random_deer(engine)


# Its own format: the thinking ends with a line break, and the box follows at once.
TINY = dict(trial_prompt="</think>\n\\boxed", exit_text="</think>\n")
OPENERS = ("Wait", "Alternatively", "Hmm", "Again", "Also", "Actually", "Well", "Okay", "Now")


def test_tiny_reasoner_needs_fewer_tokens_and_stays_right() -> None:
    engine = engine_from_disk(
        DIRECTORY, tokenizer(), dtype=torch.float32, device="cpu", batch_size=32
    )
    encoder = PromptEncoder(tokenizer=tokenizer(), template="r1")
    problems = load_arithmetic("test", num_problems=16)
    gold = {problem.id: problem.answer for problem in problems}
    requests = [r for p in problems for r in make_requests(p.id, encoder.encode(p), 2, 0, 0)]
    settings = SamplingSettings(
        temperature=0.6,
        top_p=0.95,
        max_response_tokens=512,
        end_token_ids=end_token_ids(tokenizer(), DIRECTORY),
    )
    plain = engine.generate(requests, settings)
    deer = Deer(DeerSettings(threshold=0.9, transition_words=OPENERS, **TINY), engine, tokenizer())
    found = deer.generate(requests, settings)

    def num_correct(rollouts: Sequence[Rollout]) -> int:
        answers = [(find_boxes(r.text)[-1:], gold[r.problem_id]) for r in rollouts]
        return sum(bool(boxes) and boxes[0].content == answer for boxes, answer in answers)

    rollouts = [one.rollout for one in found]
    tokens = [sum(len(r.response_ids) for r in many) for many in (plain, rollouts)]
    spent = tokens[1] + sum(one.extra_tokens for one in found)
    assert num_correct(rollouts) >= num_correct(plain) - 1
    assert tokens[1] < spent < 0.5 * tokens[0]
    assert sum(one.exited for one in found) >= 24
    # Without a transition a response is plain sampling's.
    untouched = [i for i, one in enumerate(found) if one.num_trials == 0]
    assert [rollouts[i] for i in untouched] == [plain[i] for i in untouched]
    assert untouched
