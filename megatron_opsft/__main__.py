"""`python -m megatron_opsft`, also under torchrun."""

from megatron_opsft.cli import main

if __name__ == "__main__":
    main()
