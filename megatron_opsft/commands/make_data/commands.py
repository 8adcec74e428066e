"""`megatron-opsft data`: the command and its options."""

from importlib.util import find_spec
from pathlib import Path

from pydantic import Field

from megatron_opsft.commands.command_line import RunCommand
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog.fixed_data import StepEntropy, Stop, TokenSkip


class MakeData(RunCommand):
    """Sample and choose the responses that a method trains on as data.responses."""

    words = ("method", "config")
    examples = (
        "data crst examples/configs/quickstart.yaml --out crst.parquet",
        "data tokenskip CONFIG method.ratio=0.7 --limit 9 --out FILE",
    )
    method: str
    """A method that trains on fixed data."""
    out: Path
    """Parquet file to write."""
    limit: int | None = Field(None, ge=1)
    """How many problems at most."""

    def run(self) -> None:
        """Make the data. First refuse, before heavy libraries are loaded, a method without fixed
        data, a scorer whose package is missing, and an output file that exists.
        """
        config = load_config(self.config, [f"method.name={self.method}", *self.keys])
        method = config.method
        max_tokens = config.rollout.max_response_tokens
        if not method.has_fixed_data:
            raise UserError(
                f"method.name={method.name} samples while it trains and needs no data; these do: "
                "crst, off_policy_sft, o1_pruner with method.form=fixed, step_entropy, stop and "
                "tokenskip"
            )
        if isinstance(method, StepEntropy) and method.answer_tokens >= max_tokens:
            raise UserError(
                f"method.answer_tokens={method.answer_tokens} leaves no room for thinking within "
                f"rollout.max_response_tokens={max_tokens}; lower it"
            )
        if isinstance(method, Stop) and config.verify.own_judge:
            raise UserError(
                f"verify.judge={config.verify.judge} does not say where a right answer stands, "
                "and data stop cuts behind the first one; set verify.judge=math"
            )
        if isinstance(method, TokenSkip) and find_spec("llmlingua") is None:
            raise UserError(
                "data tokenskip needs the llmlingua package: pip install '.[tokenskip]'"
            )
        if self.out.exists():
            raise UserError(
                f"--out {self.out} already exists; remove it, or name another file"
            )
        from megatron_opsft.commands.make_data.run import make_data

        make_data(config, self.out, self.limit)
