"""What the workers with vLLM run: real sessions, and what their engines say of their weights."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ref

import torch
from hf_reference import log_probs, of_labels
from live_memory import LiveMemory
from small_run import FEW_PROBLEMS, QUICKSTART
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from world import World

from megatron_opsft.config.load import load_config
from megatron_opsft.models.storage.hf_files import HfTensors
from megatron_opsft.records import Sample
from megatron_opsft.run.record.open_recorder import open_recorder
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.check import check_on_job
from megatron_opsft.run.start.session import Session, open_session
from megatron_opsft.run.sync.transfer import plan_transfer
from megatron_opsft.run.train import run_step
from megatron_opsft.trainer.model.load import TrainerParts

SMALL = [
    *FEW_PROBLEMS,
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_response_tokens=64",
    "eval.num_problems=4",
    "eval.max_response_tokens=100",
    "run.tensorboard=false",
    "verify.workers=1",
    "rollout.engine=vllm",
]


@contextmanager
def opened(run_dir: Path, overrides: list[str]) -> Iterator[tuple[Session, RunRecorder]]:
    """A session on the quickstart's configuration, after its first push."""
    config = load_config(Path(QUICKSTART), [*SMALL, f"run.dir={run_dir}", *overrides])
    checked = check_on_job(config)
    with ExitStack() as stack:
        session = stack.enter_context(open_session(checked))
        recorder = stack.enter_context(open_recorder(session, resume=False, overwrite=True))
        session.sync.push(0, session.probes(0))
        yield session, recorder
        if session.device.is_cuda:  # vLLM frees its memory of the GPU by collecting garbage
            stack.close()
            return
        # vLLM would look four times through all that was imported; the worker does after a job.
        with patch("gc.collect", return_value=0):
            stack.close()


@torch.inference_mode()
def hf_log_probs(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    given = log_probs(model, sample.prompt_ids, sample.response_ids)
    return of_labels(given, sample.response_ids)


def difference_from_hf(session: Session, model: PreTrainedModel) -> float:
    """The largest of the engine's log-probs of some samples from those of a Hugging Face model that
    takes all weights from the trainer; on every rank.
    """
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    state = dict(session.sync.exporter.stream())
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    samples = session.probes(session.sync.version)
    scores = session.sampler.engine.score(samples).log_probs
    return max(
        float((hf_log_probs(model, sample) - torch.tensor(scored)).abs().max())
        for sample, scored in zip(samples, scores, strict=True)
    )


def train_and_compare(session: Session, recorder: RunRecorder, num_steps: int) -> Any:
    """Real steps: the difference from Hugging Face after each, and how many shards a pull at the
    end does not bring back.
    """
    config = AutoConfig.from_pretrained(session.model_dir)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    differences = []
    for _ in range(num_steps):
        run_step(session, recorder, session.sync.version + 1)
        differences.append(difference_from_hf(session, model))
    return differences, spoil_and_pull(session)


def spoil_and_pull(session: Session) -> int:
    """How many shards differ from before after they were spoiled and pulled from the engine."""
    before = {name: tensor.clone() for name, tensor in session.shards.by_name.items()}
    for tensor in session.shards.by_name.values():
        tensor.fill_(7.0)
    session.sync.pull()
    now = session.shards.by_name
    return sum(not torch.equal(now[name], before[name]) for name in before)


def start_of(session: Session) -> dict[str, torch.Tensor]:
    """The bits of this rank's shards and of its main weights, which tell -0.0 from 0.0."""
    main = enumerate(session.trainer.optimizer.get_parameters())
    found = {**session.shards.by_name, **{f"main weights {n}": p for n, p in main}}
    kinds = {2: torch.int16, 4: torch.int32}
    return {name: t.detach().clone().view(kinds[t.itemsize]) for name, t in found.items()}


def engine_against_disk(session: Session, recorder: RunRecorder) -> tuple[int, list[str]]:
    """The most memory that a new session's pull from the engine takes; and what is another than
    from disk.
    """
    assert session.sync.version == 0
    engine = session.sampler.engine
    transfer = plan_transfer(session.shards, engine, 1, pull=True)
    with LiveMemory() as memory:
        transfer.run(engine.weights())
    found = start_of(session)
    for tensor in session.shards.by_name.values():
        tensor.fill_(7.0)
    stored = HfTensors(session.model_dir)
    TrainerParts(trainer=session.trainer, shards=session.shards, stored=stored).fill_from_disk()
    expected = start_of(session)
    return memory.peak_bytes, [n for n in found if not torch.equal(found[n], expected[n])]


@contextmanager
def scaled_shard(session: Session) -> Iterator[None]:
    """What leaves the trainer's last rank is not what it holds: one parameter by one percent."""
    transfer: Any = session.sync._transfer
    run = transfer.run

    def run_scaled(sources: Mapping[str, Tensor]) -> None:
        if session.layout.rank == session.layout.world_size - 1:
            name = next(n for n in sources if n.endswith("3.mlp.linear_fc2.weight"))
            sources = {**sources, name: sources[name] * 1.01}
        run(sources)

    transfer.run = run_scaled
    yield
    transfer.run = run


def kept_by_a_closed_session(run_dir: Path, overrides: list[str]) -> tuple[int, bool]:
    """What is still in memory after a session of one step: how many of its engine's parameters, and
    whether vLLM's runner, which holds keys and values.
    """
    with opened(run_dir, overrides) as (session, recorder):
        run_step(session, recorder, 1)
        engine: Any = session.sampler.engine
        weights = [StorageWeakRef(w.untyped_storage()) for w in engine.weights().values()]
        runner = ref(engine._runner)
        del engine
    gc.collect()
    return sum(not weight.expired() for weight in weights), runner() is not None


def with_session(run_dir: Path, overrides: list[str], act: Callable[..., Any]) -> Any:
    """`act(session, recorder)` on a session of its own; act: of a module, not nested."""
    with opened(run_dir, overrides) as (session, recorder):
        return act(session, recorder)


class KeptSession:
    """One session for several tests: to start its engines takes longer than most of them."""

    def __init__(self, world: World, run_dir: Path, ranks: int, overrides: list[str]) -> None:
        self.ranks = ranks
        self.run_dir = run_dir
        self._world = world
        self._entering = (opened, ranks, run_dir, overrides)

    def run(self, act: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """`act(session, recorder, *args)` on every rank; act: of a module, not nested.

        The session is opened where another one, or none, is open.
        """
        if self._world.entered is not self:
            self._world.enter(self, *self._entering)
        return self._world.inside(act, *args, timeout=timeout)
