r"""DEER, early exit without training: thinking ends where a trial answer is confident enough.

Source: Yang et al., "Dynamic Early Exit in Reasoning Models" (arXiv 2504.15895); defaults are those
of the paper and its released code. Where the model samples a transition word ("Wait"), an inducer
is put in the word's place (`\n**Final Answer**\n\boxed`) and continued greedily. The confidence in
the answer a_1 ... a_n is the geometric mean of its tokens' probabilities,

    C = (p(a_1) * ... * p(a_n)) ** (1 / n),   p(a_t) = max over the vocabulary, at temperature 1.

C > threshold: the word is dropped, the thinking closed (`\n</think>\n\n`) and the conclusion
sampled. Otherwise the trial is forgotten and the thinking continues behind the word. After
`max_trials` trials nothing stops the thinking any more.

Where this differs from the released code, and why:
- C is the paper's. The code takes the arithmetic mean by default; for Qwen3 it takes the geometric
  one, and asks that the trial ends with `</think>`.
- a_1 ... a_n are the tokens from behind the box's opening brace to its closing brace. The code
  averages all but the first token up to one of a list of endings, or to 20 tokens. A box that is
  empty or not closed within the trial is no answer here.
- Trials are greedy, as p(a_t) wants; the code leaves their temperature at vLLM's default of 1.
- A transition is a token that spells the word, spaces and punctuation aside. The code looks for one
  word's characters, inside longer words too.
- Thinking that ends by itself keeps its own closing text, and tokens are never tokenised again.
- No budget forcing: the code closes the thinking after 90 % of the budget and forces an answer
  beyond its end, which no method that this one is compared with gets.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from megatron_opsft.commands.evaluate.settings import DeerSettings
from megatron_opsft.data.answers import find_boxes
from megatron_opsft.errors import NonFiniteError, UserError
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.engine import RolloutEngine, SamplingSettings
from megatron_opsft.rollout.requests import ResponseRequest, make_rollouts
from megatron_opsft.rollout.sampling import response_seed

_OPEN_BOX = re.compile(r"\\boxed\s*\{?$")
_EDGES = re.compile(r"^[\W_]+|[\W_]+$")


@dataclass(slots=True, kw_only=True, eq=False)
class _Response:
    """An unfinished response."""

    request: ResponseRequest
    limit: int
    """Most tokens that the response may have."""
    ids: list[int] = field(default_factory=list)
    """The tokens of the response so far."""
    num_segments: int = 0
    """Calls of the engine that extended the response."""
    num_trials: int = 0
    extra_tokens: int = 0
    """Sampled tokens that are not in `ids`: trials, and the word that an exit drops."""

    @property
    def room(self) -> int:
        """How many tokens may still come."""
        return self.limit - len(self.ids)

    def request_after(self, context: Sequence[int], seed: int) -> ResponseRequest:
        """Return the request for what follows the prompt and the tokens `context`."""
        prompt_ids = (*self.request.prompt_ids, *context)
        return replace(self.request, prompt_ids=prompt_ids, seed=seed)

    def segment_seed(self) -> int:
        """Return the seed of the next segment.

        The first segment has the response's own seed: without any transition the response is the
        one that plain sampling gives.
        """
        if self.num_segments == 0:
            return self.request.seed
        index = self.request.sample_index
        return response_seed(self.request.seed, self.num_segments, "deer", index)


class Deer:
    """Samples with early exits from any engine, by its `generate` and `score` alone.

    How often they are called depends on what is sampled, so the engine must answer this rank
    without the help of others: the Hugging Face engine, or vLLM with tp=1.
    """

    def __init__(
        self, settings: DeerSettings, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Errors: `UserError` for a transition word or an end of thinking that is not a single
        token of the model, for a trial prompt without an open box at its end, and for an exit text
        that does not hold the end of thinking once.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        opening = _OPEN_BOX.search(settings.trial_prompt)
        if opening is None:
            raise UserError(
                f"deer.trial_prompt: {settings.trial_prompt!r} does not end with an open box; "
                "end it with \\boxed or \\boxed{"
            )
        self._opening = opening.group()
        self._trial_prompt_ids = self._encode(settings.trial_prompt)
        think_end_ids = self._encode(settings.think_end)
        if len(think_end_ids) != 1:
            raise UserError(
                f"deer.think_end: {settings.think_end!r} is not a single token of this model; name "
                "the token that ends its thinking"
            )
        self._think_end_id = think_end_ids[0]
        self._exit_ids = self._encode(settings.exit_text)
        if self._exit_ids.count(self._think_end_id) != 1:
            raise UserError(
                f"deer.exit_text: {settings.exit_text!r} does not hold {settings.think_end!r} once"
            )
        self._transition_ids = self._find_transition_ids() - {self._think_end_id}

    def generate(
        self,
        engine: RolloutEngine,
        requests: Sequence[ResponseRequest],
        sampling: SamplingSettings,
    ) -> list[tuple[Rollout, int]]:
        """Return all responses, in the order of the requests, each with the number of tokens that
        were sampled for trials and for words that were dropped.

        A rollout is as if sampled in one go: thinking, end of thinking, conclusion, end token, at
        most sampling.max_response_tokens. No two requests may be for the same sample of a problem.
        """
        responses = [
            _Response(request=request, limit=sampling.max_response_tokens)
            for request in requests
        ]
        stops = (*sampling.end_token_ids, *self._transition_ids, self._think_end_id)
        thinking = responses
        not_tried_again = []
        while thinking:
            self._extend(engine, thinking, sampling, stops)
            unfinished = [
                response
                for response in thinking
                if response.room and response.ids[-1] not in sampling.end_token_ids
            ]
            with_trial = [
                response for response in unfinished if self._can_try(response)
            ]
            thinking = self._try_answers(engine, with_trial, sampling)
            not_tried_again += [
                response for response in unfinished if response not in thinking
            ]
        # These waited for each other: one large batch, not many small ones.
        self._extend(engine, not_tried_again, sampling, sampling.end_token_ids)
        assert engine.version is not None, "an engine without weights"
        rollouts = make_rollouts(
            requests,
            [response.ids for response in responses],
            end_token_ids=sampling.end_token_ids,
            tokenizer=self._tokenizer,
            version=engine.version,
        )
        extra_tokens = [response.extra_tokens for response in responses]
        return list(zip(rollouts, extra_tokens, strict=True))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, sequences: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(
            sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _find_transition_ids(self) -> set[int]:
        """Find all tokens that spell a transition word, with any spaces and punctuation around it.

        Errors: `UserError` for a word that only several tokens spell together.
        """
        vocabulary = set(self._tokenizer.get_vocab().values())
        ids = sorted(vocabulary.difference(self._tokenizer.all_special_ids))
        texts = self._decode([[token_id] for token_id in ids])
        spellings: defaultdict[str, set[int]] = defaultdict(set)
        for token_id, text in zip(ids, texts, strict=True):
            spellings[_EDGES.sub("", text)].add(token_id)
        spellings.pop("", None)  # spaces and punctuation alone
        transition_ids = set()
        for word in self._settings.transition_words:
            ids_of_word = spellings[_EDGES.sub("", word)]
            if not ids_of_word:
                raise UserError(
                    f"deer.transition_words: {word!r} is not a single token of this "
                    "model; name words that are and that its thinking has where a thought ends"
                )
            transition_ids |= ids_of_word
        return transition_ids

    def _extend(
        self,
        engine: RolloutEngine,
        responses: Sequence[_Response],
        sampling: SamplingSettings,
        stops: Sequence[int],
    ) -> None:
        """Sample on from each response up to one of the stops (it is kept) or its own limit.

        A call has one limit for all. So responses with about the same room share a call, and what
        comes out beyond a response's own room is cut: at most as much again.
        """
        # Rooms of the same bit length differ by less than a factor of two.
        by_bit_length: defaultdict[int, list[_Response]] = defaultdict(list)
        for response in responses:
            by_bit_length[response.room.bit_length()].append(response)
        for num_bits, group in by_bit_length.items():
            largest_room = 2**num_bits - 1
            limit = min(largest_room, sampling.max_response_tokens)
            requests = [
                response.request_after(response.ids, response.segment_seed())
                for response in group
            ]
            rollouts = engine.generate(
                requests,
                replace(
                    sampling, max_response_tokens=limit, end_token_ids=tuple(stops)
                ),
            )
            for response, rollout in zip(group, rollouts, strict=True):
                response.ids += rollout.response_ids[: response.room]
                response.num_segments += 1

    def _can_try(self, response: _Response) -> bool:
        """Return True if the response stands at a transition with room for a trial and, after it, a
        conclusion.

        A trial does not count towards the response's limit, but it must fit into the engine's
        context, together with the token that scoring samples.
        """
        at_transition = response.ids[-1] in self._transition_ids
        trial_tokens = len(self._trial_prompt_ids) + self._settings.max_trial_tokens + 1
        exit_tokens = len(self._exit_ids) + 1  # and one of the conclusion
        # A trial and an exit both take the place of the transition word.
        room = response.room + 1
        return at_transition and room >= max(trial_tokens, exit_tokens)

    def _try_answers(
        self,
        engine: RolloutEngine,
        responses: Sequence[_Response],
        sampling: SamplingSettings,
    ) -> list[_Response]:
        """Sample a trial answer for each response and exit where it is confident enough.

        responses: all end with a transition word. Returns those that go on thinking and may be
        tried again.
        """
        if not responses:
            return []
        greedy = SamplingSettings(
            temperature=0.0,
            top_p=1.0,
            max_response_tokens=self._settings.max_trial_tokens,
            end_token_ids=(*sampling.end_token_ids, self._think_end_id),
        )
        requests = []
        for response in responses:
            context = [*response.ids[:-1], *self._trial_prompt_ids]
            requests.append(response.request_after(context, response.request.seed))
        trials = engine.generate(requests, greedy)
        confidences = self._confidences(engine, trials)
        thinking = []
        for response, trial, confidence in zip(
            responses, trials, confidences, strict=True
        ):
            response.num_trials += 1
            response.extra_tokens += len(trial.response_ids)
            if confidence > self._settings.threshold:
                response.ids[-1:] = self._exit_ids
                response.extra_tokens += 1  # the transition word
            elif response.num_trials < self._settings.max_trials:
                thinking.append(response)
        return thinking

    def _confidences(
        self, engine: RolloutEngine, trials: Sequence[Rollout]
    ) -> list[float]:
        """Return C of each trial, in [0, 1]; -1 for a trial without an answer."""
        confidences = [-1.0] * len(trials)
        answers = {}  # index of the trial -> its answer's tokens
        up_to_answer = []
        for index, trial in enumerate(trials):
            answer = self._find_answer(trial.response_ids)
            if answer is not None:
                answers[index] = answer
                response_ids = trial.response_ids[: answer.stop]
                up_to_answer.append(replace(trial, response_ids=response_ids))
        if up_to_answer:
            scores = engine.score(up_to_answer).log_probs
            for (index, answer), log_probs in zip(answers.items(), scores, strict=True):
                confidences[index] = geometric_mean(log_probs[answer])
        return confidences

    def _find_answer(self, trial_ids: Sequence[int]) -> slice | None:
        """Return which tokens of a trial are its answer: from the first with text behind the
        opening brace to the one with the closing brace.

        None: the box is empty, not closed, or not even opened.
        """
        beginnings = [list(trial_ids[: end + 1]) for end in range(len(trial_ids))]
        # texts[t]: the box as it stands after token t.
        texts = [self._opening + text for text in self._decode(beginnings)]
        for last, text in enumerate(texts):
            boxes = find_boxes(text)
            is_closed = boxes and boxes[0].start == 0
            if is_closed and "{" in text:
                length_up_to_brace = text.index("{") + 1
                first = 0
                while len(texts[first]) <= length_up_to_brace:
                    first += 1
                return slice(first, last + 1)
        return None


def geometric_mean(log_probs: Sequence[float]) -> float:
    """Return the geometric mean of one or more probabilities, given by their logarithms.

    Errors: `NonFiniteError` for NaN, which is neither above nor below a threshold.
    """
    mean = math.exp(math.fsum(log_probs) / len(log_probs))
    if math.isnan(mean):
        raise NonFiniteError(
            "early exit: the model's log-probs of a trial answer are NaN"
        )
    return mean
