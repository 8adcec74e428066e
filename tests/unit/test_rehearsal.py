"""The made-up messages of a rehearsal are those that real ranks would send."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_opsft.runtime.exchange import all_gather_bytes, route_bytes

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))
from rehearsal.fake_world import FakeWorld  # noqa: E402


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    """Of a small mixture on 4 ranks that share its experts."""
    root = TOOLS.parent
    large = root / "megatron_opsft/assets/model_configs/Qwen/Qwen3-30B-A3B/config.json"
    small = {"num_hidden_layers": 2, "num_experts": 8, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(large.read_text()) | small))
    command = [sys.executable, TOOLS / "rehearse.py", "--ranks", "4", "--json", "--config"]
    command += [root / "examples/configs/quickstart.yaml", f"model.path={tmp_path}"]
    command += ["rollout.engine=vllm", "parallel.tp=2", "parallel.sequence_parallel=true"]
    command += ["parallel.ep=4", "parallel.etp=1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    parts = {json.loads(line)["part"] for line in ended.stdout.splitlines()}
    assert {"who holds what", "schedule of a push", "plan of a checkpoint"} < parts
    assert len(parts) == 11


@pytest.mark.parametrize("world_size", [1, 2, 5, 8, 13])
def test_a_fake_world_gathers_and_routes_as_real_ranks_do(world_size: int) -> None:
    parts = [torch.full((3 + rank,), rank, dtype=torch.uint8) for rank in range(world_size)]
    # Every rank sends to every third one, itself included.
    routed = {
        source: {
            to: torch.full((1 + source,), to, dtype=torch.uint8) for to in range(0, world_size, 3)
        }
        for source in range(world_size)
    }
    rounds = (world_size - 1).bit_length()
    for rank in range(world_size):
        world = FakeWorld(rank, world_size)
        with (
            world.installed(),
            patch("torch.distributed.get_rank", return_value=rank),
            patch("torch.distributed.get_world_size", return_value=world_size),
        ):
            world.will_gather(parts, parts[::-1])
            assert [p.tolist() for p in all_gather_bytes(parts[rank])] == [
                [r] * (3 + r) for r in range(world_size)
            ]
            others = sum(3 + r for r in range(world_size) if r != rank)
            assert world.received == others + 8 * (world_size - 1)  # and the sizes
            assert len(world.partners) <= 2 * rounds
            second = all_gather_bytes(parts[::-1][rank])
            assert [p.tolist() for p in second] == [p.tolist() for p in parts[::-1]]
            world.will_gather()
            world.routed = routed
            came = route_bytes(routed[rank])
        expected = range(world_size) if rank % 3 == 0 else ()
        assert {s: p.tolist() for s, p in came.items()} == {s: [rank] * (1 + s) for s in expected}
