"""Convert checkpoints between Hugging Face and Megatron-Core.

    python tools/convert_hf.py to-megatron --hf DIR --out DIR
    python tools/convert_hf.py to-hf --megatron DIR --out DIR

The same as `megatron-opsft convert`.
"""

from megatron_opsft.commands.cli import main
from megatron_opsft.commands.convert.commands import PROGRAM

if __name__ == "__main__":
    main(PROGRAM)
