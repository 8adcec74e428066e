"""`python -m megatron_opsft`, also under torchrun."""

from megatron_opsft.commands.cli import main

if __name__ == "__main__":
    main()
