"""The commands as functions, from a script and from a notebook."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked_cli import ROOT, ForkedCli
from small_run import QUICKSTART, SMALL_RUN

import megatron_opsft
from megatron_opsft import Callback, evaluate, load_config, train
from megatron_opsft.commands.evaluate.inputs import open_model
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import resolve_config, resolve_model
from megatron_opsft.run.run_files import read_json_lines

SCRIPT = """
import json, signal, sys
from pathlib import Path
from megatron_opsft import Callback, convert, load_config, train
from megatron_opsft.runtime.durable import COMPLETE

heard = [], [], []

class Listener(Callback):
    def on_step(self, metrics):
        heard[0].append(dict(metrics))

    def on_evaluation(self, metrics):
        heard[1].append(dict(metrics))

    def on_checkpoint(self, step, directory):
        heard[2].append([step, (directory / COMPLETE).is_file()])

class Stopping(Callback):
    def on_step(self, metrics):
        signal.raise_signal(signal.SIGTERM)

assert "torch" not in sys.modules
keys = json.loads(sys.argv[2])
config = load_config(sys.argv[1], keys)
before = signal.getsignal(signal.SIGTERM)
stopped = train(config, callbacks=[Listener(), Stopping()])
assert signal.getsignal(signal.SIGTERM) is before
run = train(config, resume=True, callbacks=[Listener()])
again = train(config, resume=True, callbacks=[Stopping()])  # nothing is left
assert again == run
figures = convert(run.directory, run.directory / "megatron", to="megatron", verify=True)
convert(run.directory, run.directory / "hf_again", to="hf")
keys += [f"model.path={run.directory}/checkpoints/step_000002"]
train(load_config(sys.argv[1], [*keys, f"run.dir={run.directory}/more", "run.steps=1"]))
print(json.dumps([stopped.finished, run.finished, run.summary, figures.tensors, heard]))
"""


def test_importing_the_package_costs_nothing() -> None:
    """Its modules are imported when they are asked for; those of the same name do not hide them."""
    code = (
        "import sys, megatron_opsft as m; print(*[k for k in sys.modules if k.startswith('mega')]);"
        "from megatron_opsft import train, load_config, evaluate, convert;"
        "print(*sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)));"
        "import megatron_opsft.commands.evaluate.settings;"
        "import megatron_opsft.commands.convert.commands;"
        "import megatron_opsft.commands.evaluate.metrics as metrics;"
        "print(*map(callable, (m.evaluate, m.convert, metrics.measure)), m.train is train)"
    )
    lines = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split("\n")
    assert lines[:3] == ["megatron_opsft", "", "True True True True"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatron_opsft.nothing


def test_a_configuration_is_what_the_command_line_makes_of_it() -> None:
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
    run = tmp_path / "run"
    keys = [*SMALL_RUN, "verify.judge=math", "run.steps=2", "checkpoint.every=1"]
    keys.append(f"run.dir={run}")
    script = tmp_path / "script.py"  # without a guard for child processes
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script), QUICKSTART, json.dumps(keys)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    stopped, finished, summary, tensors, heard = json.loads(ended.stdout.split("\n")[-2])
    assert (stopped, finished, tensors > 0) == (False, True, True)
    assert summary == json.loads((run / "summary.json").read_text())
    written = [read_json_lines(run / f"{name}.jsonl") for name in ("metrics", "evals")]
    assert heard == [*written, [[1, True], [2, True]]]
    again, exported = (run / f"{name}/model.safetensors" for name in ("hf_again", "hf"))
    assert again.read_bytes() == exported.read_bytes()
    (further,) = read_json_lines(run / "more/evals.jsonl")[:1]
    timed = {"step": 0, "eval_seconds": further["eval_seconds"]}
    assert written[1][-1] | timed == further
    checkpoint = run / "checkpoints/step_000002"
    assert resolve_config(str(checkpoint)) == checkpoint
    models = [open_model(str(path)) for path in (checkpoint, run)]
    assert len({model.weights_sha256() for model in models}) == 1
    assert len({model.identity()["tokenizer_sha256"] for model in models}) == 1


def test_the_cells_of_the_notebook_run(cli: ForkedCli, tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples/from_python.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert codes[1].startswith("config = load_config(")
    keys = [*SMALL_RUN, "verify.judge=math", "run.steps=2", f"run.dir={tmp_path / 'run'}"]
    codes[1] = f"config = load_config({QUICKSTART!r}, {keys!r})"
    codes[-1] = codes[-1].replace("limit=32", "limit=2").replace("max_tokens=350", "max_tokens=64")
    ended = cli.run(["--version"], prelude="\n".join(codes))
    assert ended.exit_code == 0, ended.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 2
    assert (tmp_path / "run/eval/results.json").is_file()


def test_errors_name_python_s_arguments(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "manifest.json").write_text('{"kind": "run"}')
    config = load_config(QUICKSTART, {"run.dir": tmp_path})
    said = "continue it with resume=True, replace it with overwrite=True, or name"
    with pytest.raises(UserError, match=said):
        train(config)
    missing = load_config(QUICKSTART, {"run.dir": tmp_path / "none"})
    with pytest.raises(UserError, match='leave out resume=True, or give resume="auto"'):
        train(missing, resume=True)
    with pytest.raises(UserError, match=r"^unknown config key max_response_tokens; did you mean "):
        evaluate(ROOT / "examples/eval/paper.yaml", max_response_tokens=9)


def test_a_script_sees_no_deprecations_inside_of_megatron_and_torch() -> None:
    """But those of its own modules, and all of them if Python is told to show them."""
    warn = "warnings.warn_explicit({0!r}, FutureWarning, 'f', 1, module={0!r})"
    names = ("megatron.core.optimizer", "torch.distributed.c10d_logger", "torch.mine", "mine")
    code = "; ".join(["import warnings, megatron_opsft", *map(warn.format, names)])
    for options, shown in (([], names[2:]), (["-W", "default"], names)):
        said = subprocess.run(
            [sys.executable, *options, "-c", code], capture_output=True, text=True, check=True
        ).stderr
        assert re.findall("FutureWarning: (.*)", said) == list(shown)


def test_a_run_with_lora_says_so_in_tables(tmp_path: Path) -> None:
    """`eval`, `diagnose` and their pages call the model of a run by its folder and its adapter."""
    run = tmp_path / "mine"
    shutil.copytree(resolve_model("tiny_reasoner"), run / "hf")
    (run / "manifest.json").write_text("{}")
    assert open_model(str(run)).name == "mine"
    (run / "adapter").mkdir()
    (run / "adapter/adapter_config.json").write_text('{"r": 8}')
    assert open_model(str(run)).name == open_model(str(run / "hf")).name == "mine (LoRA, rank 8)"
    assert open_model(str(run), "short").name == "short"
