"""The text of a response that is its answer.

Only what follows the last `</think>` counts. Its last box is the answer, with those joined to it,
unless the text denies it or states another value behind it. Without a box the answer is what the
last statement ("The answer is", "Answer:") or else the last sentence says, or all of a short line.
"""

import re

from megatron_opsft.data.answers import final_boxes, last_box
from megatron_opsft.records import THINK_END

_NEXT_TURN = re.compile(r"<\|(?:im|eot|end)_?\w*\|>")
_MAX_CHARS = 2000  # of the end of a text, and of what follows a box, that are searched
_MAX_DENIAL = 200  # characters in front of a box that may deny it
_MARKUP = re.compile(
    r"</?answer>|I hope (?:it|this) is correct\.?|^\s*(?:#+|>)\s*"
    r"|(?<![\w\\*])(?:\*{1,3}|__|`)(?=\S)|(?<=[^\s\\])(?:\*{1,3}|__|`)(?![\w*])",
    re.MULTILINE,
)
# A line break between two characters that are no part of markup. Most texts without a box have one
# near their beginning; it costs much less to find than all markup to remove.
_LINE_BREAK = re.compile(
    r"\n(?<=[^\s#>*_`]\n)(?<!correct\n)(?<!correct\.\n)\s*(?!I hope)[^\s#>*_`<]"
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
# Words that change a number. "Answer: Ann sold 3 apples" has none, so its answer is 3 apples.
_CHANGING_WORDS = (
    "a|an|about|above|all|almost|and|at|base|below|between|by|cubed?|difference|digit|divided"
    "|double|either|except|fewer|from|half|halves|if|inverse|least|less|minus|mod|modulo|more|most"
    "|multiple|n't|negative|neither|no|nor|not|of|only|or|over|per|plus|power|product|quarter|ratio"
    "|reciprocal|root|square|squared|sum|than|third|times|to|triple|twice|under|unless|without"
)
_PLAIN_SENTENCE = re.compile(
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
_HAS_MATHEMATICS = re.compile(r"[\d$\\]")
_MAX_LINE = 200  # characters of a line that is an answer without saying so
_MAX_WORDS = 2  # in an answer without mathematics that the last sentence gives
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
    """Return the texts that may be the answer, the likeliest first: the first that can be read is
    the answer.
    """
    text = _text_behind_thinking(response)
    box = last_box(text)
    if box is None:
        return _stated_values(text) or _last_sentence_values(text)
    if not box.content:  # empty, or never closed
        return []
    before = text[max(0, box.start - _MAX_DENIAL) : box.start]
    behind = text[box.end : box.end + _MAX_CHARS]
    values = _stated_values(behind)
    if not _DENIED_BEFORE.search(before) and not _is_taken_back(behind):
        values.append(", ".join(final_boxes(text)))
    return values


def only_line(response: str) -> str:
    """Return a response that is one short line without a box; "" for any other."""
    text = _text_behind_thinking(response)
    if _LINE_BREAK.search(text) or last_box(text) is not None:
        return ""
    text = _MARKUP.sub("", text).strip()
    return text if "\n" not in text and len(text) <= _MAX_LINE else ""


def _text_behind_thinking(response: str) -> str:
    """Return what follows the thinking, up to the end of the turn."""
    behind_thinking = response.rpartition(THINK_END)[2]
    return _NEXT_TURN.split(behind_thinking)[0]


def _stated_values(text: str) -> list[str]:
    """Return the candidates for the answer from statements such as "The answer is ...", the last
    one first, back to the first that has mathematics in it. A statement that is taken back ("wait,
    that is wrong") ends the search: neither it nor those before it count.
    """
    text = _MARKUP.sub("", text[-_MAX_CHARS:])
    values: list[str] = []
    for statement in reversed(list(_STATEMENT.finditer(text))):
        sentence = _SENTENCE.match(text, statement.end())
        if sentence is None or _is_taken_back(text[sentence.end() :]):
            return values
        stated = sentence[1]
        values += _values_in(stated)
        if plain_sentence := _PLAIN_SENTENCE.fullmatch(stated):
            values.append(plain_sentence[1])
        if _HAS_MATHEMATICS.search(stated):
            break
    return values


def _last_sentence_values(text: str) -> list[str]:
    """Return what may be the answer in the last sentence, unless it doubts or supposes."""
    text = _MARKUP.sub("", text[-_MAX_CHARS:]).strip()
    sentence = _CORRECTED.sub("", _SENTENCE_END.split(text)[-1])
    if _DOUBTS.search(sentence):
        return []
    values = []
    for value in _values_in(sentence):
        is_short = len(value.split()) <= _MAX_WORDS
        may_be_answer = is_short or _HAS_MATHEMATICS.search(value)
        if may_be_answer and not _SUPPOSES_OR_COMPARES.search(value):
            values.append(value)
    return values


def _is_taken_back(behind: str) -> bool:
    """True if the text behind an answer denies it or thinks again."""
    return bool(_DENIED_AT_ONCE.match(behind) or _SECOND_THOUGHT.search(behind))


def _values_in(sentence: str) -> list[str]:
    """Return the texts in a sentence that may be its value, the likeliest first: what follows its
    last "is", the sentence without its first and last words, and what follows the last "is" there.
    """
    sentence = sentence.strip().rstrip(".")
    core = _TRAIL.sub("", _LEAD.sub("", sentence, count=1)).strip()
    values = [_behind_last_verb(sentence), core, _behind_last_verb(core)]
    return [value for value in values if value]


def _behind_last_verb(text: str) -> str:
    """Return what follows the last "is" or "equals"; "" if the text has neither."""
    pieces = _VERB.split(text)
    return pieces[-1].strip() if len(pieces) > 1 else ""
