"""What the judge of mathematics takes for the same answer, and what for another one."""

import re
import time

import pytest
from forked_cli import ROOT

from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.math_verifier import judge
from megatron_opsft.verify.worker import open_judge

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
6\text{ N}\cdot\text{m} == 6\,\mathrm{N\,m} ; 6 != 6\,\mathrm{N/m}
5 == 5 \text{ times} ; 5\,\mathrm{J/(kg\cdot K)} ; 5\,\Omega ; 5 (apples)
5 != 5\text{k} ; 5 \text{ gross} ; 5\text{ M}
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
# The same of whole responses; ⏎ ends a line.
RESPONSES = r"""
34 == Answer:34. ; Answer：34 ; The answer is therefore 34. ; Final answer: 34 dollars
34 == The correct answer is (B) 34. ; The answer is thirty-four.
34 == Answer: 34 ⏎ ⏎ This answer is consistent with what is given.
34 != The answer is 3.4. ; The answer is 34. The answer was 35. ; The answer isn't 34.
34 != It is not 34. ; Is the answer 34? No. ; Answer: unknown (34 is a guess)
3 != First \boxed{3}, no: \boxed{2}. ; Answer: at least 3 ; So we get $\ge 3$
4 == The answer is 4, since 2+2=4. ; \boxed{1}. The final answer is 4
4 != The answer is not 4 ; So the answer is 4!
4a-2 != \boxed{4}
5 == the answer is \(x=5\). ; So x = 5. != So we get $5 \text{ million}$
Thus the answer is $\boxed{5}$. == \boxed{5}
7 == \fbox{7} ; \boxed 7 ; \boxed{\boxed{7}} ; So $\text{the sum} = 3 + 4 = 7$
7 != The answers are 3 and 7. ; The answer is 7. \boxed{}
3,7 == The answers are 3 and 7.
12 != Answer: 12 apples and 5 pears ; First \boxed{7}; in total \boxed{12
12\frac{3}{5} == \boxed{63/5} != \boxed{\frac{3}{5}}
10000 == The answer is 10 000. ; So we get $10~000$
0 != So we get $10~000$
1/2 == \boxed\frac12 ; The answer is: ⏎ \[ ⏎ \frac{1}{2} ⏎ \]
3.4 == The answer is 3.4.
42 == #### 42 ; Never stopped thinking: \boxed{42}
90 == The angle is [90].
yes == The answer is yes. This answer is correct.
7:55 a.m. == The answer is 7:55 a.m. != The answer is 7:55 p.m.
-2, 1 == $x = \boxed{1}$ or $x = \boxed{-2}$
1, 2 != $\boxed{1} \quad\text{and}\quad \boxed{3}$
1011_3 != so we get 1011_2
B == The correct answer is (B) 34. ; The answer is (B), although option D looks right.
C == Hence the correct option is C. != The correct choice is not C. ; \boxed{B. 42 apples}
D != The answer is (B), although option D looks right.
D. none of these == So the correct answer is **(D)**.
602 == So we get $\textbf{(C)}\ 602$
9 == Answer: 9 (since 3^2 = 9) ; The answer is $9$ ($= 3^2$). ; **Answer:** 9 (see above)
9 == The answer is 9, not 12.
3 == The answer is 3 (attained at $x=1$). ; The minimum is 3, attained when $x=1$.
3 != The minimum is 1, attained when $x=3$.
2\sqrt{3} == The answer is \(2\sqrt{3}\), approximately 3.46.
yes == Answer: Yes, it is possible. ; **Final Answer** ⏎ Yes != Answer: No, it is not.
17 == So there are **17** ways. ; ### Final Answer ⏎ **17** ; **17** is the answer.
17 == The value is `17`. ; It is *17*.
24 == So 2*3*4 = 24. ; The total is **\$24**. != She makes \$24 every two days.
24 != 24 is not the answer. ; We get 24, which is impossible.
D == **Final Answer** ⏎ (D) ; **(D)** ; Option D. ; So option D is correct.
D == **D** is the correct answer. ; (D) is correct. ; Final choice: D ; D) 8 ; 故选：D != (C)
7 == \boxed{7} is the final answer. This is what we wanted. ; 答案是7。
7 == <answer>7</answer> ; \boxed{7} ⏎ The final answer is boxed above.
7 != \boxed{5} The final answer is an integer near 7. ; It's either 6 or 7. ; It is 7 million.
6 != The answer is half of 6. ; The answer is the square of 6. ; The answer is a 6-digit number.
6 != It is definitely not \boxed{6} ; \boxed{6}? No. ; \boxed{6} is not the answer.
6 != \boxed{6}. Wait, I made an error. The correct answer is 7. ; Is it \boxed{6}? I don't think so.
6 != I got \boxed{6}. Hmm, let me check: 5?
7 == \boxed{6}. No, that is wrong: the answer is 7.
6 == \boxed{6}. No other values work. ; It is not 5 but \boxed{6}.
6 == \boxed{6}. The answer is an integer.
8 != the answer should be 8. Maybe, let me see: 5? 5?
8 != So x is at most 8 ; There are 7 cats and 8 dogs.
12 != The question: find x if 2x = 12. I do not know. ; x = 12y ; 2 + 4 \ne 12
-6 == So the answer is minus six. ; The answer is negative 6.
42 == 答えは42です。 ; La respuesta es 42. ; Die Antwort ist 42. ; Ответ: 42
70 == We add.⏎A: 70
7 != The answer is less than $7$. ; Possible values: 5, 6, 7
""".strip().split("\n")


def judged(line: str, response: str) -> None:
    """AssertionError where an answer of the line, in that response, is not judged as it says."""
    same, _, other = line.partition(" != ")
    gold, _, accepted = same.partition(" == ")
    for answers in (accepted, other):
        for answer in filter(None, answers.split(" ; ")):
            text = response.replace("ANSWER", answer).replace("⏎", "\n")
            is_right = judge(text, gold).outcome is Outcome.CORRECT
            assert is_right == (answers is accepted), answer


@pytest.mark.parametrize("line", ANSWERS)
def test_the_same_answer_and_another_one(line: str) -> None:
    judged(line, "Therefore.\n</think>\n\nThe answer is $\\boxed{ANSWER}$.")


@pytest.mark.parametrize("line", RESPONSES)
def test_what_a_response_calls_its_answer(line: str) -> None:
    judged(line, "ANSWER")


def test_a_response_without_an_answer_has_none() -> None:
    unclosed, behind = r"\boxed{4", r"<think>It is \boxed{4}.</think> I give up."
    for response in (unclosed, behind, "I do not know.", "", r"\boxed{}"):
        assert judge(response, "4") == Verdict(outcome=Outcome.NO_ANSWER)


def test_verdict_names_the_answer_it_read() -> None:
    assert judge(r"so \boxed{ 3 }", "4") == Verdict(outcome=Outcome.WRONG, answer="3")
    assert len(open_judge("math")("\\boxed{" + "9" * 2000 + "}", "4").answer) == 500


def test_the_conventions_in_the_docs_are_the_judge_s() -> None:
    """Of docs/data.md, "What counts as the same": gold answer, also right, wrong."""
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
    "response",
    [
        "**6** " * 20_000,
        r"\[ " * 20_000,
        r"\boxed{" + r"\cup".join(f"({n},{n}.5)" for n in range(150)) + "}",
        r"\boxed{" + "(" * 2000 + "}",
        r"\boxed{5" + " " * 4900 + "x}",
        r"\boxed{" + "9" * 4990 + "}",
        r"\boxed{" + "1, " * 1600 + "}",
    ],
    ids=["bold", "formulas", "unions", "brackets", "spaces", "digits", "members"],
)
def test_no_response_keeps_the_judge_busy(response: str) -> None:
    """Neither patterns nor the parser take time that grows with the square of the length."""
    start = time.process_time()
    assert judge(response, "5").outcome is not Outcome.CORRECT
    assert time.process_time() - start < 5  # it takes less than one on an idle core
