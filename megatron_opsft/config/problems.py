"""What is asked, and who judges the answers."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_opsft.config_section import (
    FREE,
    MATH,
    HomeExpanded,
    JudgeName,
    MixturePart,
    Section,
    Sources,
    TemplateName,
)


class DataConfig(Section):
    train: Sources
    """`arithmetic` (embedded), a .jsonl/.jsonl.gz/.parquet file, or a Hugging Face data set name; or a list of {path, weight}, a mixture (docs/data.md)."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    subset: str | None = None
    """Configuration name of a Hugging Face data set, such as `main` of gsm8k."""
    problem_field: str | None = None
    """Field of the problem (text or chat messages; may be dotted); by default the first of problem, question, prompt."""
    answer_field: str | None = None
    """Field of the gold answer (may be dotted); by default the first of answer, final_answer, solution."""
    responses: Annotated[Path | None, HomeExpanded] = None
    """Fixed data, written by the command `data`, for a method that samples nothing; B x G responses a step."""
    prompts_per_step: int = Field(64, ge=1)
    """B: problems drawn in each step."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Problems with a longer prompt are listed and left out. The default shrinks if the model has no room for it beside the longest response."""
    template: TemplateName = "r1"
    """r1: step by step; cod: Chain of Draft; concise: key steps alone; chat: the problem alone; or a .jinja file (docs/data.md). All through the model's chat template."""
    system_prompt: str = ""
    """System message before each problem; rows that have one keep theirs."""

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        """The sources of `train`, with what they do not say themselves."""
        given = (MixturePart(path=self.train),) if isinstance(self.train, str) else self.train
        own = ("split", "subset", "problem_field", "answer_field")
        return tuple(
            part.model_copy(update={key: getattr(part, key) or getattr(self, key) for key in own})
            for part in given
        )

    @property
    def name(self) -> str:
        """What `train` is called in messages."""
        return " + ".join(part.path for part in self.parts)


class VerifyConfig(Section):
    judge: JudgeName = "math"
    """Who judges an answer: math, or a function of your own, package.module:function (docs/data.md)."""
    workers: Annotated[int, FREE] = Field(0, ge=0)
    """Most verifier processes of a rank; 0: its share of the CPU cores."""
    timeout_seconds: float = Field(10.0, gt=0)
    """Wall-clock limit for one answer."""

    @property
    def own_judge(self) -> bool:
        """Whether `judge` is a function of the user's, which takes all columns of a row."""
        return self.judge != MATH
