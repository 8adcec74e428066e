"""Names of steps match whole and back; a run deletes what it wrote, and nothing else."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime.durable import PARTIAL, REPLACED, step_in, step_name

STEPS = st.integers(min_value=0, max_value=10**12)
PREFIXES = st.sampled_from(["step_", PARTIAL, REPLACED, "a.b", "", "(", "000"])
# Names that nearly are those of a run, and any others that a file system takes.
NEARLY = st.tuples(
    st.sampled_from(["step_", PARTIAL, REPLACED, "report.", ""]),
    st.text("0123456789", max_size=8),
    st.sampled_from(["", ".jsonl.gz", ".json", ".gz", "_", ".bak", "html", "\n"]),
).map("".join)
ANY = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=20)
NAMES = st.one_of(NEARLY, ANY).filter(lambda name: name not in ("", ".", ".."))
MADE = ("report.html",)  # of a run, by `report`
# What README and docs say that a run writes.
OF_A_RUN = (
    *("manifest.json", "config.yaml", "metrics.jsonl", "evals.jsonl", "summary.json", *MADE),
    *("rollouts", "checkpoints", "hf", "tensorboard", "wandb"),
)


@given(STEPS, NAMES, PREFIXES)
@example(1, "step_0000001", "step_")
@example(1, "step_000001\n", "step_")
def test_a_step_is_read_from_its_own_name_alone(step: int, name: str, prefix: str) -> None:
    assert step_in(step_name(step, prefix), prefix) == step
    found = step_in(name, prefix)
    assert found is None or step_name(found, prefix) == name


def is_of_a_step(name: str) -> bool:
    """True for a rollout's file, and for a checkpoint that is not complete."""
    stem = name.removesuffix(".jsonl.gz")
    is_rollout = stem != name and step_in(stem) is not None
    return is_rollout or any(step_in(name, prefix) is not None for prefix in (PARTIAL, REPLACED))


@settings(max_examples=25)
@given(st.lists(NAMES, max_size=6, unique=True), st.integers(0, 3))
@example(["report.csv", "report.html"], 0)
def test_overwriting_and_resuming_leave_what_is_not_the_runs(
    names: list[str], after_step: int
) -> None:
    foreign = {name for name in names if name not in OF_A_RUN}
    of_a_step = set(filter(is_of_a_step, names))
    with tempfile.TemporaryDirectory() as place:
        run = RunDir(Path(place))
        run.open(resume=False, overwrite=False)
        run.write_manifest({})
        folders = [run.path, run.path / "rollouts", run.path / "checkpoints"]
        for folder in folders:
            folder.mkdir(exist_ok=True)
            for name in {*foreign, *MADE} & {*names}:
                (folder / name).touch()
        run.truncate(after_step)
        for folder in folders:
            assert foreign - of_a_step <= {path.name for path in folder.iterdir()}
        shutil.rmtree(run.path / "rollouts")
        run.open(resume=False, overwrite=True)
        assert {path.name for path in run.path.iterdir()} == {*foreign, "checkpoints"}
