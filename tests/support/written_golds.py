"""Gold answers of each kind that data sets hold, written for the tests from templates."""

import re
from random import Random

# {a} and {b} are numbers above one, {s} is a sign, and {p} and {q} have no common divisor.
_TEMPLATES = r"""
{a} ; {a}{b}0 ; -{a} ; {a}000000 ; {a}.{b}5 ; -0.{a}{b} ; \frac{{{p}}}{{{q}}} ;
-\frac{{{q}}}{{{p}}} ; {a}\% ; \dfrac{{{p}}}{{33}} ; {a}.{b}2 \times 10^{{-{p}}} ;
{a} \text{{ inches}} ; {a} \text{{ feet}} ; {a} \text{{ mum}} ; {a} \text{{ cm}} ;
{a} \text{{ hours}} ; {a} \text{{ m/s}}^2 ; {a} \text{{ km/h}} ; {a}^\circ ; \${a} ;
{a}^\circ \text{{F}} ; {a} \text{{ hours }}{b}\text{{ minutes}} ;
{a}:4{b} p.m. ; {a}:{q} ; {a}{b}_{{16}} ; 10{b}1_9 ;
\sqrt{{{a}}} ; {a}\sqrt{{{b}}} ; \frac{{{a}+\sqrt{{{b}}}}}{{{q}}} ; \sqrt[3]{{{a}}} ; {a}\pi ;
\frac{{\pi}}{{{a}}} ; \ln {a} ; \log_{{2}} {a} ; \log_{{10}} {a} ; e^{{{a}}} ; ({a}!)^2 ;
\binom{{9}}{{{q}}} ; \binom{{n}}{{{a}}} ; {a}^{{{b}}}-1 ; {a}{s}{b}i ; ({a}, -{b}) ;
({a}, {b}, {p}) ; {a}, {b}, 2{a} ; -{a}, {b} ; \{{{a}, {b}, 4{a}\}} ; ({a}, 1{b}] ; [-{a}, {b}] ;
(-\infty, {a}) ; (-\infty, -{a}] \cup ({b}, \infty) ; {a} \pm \sqrt{{{b}}} ; x^2{s}{a}x+{b} ;
(x+{a})(y+{b}) ; \frac{{x+{a}}}{{x-{b}}} ; {a}n+{b} ; n^2{s}{a}n ; 2^{{n+{a}}}-{b} ;
\frac{{R+{a}r}}{{{b}}} ; \sqrt{{{a}n+{b}}} ; a^2+{a}ab+b^2 ; {a}k+{b} ; \frac{{{a}abc}}{{{b}}} ;
\sin(x+\frac{{\pi}}{{6}})+{a} ; {a}\cos x+{b}\sin x ; {a}\ln x+C ; \tan x - {a}x ; \max(a,b)+{a} ;
|x-{a}|+{b} ; f(x)={a}x+{b} ; f(x)=x^2+{a} ; g(x)={a}-x ; a_n={a}n+{b} ; a_n={a}^n ; y={a}x+{b} ;
y=\frac{{{a}}}{{x}} ; x={a}, y=-{b} ; x<{a} ; x \ge {a} ; x > -{a} ; -{a}<x<{a} ; -{a}<x<1{b} ;
{a}x+{b}y=1 ; \begin{{pmatrix}} {a} \\ -{b} \end{{pmatrix}} ; x \equiv {p} \pmod{{1{q}}} ;
\lfloor \frac{{n}}{{{a}}} \rfloor
"""
_WORDS = r"""
\text{east} ; Tuesday ; \text{no solution} ; \text{yes} ; a circle ; A ; C ; A, C ; B, D, E ;
\mathbb{R} ; \mathbb{Z} ; AB ; 10:45 a.m. ; 3:30 p.m. ; 2114_5 ; 1F_{16} ; 0.000031 ; 1234567 ;
\text{odd} ; W and Z
"""
_PAIRS = ((2, 3), (3, 4), (5, 11), (4, 9), (7, 2), (5, 8))  # p and q of each draw


def written_golds() -> list[str]:
    """More than 400 different gold answers, always the same."""
    random = Random(7)
    golds = [one.strip() for one in re.split(r"\s;\s", _WORDS)]
    for template in re.split(r"\s;\s", _TEMPLATES):
        for p, q in _PAIRS:
            a, b = random.sample(range(2, 10), 2)
            golds.append(template.strip().format(a=a, b=b, p=p, q=q, s=random.choice("+-")))
    return list(dict.fromkeys(golds))
