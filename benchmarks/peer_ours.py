"""Our side of `against_peers.py`: the update alone, and whole steps of a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ranks import join_ranks, pack_accepted
from update_work import Run, Work, time_steps

from megatron_opsft.callback import Callback
from megatron_opsft.config import Config, ParallelConfig
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.records import MicroBatch
from megatron_opsft.run.record.open_recorder import open_recorder
from megatron_opsft.run.start.check import check_on_job
from megatron_opsft.run.start.session import open_session
from megatron_opsft.run.train import run_step
from megatron_opsft.trainer.model.load import build_trainer


def our_batches(work: Work) -> tuple[list[MicroBatch], float]:
    """Micro-batches packed as by a step of one rank, with the factor of the loss; needs no process
    group.
    """
    return pack_accepted(
        work.samples,
        work.accepted,
        ParallelConfig(),
        budget=work.microbatch_tokens,
        device=work.device.torch_device,
    )


def build_our_update(work: Work) -> Run:
    """The trainer of a run of one rank, with the defaults of a run's configuration."""
    model = {"path": str(work.model_dir), "dtype": work.dtype}
    config = Config.model_validate({"model": model, "data": {"train": "arithmetic"}})
    device, layout = join_ranks(work.device.torch_device.type, config.parallel)
    shape = read_model_shape(work.model_dir)
    parts = build_trainer(config, shape, work.model_dir, device, layout)
    parts.fill_from_disk()
    trainer = parts.trainer
    return lambda: time_steps(lambda: trainer.step(*our_batches(work), work.optimizer.lr), work)


class _LastMetrics(Callback):
    """Keeps the metrics of the last step."""

    metrics: Mapping[str, float | int] = {}

    def on_step(self, metrics: Mapping[str, float | int]) -> None:
        self.metrics = metrics


@contextmanager
def our_steps(config: Config) -> Iterator[Iterator[dict[str, float]]]:
    """Steps of a run, one for every figure taken: seconds of its parts, and what was sampled."""
    last = _LastMetrics()

    def steps() -> Iterator[dict[str, float]]:
        for step in range(1, config.run.steps + 1):
            run_step(session, recorder, step)
            figures = last.metrics
            parts = ("rollout", "verify", "train", "sync")
            yield {
                **{f"{part}_seconds": figures[f"{part}_seconds"] for part in parts},
                "sampled_tokens": figures["mean_response_tokens"] * figures["num_rollouts"],
                "num_accepted": figures["num_accepted"],
            }

    with (
        open_session(check_on_job(config)) as session,
        open_recorder(session, resume=False, overwrite=True, callbacks=[last]) as recorder,
    ):
        session.sync.push(0, session.probes(0))
        yield steps()
