"""`megatron-opsft diagnose`: the command, as users call it."""

from pathlib import Path

from megatron_opsft.commands.command_line import Command
from megatron_opsft.commands.evaluate.settings import EvalSettings
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.libraries import loading_libraries


class Diagnose(Command):
    """Compare two models at every token of the original's responses: D_t, the divergence of their
    next-token distributions; where and at which words it is large.

    The same command continues what is in --out. Responses are sampled as `eval` samples them, by
    the same settings: limit (32 problems), samples (1), max_tokens, benchmarks, data and others.
    """

    keys_of = EvalSettings
    examples = (
        "diagnose --original tiny_reasoner --efficient RUN --out DIR",
        "diagnose --original A --efficient B --out D --data mine=FILE",
    )
    original: str
    """Model whose responses are diagnosed."""
    efficient: str
    """Model trained from it."""
    out: Path
    """Directory to write."""
    keys: tuple[str, ...] = ()
    overwrite: bool = False
    """Delete the diagnosis that --out holds."""

    def run(self) -> None:
        """Diagnose, then print D_t by kind of token."""
        with loading_libraries():
            from megatron_opsft.commands.diagnose.run import diagnose

        table = diagnose(
            self.original,
            self.efficient,
            self.out,
            self.keys,
            overwrite=self.overwrite,
        )
        say(table, end="")
        say(f"every token and the page: {self.out}")
