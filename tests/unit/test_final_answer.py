"""Which text of a response the judge of mathematics takes for its answer."""

import time

import pytest
from judged_answers import assert_judged

from megatron_opsft.records import Outcome, Verdict
from megatron_opsft.verify.final_answer import only_line
from megatron_opsft.verify.math_verifier import judge
from megatron_opsft.verify.worker import open_judge

# gold == accepted ; accepted != refused ; refused: whole responses; ⏎ ends a line.
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
6 != \boxed{6} cannot be right. ; It is anything but \boxed{6}. ; \boxed{6} must be wrong.
6 != \boxed{6}. Wait, I made an error. The correct answer is 7. ; Is it \boxed{6}? I don't think so.
6 != I got \boxed{6}. Hmm, let me check: 5?
7 == \boxed{6}. No, that is wrong: the answer is 7.
6 == \boxed{6}. No other values work. ; It is not 5 but \boxed{6}.
6 == \boxed{6}. The answer is an integer. ; \boxed{6}. It is not hard to check this.
6 == \boxed{6}. Let me know if you have questions! ; \boxed{6}. The answer is $x=6$.
8 != the answer should be 8. Maybe, let me see: 5? 5?
8 != So x is at most 8 ; There are 7 cats and 8 dogs.
12 != The question: find x if 2x = 12. I do not know. ; x = 12y ; 2 + 4 \ne 12
-6 == So the answer is minus six. ; The answer is negative 6.
\text{no solution} == No solution ; There is no solution.
\text{at least } 3 == at least 3 != at most 3
42 == 答えは42です。 ; La respuesta es 42. ; Die Antwort ist 42. ; Ответ: 42
70 == We add.⏎A: 70
3 == Final Answer: Jane started growing Sphere 3 hours ago. ; Answer: Ann sold 3 apples yesterday.
3 != Answer: Jane has half of 3 apples. ; Answer: Ann sold 3 more apples than Tom.
3 != Answer: Ann did not sell 3 apples. ; Answer: Each of 3 boys has 5 apples.
1000.99 == so the number is 10 which is 1,000.99m² ; it's not 10, it's 1,000.99m²
7 == the number is not 10 which is 7. ; It is not 10 but 7. != It is not 10 and not 7.
100\% == Therefore, the error increases by 100%.
7 != The answer is less than $7$. ; Possible values: 5, 6, 7
""".strip().split("\n")


@pytest.mark.parametrize("line", RESPONSES)
def test_what_a_response_calls_its_answer(line: str) -> None:
    assert_judged(line, "ANSWER")


def test_a_response_without_an_answer_has_none() -> None:
    unclosed, behind = r"\boxed{4", r"<think>It is \boxed{4}.</think> I give up."
    for response in (unclosed, behind, "I do not know.", "", r"\boxed{}"):
        assert judge(response, "4") == Verdict(outcome=Outcome.NO_ANSWER)


def test_verdict_names_the_answer_it_read() -> None:
    assert judge(r"so \boxed{ 3 }", "4") == Verdict(outcome=Outcome.WRONG, answer="3")
    assert len(open_judge("math")("\\boxed{" + "9" * 2000 + "}", "4").answer) == 500


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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("12", "12"),
        ("Twelve.\nOr 12.", ""),
        ("Twelve  \n\n  Or 12", ""),
        ("x = 3\n(12)", ""),
        # Line breaks beside markup go with it.
        ("<answer>\n12\n</answer>", "12"),
        ("12\n</answer>", "12"),
        ("12\nI hope it is correct.", "12"),
        ("12.\n\n I hope this is correct", "12."),
        ("I hope it is correct\n12", "12"),
        ("I hope it is correct.\n12", "12"),
        ("That is correct.\n12", ""),
        ("12\nI hope so", ""),
        ("12\n##", "12"),
        ("#\n12", "12"),
        ("Twelve\n# 12", ""),
        ("**\n12", "12"),
        ("Twelve*\n12", ""),
    ],
)
def test_a_response_of_one_line_has_no_line_break_but_beside_markup(text: str, line: str) -> None:
    assert only_line(text) == line


def test_the_line_breaks_of_a_long_text_are_found_at_once() -> None:
    text = "Twelve, *perhaps* _more_.\n" * 200_000
    start = time.process_time()

    assert only_line(f"So.\nOr {text}") == ""

    assert time.process_time() - start < 0.1  # 2 ms; to remove the markup takes 0.4 s
