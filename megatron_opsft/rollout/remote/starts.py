"""How an engine of a number is started, or found on its node, and told what it is."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from megatron_opsft.rollout.agreement import check_agreement, read_identity
from megatron_opsft.rollout.engine import EngineSettings
from megatron_opsft.rollout.remote.addresses import Address
from megatron_opsft.rollout.remote.client import Connected, EngineClient
from megatron_opsft.rollout.remote.engine_process import EngineProcess
from megatron_opsft.rollout.remote.gpus import NodeRank, engine_gpus
from megatron_opsft.rollout.remote.hosted import HostedEngine
from megatron_opsft.weights.rules import WeightTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Engines on other nodes, by number, and the secret that they share with this job."""

    addresses: tuple[Address, ...]
    token: str = field(repr=False)


@dataclass(kw_only=True)
class EngineStarts:
    """What every engine of the job is started with. elsewhere: None for processes of this node.

    packs_head: whether the engine that was introduced last packs its head.
    """

    settings: EngineSettings
    table: WeightTable
    num_engines: int
    timeout_seconds: float
    log_dir: Path
    elsewhere: Elsewhere | None
    packs_head: bool = False

    def connect(self, number: int, context: "zmq.Context[Any]") -> Connected:
        """A process for the engine of this number."""
        if self.elsewhere is None:
            log_file = self.log_dir / f"engine_{number}.log"
            return EngineProcess(context, log_file, self._gpus(number))
        address = self.elsewhere.addresses[number]
        return HostedEngine(context, address, self.elsewhere.token, self.timeout_seconds)

    def introduce(self, client: EngineClient) -> None:
        """Start it. Errors: `UserError` where it reads another tokenizer or model."""
        shape = self.table.shape
        identity, self.packs_head = client.start(self.settings, shape)
        check_agreement(read_identity(self.settings.model_dir, shape.vocab_size), identity)

    def _gpus(self, number: int) -> tuple[int, ...]:
        if not self.settings.is_cuda:
            return ()
        node = NodeRank.of_this_process()
        return engine_gpus(node, self.num_engines, self.settings.tp, number)
