"""`megatron-opsft diagnose`: the command, as users call it."""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_opsft.command_line import Command
from megatron_opsft.config_section import CommaSeparated, NamedFiles
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.console import printable
from megatron_opsft.runtime.libraries import loading_libraries

_SAMPLING = {"benchmarks", "data", "problem_field", "answer_field", "samples", "limit"}
_SAMPLING |= {"max_tokens", "dtype", "device", "seed"}


class Diagnose(Command):
    """Compare two models at every token of the original's responses: D_t, the divergence of their
    next-token distributions; where and at which words it is large.

    The same command continues what is in --out.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "diagnose --original tiny_reasoner --efficient RUN --out DIR",
        "diagnose --original A --efficient B --out D --data mine=FILE",
    )
    original: str = Field(description="Model whose responses are diagnosed.")
    efficient: str = Field(description="Model trained from it.")
    out: Path = Field(description="Directory to write.")
    data: NamedFiles = Field({}, description="BENCHMARK=FILE; may be repeated.")
    problem_field: str | None = Field(None, description="Field of the problem in --data.")
    answer_field: str | None = Field(None, description="Field of the answer in --data.")
    benchmarks: Annotated[tuple[str, ...], CommaSeparated] = Field(
        (), description="Such as gsm8k,math500."
    )
    samples: int = Field(1, ge=1, description="Responses to a problem.")
    limit: int = Field(32, ge=1, description="Problems of a benchmark, at most.")
    max_tokens: int | None = Field(None, ge=1, description="Longest response.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of both models."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the models run.")
    seed: int = Field(0, ge=0, description="Seed of the responses.")
    overwrite: bool = Field(False, description="Delete the diagnosis that --out holds.")

    def run(self) -> None:
        """Diagnose."""
        if (num_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise UserError(
                f"diagnose runs as one process, but {num_ranks} were started; start it without "
                "torchrun or srun: it uses all GPUs that it sees"
            )
        with loading_libraries():
            from megatron_opsft.diagnose.run import diagnose

        sampling = self.model_dump(include=_SAMPLING)
        told = diagnose(self.original, self.efficient, self.out, sampling, overwrite=self.overwrite)
        print(printable(told), end="")
        print(f"every token and the page: {self.out}")
