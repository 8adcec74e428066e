"""Training while engines decode: the same gradients as after all is decoded, in any layout."""

import json
from pathlib import Path

import pytest
from small_run import QUICKSTART, SMALL_RUN
from world import World

from megatron_opsft.config_file import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.rollout.limits import check_engine
from megatron_opsft.train import train

SEPARATE = ["rollout.placement=separate"]
# Batches of two responses and packs of few tokens: much is ready long before all is decoded.
STEPS = [
    *SMALL_RUN,
    "run.steps=2",
    "checkpoint.every=0",
    "rollout.batch_size=2",
    "train.max_tokens_per_microbatch=128",
    "optimizer.lr=1e-3",
]


def metrics_of(run_dir: Path, overrides: list[str]) -> list[dict[str, float]]:
    assert train(load_config(Path(QUICKSTART), [*overrides, f"run.dir={run_dir}"])) == 0
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("num_ranks", "num_engines", "layout"),
    [
        (2, 2, ["optimizer.clip_grad=0.01"]),
        (2, 1, ["parallel.pp=2", "parallel.vpp=2"]),
        (
            2,
            1,
            ["parallel.tp=2", "method.aggregation=sequence", "parallel.overlap_grad_reduce=false"],
        ),
    ],
    ids=["dp2", "pp2 vpp2", "tp2"],
)
def test_losses_and_norms_are_those_of_training_afterwards(
    world: World, tmp_path: Path, num_ranks: int, num_engines: int, layout: list[str]
) -> None:
    """Afterwards: with engines in the training ranks, which sample the same responses."""
    overrides = [*STEPS, *layout]
    after = world.run(metrics_of, num_ranks, tmp_path / "after", overrides)[0]
    overlapped = [*SEPARATE, f"rollout.num_engines={num_engines}", "rollout.overlap=true"]
    during = world.run(metrics_of, num_ranks, tmp_path / "during", [*overrides, *overlapped])[0]
    assert len(after) == len(during) == 2
    for a, b in zip(after, during, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
        assert (b["num_accepted"], b["mean_response_tokens"]) == (
            a["num_accepted"],
            a["mean_response_tokens"],
        )
        assert "overlap_share" not in a
    # Megatron's exchange of gradients is set up in the first step and differs in the next.
    assert all(b["overlap_share"] > 0.2 for b in during)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], "rollout.placement=separate"),
        ([*SEPARATE, "method.name=grpo"], "method.name=grpo"),
        ([*SEPARATE, "rollout.dealing=fixed"], "rollout.dealing=fixed"),
    ],
)
def test_where_nothing_can_be_trained_on_meanwhile_a_line_says_so(
    overrides: list[str], named: str
) -> None:
    config = load_config(Path(QUICKSTART), [*overrides, "rollout.overlap=true"])
    with pytest.raises(UserError, match=named):
        check_engine(config)
