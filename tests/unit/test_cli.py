"""The command line: every mistake is one line on stderr and exit code 2, without a traceback."""

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import all_commands, command_of
from forked_cli import ROOT, Finished, ForkedCli

QUICKSTART = ROOT / "examples/configs/quickstart.yaml"
ASSET = ROOT / "megatron_opsft/assets/tiny_reasoner"


def train(cli: ForkedCli, run_dir: Path, *overrides: str) -> Finished:
    return cli.run(["train", QUICKSTART, f"run.dir={run_dir}", "run.device=cpu", *overrides])


def error_of(ended: Finished) -> str:
    """The one error line; what else is on stderr are warnings of libraries."""
    assert ended.exit_code == 2, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.stderr.rstrip().endswith(line)
    return line


@pytest.mark.parametrize("path", all_commands(), ids=lambda path: " ".join(path) or "(program)")
def test_a_command_without_arguments_says_what_is_missing(
    cli: ForkedCli, path: tuple[str, ...]
) -> None:
    ended = cli.run(path)
    if hasattr(command_of(path)[0], "commands"):  # a group
        assert "Examples:" in ended.stdout + ended.stderr
    elif path == ("methods",):
        assert ended.exit_code == 0
    else:
        line = error_of(ended)
        assert "issing" in line or "name a YAML file" in line
        assert "for example: megatron-opsft " in line or "as model=" in line or "such as" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report", "report: Missing argument 'PATHS...'; for example: megatron-opsft report runs/"),
        ("plan run", "plan run: Missing argument 'CONFIG'; for example: megatron-opsft plan exa"),
        ("train --bogus", "train: --bogus has no value; for example: megatron-opsft train exa"),
        ("report x --bogus", "report: No such option '--bogus'"),
        ("report x --max-mb y", "report: --max-mb=y: Input should be a valid number"),
        ("methods x", "methods: Got unexpected extra argument (x); for example: megatron-"),
        ("convert bogus", "convert: No such command 'bogus'; for example: megatron-opsft conv"),
        ("train no.yaml", "no.yaml does not exist"),
        ("report no-run", "no-run"),
        ("bogus", "No such command 'bogus'; for example: megatron-opsft train examples/"),
    ],
)
def test_wrong_words_are_one_line_with_an_example(cli: ForkedCli, words: str, said: str) -> None:
    ended = cli.run(words.split())
    assert said in error_of(ended)
    assert ended.stdout == ""


def test_what_others_wrote_moves_no_cursor(cli: ForkedCli, tmp_path: Path) -> None:
    assert r"\x1b[2J.yaml does not exist" in error_of(cli.run(["train", "\x1b[2J.yaml"]))
    assert r"\x1b[2J.jinja" in error_of(train(cli, tmp_path, "data.template=\x1b[2J.jinja"))
    warn = "import logging; logging.getLogger('megatron_opsft').warning('id %s', '\\x1b[2J')"
    ended = cli.run(
        ["train", "no.yaml"],
        prelude="import megatron_opsft.config.load as f\n"
        f"def load_config(*args):\n    {warn}\n    raise f.UserError('no')\n"
        "f.load_config = load_config",
    )
    assert ended.stderr == "WARNING id \\x1b[2J\nerror: no\n"


def test_resume_and_overwrite_exclude_each_other(cli: ForkedCli) -> None:
    assert "--resume" in error_of(cli.run(["train", QUICKSTART, "--resume", "--overwrite"]))


def test_a_key_may_have_dashes(cli: ForkedCli) -> None:
    """`--key value` is short for key=value, wherever it stands."""
    plain = cli.run(["config", QUICKSTART, "optimizer.lr=1e-6", "run.dir=010"]).stdout
    for words in (["--optimizer.lr", "1e-6"], ["--optimizer.lr=1e-6"]):
        assert cli.run(["config", *words, QUICKSTART, "--run.dir", "010"]).stdout == plain
    assert "lr: 1.0e-06" in plain and "dir: '010'" in plain


def test_a_file_that_may_not_be_written_is_bad_input(cli: ForkedCli, tmp_path: Path) -> None:
    refused = (
        "import pathlib\n"
        "def refuse(self, *a, **k): raise PermissionError(13, 'Permission denied', str(self))\n"
        "pathlib.Path.read_bytes = refuse\n"
    )
    (tmp_path / "summary.json").touch()
    line = error_of(cli.run(["report", tmp_path], prelude=refused))
    assert line.startswith(f"error: {tmp_path}/summary.json: Permission denied; name another")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temprature=1", ["rollout.temprature", "did you mean rollout.temperature?"]),
        ("run.steps=ten", ["run.steps='ten'"]),
        ("model.path=./no/model", ["./no/model"]),
        ("parallel.tp=3", ["parallel.tp=3 does not divide", "heads"]),
        ("parallel.pp=3", ["parallel.pp=3"]),
        ("parallel.tp=2", ["world size 1", "torchrun --nproc-per-node"]),
        ("data.train=none.jsonl", ["none.jsonl"]),
    ],
)
def test_a_wrong_key_or_value_is_named(
    cli: ForkedCli, tmp_path: Path, override: str, words: list[str]
) -> None:
    line = error_of(train(cli, tmp_path / "r", override))
    assert all(word in line for word in words), line


def test_a_model_that_cannot_be_trained_is_named(cli: ForkedCli, tmp_path: Path) -> None:
    def error_with(name: str, **changes: object) -> str:
        model = Path(shutil.copytree(ASSET, tmp_path / name))
        config = model / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        if not changes:
            (model / name).unlink()
        return error_of(train(cli, tmp_path / "r", f"model.path={model}"))

    assert "tokenizer.json" in error_with("tokenizer.json")
    assert str(tmp_path / "model.safetensors") in error_with("model.safetensors")
    line = error_with("other", architectures=["Gemma3ForCausalLM"])
    for name in ("Gemma3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"):
        assert name in line
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    assert "model.layers.4" in error_with("deeper", **layers)


@pytest.mark.parametrize("content", ["", '{"problem": "1+1?"}\n{"answer": "2"}\n'])
def test_data_without_a_usable_row(cli: ForkedCli, tmp_path: Path, content: str) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(content)
    assert str(data) in error_of(train(cli, tmp_path / "r", f"data.train={data}"))


def test_existing_run_directory_is_not_touched(cli: ForkedCli, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("mine\n")
    line = error_of(train(cli, run_dir))
    assert str(run_dir) in line
    assert "no manifest.json of a run; name another directory" in line
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
    assert (run_dir / "metrics.jsonl").read_text() == "mine\n"


def test_version(cli: ForkedCli) -> None:
    ended = cli.run(["--version"])
    assert (ended.exit_code, ended.stdout.split()[0]) == (0, "megatron-opsft")
    assert re.fullmatch(r"\d+\.\d+\.\d+", ended.stdout.split()[1])


def test_config_prints_what_loads_again(cli: ForkedCli, tmp_path: Path) -> None:
    first = cli.run(["config", QUICKSTART, "optimizer.lr=1e-5"])
    assert first.exit_code == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(first.stdout)
    assert "lr: 1.0e-05" in first.stdout
    assert cli.run(["config", resolved]).stdout == first.stdout
