"""What the judge of mathematics takes for the same answer, and what for another one."""

import re

import pytest
from forked_cli import ROOT
from judged_answers import assert_judged

from megatron_opsft.errors import RowError
from megatron_opsft.records import Outcome
from megatron_opsft.verify.math_verifier import judge

# gold == accepted ; accepted != refused ; refused
ANSWERS = r"""
10000 == 10~000 ; 10{\,}000 ; 10\thinspace000 ; 10\text{,}000
0 != 10 000 ; 0.000000001 ; 10^{-9}
33\frac{1}{3}\% == \frac{100}{3}\%
0.375 == 37.5\%
50\% != 0.05 ; -50\%
25\% == 25\% \text{ increase}
5\text{ m}^2 == 5m^2 ; 5m^{2} ; 5 m^2 != 5m^3 ; 5m
\$5 == \$5\text{ per ticket} ; \$5 \text{ apples}
\sqrt{2} != \frac{14142135623}{10000000000}
3:4 != 3:4 \text{ cm}
\textbf{(A)}\ 5 == \text{(A) } 5 != \text{(A) } 6
34 == 34元 ; ３４
\frac12 == ½ ; \frac12 \text{ or } 0.5 ; \frac12 = 0.5
x^2\le 3 == x² ≤ 3
x\le 3 == x\in(-\infty,3]
602 == \mathbf{(C)}~602 ; C) 602 ; \text{Option C: } 602 ; 602\ (\text{C}) != \textbf{(C)}\ 603
C == \textbf{(C)}\ 602
\textbf{(C)}\ 602 == 602 ; C ; (C) != B
\text{(B)} == B ; b
\ln a-\ln b == \ln(a/b)
x == \sqrt{x^2} != |x|
\sqrt{n} != \sqrt{n+1}
1.6\times 10^{-19} == 1.6e-19 != 1.7e-19
2e-1 == 2e-1 ; 2e - 1
12 == 12 apples ; x=12\text{ cm} ; = 12 != 12 apples and 5 pears ; 1,2 ; \text{12 twice}
3 == \approx 3 ; \{3\} ; (3) ; \text{3} != x>3 ; \text{at least } 3 ; 3+ ; 3 \ldots ; \neq 3
3 != 3 \text{ and } 4 ; 3? ; 3! ; 3 PM
x>3 == >3 ; 3<x ; \{x \mid x>3\} != x<3
7:55 a.m. == 7:55 AM ; 7:55\text{ a.m.} != 7:55 p.m.
7:55 \text{ p.m.} == t=7{:}55\text{ p.m.} ; 7:55 \text{ in the evening} != 07:55
10:20 == 10:20 != 5:10
4:51:06 p.m. == 4\!:\!51\!:\!06 \text{ p.m.}
$5:21\textsc{pm}$ == 5:21 PM
12:00 \text{ p.m.} == \text{noon} != \text{midnight}
3:00 PM == 3 PM
2:3:4 == 4:6:8 != 2:3:5
1:\sqrt{2} == \sqrt2:2
52_8 == 52_{\text{eight}} ; \text{52}_8 ; 52 (base 8) ; (52)_8 ; x=52_8 != 53_8 ; 52_9
52 == 52_8
1A_{16} == 1a_{16}
1011_2 != 1011_3 ; 11
1, 3, 5, \ldots, 2n-1 == 1,3,5,...,2n-1 != 1, 2, \ldots, n
1,2,\ldots,n == 1,2,3,\ldots,n != 1,2,4,\ldots,n ; 1,3,\ldots,n
1,2,\ldots,5 == 1,2,3,4,5 != 1,2,3,4,6
1+2+\cdots+n == 1+2+\ldots+n != 1+2+n
-1 == x=-1 ; -1=x != x=1 ; 1=x
5 != x=6 ; 5 \text{ and a half} ; 5\frac12 ; \text{about } 5 ; 5\cdots ; 5 \text{ dozen}
5\text{ cm}^2 == 5\text{ square centimeters} ; 5 cm^2 ; 5 \text{ sq cm} != 5\text{ cm}
\$5 == 5 dollars != 5 cents
\$18.90 == \text{USD }18.90 != \text{EUR }18.90
5\text{ m/s} == 5\ \mathrm{m\,s^{-1}} ; 5\,\frac{\text{m}}{\text{s}}
5\text{ m} == 5m ; 5 m
7 minutes and 5 seconds == 7 \text{ minutes and } 5\text{ seconds} != 7 minutes and 6 seconds
7 != 7 minutes and 5 seconds
5 \text{ feet } 10 \text{ inches} != 5'10"
11^{\text{th}} == 11
25 == \text{twenty-five} ; 25°C
25\% == 25\% \text{ increase}
5\text{ m}^2 == 5m^2 ; 5m^{2} ; 5 m^2 != 5m^3 ; 5m
25^\circ == 25^\circ\text{C}
25^\circ C != 25^\circ F
\frac{\sqrt{3}}{2} == \sin 60^\circ
0.6\text{ m} == 60\text{ cm}=0.6\text{ m} != 0.6\text{ m}=60\text{ cm} ; 60\text{ cm}=0.5\text{ m}
f(x)=0, f(x)=x^2 == f(t)=0\text{ or }f(t)=t^2 != f(t)=0\text{ or }f(t)=x^2 ; f(t)=0
W(n)=1,W(n)=-1 == W(x)=1orW(x)=-1 != W(x)=1
\\boxed{35 cm} + \\boxed{4} == 35 cm, 4 != 35 ; 4
\boxed{x = 3 == 3 ; x=3 != 4
5\text{ m}^2 == 5m² != 5m³ ; 5cm²
1.22\text{ kg} == 1,22\text{ kg} != 1,22\text{ m}
2\cdot 10^8\text{ km} == 2e8\text{ km} != 2e8\text{ m}
(1,2) == （1，2） != [1,2] ; \{1,2\} ; (1,2+10^{-9})
x\in(1,2) == 1<x<2
(1,2] == 1<x\le 2 != 1\le x\le 2
(1,2),(3,4) == (3,4),(1,2)
(2,3) == x=2, y=3
\pm 3 == 3,-3 != -3
x<1 \text{ or } x>3 == (-\infty,1)\cup(3,\infty) != (-\infty,1)\cup(4,\infty)
\mathbb R\setminus\{1\} == (-\infty,1)\cup(1,\infty)
\text{east} == \text{an east} != seat
BEE != EBE
\text{even} != \text{odd}
W \text{ and } Z == Z, W
0.\overline{3} == \frac13 != 0.3
\frac13 == 0.333333 ; 0.3333333333 ; 0.333\ldots != 0.33
\sqrt2 == 1.41421356 != 1.414
0.30000000000000004 == 0.3
0.5 == 0,5
1,2 != 1.2
-3,0 != -3
R-r != r-R ; 0
\sqrt{1-\frac{2r}{R}} != \sqrt{-1} ; i
I=VR != I=V/R
2i=6 != 2i=4
x+i=5 != x+i=3
i<3 != i<2
2+3i == 2+3I
7 != 6=7 ; 1=2=7
\sqrt2 != \sqrt2+10^{-40}
262537412640768744 != e^{\pi\sqrt{163}}
f(x)=x^2 == f(t)=t^2 != f(t)=x^2 ; g(x)=x^2
x<1 == 3x<3 ; 1>x != 3x>3 ; -x<-1
|x|<1 == -1<x<1 != -1<y<1
-\ln|\cos x| == \ln|\sec x| != \ln(\cos x)
-\ln\frac{1-x}{1+x} == \ln\frac{1+x}{1-x} != \ln\frac{1-x}{1+x}
-2 == \sqrt[3]{-8}
\gamma != \Gamma
-1,3,3 == (-1,3,3) != (-1,-1,3)
FF_{16} == \text{FF}_{16} ; 255_{10} != FE_{16}
1/20! != 1/21!
1/2^{60} != 1/2^{61}
2^{2008} != 2^{2009}
0.0000031x != 0.0000029x
(0.0000031, 2) != (0.0000029,2)
3x+2y-5=0 == 5-3x-2y=0
f(x)=x^2 == x^2
f'(x)=2x != f(x)=2x
x_1+x_2 != x_1+x_3
y=2x+3 == 2x+3 ; y=3+2x
4 \cdot 2007 - 3 = 8025 == 8025 != 5 \cdot 2007 - 3 = 8025
8025 == 4 \cdot 2007 - 3 = 8025
\binom{5}{2} == 10 ; {5\choose 2}
n \equiv 0,2 (\bmod 6) == n \equiv 0,2 \pmod 6
\text{no solution} != \emptyset
\infty != -\infty
2+3i == 3\mathrm{i}+2 != 2-3i
2i == \sqrt{-4}
e == 2.718282 != 2.71
\sqrt{\frac{1209}{7}} \text{ OR } \frac{\sqrt{8463}}{7} == \frac{\sqrt{8463}}{7}
abc == cba
AB != BA
\overline{AB} == \overline{AB}
42 == \text{Answer: } 42 ; \text{The answer is } 42
(1,234) == (1, 234)
\frac{574,287}{593,775} == \frac{574287}{593775}
\frac{3}{4} == \frac{3}{4}\text{ of the cake}
1 + 2004! == 2004! + 1 != 6 + 2004! ; 2004!
16 != 16 \text{ (approximately)}
n! == n(n-1)!
-x != \sqrt{x^2}
\{2, 3\} != 2<x<3 ; x\in(2,3)
-2<x<5 == (-2,5) != -2,5 ; x=-2 \text{ or } x=5
(-2,5) != x=-2, x=5
|x|<2 != x=\pm 2
0<x<2.5 == x\in(0,2.5) ; x\in(0,\frac52) != x\in(0,2.6)
x \ge 0.5 == x\in[0.5,\infty)
\frac{-1 \pm \sqrt5}{2} == x = \frac{-1 \pm \sqrt5}{2} ; \frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}
\frac{-1 \pm \sqrt{5}}{2} != \frac{1 \pm \sqrt{5}}{2} ; \frac{-1+\sqrt5}{2}
1, \frac{-1+i\sqrt3}{2}, \frac{-1-i\sqrt3}{2} == 1, \frac{-1 \pm i\sqrt{3}}{2}
(\pm 3, 0) == (3,0),(-3,0) != (3,0)
\pm 1 \pm \sqrt2 == \{1 \pm \sqrt2, -1 \pm \sqrt2\}
\pm 2i == x = \pm 2i ; x = 2i, x = -2i
\log_2 3 == \log_2(3) ; \log_{2}{3} ; \frac{\ln 3}{\ln 2} ; x=\log_2 3 != \log_3 2
2^4 \cdot 3^2 == 2^4 3^2
20 == \frac{6!}{3!^2}
2n!^2 == 2(n!)^2 != (2n!)^2
circle == \text{a circle} ; A circle != \text{a square}
90 == 90 \mathrm{~km} / \mathrm{h}
9.8 \mathrm{~m} / \mathrm{s}^{2} == 9.8 ; 9.8 \text{ m/s}^2 != 9.8 \text{ m/s}
17 == n_{\min} = 17 ; S_\max=17 ; \det A = 17 ; f'(2) = 17 ; \mathbb{P}(A)=17 != n_{\min} = 18
(1,1,1) == x=y=z=1 != x=y=z=2
12 == 3(4) ; (3)(4) ; 3(4)=12 ; 24(\frac12)
7 != 3(4) ; (3)(4)
60 == 3\binom{6}{3} ; \binom63\binom32 ; \frac{10(12)}{2}
3 == \log_{2}(8)
\frac{\pi}{4} == \frac\pi4 ; \frac\pi{4}
\sqrt{\frac{\pi}{2}} == \sqrt\frac\pi2
C == \mathrm{C} ; \text{Answer: }C
7 == \text{Total: }7 ; \text{The total is }7 != \text{The total is not }7
\mathbb{R} == \text{All real numbers}
x = \frac{\pi}{4} + k\pi, k \in \mathbb{Z} == \frac{\pi}{4}+k\pi (k \in \mathbb{Z})
x \equiv 3 \pmod{7} == x\equiv3\pmod7 ; x \equiv 3 (\operatorname{mod} 7)
x=2, y=-3 == (2,-3) ; y=-3, x=2 != (-3,2) ; x=-3, y=2 ; -3, 2
p=2, a=3 == 2, 3 != 3, 2
(2,3) == y=3, x=2 ; \begin{cases}x=2\\y=3\end{cases} != y=2, x=3
(2,3) == \begin{aligned}x&=2\\y&=3\end{aligned}
3, 3, 5 == 5, 3, 3 != 3, 5, 5
12 != 12 \text{ lakh} ; 12万 ; 12 \text{ sixths}
6, 8 == 6 \text{ 或 } 8
f(x)=x == f(x)=x \text{ for all } x ; f(x)=x,\ \forall x\in\mathbb R ; \text{only } f(x)=x
f(x)=x != f(x)=x \text{ if } x>0, 0 \text{ otherwise} ; f(x)=x \text{ or } f(x)=0
n^2 \text{ for } n\ge1 == n^2 ; n^2\ (1\le n) ; n^2,\ n\ge1 != n^2 \text{ for } n\ge3 ; n^3
2k+1, k\in\mathbb{Z} == 2k+1 ; 2k+1 \text{ for all integers } k != 2k+1, k\in\mathbb{R}
3 == 3\ (x>0) ; 3, \text{ since } x>0 ; x=3 \text{ (rejecting } x=-3) != 3 \text{ for } 2
f(x,y)=x+2y == f(a,b)=a+2b != f(y,x)=x+2y
P(A)=\frac12 == \frac12 ; \Pr(A)=0.5 != P(B)=\frac12
f'(x)=2x == 2x ; f'(t)=2t != f''(x)=2x
9.8 \text{ m/s}^2 == 9.8\,\mathrm{m\cdot s^{-2}} ; 9.8\mathrm{\ m/s^{2}} != 9.8\mathrm{m^2/s^2}
9.8\text{ m/s}^2 == 9.8 \text{ metres per second squared} != 9.8 \text{ metres per second}
9.8\text{ m/s}^2 == 9.8\text{ m/s squared} != 9.8\text{ m squared/s}
5\text{ kg/m}^3 == 5\text{ kg per cubic metre} != 5\text{ kg per square metre}
5\text{ kg/m}^3 == 5\text{ kg per metre cubed} != 5\text{ kg cubic metres}
6\text{ N}\cdot\text{m} == 6\,\mathrm{N\,m} ; 6 != 6\,\mathrm{N/m}
5 == 5 \text{ times} ; 5\,\mathrm{J/(kg\cdot K)} ; 5\,\Omega ; 5 (apples)
5 != 5\text{k} ; 5 \text{ gross} ; 5\text{ M}
5 != 5 \text{ squared} ; 5\text{K} ; 5 \text{ couple}
20 == 20 (cm^2) ; 20 (km/h) ; 20\,\mu\mathrm{m} != 20 (xy)
5 == \operatorname{tr}(A)=5 ; |A\cup B|=5 ; P(X>2)=5 ; \mathrm{E}(X)=5
P(X>2)=\frac12 != P(X>3)=\frac12
x=2 == x=2 \text{ is the only solution} ; \text{only } x=2
f(x)=x == \text{For all } x,\ f(x)=x ; \forall x\in\mathbb{R}: f(x)=x
5 != 5 \text{ (approximately)} ; \text{a 5-digit number} ; \text{half of } 5
60\text{ km/h} == 60\text{ kph} ; 60\text{ kilometers per hour} != 60\text{ mph}
2\text{ hours }30\text{ minutes} == 2.5\text{ h} ; 150\text{ min} != 2\text{ h }20\text{ min}
\arctan x+\ln|x| == atan(x)+ln(abs(x)) ; \tan^{-1}(x)+\ln|x|
\lfloor x\rfloor == floor(x) != ceil(x)
10 == C(5,2) ; ^5C_2 ; 5 choose 2 ; nCr(5,3) != P(5,2)
B == \text{(B) The cat} ; \textbf{B. The cat} != \text{A. The B}
A, C == AC ; \text{C and A} != AB ; A
-\cos A == \cos(180^\circ-A)
3 \pmod 7 == x \equiv 3 \pmod{7} != 3 \pmod 5
(\pm\sqrt2,0) == (\sqrt2,0),(-\sqrt2,0)
\max\{a,b\} == \max(b,a) != \min(a,b)
\frac13 != \frac13\%
-6 == \text{minus six} ; \text{negative } 6
\text{no solution} == \text{There is no solution}
cat != act
AB != ab
\frac{1}{\gcd(a,b)} != 1
""".strip().split("\n")


@pytest.mark.parametrize("line", ANSWERS)
def test_the_same_answer_and_another_one(line: str) -> None:
    assert_judged(line, "Therefore.\n</think>\n\nThe answer is $\\boxed{ANSWER}$.")


def test_the_conventions_in_the_docs_are_the_judge_s() -> None:
    """The table of docs/data.md: gold answer, also right, wrong."""
    table = (ROOT / "docs/data.md").read_text().partition("| gold answer | also right | wrong |")[2]
    checked = 0
    for line in table.partition("\n\n")[0].split("\n")[2:]:
        golds, right, wrong = (re.findall("`([^`]*)`", cell) for cell in line.split(" | "))
        for answers, outcome in ((right, Outcome.CORRECT), (wrong, Outcome.WRONG)):
            for answer in answers:
                assert judge(rf"\boxed{{{answer}}}", golds[0]).outcome is outcome, (golds, answer)
                checked += 1
    assert checked > 40


@pytest.mark.parametrize(
    ("gold", "accepted", "refused"),
    [(42, "42", "24"), (0.5, r"\frac{1}{2}", "0.6"), (1e-7, r"1 \times 10^{-7}", "1e-8")],
)
def test_a_gold_may_be_a_number_of_json(gold: float, accepted: str, refused: str) -> None:
    assert judge(rf"\boxed{{{accepted}}}", gold).outcome is Outcome.CORRECT
    assert judge(rf"\boxed{{{refused}}}", gold).outcome is Outcome.WRONG


def test_a_gold_that_is_neither_text_nor_a_number_is_refused() -> None:
    for gold in (None, True, ["7", "8"], float("nan")):
        with pytest.raises(RowError, match="gold"):
            judge(r"\boxed{7}", gold)  # type: ignore[arg-type]
