"""Many distinct LaTeX answers through the verifier, in two orders: answers a second, the resident
memory of its workers, and whether the verdicts are equal. Prints one JSON object.

    python benchmarks/verifier.py --answers 20000 --workers 2
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

from megatron_opsft.verify.worker_pool import VerifierPool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from verifier_load import latex_items, resident_bytes  # noqa: E402

CHUNK = 1000  # answers between two looks at the memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    items = latex_items(options.answers)
    rates, verdicts, resident = [], [], []
    with VerifierPool(options.workers, 60) as pool:
        pool.score([("warm", "up")])
        for seed in (1, 2):
            shuffled = random.Random(seed).sample(items, len(items))
            found = {}
            start = time.perf_counter()
            for first in range(0, len(items), CHUNK):
                chunk = shuffled[first : first + CHUNK]
                found.update(zip(chunk, pool.score(chunk), strict=True))
                resident.append(max(resident_bytes(w.process.pid) for w in pool._workers))
            rates.append(len(items) / (time.perf_counter() - start))
            verdicts.append(found)
    result = {
        "answers": len(items),
        "answers_per_second": [round(rate) for rate in rates],
        "resident_mb": {"early": resident[0] >> 20, "highest": max(resident) >> 20},
        "verdicts_equal": verdicts[0] == verdicts[1],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
