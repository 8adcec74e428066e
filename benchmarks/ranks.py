"""What the benchmarks over several ranks share: starting them, and ending with one clear line."""

import os
import sys
from collections.abc import Callable

from megatron_opsft.errors import UserError


def start_ranks(count: int) -> None:
    """Become torchrun with `count` processes of this very command; inside it nothing is to do."""
    if count > 1 and "WORLD_SIZE" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def run_main(main: Callable[[], None]) -> None:
    """Bad input: one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
