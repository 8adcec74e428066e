"""A trainer on this rank, built from a model directory: shape, shards, optimizer; then weights."""

from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.errors import log
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.storage.adapters import StoredAdapter
from megatron_opsft.models.storage.stored_weights import StoredWeights, open_weights
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import record
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout
from megatron_opsft.trainer.loss.cross_entropy import te_problem
from megatron_opsft.trainer.loss.loss_memory import choose_cross_entropy
from megatron_opsft.trainer.model.build import build_model, wrap_for_training
from megatron_opsft.trainer.model.lora import add_adapters
from megatron_opsft.trainer.model.optimizer import build_optimizer
from megatron_opsft.trainer.model.shards import ModelShards
from megatron_opsft.trainer.model.step import Trainer
from megatron_opsft.trainer.model.transformer_config import (
    describe_parts,
    transformer_config,
    uses_transformer_engine,
)


@record
class TrainerParts:
    """A trainer whose weights are not loaded yet, and the weights `stored` on disk."""

    trainer: Trainer
    shards: ModelShards
    stored: StoredWeights

    def fill_from_disk(self) -> None:
        """Load this rank's slices of the weights, tensor by tensor."""
        self.shards.fill(self.stored.read)
        # Copy them into the optimizer's float32 weights.
        self.trainer.optimizer.reload_model_params()

    def fill_adapters(self, stored: StoredAdapter) -> None:
        """Load this rank's slices of an adapter."""
        for adapter in self.shards.adapters.values():
            adapter.fill(stored.read)
        self.trainer.optimizer.reload_model_params()


def build_trainer(
    config: Config, shape: ModelShape, model_dir: Path, device: Device, layout: Layout
) -> TrainerParts:
    """Build the trainer of a run of the directory's model; its weights have arbitrary values.
    Called by every rank.

    Only the headers of the weight files are read. shape: the model's, which `config.parallel` can
    cut.
    Errors: `UserError` for a weight file that is damaged or holds other tensors than config.json
    says.
    """
    dtype, train, tp = config.model.dtype, config.train, config.parallel.tp
    objective = config.method.objective(config.rollout.temperature)
    stored = open_weights(model_dir, WeightTable(shape, "te"), check=layout.is_main)
    with_te = uses_transformer_engine(device, dtype)
    megatron = transformer_config(
        shape,
        dtype=dtype,
        parallel=config.parallel,
        train=train,
        device=device,
        deterministic=config.run.deterministic,
    )
    table = WeightTable(shape, "te" if with_te else "local", tp)
    loss = choose_cross_entropy(
        train.cross_entropy,
        te_problem(device, dtype),
        max_tokens=train.max_tokens_per_microbatch,
        rows_per_rank=table.padded_vocab // tp,
        with_teacher=objective.has_teacher,
    )
    if layout.is_main:
        log.info(describe_parts(megatron, loss, device))
    models = build_model(shape, megatron, device)
    if config.lora.rank:
        is_stacked = table.num_experts > 0 and table.architecture.stacks_experts
        if layout.is_main and config.lora.feed_forward_targets and is_stacked:
            log.warning(
                "PEFT (0.21) ignores the adapters of this model's experts: use the merged hf/, or "
                "`megatron-opsft convert merge`"
            )
        add_adapters(models, table, layout, config.lora, config.run.seed)
    chunks = wrap_for_training(models, megatron, config.parallel)
    optimizer = build_optimizer(chunks, config.optimizer, bf16=megatron.bf16)
    trainer = Trainer(
        chunks=chunks,
        optimizer=optimizer,
        config=megatron,
        layout=layout,
        vocab_size=shape.vocab_size,
        cross_entropy=loss.kind,
        objective=objective,
    )
    # The distributed optimizer has moved the parameters into its own buffer.
    shards = ModelShards.of(models, table, layout)
    return TrainerParts(trainer=trainer, shards=shards, stored=stored)
