"""Makes what writes and reads a run's checkpoints."""

from megatron_opsft.config import Config
from megatron_opsft.models.storage.adapter_config import adapter_config_json
from megatron_opsft.models.storage.large_files import Region
from megatron_opsft.models.storage.stored_weights import carried_of
from megatron_opsft.run.start.input import RunInput
from megatron_opsft.trainer.model.checkpoint import Checkpointer
from megatron_opsft.trainer.model.load import TrainerParts
from megatron_opsft.trainer.model.offload import Offload
from megatron_opsft.trainer.model.reference import ReferenceModel


def make_checkpointer(
    config: Config,
    run_input: RunInput,
    parts: TrainerParts,
    offload: Offload,
    reference: ReferenceModel | None,
) -> Checkpointer:
    """Make the writer and reader of the run's checkpoints. Called by every rank.

    parts: the trainer, and its shards, which need not be filled yet.
    """
    trainer, adapter_config = parts.trainer, None
    model_dir = run_input.model_dir
    carried: dict[str, Region] = {}
    if parts.shards.adapters:
        adapter_config = adapter_config_json(config.model, config.lora, model_dir)
    else:
        carried = carried_of(model_dir, parts.shards.table)
    return Checkpointer(
        config.run.dir / "checkpoints",
        trainer.models,
        trainer.optimizer,
        keep=config.checkpoint.keep,
        reference=reference,
        stored=offload.stored,
        model_dir=model_dir,
        model_files=run_input.model_files,
        adapter_config=adapter_config,
        carried=carried,
    )
