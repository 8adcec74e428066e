"""The commands as functions: `from megatron_opsft import load_config, train, evaluate, convert`.

All of them raise `megatron_opsft.errors.UserError`, one line, for what the caller can fix. In
a script of several ranks, under torchrun, every rank calls the same.
"""

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_opsft.callback import Callback
from megatron_opsft.config import Config
from megatron_opsft.config import load as config_load
from megatron_opsft.errors import NothingLeft, UserError, log
from megatron_opsft.records import JsonObject, record
from megatron_opsft.runtime.console import say
from megatron_opsft.runtime.launched import launched_rank
from megatron_opsft.runtime.libraries import loading_libraries
from megatron_opsft.runtime.phase import STOP_SIGNALS
from megatron_opsft.runtime.successive import ended_with_its_job

if TYPE_CHECKING:
    from megatron_opsft.commands.convert.run import Figures
    from megatron_opsft.commands.evaluate.results import Results
    from megatron_opsft.commands.evaluate.settings import EvalSettings


@record
class TrainedRun:
    """A run that ended without an error."""

    directory: Path
    finished: bool
    """False if a stop was requested; the run left a checkpoint to resume from."""

    @property
    def model(self) -> Path:
        """The trained model of a finished run, a Hugging Face directory."""
        return self.directory / "hf"

    @property
    def summary(self) -> JsonObject:
        """summary.json of a finished run: accuracy and length before and after."""
        text = (self.directory / "summary.json").read_text("utf-8")
        summary: JsonObject = json.loads(text)
        return summary


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, object] | Sequence[str] = ()
) -> Config:
    """Read the configuration of a run and check every key.

    overrides: `{"optimizer.lr": 1e-6}`, or as on the command line `["optimizer.lr=1e-6"]`.
    """
    if isinstance(overrides, Mapping):
        overrides = [
            f"{key}={json.dumps(value, default=str)}"
            for key, value in overrides.items()
        ]
    if path is not None:
        path = Path(path)
    return config_load.load_config(path, overrides)


def train(
    config: Config,
    *,
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    data: object = None,
    judge: str | Callable[..., object] | None = None,
) -> TrainedRun:
    """Train as `megatron-opsft train` does.

    resume: continue from the newest checkpoint; "auto": start anew if there is no run.
    overwrite: delete what the run's directory holds.
    data: rows in place of data.train: dicts in a list, a `datasets.Dataset`, a pandas DataFrame.
    judge: in place of verify.judge its name, or a function, also a lambda (docs/convert.md). Rows
    and function are written to files in the run's directory that its config.yaml names, which alone
    is enough to resume.

    Call it in the main thread. After Ctrl-C, SIGTERM or `run.max_minutes` the run finishes its
    step, writes a checkpoint and returns. Errors: `UserError`, `NonFiniteError` and `SyncError`
    (megatron_opsft.errors). After an error of all ranks this process can train and evaluate again;
    if one rank fails alone, the others' processes end.
    """
    if not isinstance(config, Config):
        raise UserError(
            f"train: give a configuration: train(load_config({str(config)!r}))"
        )
    if resume and overwrite:
        raise UserError(
            "train: resume and overwrite exclude each other; give one of them"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "train: call it in the main thread; no other thread receives signals"
        )
    with ExitStack() as cleanup:
        for number in STOP_SIGNALS:  # their handlers are restored at the end
            cleanup.callback(signal.signal, number, signal.getsignal(number))
        cleanup.enter_context(ended_with_its_job())
        if data is not None or judge is not None:
            _check_start(config, resume=bool(resume), overwrite=overwrite)
            config = _with_handed(config, data, judge)
        code = start_training(
            config,
            resume=bool(resume),
            must_exist=resume is True,
            overwrite=overwrite,
            callbacks=callbacks,
        )
    return TrainedRun(directory=config.run.dir, finished=code == 0)


def _check_start(config: Config, *, resume: bool, overwrite: bool) -> None:
    """Check that a run may start, before anything is written for it. Errors: `UserError`."""
    from megatron_opsft.run.start.run_directory import RunDir

    if launched_rank() == 0:
        RunDir(config.run.dir).check_start(resume=resume, overwrite=overwrite)


def _with_handed(config: Config, data: object, judge: object) -> Config:
    """Write the data and the judge that Python hands over, if any; return the configuration that
    names their files. Called by every rank. Errors: `UserError`.
    """
    sections: dict[str, Any] = {}
    is_written = data is not None
    if data is not None:
        from megatron_opsft.data.handed import write_rows

        path = write_rows(data, config.run.dir, where="train: data")
        sections["data"] = config.data.model_copy(update={"train": str(path)})
    if judge is not None:
        from megatron_opsft.verify.handed_judge import pack_judge

        packed = pack_judge(judge, where="train: judge")
        packed.write(config.run.dir)
        is_written = is_written or bool(packed.module)
        sections["verify"] = config.verify.model_copy(update={"judge": packed.name})
    if is_written and launched_rank() == 0:
        log.info(
            "what Python hands over is written to %s: `megatron-opsft train %s --resume` "
            "continues the run as well",
            config.run.dir,
            config.run.dir / "config.yaml",
        )
    return config.model_copy(update=sections)


def start_training(
    config: Config,
    *,
    resume: bool,
    must_exist: bool,
    overwrite: bool,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Train as `train` does. Returns the exit code of the command.

    must_exist: refuse to resume a run that is not there. Errors: see `train`.
    """
    from megatron_opsft.run.start.check import opened_run

    directory = config.run.dir
    try:
        with opened_run(
            config, resume=resume, overwrite=overwrite, must_exist=must_exist
        ) as checked:
            with loading_libraries():
                from megatron_opsft.commands.plan.least_offload import (
                    with_least_offload,
                )
                from megatron_opsft.run.train import train as run

            checked = with_least_offload(checked)
            return run(checked, resume=resume, overwrite=overwrite, callbacks=callbacks)
    except NothingLeft:
        if launched_rank() == 0:
            _end_finished(config)
        return 0
    except FileNotFoundError as error:
        if directory.exists():
            raise
        raise UserError(
            f"run.dir={directory} was deleted while the run was writing to it"
        ) from error


def _end_finished(config: Config) -> None:
    """Upload the model of a run that had finished before, if that is due, or say that nothing is
    left. Called on rank 0. Errors: `UserError` if another process is doing it.
    """
    from megatron_opsft.run.record.hub import is_upload_due, push_to_hub
    from megatron_opsft.run.start.run_directory import RunDir

    if not is_upload_due(config):
        say(f"{config.run.dir}: the run is finished; nothing is left")
        return
    say(f"{config.run.dir}: the run is finished; its upload is left")
    with RunDir(config.run.dir).locked():
        push_to_hub(config)


def evaluate(
    settings: str | Path | None = None, *, overwrite: bool = False, **keys: object
) -> "Results | None":
    """Evaluate as `megatron-opsft eval` does; `results.model_dump()` is results.json.

    settings: a YAML file; keys: settings on top of it, such as `model=`, `out=`, `limit=`, and
    `data={"mine": "problems.jsonl"}` (docs/evaluation.md). In place of a file `data` takes rows as
    `train` does, and rows alone are the benchmark `data`; `judge` takes a function. The same call
    continues the evaluation in `out`. Returns None on ranks other than 0.
    """
    with ended_with_its_job():
        from megatron_opsft.commands.evaluate.settings import check_settings

        for key, value in keys.items():
            if isinstance(value, Path):
                keys[key] = str(value)
        if settings is not None:
            settings = Path(settings)
        loaded = _load_evaluation(settings, keys)
        check_settings(loaded)
        from megatron_opsft.commands.evaluate.results import read_results

        with loading_libraries():
            from megatron_opsft.commands.evaluate.run import evaluate as run
        if not run(loaded, overwrite=overwrite):
            return None
        return read_results(loaded.out)


def _load_evaluation(
    settings: Path | None, keys: Mapping[str, object]
) -> "EvalSettings":
    """Load the settings of an evaluation, and write the data and the judge that Python hands over,
    if any, to its directory. Called by every rank. Errors: `UserError`.
    """
    from megatron_opsft.commands.evaluate.settings import (
        EvaluationDirectory,
        load_settings,
    )
    from megatron_opsft.data.handed import split_benchmarks, write_rows
    from megatron_opsft.verify.handed_judge import pack_judge

    plain = dict(keys)
    rows: Mapping[str, object] = {}
    judge = None
    if "data" in keys:
        plain["data"], rows = split_benchmarks(keys["data"])
    if not isinstance(keys.get("judge", ""), str):
        judge = pack_judge(keys["judge"], where="evaluate: judge")
        plain["judge"] = judge.name
    loaded = load_settings(settings, (), plain)
    if launched_rank() == 0 and (rows or judge):
        EvaluationDirectory(loaded.out).check()
    if judge is not None:
        judge.write(loaded.out)
    written = {}
    for name, data in rows.items():
        where = f"evaluate: data {name}"
        written[name] = str(write_rows(data, loaded.out, where=where))
    return loaded.model_copy(update={"data": loaded.data | written})


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: Literal["hf", "megatron"],
    config_from: str | Path | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    overwrite: bool = False,
    verify: bool = False,
) -> "Figures":
    """Convert a model as `megatron-opsft convert` does.

    source: the model that the command takes as `--hf` or `--megatron`. config_from: a Hugging Face
    directory, for a checkpoint without config and tokenizer. dtype: that of the output; by default
    the source's. verify: read the output back and compare it.
    """
    from megatron_opsft.commands.convert.commands import find_source
    from megatron_opsft.commands.convert.run import open_to_convert, write_source

    directory = find_source(str(source), to, Path(out), overwrite=overwrite)
    config_dir = Path(config_from) if config_from is not None else None
    return write_source(
        open_to_convert(directory, to, config_dir),
        Path(out),
        to,
        dtype=dtype,
        overwrite=overwrite,
        verify=verify,
    )
