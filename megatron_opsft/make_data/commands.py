"""`megatron-opsft data`: the command, as users call it."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from megatron_opsft.command_line import RunCommand
from megatron_opsft.config_file import load_config


class MakeData(RunCommand):
    """Sample and choose the responses that a method trains on as data.responses."""

    words: ClassVar[tuple[str, ...]] = ("method", "config")
    examples: ClassVar[tuple[str, ...]] = (
        "data crst examples/configs/quickstart.yaml --out crst.parquet",
        "data tokenskip CONFIG method.ratio=0.7 --limit 9 --out FILE",
    )
    method: str = Field(description="A method that trains on fixed data.")
    out: Path = Field(description="Parquet file to write.")
    limit: int | None = Field(None, ge=1, description="How many problems at most.")

    def run(self) -> None:
        """Make them."""
        from megatron_opsft.make_data.check import check_data

        config = load_config(self.config, [f"method.name={self.method}", *self.keys])
        check_data(config, self.out)
        from megatron_opsft.make_data.run import make_data

        make_data(config, self.out, self.limit)
