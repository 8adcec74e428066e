"""The directory of a run: it is created or reopened without losing anything."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_opsft.data.problems import BadRow
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.replacing import check_out
from megatron_opsft.run.run_files import read_json_lines
from megatron_opsft.runtime.durable import (
    PARTIAL,
    REPLACED,
    in_step_order,
    remove,
    rollout_files,
    write_text,
)
from megatron_opsft.runtime.owned_directory import OwnedDirectory

# The folder of the best models so far, a Hugging Face directory for each step.
BEST = "best"
# The folder of the responses to held-out problems: a file for each evaluation, and a folder of such
# files for each set of eval.more.
HELD_OUT = "held_out"
# The folder of the final LoRA adapter, as PEFT reads it.
ADAPTER = "adapter"


class RunDir(OwnedDirectory):
    """The directory run.dir, which one `train` at a time owns. Only rank 0 uses it.

    `check_start` tells whether a run may start here, continue (resume) or replace another
    (overwrite).
    """

    kind = "run"
    option = "run.dir="
    fix = "restore what it had, or name another run.dir"
    folders_of_steps = ("rollouts", HELD_OUT, "checkpoints", BEST, "tensorboard")
    names = (
        "config.yaml",
        "metrics.jsonl",
        "evals.jsonl",
        "summary.json",
        "bad_rows.jsonl",
        "report.html",
        "rollouts",
        HELD_OUT,
        "checkpoints",
        "hf",
        ADAPTER,
        BEST,
        "tensorboard",
        "wandb",
    )

    def check_start(self, *, resume: bool, overwrite: bool) -> None:
        """Check that a run may start here.

        Errors: those of `check`, and `UserError` for a run that is neither continued nor replaced.
        """
        self.check()
        if not (resume or overwrite) and self.entries():
            raise UserError(
                f"run.dir={self.path} already holds a run; continue it with --resume, replace it "
                "with --overwrite, or name another directory"
            )

    def open(
        self, *, resume: bool, overwrite: bool, needed: Sequence[Path] = ()
    ) -> None:
        """Make the directory ready for a run; with `resume`, an empty directory is a new run.

        Files that no run writes (a scheduler's log) do not matter and are never deleted.
        needed: files that the run reads, which must not be deleted. Errors: those of `check_start`
        and `clear`.
        """
        self.check_start(resume=resume, overwrite=overwrite)
        if overwrite:
            self.clear(needed)
        # Better refused now than when the model has been trained.
        check_out(self.path / "hf", needed, overwrite=True)
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)

    def truncate(self, after_step: int) -> None:
        """Delete the records of steps after `after_step`, which a resumed run writes again.

        Lines of metrics and evaluations, responses and exported models of later steps go, and
        whatever a kill left behind: a torn last line, half-written and half-deleted checkpoints.
        Files with other names stay. Errors: those of `read_json_lines`, before anything is deleted.
        """
        kept = {}
        for name in ("metrics.jsonl", "evals.jsonl"):
            path = self.path / name
            # A fresh start keeps no line: the evaluation of step 0 is part of it.
            records = read_json_lines(path) if after_step else []
            lines = [
                json.dumps(record) + "\n"
                for record in records
                if record["step"] <= after_step
            ]
            kept[path] = "".join(lines)
        for path, text in kept.items():
            if path.exists():
                write_text(path, text)
        rollouts = rollout_files(self.path / "rollouts")
        models = in_step_order((self.path / BEST).glob("*"))
        for step, path in [*rollouts, *held_out_files(self.path), *models]:
            if step > after_step or after_step == 0:
                remove(path)
        for prefix in (PARTIAL, REPLACED):
            for _, path in in_step_order((self.path / "checkpoints").iterdir(), prefix):
                if path.is_dir() and not path.is_symlink():
                    remove(path, quietly=True)

    def save_bad_rows(self, bad_rows: Sequence[BadRow]) -> None:
        """Write bad_rows.jsonl, a line for each row of the data that is left out.

        No file is written if there is no such row.
        """
        path = self.path / "bad_rows.jsonl"
        path.unlink(missing_ok=True)
        if bad_rows:
            lines = [json.dumps(asdict(row)) + "\n" for row in bad_rows]
            write_text(path, "".join(lines))


def held_out_files(run: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of a run's files of responses to held-out problems: the first set's, and
    then those of the sets of `eval.more`.
    """
    folder = run / HELD_OUT
    files = rollout_files(folder)
    for of_set in sorted(path for path in folder.glob("*") if path.is_dir()):
        files += rollout_files(of_set)
    return files
