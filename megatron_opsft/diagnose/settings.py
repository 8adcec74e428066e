"""What a diagnosis is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseSettings:
    """original, efficient: what `resolve_model` takes. responses: directory of an evaluation or a
    run with the original's responses; None: it samples them. benchmarks, data: of what; data may
    also say where the problems of an evaluation lie now. samples, limit: responses to a problem,
    and problems of a benchmark, at most. max_tokens: of a sampled response. tp: ranks that share
    both models.
    """

    original: str
    efficient: str
    out: Path
    responses: Path | None = None
    benchmarks: tuple[str, ...] = ()
    data: dict[str, str]
    samples: int = 1
    limit: int = 32
    max_tokens: int | None = None
    tp: int = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
