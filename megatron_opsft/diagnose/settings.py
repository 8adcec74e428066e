"""What a diagnosis is asked for."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_opsft.config_section import CommaSeparated, NamedFiles, Section
from megatron_opsft.errors import UserError


class DiagnoseSettings(Section):
    """Two models, and the responses of the first that both are asked about."""

    original: str = Field(description="Model whose responses are diagnosed.")
    efficient: str = Field(description="Model trained from it.")
    out: Path = Field(description="Directory to write.")
    responses: Path | None = Field(
        None, description="Evaluation of the original, with its responses; else it samples them."
    )
    data: NamedFiles = Field({}, description="BENCHMARK=FILE; may be repeated.")
    benchmarks: Annotated[tuple[str, ...], CommaSeparated] = Field(
        (), description="Such as gsm8k,math500."
    )
    samples: int = Field(1, ge=1, description="Responses to a problem.")
    limit: int = Field(32, ge=1, description="Problems of a benchmark, at most.")
    max_tokens: int | None = Field(None, ge=1, description="Of a sampled response.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Of both models.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where.")
    seed: int = Field(0, ge=0, description="Of the responses that are sampled.")
    overwrite: bool = Field(False, description="Delete the diagnosis that --out holds.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        """Errors: `UserError` for stored responses and benchmarks at once."""
        if self.responses is not None and self.benchmarks:
            raise UserError("--responses and --benchmarks exclude each other; give one of them")
        return self
