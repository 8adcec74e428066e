"""The commands as functions, from a script and from a notebook."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT, ForkedCli
from small_run import QUICKSTART, SMALL_RUN

import megatron_opsft
from megatron_opsft import Callback, load_config, train
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.inputs import open_model
from megatron_opsft.report.runs import read_json_lines
from megatron_opsft.storage.model_paths import resolve_config

SCRIPT = """
import json, signal, sys
from pathlib import Path
from megatron_opsft import Callback, convert, load_config, train
from megatron_opsft.runtime.durable import COMPLETE

heard = []

class Listener(Callback):
    def on_step(self, metrics):
        heard.append(["step", dict(metrics)])

    def on_evaluation(self, metrics):
        heard.append(["evaluation", dict(metrics)])

    def on_checkpoint(self, step, directory):
        heard.append(["checkpoint", step, (directory / COMPLETE).is_file()])

class Stopping(Callback):
    def on_step(self, metrics):
        signal.raise_signal(signal.SIGTERM)

assert "torch" not in sys.modules
config = load_config(sys.argv[1], json.loads(sys.argv[2]))
before = signal.getsignal(signal.SIGTERM)
stopped = train(config, callbacks=[Listener(), Stopping()])
assert signal.getsignal(signal.SIGTERM) is before
run = train(config, resume=True, callbacks=[Listener()])
again = train(config, resume=True, callbacks=[Stopping()])  # nothing is left
assert again == run
figures = convert(run.directory, run.directory / "megatron", to="megatron", verify=True)
convert(run.directory, run.directory / "hf_again", to="hf")
checkpoint = {"model.path": run.directory / "checkpoints/step_000002"}
more = {"run.dir": run.directory / "more", "run.steps": 1, **checkpoint}
keys = dict(override.split("=", 1) for override in json.loads(sys.argv[2]))
train(load_config(sys.argv[1], keys | more))
print(json.dumps([stopped.finished, run.finished, run.summary, figures.tensors, heard]))
"""


def keys_of(overrides: list[str]) -> dict[str, Any]:
    return dict(override.split("=", 1) for override in overrides)


def test_importing_the_package_costs_nothing() -> None:
    """Its modules are imported when they are asked for; those of the same name do not hide them."""
    code = (
        "import sys, megatron_opsft as m; print(*[k for k in sys.modules if k.startswith('mega')]);"
        "from megatron_opsft import train, load_config, evaluate, convert;"
        "print(*sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)));"
        "import megatron_opsft.evaluate.settings, megatron_opsft.convert.commands;"
        "print(m.evaluate is evaluate, m.convert is convert, m.__version__)"
    )
    lines = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split("\n")
    assert lines[:3] == ["megatron_opsft", "", "True True 0.1.0"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatron_opsft.nothing


def test_a_configuration_is_what_the_command_line_makes_of_it() -> None:
    overrides = ["optimizer.lr=1e-06", "run.dir=x: y", "data.train=no", "eval.data=null"]
    mapped = {"optimizer.lr": 1e-6, "run.dir": Path("x: y"), "data.train": "no", "eval.data": None}
    config = load_config(QUICKSTART, mapped)
    assert (config.optimizer.lr, config.data.train, config.eval.data) == (1e-6, "no", None)
    assert config.run.dir == Path("x: y")
    overrides = ["optimizer.lr=1.0e-6", "run.dir='x: y'", "data.train='no'", "eval.data=null"]
    assert load_config(QUICKSTART, overrides) == config
    with pytest.raises(UserError, match=r"unknown config key optimizer.lrr"):
        load_config(QUICKSTART, {"optimizer.lrr": 1})


def test_mistakes_are_errors_of_the_caller(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, {"run.dir": tmp_path / "run"})
    with pytest.raises(UserError, match="resume and overwrite exclude each other"):
        train(config, resume=True, overwrite=True)
    with pytest.raises(UserError, match=r"train\(load_config\('mix.yaml'\)\)"):
        train("mix.yaml")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has no run to continue"):
        train(config, resume=True)
    with ThreadPoolExecutor(1) as threads:
        assert "call it in the main thread" in str(threads.submit(train, config).exception())
    assert Callback().on_step({"step": 1}) is None


def test_a_script_trains_stops_resumes_converts_and_trains_on(tmp_path: Path) -> None:
    """The last from a checkpoint, which is a model wherever one is meant."""
    keys = keys_of([*SMALL_RUN, "run.steps=2", "checkpoint.every=1"])
    keys |= {"run.dir": str(tmp_path / "run"), "run.device": "cpu"}
    script = tmp_path / "script.py"  # without a guard for child processes
    script.write_text(SCRIPT)
    overrides = [f"{key}={value}" for key, value in keys.items()]
    ended = subprocess.run(
        [sys.executable, str(script), QUICKSTART, json.dumps(overrides)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    stopped, finished, summary, tensors, heard = json.loads(ended.stdout.split("\n")[-2])
    assert (stopped, finished, tensors > 0) == (False, True, True)
    assert summary == json.loads((tmp_path / "run/summary.json").read_text())
    assert [what[1] for what in heard if what[0] == "step"] == [
        *read_json_lines(tmp_path / "run/metrics.jsonl")
    ]
    assert [what[1] for what in heard if what[0] == "evaluation"] == [
        *read_json_lines(tmp_path / "run/evals.jsonl")
    ]
    assert [what[1:] for what in heard if what[0] == "checkpoint"] == [[1, True], [2, True]]
    weights = [
        (Path(directory) / "model.safetensors").read_bytes()
        for directory in (tmp_path / "run/hf_again", tmp_path / "run/hf")
    ]
    assert weights[0] == weights[1]
    last, first = (
        read_json_lines(tmp_path / name)[place]
        for name, place in (("run/evals.jsonl", -1), ("run/more/evals.jsonl", 0))
    )
    assert last | {"step": 0} == first
    checkpoint = tmp_path / "run/checkpoints/step_000002"
    assert resolve_config(str(checkpoint)) == checkpoint
    models = [open_model(str(path)) for path in (checkpoint, tmp_path / "run")]
    assert len({model.weights_sha256() for model in models}) == 1
    assert len({model.identity()["tokenizer_sha256"] for model in models}) == 1


def test_the_cells_of_the_notebook_run(cli: ForkedCli, tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples/from_python.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    overrides = [*SMALL_RUN, "run.steps=2", f"run.dir={tmp_path / 'run'}"]
    assert codes[1].startswith("config = load_config(")
    codes[1] = f"config = load_config({QUICKSTART!r}, {overrides!r})"
    codes[-1] = codes[-1].replace("limit=32", "limit=2").replace("max_tokens=350", "max_tokens=64")
    ended = cli.run(["--version"], prelude="\n".join(codes))
    assert ended.exit_code == 0, ended.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 2
    assert (tmp_path / "run/eval/results.json").is_file()
