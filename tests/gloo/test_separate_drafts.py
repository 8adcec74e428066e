"""A separate HF engine with drafts: the same responses, and what drafts brought."""

from pathlib import Path

from small_run import QUICKSTART, SMALL_RUN
from world import World

from megatron_opsft.config_file import load_config
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.draft_counts import DraftCounts
from megatron_opsft.session import open_session


def two_epochs(run_dir: Path, keys: list[str]) -> tuple[list[Rollout], DraftCounts]:
    """The same problems twice, with other seeds; what the second time gave, and all drafts."""
    config = load_config(Path(QUICKSTART), [*SMALL_RUN, *keys, f"run.dir={run_dir}"])
    with open_session(config) as s:
        s.sync.push(0, s.probes(0))
        for step in (1, 2):
            found = s.sampler.sample(s.problems_of(1), s.settings, num_samples=4, step=step)
        return found, s.sampler.engine.take_draft_counts()


def test_responses_of_a_separate_engine_are_the_same_with_drafts(
    world: World, tmp_path: Path
) -> None:
    """As those of an engine in the training rank without drafts."""
    ((plain, none),) = world.run(two_epochs, 1, tmp_path / "plain", ["rollout.speculation=off"])
    separate = ["rollout.placement=separate", "rollout.speculation=suffix"]
    ((drafted, counts),) = world.run(two_epochs, 1, tmp_path / "drafted", separate)
    assert drafted == plain and len(plain) == 24
    assert none == DraftCounts()
    assert counts.rows > 0 and counts.tokens >= sum(len(r.response_ids) for r in drafted)
