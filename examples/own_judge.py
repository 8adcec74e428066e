"""A judge of one's own: a number within the tolerance that its row gives.

    megatron-opsft train my_run.yaml verify.judge=examples.own_judge:within_tolerance

with rows such as {"problem": "How tall is ...?", "answer": "8849", "tolerance": 2}.
"""

import re
from typing import Any

from megatron_opsft.records import Outcome, Verdict

_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def within_tolerance(text: str, gold: str, fields: dict[str, Any]) -> Verdict:
    """The last number behind the thinking against the gold answer; without `tolerance`, exactly."""
    numbers = _NUMBER.findall(text.rpartition("</think>")[2])
    if not numbers:
        return Verdict(outcome=Outcome.NO_ANSWER)
    near = abs(float(numbers[-1]) - float(gold)) <= fields.get("tolerance", 0)
    return Verdict(outcome=Outcome.CORRECT if near else Outcome.WRONG, answer=numbers[-1])
