"""Gold answers in other spellings, other answers, and why each rule is in the table."""

from random import Random

import pytest
from answer_spellings import EQUIVALENT, INEQUIVALENT
from olympiad_spellings import OLYMPIAD_EQUIVALENT, OLYMPIAD_INEQUIVALENT
from written_golds import written_golds

from megatron_opsft.records import Outcome
from megatron_opsft.verify import math_verifier, spelling
from megatron_opsft.verify.layout import SpellingRule
from megatron_opsft.verify.math_verifier import judge
from megatron_opsft.verify.spelling import TABLE, respell

KEEPING = EQUIVALENT | OLYMPIAD_EQUIVALENT
CHANGING = INEQUIVALENT | OLYMPIAD_INEQUIVALENT
GOLDS = written_golds()
# Data with rows that need a rule, where no spelling of the tests does.
CORPORA = {"DeepScaleR", "math-verify's tests"}
NUM_QUICK = 12  # golds of a spelling in a quick run


def responses(name: str) -> list[tuple[str, str]]:
    """(gold, response) for each gold that the rule fits."""
    rule = (KEEPING | CHANGING)[name]
    pairs = [(gold, rule(gold, Random(f"{name}, {gold}"))) for gold in GOLDS]
    return [(gold, response) for gold, response in pairs if response is not None]


def misjudged(name: str, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    wanted = name in KEEPING
    return [
        (gold, response)
        for gold, response in pairs
        if (judge(response, gold).outcome is Outcome.CORRECT) != wanted
    ]


def test_there_are_many_golds_and_spellings() -> None:
    assert len(GOLDS) >= 400 and len(KEEPING) >= 40 and len(CHANGING) >= 30
    assert not KEEPING.keys() & CHANGING.keys()


@pytest.mark.parametrize("name", KEEPING | CHANGING)
def test_a_gold_is_accepted_in_another_spelling_and_another_answer_is_not(name: str) -> None:
    fitting = responses(name)
    assert fitting, "no gold answer has this spelling"
    assert misjudged(name, Random(name).sample(fitting, min(NUM_QUICK, len(fitting)))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING | CHANGING)
def test_every_gold_is_accepted_in_another_spelling_and_another_answer_is_not(name: str) -> None:
    assert misjudged(name, responses(name)) == []


def test_an_empty_argument_and_powers_without_a_unit_are_no_errors() -> None:
    assert respell("max()") == r"\max()"
    for words in ("square squared", "cubic cubed", "squared", "square squared apples"):
        verdict = judge(rf"\boxed{{5\text{{ {words}}}}}", "5")
        assert verdict.outcome is not Outcome.ERROR, words


def test_a_fraction_with_thousands_of_digits_is_no_error() -> None:
    for answer in ("1/" + "7" * 5000, "3 1/" + "7" * 5000, "7" * 5000 + "/3"):
        assert judge(rf"\boxed{{{answer}}}", "3").outcome is Outcome.WRONG


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.example)
def test_each_rule_does_what_its_row_says(rule: SpellingRule) -> None:
    written, becomes = rule.example.split(" -> ")
    assert respell(written) == becomes
    assert respell(becomes) == becomes


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.example)
def test_each_rule_is_needed_by_what_its_row_names(
    rule: SpellingRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rule a gold in that spelling is no longer accepted."""
    if rule.evidence in CORPORA:
        return
    others = tuple(one for one in TABLE if one is not rule)
    monkeypatch.setattr(spelling, "TABLE", others)
    math_verifier.forget_golds()
    try:
        assert any(misjudged(rule.evidence, [pair]) for pair in responses(rule.evidence))
    finally:
        math_verifier.forget_golds()
