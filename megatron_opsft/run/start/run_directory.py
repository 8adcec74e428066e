"""The directory of a run: created or reopened without losing anything, written atomically."""

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
    write_bytes,
    write_text,
)
from megatron_opsft.runtime.owned_directory import OwnedDirectory

BEST = "best"  # the folder of the best Hugging Face models, one a step


class RunDir(OwnedDirectory):
    """The files of one run. Used by rank 0 alone."""

    kind = "run"
    option = "run.dir="
    fix = "restore the data and the model's chat template, or name another run.dir"
    folders_of_steps = ("rollouts", "checkpoints", BEST, "tensorboard")
    names = (
        "config.yaml",
        "metrics.jsonl",
        "evals.jsonl",
        "summary.json",
        "bad_rows.jsonl",
        "report.html",
        "rollouts",
        "checkpoints",
        "hf",
        BEST,
        "tensorboard",
        "wandb",
    )

    def check_start(self, *, resume: bool, overwrite: bool) -> None:
        """Errors: as of `check`, and for a run that is neither continued nor replaced."""
        self.check()
        if not (resume or overwrite) and self.entries():
            raise UserError(
                f"run.dir={self.path} already holds a run; continue it with --resume, replace it "
                "with --overwrite, or name another directory"
            )

    def open(
        self, *, resume: bool, overwrite: bool, needed: Sequence[Path] = ()
    ) -> None:
        """Make the directory ready; without a run in it, `resume` starts a new one.

        Files that no run writes (a scheduler's log) do not matter and are never deleted. needed:
        what the run reads, which is not deleted either. Errors: as of `check_start` and `clear`.
        """
        self.check_start(resume=resume, overwrite=overwrite)
        if overwrite:
            self.clear(needed)
        check_out(
            self.path / "hf", needed, overwrite=True
        )  # now, not when it is trained
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)

    def truncate(self, after_step: int) -> None:
        """Forget what came after `after_step`, so that a resumed run writes it just once.

        Also drops a last line that a kill left unfinished, half-written and half-deleted
        checkpoints, and exported models of later steps. What has another name than a run gives
        stays. Errors: as of `read_json_lines`; nothing is dropped then.
        """
        # The evaluation of step 0 belongs to a fresh start: it is made again.
        files = [self.path / name for name in ("metrics.jsonl", "evals.jsonl")]
        kept = [_lines_until(path, after_step) if after_step else b"" for path in files]
        for path, lines in zip(files, kept, strict=True):
            if path.exists():
                write_bytes(path, lines)
        for step, path in rollout_files(self.path / "rollouts"):
            if step > after_step and path.is_file():
                path.unlink()
        for step, path in in_step_order((self.path / BEST).glob("*")):
            if step > after_step:
                remove(path)
        for before in (PARTIAL, REPLACED):
            for _, path in in_step_order((self.path / "checkpoints").iterdir(), before):
                if path.is_dir() and not path.is_symlink():
                    remove(path, quietly=True)

    def save_bad_rows(self, bad_rows: Sequence[BadRow]) -> None:
        """bad_rows.jsonl: every row of the data that is left out; no file where there is none."""
        path = self.path / "bad_rows.jsonl"
        path.unlink(missing_ok=True)
        if bad_rows:
            write_text(
                path, "".join(json.dumps(asdict(row)) + "\n" for row in bad_rows)
            )


def _lines_until(path: Path, last_step: int) -> bytes:
    """The lines of steps up to `last_step`, as they are in the file."""
    steps = [line["step"] for line in read_json_lines(path)]
    lines = zip(steps, path.read_bytes().split(b"\n") if steps else (), strict=False)
    return b"".join(b"%s\n" % line for step, line in lines if step <= last_step)
