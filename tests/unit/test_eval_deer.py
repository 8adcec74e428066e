"""DEER on scripted engines, where every token is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from forked_cli import ROOT
from responses import rollout_of

from megatron_opsft.commands.evaluate.deer import Deer, geometric_mean
from megatron_opsft.commands.evaluate.settings import DeerSettings
from megatron_opsft.data.prompts import load_tokenizer
from megatron_opsft.errors import NonFiniteError, UserError
from megatron_opsft.records import FinishReason, Rollout, Sample
from megatron_opsft.rollout.engine import SamplingSettings, Scores
from megatron_opsft.rollout.requests import ResponseRequest

EXIT = "\n</think>\n\n"
INDUCER = "\n**Final Answer**\n\\boxed"
TOKENIZER = load_tokenizer(ROOT / "megatron_opsft/assets/tiny_reasoner")


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


(END,) = ids_of("<｜end▁of▁sentence｜>")


@dataclass(kw_only=True)
class Script:
    """An engine: what a model would say to a prompt of one token, whatever the seed.

    thought: undisturbed, up to the end token. trials: (text, probability of each of its tokens) at
    each transition word in turn. conclusion: after an exit. calls: what was asked for. seeds: of
    what was not greedy.
    """

    thought: str
    trials: tuple[tuple[str, tuple[float, ...]], ...] = ()
    conclusion: str = ""
    words: tuple[str, ...] = ("Wait",)
    version: int = 7
    calls: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def generate(
        self, requests: Sequence[ResponseRequest], sampling: SamplingSettings
    ) -> list[Rollout]:
        (request,) = requests
        greedy, limit = sampling.temperature == 0, sampling.max_response_tokens
        assert limit >= 1
        self.calls.append("trial" if greedy else "think")
        self.seeds += [] if greedy else [request.seed]
        out: list[int] = []
        while len(out) < limit and not (out and out[-1] in sampling.end_token_ids):
            out.append(self.next_token([*request.prompt_ids[1:], *out]))
        return [rollout_of("", tuple(out), prompt_ids=request.prompt_ids)]

    def score(self, samples: Sequence[Sample]) -> Scores:
        self.calls.append("score")
        (sample,) = samples
        text, probabilities = self.trial_in(list(sample.prompt_ids[1:]))
        assert len(probabilities) == len(ids_of(text))
        log_probs = tuple(map(math.log, probabilities[: len(sample.response_ids)]))
        return Scores(log_probs=(log_probs,), stale_tokens=0)

    def trial_in(self, context: list[int]) -> tuple[str, tuple[float, ...]]:
        """The trial that `context` asks for, by the transition words before the inducer."""
        rest = behind(context, ids_of(INDUCER))
        assert rest is not None
        words = [ids_of(word)[0] for word in self.words]
        before = context[: len(context) - len(rest)]
        return self.trials[sum(token in words for token in before)]

    def next_token(self, context: list[int]) -> int:
        thought = [*ids_of(self.thought), END]
        if (said := behind(context, ids_of(INDUCER))) is not None:
            whole = self.trial_in(context)[0]
        elif context == thought[: len(context)]:
            return thought[len(context)]
        else:
            said, whole = behind(context, ids_of(EXIT)), self.conclusion
            assert said is not None
        return [*ids_of(whole), END][len(said)]


def behind(context: list[int], part: list[int]) -> list[int] | None:
    """The tokens behind the last `part`; None if it is not there."""
    for end in range(len(context), len(part) - 1, -1):
        if context[end - len(part) : end] == part:
            return context[end:]
    return None


class Found(NamedTuple):
    """A response, what it took, and what was asked of the engine."""

    rollout: Rollout
    extra_tokens: int
    exited: bool
    calls: list[str]

    @property
    def num_trials(self) -> int:
        return self.calls.count("trial")


def run(script: Script, *, limit: int = 400, **settings: object) -> Found:
    script.calls = []
    request = ResponseRequest(problem_id="p0", sample_index=0, prompt_ids=(0,), seed=100)
    sampling = SamplingSettings(
        temperature=0.6, top_p=0.95, max_response_tokens=limit, end_token_ids=(END,)
    )
    deer = Deer(DeerSettings(**settings), TOKENIZER)
    ((rollout, extra_tokens),) = deer.generate(script, [request], sampling)
    exited = bool(script.conclusion) and EXIT + script.conclusion[:1] in rollout.text
    return Found(rollout, extra_tokens, exited, script.calls)


THOUGHT = "2+7=9.\nWait, 2+7=9.\nWait, it is 9.\nWait, 9.\n</think>\n\\boxed{9}"
WHOLE = (*ids_of(THOUGHT), END)
SHORT = "1.\nWait, 2.\n</think>"
DOUBT = ("{9}", (1.0, 0.5, 1.0))
SURE = ("{9}", (1.0, 0.99, 0.98))


def test_exit_at_the_first_transition_above_the_threshold() -> None:
    script = Script(thought=THOUGHT, trials=(DOUBT, SURE, SURE), conclusion="So \\boxed{9}")
    found = run(script)
    text = "2+7=9.\nWait, 2+7=9.\n" + EXIT + "So \\boxed{9}"
    ids = [token for part in text.partition(EXIT) for token in ids_of(part)]
    assert found.rollout == rollout_of(text, (*ids, END), problem_id="p0")
    # Two trials of "{", "9", "}" and their end, and the dropped word.
    assert found.extra_tokens == 4 + 4 + 1
    assert found.calls == [*("think", "trial", "score") * 2, "think"]
    # A response's segments have different seeds, the first of them its own.
    assert script.seeds[0] == 100 and len(set(script.seeds)) == len(script.seeds) == 3


@pytest.mark.parametrize(
    ("trial", "probabilities"),
    [
        ("{12}.\n", (0.1, 0.9, 0.8, 0.7, 0.2)),  # not the opening brace, and nothing behind
        ("{\\sqrt{9}}", (0.1, *[1.0] * (len(ids_of("{\\sqrt{9}}")) - 2), 0.5)),  # nested braces
    ],
)
def test_threshold_is_compared_with_the_mean_over_the_answer_alone(
    trial: str, probabilities: tuple[float, ...]
) -> None:
    answer = probabilities[1:4] if "12" in trial else probabilities[1:]
    confidence = math.prod(answer) ** (1 / len(answer))
    script = Script(thought=SHORT, trials=((trial, probabilities),), conclusion="9")
    assert run(script, threshold=confidence - 1e-9).exited
    assert not run(script, threshold=confidence + 1e-9).exited
    with pytest.raises(NonFiniteError, match="log-probs of a trial answer are NaN"):
        geometric_mean([-0.1, math.nan])


@pytest.mark.parametrize(
    ("trial", "settings", "num_trials"),
    [
        (DOUBT, {}, 3),
        (("{9}", (1.0, 1.0, 1.0)), {"threshold": 1.0}, 3),  # not above it
        (DOUBT, {"max_trials": 2}, 2),
    ],
)
def test_no_exit_leaves_the_response_as_it_is_at_any_limit(
    trial: tuple[str, tuple[float, ...]], settings: dict[str, float], num_trials: int
) -> None:
    script = Script(thought=THOUGHT, trials=(trial,) * 3)
    found = run(script, **settings)
    assert (found.rollout.response_ids, found.rollout.text) == (WHOLE, THOUGHT)
    assert (found.num_trials, found.extra_tokens) == (num_trials, 4 * num_trials)
    for limit in range(1, len(WHOLE) + 2):
        rollout = run(script, limit=limit, max_trial_tokens=4, **settings).rollout
        assert rollout.response_ids == WHOLE[:limit]
        finished = limit >= len(WHOLE)
        assert rollout.finish_reason is (FinishReason.STOP if finished else FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("trial", "max_tokens", "exits"),
    [
        ("{}", 20, False),  # empty
        ("9", 20, False),  # not opened
        ("{9", 20, False),  # not closed
        ("{\\frac{9}", 20, False),  # closed inside only
        ("So \\boxed{9}", 20, False),  # another box
        ("{123}", 5, True),
        ("{123}", 4, False),  # longer than a trial
    ],
)
def test_trial_without_an_answer_is_no_exit(trial: str, max_tokens: int, exits: bool) -> None:
    probabilities = (1.0,) * len(ids_of(trial))
    script = Script(thought=SHORT, trials=((trial, probabilities),), conclusion="3" * exits)
    found = run(script, threshold=0.0, max_trial_tokens=max_tokens)
    assert (found.exited, found.num_trials) == (exits, 1)
    assert exits or (found.rollout.text == SHORT and "score" not in found.calls)


@pytest.mark.parametrize(
    ("thought", "calls"),
    [("2+7=9.\n</think>\nWait, \\boxed{9}", 2), ("2+7=9.", 1)],
    ids=["a transition word in the conclusion", "the end token inside the thinking"],
)
def test_thinking_that_ends_by_itself_needs_no_trial(thought: str, calls: int) -> None:
    found = run(Script(thought=thought))
    assert found.rollout.response_ids == (*ids_of(thought), END)
    assert found.rollout.finish_reason is FinishReason.STOP
    assert found.calls == ["think"] * calls and found.extra_tokens == 0


def test_several_words_and_several_tokens_of_a_word() -> None:
    """`think` and ` think` are two tokens of this tokenizer; a comma in the setting is nothing."""
    assert len(ids_of("think")) == len(ids_of(" think")) == 1
    words = (" think", "Hmm,")
    thought = "a think b think.\nHmm, c\n</think>"
    script = Script(thought=thought, trials=(DOUBT,) * 3, words=(" think", "Hmm"))
    found = run(script, transition_words=words)
    assert (found.rollout.text, found.num_trials) == (thought, 3)
    plain = Script(thought="think b\n</think>", trials=(SURE,), conclusion="9", words=("think",))
    assert run(plain, transition_words=words).rollout.text == EXIT + "9"


def test_limit_inside_the_conclusion() -> None:
    script = Script(thought=THOUGHT, trials=(SURE,), conclusion="It is so. " * 12 + "\\boxed{9}")
    opened = (*ids_of("2+7=9.\n"), *ids_of(EXIT))
    whole = (*opened, *ids_of(script.conclusion), END)
    for limit in (len(opened) + 40, len(whole) - 1, len(whole)):
        rollout = run(script, limit=limit).rollout
        assert rollout.response_ids == whole[:limit]
        stopped = limit == len(whole)
        assert rollout.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_trial_needs_room() -> None:
    """For the inducer, the trial and the token that scoring may add, or for the closing text."""
    script = Script(thought=THOUGHT, trials=(SURE,), conclusion="9")
    before = len(ids_of("2+7=9.\n"))
    needed = before + len(ids_of(INDUCER)) + 20 + 1
    assert run(script, limit=needed).exited
    found = run(script, limit=needed - 1)
    assert (found.num_trials, found.rollout.response_ids) == (0, WHOLE[: needed - 1])
    long = "So be it. " * 20 + "</think>"
    script = Script(thought=THOUGHT, trials=(DOUBT,) * 3)
    closed = before + len(ids_of(long))
    assert closed > needed
    for limit, num_trials in ((closed, 0), (closed + 1, 1)):
        assert run(script, limit=limit, exit_text=long, max_trials=1).num_trials == num_trials


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(transition_words=("Wait", "Waitress")), "transition_words: 'Waitress' is not a"),
        (dict(transition_words=("...",)), r"transition_words: '\.\.\.' is not a single token"),
        (dict(think_end="</thought>"), "think_end: '</thought>' is not a single token"),
        (dict(exit_text="\n\n"), "exit_text: .* does not hold '</think>' once"),
        (dict(trial_prompt="The answer is"), "trial_prompt: .* does not end with an open box"),
    ],
)
def test_settings_that_do_not_fit_the_model(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Deer(DeerSettings(**settings), TOKENIZER)
    assert "\n" not in str(error.value)
