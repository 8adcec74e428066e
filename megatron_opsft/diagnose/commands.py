"""`megatron-opsft diagnose`: the command, as users call it."""

import os
from typing import ClassVar

from megatron_opsft.command_line import Command
from megatron_opsft.diagnose.settings import DiagnoseSettings
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.console import printable
from megatron_opsft.runtime.libraries import loading_libraries


class Diagnose(DiagnoseSettings, Command):
    """Compare two models at every token of the original's responses: D_t, the divergence of their
    next-token distributions; where and at which words it is large.

    The same command continues what is in --out. Without --responses the original samples.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "diagnose --original tiny_reasoner --efficient RUN --out DIR",
        "diagnose --original A --efficient B --out D --data mine=FILE",
        "diagnose --original A --efficient B --out D --responses EVAL",
    )

    def run(self) -> None:
        """Diagnose."""
        if (num_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise UserError(
                f"diagnose is one process, and {num_ranks} were started; start it without torchrun "
                "or srun: it takes all GPUs that it sees"
            )
        with loading_libraries():
            from megatron_opsft.diagnose.run import diagnose

        print(printable(diagnose(self)), end="")
        print(f"every token, summary and page: {self.out}")
