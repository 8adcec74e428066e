"""Packing of a step's accepted samples, which every rank plans for all of them.

    python benchmarks/packing.py [--repeats N]

Prints one JSON line a case: seconds of CPU time, the fastest of the repeats, and how much longer a
sequence takes than in the first case, a small run. `equal` lengths and `wide` ones (up to the
budget) are the hardest to pack and to balance.
"""

import argparse
import json
import random
import time
from collections.abc import Callable

from megatron_opsft.batching.packing import describe_plan, plan_packing

BUDGET = 16_384
QUADRATIC_AT = 8192.0
DRAWS: dict[str, Callable[[random.Random], int]] = {
    "lognormal": lambda draw: min(8192, max(20, round(draw.lognormvariate(7.5, 0.6)))),
    "uniform": lambda draw: draw.randint(100, 3600),
    "wide": lambda draw: draw.randint(20, BUDGET),
    "equal": lambda draw: 5000,
}
CASES = [(512, 8), (512, 4096), (5000, 4096), (8192, 256), (65_536, 512), (65_536, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for name, draw_length in DRAWS.items():
        first = 0.0
        for num, dp_size in CASES:
            draw = random.Random(0)
            lengths = [draw_length(draw) for _ in range(num)]
            seconds = []
            for _ in range(args.repeats):
                begin = time.process_time()
                plan = plan_packing(lengths, budget=BUDGET, dp_size=dp_size)
                seconds.append(time.process_time() - begin)
            first = first or min(seconds) / num
            report = describe_plan(lengths, plan, budget=BUDGET, quadratic_at=QUADRATIC_AT)
            result = {
                "lengths": name,
                "sequences": num,
                "dp": dp_size,
                "seconds": round(min(seconds), 4),
                "a_sequence_against_512_on_8": round(min(seconds) / num / first, 2),
                "fill": round(report.fill, 4),
                "imbalance": round(report.imbalance, 4),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
