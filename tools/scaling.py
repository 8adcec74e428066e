"""Scaling experiments: sweeps that are run or simulated, their tables and figures.

    python tools/scaling.py simulate CONFIG --ranks 8,16,32 --out DIR
    python tools/scaling.py run CONFIG --ranks 1,2,4 --out DIR
    python tools/scaling.py collect RUN_DIR... --out DIR

See docs/scaling.md.
"""

from megatron_opsft.cli import run
from megatron_opsft.plan.scaling.commands import app

if __name__ == "__main__":
    run(app)
