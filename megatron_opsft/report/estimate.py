"""A number with its interval, as results, tables and figures show it."""

from pydantic import BaseModel, ConfigDict, model_validator


class Estimate(BaseModel):
    """A metric and its interval; None where a value was derived from others without samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: float
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _check(self) -> "Estimate":
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high must both be there or both be missing")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self
