"""vLLM elsewhere, its weights packed: whole tensors over the group, through its own loader."""

from pathlib import Path

import pytest
from elsewhere_jobs import engine_hosts
from vllm_jobs import KeptSession, train_and_compare
from world import World

pytestmark = pytest.mark.vllm


def test_packed_weights_come_as_whole_tensors(vllm_world: World, tmp_path: Path) -> None:
    with engine_hosts(tmp_path, 1) as elsewhere:
        overrides = [*elsewhere, "parallel.pp=2", "sync.bucket_mb=1", "optimizer.lr=5e-4"]
        kept = KeptSession(vllm_world, tmp_path / "run", 2, overrides)
        for differences, ways, not_pulled in kept.run(train_and_compare, 3, timeout=300):
            assert len(differences) == 3
            assert max(differences) < 1e-4
            assert ways == ["stream"] * 3
            assert not_pulled == 0
        vllm_world.leave()
