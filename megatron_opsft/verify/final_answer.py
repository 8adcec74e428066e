"""Which text of a response is its answer.

Only what follows the last `</think>` counts. Its last box is the answer, with those joined to it,
unless the text denies it or states another value behind it. Without a box the answer is what the
last statement ("The answer is", "Answer:") or else the last sentence says, or all of a short line.
"""

import re

from megatron_opsft.data.answers import final_boxes, last_box

THINK_END = "</think>"
_NEXT_TURN = re.compile(r"<\|(?:im|eot|end)_?\w*\|>")
_MAX_CHARS = 2000  # before and behind the answer that are looked at
_MARKUP = re.compile(
    r"</?answer>|I hope (?:it|this) is correct\.?|^\s*(?:#+|>)\s*"
    r"|(?<![\w\\*])(?:\*{1,3}|__|`)(?=\S)|(?<=[^\s\\])(?:\*{1,3}|__|`)(?![\w*])",
    re.MULTILINE,
)
_ANSWER = (
    r"\b(?:answers?|ans|final choice|(?:correct|right) (?:option|choice)|respuesta|réponse|antwort"
    r"|resposta|risposta|ответ)\b"
)
_STATEMENT = re.compile(
    rf"{_ANSWER}(?:[^\n.:：=$\\]{{0,60}}?\b(?:is|are|be|was|es|est|ist|é|è)\b\s*[:：]?|\s*[:：=]"
    r"|\s*\n|\s*(?=\$|\\[(\[]))\s*(?:therefore|thus|then|given by|equal to)?,?\s*"
    r"|^A:\s*|(?:答案|答え|故选|정답|답)\s*(?:[是为は은:：]\s*)*",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE = re.compile(
    r"\s*(\\\[.*?\\\]|\$\$.*?\$\$|.*?(?=\.\s+[^\s\d]|!\s+[A-Z]|。|\n|\Z))", re.DOTALL
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^\s\d])|。|\n")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|finally|and|that|it(?: is|'s)|option|choice"
    r"|but|we (?:get|find|obtain)|this gives)\b[\s,:]*)*",
    re.IGNORECASE,
)
_TRAIL = re.compile(
    r"\s+is\s+(?:(?:the|our)\s+)?(?:correct|right|final)?\s*(?:answer|option|choice|solution)?\Z"
    r"|(?:です|입니다)\Z"
    r"|[,;]?\s+\(?(?:because|since|which|where|so that|when|as|but|although|though|while"
    r"|attained|achieved|reached)\b.*|\s+\((?:see|i\.e|\$?\s*=).*"
    r"|,\s+(?:not|approximately|about|roughly|it)\b.*",
    re.DOTALL | re.IGNORECASE,
)
_VERB = re.compile(r"\b(?:is|are|equals|(?:in|de)creases by)\b|(?<=[^\W\d_]):\s")
_CORRECTED = re.compile(
    r".*\bnot\s+[\d.,]+,?\s+(?=(?:which is|it's|it is|but)\b)", re.IGNORECASE
)
# Answer: Ann sold 3 apples. The words of the sentence change no number.
_CHANGING_WORDS = (
    "a|an|about|above|all|almost|and|at|base|below|between|by|cubed?|difference|digit|divided"
    "|double|either|except|fewer|from|half|halves|if|inverse|least|less|minus|mod|modulo|more|most"
    "|multiple|n't|negative|neither|no|nor|not|of|only|or|over|per|plus|power|product|quarter|ratio"
    "|reciprocal|root|square|squared|sum|than|third|times|to|triple|twice|under|unless|without"
)
_TOLD = re.compile(
    rf"(?!(?i:.*\b(?:{_CHANGING_WORDS})\b))[A-Z][a-z']+(?:\s+[A-Za-z']+){{1,12}}"
    r"\s+(\\?\$?\d[\d.,]*(?:\s+[a-z]+)?)(?:\s+[a-z]+){0,3}\.?\s*"
)
_DOUBTS = re.compile(
    r"\?|n't\b|\b(?:not|never|maybe|perhaps|guess|wait|impossible|wrong|incorrect)\b",
    re.IGNORECASE,
)
_SUPPOSES_OR_COMPARES = re.compile(
    r"\b(?:no|if|when|let|suppose|assume|case|than|least|most|about|between|either)\b",
    re.IGNORECASE,
)
_MAX_LINE = 200  # characters of a response that is the answer itself
_MAX_WORDS = 2  # of a last sentence that is the answer without holding mathematics
_DENIED_BEFORE = re.compile(
    r"(?:\bnot|n't|\bnever|\bcannot|\bexcept|\brather than|\binstead of|\banything but)"
    r"(?:\s+(?!but\b|so\b|hence\b)[a-z]+){0,2}[\s$\\(\[]*\Z",
    re.IGNORECASE,
)
_WRONG = r"(?:wrong|incorrect|impossible|not (?:right|correct|true|quite|the)\b)"
_DENIED_AT_ONCE = re.compile(
    r"[\s.$)\]\\*]*(?:\?|\(?wrong|(?:is|was|cannot|can|could|must|would|does|did)(?:n't|\s+not)\b"
    r"|cannot\b"
    rf"|(?:is|was|(?:must|would) be)\s+(?:(?:the\s+)?{_WRONG}|my first))"
)
_SECOND_THOUGHT = re.compile(
    r"(?:^\W*|[.!?,]\s+|\n\s*)(?:but\s+)?(?:(?:oh )?no(?=\s*(?:[,.:;!]|\Z)|\s+wait)"
    r"|(?:wait|hmm|oh no|actually|maybe|perhaps|sorry|oops|correction|let me(?! know)"
    rf"|i made an? (?:error|mistake)|(?:that|this|it) (?:is|was) {_WRONG})\b)",
    re.IGNORECASE,
)


def find_answers(response: str) -> list[str]:
    """What may be the answer, the likeliest first: the first of them that can be read is it."""
    tail = _answer_part(response)
    box = last_box(tail)
    if box is None:
        return _stated_values(tail) or _last_sentence_values(tail)
    if not box.content:  # empty, or never closed
        return []
    behind = tail[box.end : box.end + _MAX_CHARS]
    before = tail[max(0, box.start - _MAX_CHARS) : box.start]
    is_denied = _DENIED_BEFORE.search(before) or _is_taken_back(behind)
    boxed = [] if is_denied else [", ".join(final_boxes(tail))]
    return [*_stated_values(behind), *boxed]


def only_line(response: str) -> str:
    """A response that is one short line without a box; "" for any other."""
    tail = _MARKUP.sub("", _answer_part(response)).strip()
    is_line = "\n" not in tail and len(tail) <= _MAX_LINE and last_box(tail) is None
    return tail if is_line else ""


def _answer_part(response: str) -> str:
    """What follows the thinking, up to the end of the turn."""
    return _NEXT_TURN.split(response.rpartition(THINK_END)[2])[0]


def _stated_values(text: str) -> list[str]:
    """What may be the answer in the last statement that gives more than words."""
    text = _MARKUP.sub("", text[-_MAX_CHARS:])
    values: list[str] = []
    for match in reversed(list(_STATEMENT.finditer(text))):
        stated = _SENTENCE.match(text, match.end())
        if stated is None or _is_taken_back(text[stated.end() :]):
            return values
        values += _values_in(stated[1])
        if told := _TOLD.fullmatch(stated[1]):
            values.append(told[1])
        if re.search(r"[\d$\\]", stated[1]):
            break
    return values


def _last_sentence_values(text: str) -> list[str]:
    """What may be the answer in the last sentence, unless it doubts, supposes or compares."""
    text = _MARKUP.sub("", text[-_MAX_CHARS:]).strip()
    sentence = _CORRECTED.sub("", _SENTENCE_END.split(text)[-1])
    if _DOUBTS.search(sentence):
        return []
    return [
        one
        for one in _values_in(sentence)
        if not _SUPPOSES_OR_COMPARES.search(one)
        and (re.search(r"[\d$\\]", one) or len(one.split()) <= _MAX_WORDS)
    ]


def _is_taken_back(behind: str) -> bool:
    """Whether what follows an answer denies it or thinks again."""
    return bool(_DENIED_AT_ONCE.match(behind) or _SECOND_THOUGHT.search(behind))


def _values_in(sentence: str) -> list[str]:
    """All of a sentence that may be its value; what follows its last "is"."""
    sentence = sentence.strip().rstrip(".")
    value = _TRAIL.sub("", _LEAD.sub("", sentence, count=1)).strip()
    restated = [_VERB.split(text)[1:][-1:] for text in (sentence, value)]
    values = [*restated[0], value, *restated[1]]
    return [one.strip() for one in values if one.strip()]
