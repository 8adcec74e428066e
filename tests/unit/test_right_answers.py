"""Where a response states the right answer and doubts itself, as a person marks it, character for
character.
"""

import time

import pytest
from planted_responses import Planted, planted_responses

from megatron_opsft.records import Outcome, TextMarks, Verdict
from megatron_opsft.verify import math_verifier
from megatron_opsft.verify.doubts import TURNS, find_doubts
from megatron_opsft.verify.overthinking import mark
from megatron_opsft.verify.right_answers import find_right_answers

RESPONSES = planted_responses()
LONG = 200_000  # characters


def ends_of(text: str, gold: str) -> list[int]:
    """Where the meter finds statements of the gold alone."""
    return find_right_answers(text, [gold], lambda value: math_verifier.is_right(value, gold))


def test_there_are_enough_responses_and_no_two_have_the_same_name() -> None:
    assert len(RESPONSES) > 200
    assert len({response.name for response in RESPONSES}) == len(RESPONSES)


@pytest.mark.parametrize("response", RESPONSES, ids=lambda response: response.name)
def test_marks_are_those_of_a_person(response: Planted) -> None:
    text, gold = response.text, response.gold
    verdict = math_verifier.judge(text, gold)
    found = mark(text, gold, verdict, math_verifier.is_right)
    answers = [gold, verdict.answer] if verdict.outcome is Outcome.CORRECT else [gold]
    ends = find_right_answers(text, answers, lambda value: math_verifier.is_right(value, gold))

    if response.name.startswith("just the answer"):  # stated in no words: where the judge reads it
        assert ends == []
    else:
        assert ends == response.ends
    assert found.first_right == (response.ends[0] if response.ends else None)
    assert found.num_restated == max(len(response.ends) - 1, 0)
    assert [turn.start for turn in find_doubts(text)] == response.doubts
    assert (found.num_doubts, found.leak) == (len(response.doubts), response.leak)


@pytest.mark.parametrize(
    ("text", "gold"),
    [("30", "30"), ("$30$", "30"), ("I would say 12 apples.", "12 apples")],
)
def test_an_answer_that_the_judge_accepts_is_found_where_it_read_it(text: str, gold: str) -> None:
    verdict = Verdict(outcome=Outcome.CORRECT, answer=text.rstrip("."))

    found = mark(text, gold, verdict, math_verifier.is_right)

    assert ends_of(text, gold) == []
    assert found == TextMarks(first_right=len(text.rstrip(".")))


def test_without_a_judge_no_right_answer_is_looked_for() -> None:
    verdict = Verdict(outcome=Outcome.CORRECT, answer="12")

    found = mark("So it is 12. Wait, 12.", "12", verdict, None)

    assert found == TextMarks(num_doubts=1)


def test_the_judge_is_asked_once_for_a_text_and_for_few_texts() -> None:
    asked: list[str] = []

    def is_right(value: str) -> bool:
        asked.append(value)
        return value.strip() == "p - q"

    other_spellings = " ".join(f"So it is p{' ' * spaces}- q." for spaces in range(50))
    ends = find_right_answers(f"{other_spellings} So it is p - q.", ["p - q"], is_right)

    assert len(asked) == len(set(asked)) == 16
    assert len(ends) == 2


def test_the_judge_is_not_asked_for_texts_with_other_numbers_letters_or_brackets() -> None:
    asked: list[str] = []
    text = r"So it is -\pi. So it is 2\pi. So it is \pi r. So it is (\pi. So it is 3. So it is x."

    ends = find_right_answers(text, ["\\pi", "12"], lambda value: bool(asked.append(value)))

    assert (ends, asked) == ([], [])


@pytest.mark.parametrize(
    ("repeated", "gold", "num_ends"),
    [
        ("so x = 12 and ", "12", 1),
        ("so the answer is 12. ", "12", 1),
        ("12 ", "12", 0),
        ("so x is 12 + ", "12", 0),
        ("\\boxed{12} ", "12", 1),
        ("\\boxed{", "12", 0),
        ("\\frac{", "\\frac{1}{2}", 0),
        ("so it is 2\\sqrt{3}. ", "2\\sqrt{3}", 1),
        ("a is 2√3 ", "2\\sqrt{3}", 0),
        ("π", "\\pi", 0),
        ("= p - q ", "p - q", 1),
        ("so Evelyn ", "Evelyn", 1),
        (" ", "12", 0),
    ],
)
def test_long_texts_take_time_in_proportion_to_their_length(
    repeated: str, gold: str, num_ends: int
) -> None:
    times = LONG // len(repeated)
    start = time.process_time()

    ends = find_right_answers(repeated * times, [gold], lambda value: True)

    assert time.process_time() - start < 10  # 0.3 s to 1 s; a quadratic search takes minutes
    assert len(ends) == num_ends * times


def test_turns_in_long_texts_are_counted_one_by_one() -> None:
    text = "Wait, I will count the apples again. " * (LONG // 37)
    start = time.process_time()

    turns = find_doubts(text)

    assert time.process_time() - start < 10
    assert [turn.start for turn in turns] == list(range(0, len(text), 37))


@pytest.mark.parametrize(
    ("text", "gold", "found"),
    [
        # A long front, cut where its last sentence begins.
        ("If x = 4 it fails! So the total is 12.", "12", True),
        ("So the total is known. Maybe it is 12.", "12", False),
        ("So it stays?\nSuppose it is 12.", "12", False),
        ("Suppose not.\nSo the total is 12.", "12", True),
        # What may stand directly in front of a number, and what not.
        ("So the total is 112.", "12", False),
        ("得12。", "12", True),
        ("THUS 12.", "12", True),
        ("Thus, 12.", "12", True),
        ("The area 12 is the answer.", "12", True),
        ("So she gets about 12.", "12", True),
        # Formulas: factors, other spellings, and a box that ends far behind its first part.
        ("So the area is \\pi.", "\\pi", True),
        ("So the area is π.", "\\pi", True),
        ("So the area is 2\\pi.", "\\pi", False),
        ("So the area is 2 π.", "\\pi", False),
        ("So x = 3√{13}.", "3\\sqrt{13}", True),
        ("So x = 2√{13}.", "3\\sqrt{13}", False),
        ("So x = p − q.", "p - q", True),
        ("\\boxed{\\sqrt{13}" + " " * 150 + "+ 7}", "\\sqrt{13} + 7", True),
        # What only the words behind a number say of it, and numbers that go on behind their digits.
        ("By symmetry (12) is the answer.", "12", False),
        ("By symmetry 12 is the answer.", "12", True),
        ("By symmetry 12 / 5 is the answer.", "12/5", True),
        ("By symmetry 1{,}234 must be the result.", "1234", True),
        ("By symmetry 12 \\% is indeed the answer.", "12", True),
        ("By symmetry $12$ is the final answer.", "12", True),
        ("By symmetry 12, 13 is the answer.", "12", False),
        # Words of a conclusion in any letters, with commas and colons; fractions and boxes.
        ("So, 12.", "12", True),
        ("sO:, 12.", "12", True),
        ("THEREFORE,, 12.", "12", True),
        ("THERE, 12.", "12", False),
        ("So it is \\dfrac{12}{5}.", "12/5", True),
        ("\\fbox{12}", "12", True),
        # Parts of words assume and deny nothing; a product behind an equals sign is no unknown.
        ("So the motif gives 12.", "12", True),
        ("So if it gives 12.", "12", False),
        ("So the unassumed total is 12.", "12", True),
        ("So the assumed total is 12.", "12", False),
        ("So the knot gives 12.", "12", True),
        ("So it does not give 12. So nobody could get 12.", "12", False),
        ("So y =2x = 12.", "12", True),
        ("So 2x = 12.", "12", False),
        # Ends of longer numbers.
        ("The number 312 is the answer.", "12", False),
        ("The number 10²12 is the answer.", "12", False),
        ("So it is 10²12.", "12", False),
        ("So it is 10.50.", "0.5", False),
        ("So it is 4{,}012.", "12", False),
        # The last verb in front of a formula introduces it, and a sign without a break behind it.
        ("So it is known that the area equals \\pi.", "\\pi", True),
        ("So this gets \\pi.", "\\pi", True),
        ("So it's \\pi.", "\\pi", True),
        ("Therefore: \\pi.", "\\pi", True),
        ("The area:\\pi.", "\\pi", False),
        ("So this misgets \\pi.", "\\pi", False),
        ("So the island \\pi.", "\\pi", False),
        ("因此 A 为 \\pi。", "\\pi", True),
    ],
)
def test_what_is_not_looked_at_more_closely_states_nothing(
    text: str, gold: str, found: bool
) -> None:
    assert bool(find_right_answers(text, [gold], lambda value: True)) == found


def test_numbers_behind_other_numbers_are_as_their_own_signs_say() -> None:
    """Quotients are read once for each spelling, and keep no sign of another place."""
    text = "So x = -1/2. So y = 1/2. So z = 0.50. So w = -0.5. So v = 2/4."
    assert ends_of(text, "0.5") == [text.index("1/2. So z") + 3, text.index("0.50") + 4]
    assert ends_of(text, "-0.5") == [text.index("-1/2") + 4, text.index("-0.5") + 4]


@pytest.mark.parametrize("gold", ["1/2", "\\frac{1}{2}", "0.5", ".5"])
@pytest.mark.parametrize("stated", ["0.5", ".50", "1/2", "\\frac{1}{2}", "\\dfrac12"])
def test_a_fraction_is_found_however_it_is_written(gold: str, stated: str) -> None:
    text = f"So x = {stated}."
    assert ends_of(text, gold) == [len(text) - 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Wait, no, let me check: 3.", ["Wait, no, let me check"]),
        ("Wait, let me think. Then let me check.", ["Wait", "let me check"]),
        ("but wait! Hold on.", ["wait! Hold on"]),
        ("We await the waiter. They wait. I actually hold on to it.", []),
        ("Hmmm... that's wrong", ["Hmmm... that's wrong"]),
        ("I like to make sure of this sum. To be safe:", ["to make sure", "To be safe"]),
        ("İ said: wait, is that right?", ["wait, is that right?"]),
        ("等等，让我再检查一下。", ["等等，让我再检查"]),
        ("苹果等等。不对", ["不对"]),
        ("", []),
    ],
)
def test_a_turn_is_its_words(text: str, words: list[str]) -> None:
    assert [text[turn.start : turn.end] for turn in find_doubts(text)] == words


def parts_of(text: str) -> list[tuple[int, int]]:
    """Every place of every phrase of `TURNS`, found one by one."""
    return sorted(
        (start, start + len(turn))
        for beginning, phrases in TURNS.items()
        for turn in {beginning + phrase for phrase in phrases}
        for start in range(len(text))
        if text.startswith(turn, start)
    )


@pytest.mark.parametrize("beginning", TURNS)
def test_every_turn_is_found_in_any_letters_and_not_within_a_word(beginning: str) -> None:
    for phrase in TURNS[beginning]:
        turn = beginning + phrase
        for accent in ("", "É", "然"):  # the text is ASCII, Latin or Chinese
            words = f"{turn.upper()}; {turn.capitalize()}: {accent}"
            text = f"{accent}. {words} {'.' * 20} {turn}"
            (first, _), *_, (_, end) = parts_of(text.lower())

            turns = find_doubts(text)

            assert (turns[0].start, turns[-1].end) == (first, end)
            assert len(turns) == 2
        if turn.isascii():
            assert not find_doubts(f"a{turn}. {turn}b. K{turn}, \u212a{turn}, \u0130{turn}")


def test_turns_with_one_rare_letter_are_all_found() -> None:
    """Turns with the same rare letter are found in one search of a text."""
    turns = [next(iter(phrases)) for phrases in TURNS.values()]
    texts = [beginning + end for beginning, end in zip(TURNS, turns, strict=True)]
    text = ("." * 30).join(["", *texts, *texts[::-1]])

    found = find_doubts(text)

    assert [text[turn.start : turn.end] for turn in found] == [*texts, *texts[::-1]]
