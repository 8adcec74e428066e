"""Run a program on a pretended GPU:
`python -m pretend_gpu NUM_GPUS [--te] (-m MODULE | FILE) ARGUMENTS`.

Its exit code is the program's, or 70 where a fault was found that the program itself passed over.
--te: TransformerEngine's modules run, on stand-ins for its extension; else it is as if it were not
installed.
"""

import os
import runpy
import sys
from typing import Any

from pretend_gpu import pretended, te_extension


def main() -> None:
    """Entry point."""
    num_gpus, *words = sys.argv[1:]
    with_te = words[0] == "--te"
    words = words[with_te:]
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # a compiled function shows its operations to nobody
    if with_te:
        os.environ["NVTE_PLUGIN"] = te_extension.__name__
    else:
        absent: Any = None
        sys.modules["transformer_engine"] = absent
    with pretended(int(num_gpus)) as gpu:
        code: Any = 0
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
    for fault in gpu.faults:
        print(f"FAULT {fault}", file=sys.stderr)
    sys.exit(code or (70 if gpu.faults else 0))


if __name__ == "__main__":
    main()
