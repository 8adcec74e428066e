"""Gold answers of every kind, each in all spellings that keep it and in all that change it."""

import random

import pytest
from answer_spellings import EQUIVALENT, INEQUIVALENT

from megatron_opsft.records import Outcome
from megatron_opsft.verify.math_verifier import judge

# Of each kind of answer that data sets hold.
GOLDS = r"""
0
7
-13
602
10000
1234567
0.25
-1.5
12.75
0.000031
\frac{3}{4}
-\frac{7}{3}
\dfrac{125}{8}
5/12
2\sqrt{14}
\frac{1+\sqrt{5}}{2}
3\pi
x^2+2x+1
2^{n+1}-1
(3,-2)
\left(\frac{1}{2}, 3, -1\right)
(2, 5]
(-\infty, 4)
[1,3]
1, 4, 9
-2,3
155^\circ
37.5\%
19\%
2114_5
1011_2
10:45 a.m.
3:30 p.m.
3:4
5 \text{ cm}
24 \text{ hours}
3 \text{ dollars}
\text{east}
Tuesday
\text{no solution}
y=2x+3
x \le 5
\begin{pmatrix} 1 \\ -2 \end{pmatrix}
2+3i
\{2, 3, 5\}
(-\infty, 1] \cup (4, \infty)
2 \times 10^{5}
""".strip().split("\n")


@pytest.mark.parametrize("name", EQUIVALENT)
def test_equivalent_spellings_are_accepted(name: str) -> None:
    _check(name, Outcome.CORRECT)


@pytest.mark.parametrize("name", INEQUIVALENT)
def test_other_answers_are_refused(name: str) -> None:
    _check(name, None)


def _check(name: str, outcome: Outcome | None) -> None:
    rule, tried = (EQUIVALENT | INEQUIVALENT)[name], 0
    for gold in GOLDS:
        response = rule(gold, random.Random(f"{name}, {gold}"))
        if response is not None:
            tried += 1
            found = judge(response, gold).outcome
            assert (found is Outcome.CORRECT) == (outcome is Outcome.CORRECT), (gold, response)
    assert tried, "no gold answer has this rule"
