"""The command line: every mistake is one line on stderr and exit code 2, without a traceback; and
`--help` of every command is one screen, with examples that the program takes.
"""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from commands import all_commands, calls_in, command_of, read_command
from forked_cli import ROOT, Finished, ForkedCli
from small_run import QUICKSTART

from megatron_opsft.commands.cli import PROGRAM
from megatron_opsft.commands.command_line import invoke, reference_table
from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.runtime.console import describe_full_gpu


def train(cli: ForkedCli, run_dir: Path, *overrides: str, prelude: str = "") -> Finished:
    words = ["train", QUICKSTART, f"run.dir={run_dir / 'run'}", "run.device=cpu", *overrides]
    return cli.run(words, prelude=prelude)


@pytest.mark.parametrize("path", all_commands(), ids=lambda path: " ".join(path) or "(program)")
def test_a_command_without_arguments_says_what_is_missing(path: Any, capsys: Any) -> None:
    if hasattr(command_of(path)[0], "commands"):  # a group
        assert invoke(PROGRAM, path) == 2
        assert "Examples:" in capsys.readouterr().err
    elif path == ("methods",):
        assert invoke(PROGRAM, path) is None
    else:
        with pytest.raises(UserError, match="for example: megatron-opsft |as model=|such as"):
            invoke(PROGRAM, path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report", "report: Missing argument 'PATHS...'; for example: megatron-opsft report runs/"),
        ("train --bogus", "train: --bogus is no option of this command; for example"),
        ("eval --limit", "eval run: --limit has no value; for example: megatron-opsft eval"),
        ("eval --data m/ok.jsonl", "--data m/ok.jsonl: write --data NAME=FILE, as in --data gsm8k"),
        ("train a.yaml optimizer.lr 1e-5", "train: write optimizer.lr=1e-5; for example"),
        ("report x --bogus", "report: No such option '--bogus'"),
        ("report x --max-mb y", "report: --max-mb=y: Input should be a valid number"),
        ("methods gr3 x", "methods: Got unexpected extra argument (x); for example: megatron-"),
        ("methods lasr", "unknown method 'lasr'; did you mean laser?"),
        ("convert bogus", "convert: No such command 'bogus'; for example: megatron-opsft conv"),
        (f"train {QUICKSTART} --resume --overwrite", "--resume and --overwrite exclude each other"),
        ("bogus", "No such command 'bogus'; for example: megatron-opsft train examples/"),
    ],
)
def test_wrong_words_are_one_line_with_an_example(words: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        invoke(PROGRAM, words.split())
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_keys_of_a_method_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    invoke(PROGRAM, ["methods", "laser"])
    shown = capsys.readouterr().out
    assert "| `method.target` | `2048` | Lt: tokens within which the bonus is paid. |" in shown
    assert "| `method.beta` | `0.001` |" in shown and "| `method.name`" not in shown


def test_what_others_wrote_moves_no_cursor(cli: ForkedCli, tmp_path: Path) -> None:
    assert r"\x1b[2J.yaml does not exist" in cli.run(["train", "\x1b[2J.yaml"]).error
    assert r"\x1b[2J.jinja" in train(cli, tmp_path, "data.template=\x1b[2J.jinja").error
    warn = "import logging; logging.getLogger('megatron_opsft').warning('id %s', '\\x1b[2J')"
    ended = cli.run(
        ["train", "no.yaml"],
        prelude="import megatron_opsft.commands.command_line as f\n"
        f"def load_config(*args):\n    {warn}\n    raise f.UserError('no')\n"
        "f.load_config = load_config",
    )
    assert ended.stderr == "WARNING id \\x1b[2J\nerror: no\n"


def test_the_command_line_needs_no_installation() -> None:
    """As where a copy of the checkout is on PYTHONPATH."""
    code = (
        "import importlib.metadata as m, sys\n"
        "known = m.version\n"
        "def version(name):\n"
        "    if 'opsft' in name: raise m.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "m.version = version\n"
        "sys.argv = ['megatron-opsft', '--version']\n"
        "from megatron_opsft.commands.cli import main\n"
        "main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == f"megatron-opsft {version('megatron-opsft')}\n", ended.stderr


def test_a_key_may_have_dashes(cli: ForkedCli) -> None:
    """`--key value` is short for key=value, wherever it stands."""
    plain = cli.run(["config", QUICKSTART, "optimizer.lr=1e-6", "run.dir=010"]).stdout
    for words in (["--optimizer.lr", "1e-6"], ["--optimizer.lr=1e-6"]):
        assert cli.run(["config", *words, QUICKSTART, "--run.dir", "010"]).stdout == plain
    assert "lr: 1.0e-06" in plain and "dir: '010'" in plain


FULL_GPU = """
import importlib
class OutOfMemoryError(RuntimeError): pass
def full(*a, **k): raise {error}
importlib.import_module('megatron_opsft.run.train').train = full
"""
LESS_MEMORY = "lower train.max_tokens_per_microbatch"
LESS_MEMORY_FOR_VLLM = "lower rollout.gpu_memory_fraction or rollout.kv_cache_bytes"
UNREADABLE = """
import pathlib
def refuse(self, *a, **k): raise PermissionError(13, 'Permission denied', str(self))
pathlib.Path.read_bytes = refuse
"""


def test_what_the_machine_refuses_is_one_line_with_what_to_do(
    cli: ForkedCli, tmp_path: Path
) -> None:
    (tmp_path / "summary.json").touch()
    (tmp_path / "config.yaml").touch()
    line = cli.run(["report", tmp_path], prelude=UNREADABLE).error
    assert line.startswith(f"error: {tmp_path}/summary.json: Permission denied; name another")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("OutOfMemoryError('CUDA out of memory')", LESS_MEMORY),
        ("RuntimeError('CUDA error: out of memory\\n more')", LESS_MEMORY),
        ("RuntimeError('NCCL error\\nLast error:\\nCuda failure 2 (out of memory)')", LESS_MEMORY),
        ("RuntimeError('Triton Error [CUDA]: out of memory')", LESS_MEMORY),
        ("RuntimeError('CUDA Error: out of memory at cumem.cpp:1')", LESS_MEMORY_FOR_VLLM),
        ("ValueError('no') from RuntimeError('CUDA out of memory')", LESS_MEMORY),
    ],
)
def test_a_full_gpu_is_one_line_with_what_to_lower(
    cli: ForkedCli, tmp_path: Path, error: str, remedy: str
) -> None:
    """Whoever says it: torch, CUDA, NCCL, Triton, vLLM when it wakes up."""
    line = train(cli, tmp_path, prelude=FULL_GPU.replace("{error}", error)).error
    assert "out of memory" in line and remedy in line


def test_a_fault_that_came_up_behind_a_full_gpu_is_not_hidden_by_it() -> None:
    def described(outer: Exception, **how: bool) -> str:
        try:
            try:
                raise RuntimeError("CUDA out of memory")
            except RuntimeError as full:
                if how:
                    raise outer from (full if how["cause"] else None)
                raise outer  # noqa: B904
        except Exception as error:
            return describe_full_gpu(error)

    full = "RuntimeError: CUDA out of memory"
    assert described(RuntimeError("teardown")) == described(KeyError("x"), cause=True) == full
    assert described(KeyError("bug")) == described(RuntimeError("other"), cause=False) == ""
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert describe_full_gpu(one) == ""


def test_a_model_that_cannot_be_trained_is_named(cli: ForkedCli, tmp_path: Path) -> None:
    def error_with(name: str, **changes: object) -> str:
        model = Path(shutil.copytree(ASSETS / TINY_REASONER, tmp_path / name))
        config = model / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        if not changes:
            (model / name).unlink()
        return train(cli, tmp_path, f"model.path={model}").error

    assert "tokenizer.json" in error_with("tokenizer.json")
    assert str(tmp_path / "model.safetensors") in error_with("model.safetensors")
    line = error_with("other", architectures=["Gemma3ForCausalLM"])
    for name in ("Gemma3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"):
        assert name in line
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    assert "model.layers.4" in error_with("deeper", **layers)


def check_example(words: list[str]) -> None:
    """AssertionError or `UsageError` unless command, options, keys and files exist."""
    read = read_command(words)
    if read.keys_of is not None:
        methods = (reference_table(method, prefix="method.") for method in METHODS.values())
        table = "\n".join([reference_table(read.keys_of), *methods])
        for key in (word.partition("=")[0] for word in read.keys):
            known = f"| `{key}` |" in table or f"| `{key.partition('.')[0]}` |" in table
            assert known, f"{words}: no key {key}"
    for file in re.findall(r"examples/[\w/.]+", " ".join(words)):
        assert (ROOT / file).is_file(), f"{words}: no file {file}"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("launch", "slurm"), "--gpus-per-node N"),
        (("study",), "--only N"),
        (("report",), "--max-mb X"),
    ],
)
def test_help_shows_what_kind_of_value_an_option_takes(words: tuple[str, ...], option: str) -> None:
    said = CliRunner().invoke(PROGRAM, [*words, "--help"], env={"COLUMNS": "80"}).stdout
    assert f"{option} " in said


@pytest.mark.parametrize("path", all_commands(), ids=lambda path: " ".join(path) or "(program)")
def test_help_is_one_screen_with_examples(path: tuple[str, ...]) -> None:
    ended = CliRunner().invoke(PROGRAM, [*path, "--help"], env={"COLUMNS": "80"})
    assert ended.exit_code == 0
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("Usage: ")
    assert len(lines) <= 45 and max(map(len, lines)) <= 80
    examples = calls_in(lines[lines.index("  Examples:") :])
    assert len(examples) >= 2
    for words in examples:
        check_example(words)
        name, *_ = path or words
        assert words[0] == name, f"{words} is no example of {path}"
