"""The configuration of a run: frozen, nested, checked once; YAML plus dotted overrides.

A function takes the section that it needs, not the whole. Only `load.load_config` makes a `Config`.
"""

from typing import Annotated, Self

from pydantic import BeforeValidator, SerializeAsAny, model_validator

from megatron_opsft.config.run import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ExportConfig,
    RunConfig,
    VerifyConfig,
)
from megatron_opsft.config.training import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    SyncConfig,
    TrainConfig,
)
from megatron_opsft.methods.catalog import with_class
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySft
from megatron_opsft.methods.settings import MethodSettings, RunSize
from megatron_opsft.section import FREE, Section


class Config(Section):
    """The whole configuration of one run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    method: Annotated[SerializeAsAny[MethodSettings], BeforeValidator(with_class)] = (
        OnPolicySft()
    )
    verify: VerifyConfig = VerifyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: Annotated[ParallelConfig, FREE] = ParallelConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: Annotated[CheckpointConfig, FREE] = CheckpointConfig()
    export: Annotated[ExportConfig, FREE] = ExportConfig()

    @property
    def responses_per_step(self) -> int:
        """B x G: the responses that a step samples or reads from a file."""
        return self.data.prompts_per_step * self.rollout.group_size

    @model_validator(mode="after")
    def _fit_method(self) -> Self:
        """Scale the method's defaults that are numbers of tokens, if responses are shorter.

        Errors: `UserError` if the other sections do not go with the method.
        """
        fitted = self.method.fitted(self.rollout.max_response_tokens)
        object.__setattr__(self, "method", fitted)  # the section is frozen
        self.method.check(
            RunSize(
                group_size=self.rollout.group_size,
                prompts_per_step=self.data.prompts_per_step,
                max_response_tokens=self.rollout.max_response_tokens,
            )
        )
        return self
