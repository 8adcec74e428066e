"""The process of a separate engine: `python -m megatron_opsft.rollout.remote ADDRESS`."""

import sys

from megatron_opsft.runtime.loading import collector_at_rest

with collector_at_rest():
    from megatron_opsft.rollout.remote.process import main

if __name__ == "__main__":
    main(sys.argv[1])
