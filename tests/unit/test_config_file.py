"""Config files: every mistake is one line that names the key, the value and the fix."""

import ast
import re
from pathlib import Path

import pytest

import megatron_opsft
from megatron_opsft.config import Config
from megatron_opsft.config.load import (
    check_resumable,
    config_hash,
    decisive_settings,
    find_changes,
    load_config,
    to_yaml,
)
from megatron_opsft.errors import UserError
from megatron_opsft.run.start.checked_run import check_lengths, fit_lengths

MINIMAL = "model: {path: m}\ndata: {train: d}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL)
    return file


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_the_papers(path: Path) -> None:
    config = load_config(path)
    data, rollout, method = config.data, config.rollout, config.method
    assert (data.prompts_per_step, rollout.group_size, config.optimizer.lr) == (64, 8, 1e-7)
    assert (rollout.max_response_tokens, rollout.temperature, rollout.top_p) == (3500, 1.0, 0.95)
    assert (method.name, method.aggregation) == ("on_policy_sft", "max_accepted")


GRPO = "method.name=grpo"
GREEDY = ["eval.temperature=0", "eval.samples_per_problem=1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optimizer.lrr=1e-6", r"optimizer\.lrr.*did you mean optimizer\.lr\?"),
        ("optimiser.lr=1e-6", r"optimiser.*did you mean optimizer\?"),
        ("train.zzz=5", r"train\.zzz.*cross_entropy"),
        ("rollout.top_p=1.5", r"rollout\.top_p=1\.5.*less than or equal to 1"),
        ("optimizer.lr", r"optimizer\.lr'.*write key=value"),
        ("lr=1", r"unknown config key lr; did you mean optimizer\.lr\?"),
        ("train.lr=1", r"unknown config key train\.lr; did you mean optimizer\.lr\?"),
        ("no_such=1", r"no_such.*choose one of run, model"),
        ("optimizer={lr: 1}", r"optimizer is a section: write a key of it, such as optimizer\.lr="),
        ("optimizer", r"optimizer is a section"),
        ("lr", r"write key=value, for example optimizer\.lr=1e-6"),
        ("method=grpo", r"override 'method=grpo': method is a section: write method\.name=grpo"),
        ("optimizer.lr=[", r"optimizer\.lr=\["),
        ("run.steps=1:30", r"run\.steps='1:30'.*integer"),
        ("run.dir=runs/a #1", "'#1' for a comment; put the value in quotes"),
        ("run.seed=" + "1" * 5000, "digits"),
        ("run.dir=" + "[" * 3000, "nested too deeply"),
        ("run.steps=!!int x", "does not fit its !!tag"),
        ("run.dir={a: 1, a: 2}", "the key a is there twice"),
        ("run.steps=true", r"config key run\.steps=.*write a number"),
        ("optimizer.lr=.inf", r"config key optimizer\.lr=.*finite"),
        (f"run.seed={2**64}", r"config key run\.seed=.*less than"),
        ("run.dir.x=1", r"unknown config key run\.dir\.x; choose one of dir, steps"),
        # Of a group of equal responses nothing is learned, and of equal samples one is enough.
        ("rollout.temperature=0", r"rollout\.temperature=0: all responses to a problem"),
        ("eval.temperature=0", r"eval\.temperature=0: .* set eval\.samples_per_problem=1"),
        ([*GREEDY, "eval.more={a: {data: a, samples_per_problem: 2}}"], r"eval\.temperature=0"),
        ("eval.more={a b: x.jsonl}", r"eval\.more"),
        (
            "eval.more=[{name: a, data: x.jsonl}, {name: a, data: y.jsonl}]",
            r"eval\.more has 2 sets named a; rename one",
        ),
        ("eval.more={a: {data: x, steps: 1}}", r"eval\.more"),
        (
            "method.name=grop",
            r"unknown method 'grop'; did you mean grpo\? choose one of on_policy_sft, ",
        ),
        ("method.beta=1", r"unknown config key method\.beta"),
        ("data.template=Be brief.", r"'Be brief.' is not a template.*\.jinja.*system_prompt"),
        ([GRPO, "method.bta=1"], r"unknown config key method\.bta; did you mean method\.beta\?"),
        ([GRPO, "method.kl=k4"], r"config key method\.kl='k4': Input should be 'k1', "),
        ([GRPO, "rollout.group_size=1"], r"rollout\.group_size=1 leaves nothing to "),
        ([GRPO, "method.updates_per_batch=3"], r"=3 does not divide data\.prompts_per"),
    ],
)
def test_wrong_override_is_named(path: Path, overrides: str | list[str], message: str) -> None:
    said = error_of(path, *([overrides] if isinstance(overrides, str) else overrides))
    assert re.search(message, said), said


@pytest.mark.parametrize("word", ["None", "null", ""])
def test_no_value_is_none_in_yaml_s_and_in_python_s_words(path: Path, word: str) -> None:
    """Never the word itself, which would be the name of a file, or stand before each problem."""
    keys = ("data.system_prompt", "data.subset", "eval.data")
    config = load_config(path, [f"{key}={word}" for key in keys])
    assert (config.data.system_prompt, config.data.subset, config.eval.data) == ("", None, None)
    said = error_of(path, f"data.split={word}")
    assert "config key data.split=" in said and "write a text, or leave the key out" in said


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data: {train: d}\n", "config key model.path is missing"),
        ("- 1\n", "sections"),
        (
            "model: {path: m\n",
            "PATH cannot be read: line 2, column 1: expected ',' or '}', but got",
        ),
        (
            "run:\n  dir: a: b\n",
            "PATH cannot be read: line 2, column 9: mapping values are not all",
        ),
        (
            "run:\n  steps: 1\n- 1\n",
            "line 3, column 1: expected <block end>, but found '-' (while ",
        ),
        (MINIMAL + "optimizer: {lr: fast}\n", "optimizer.lr='fast'"),
        (MINIMAL + "optimizer:\n", "config section optimizer must hold keys"),
        (MINIMAL + "method: 3\n", "config section method must hold keys, not 3"),
        (MINIMAL + "optimizer: {lr: 1, momentun: 2}\n", "optimizer.momentun in PATH; "),
        (MINIMAL + "1: 2\n", "config key 1=1: "),
        (
            MINIMAL + "run: {steps: 1}\nrun: {seed: 3}\n",
            "line 4, column 1: the key run is there twice",
        ),
        ("base: run.yaml\n", "run.yaml is a base of itself"),
        ("base: none.yaml\n", "none.yaml does not exist"),
        ("base: [a]\n", "base=['a'] must be the path of a file"),
    ],
)
def test_wrong_file_is_named(path: Path, text: str, part: str) -> None:
    path.write_text(text)
    assert part.replace("PATH", str(path)) in error_of(path, "optimizer.beta1=0.5")


def test_a_file_needs_only_what_its_base_has_otherwise(path: Path, tmp_path: Path) -> None:
    path.write_text(MINIMAL + "optimizer: {lr: 1e-3, beta1: 0.8}\n")
    other = tmp_path / "sub/other.yaml"
    other.parent.mkdir()
    other.write_text("base: ../run.yaml\noptimizer: {lr: 2e-3, beta2: 0.6}\nrun: {steps: 7}\n")
    keys = ["run.seed=3", "optimizer.beta2=0.7", "run.dir='a #1'", "run.wandb_project=010"]
    config = load_config(other, keys)
    run, optimizer = config.run, config.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (2e-3, 0.8, 0.7)
    assert (run.steps, run.seed, config.model.path) == (7, 3, "m")
    assert (run.dir, run.wandb_project) == (Path("a #1"), "010")


def test_home_is_expanded_in_names_of_places(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    keys = ("run.dir", "model.path", "data.train", "eval.data")
    loaded = load_config(path, [f"{key}=~/{key}" for key in keys])
    found = [loaded.run.dir, loaded.model.path, loaded.data.train, loaded.eval.data]
    assert list(map(str, found)) == [f"/home/somebody/{key}" for key in keys]


def test_so_are_variables_of_the_environment_and_one_that_is_not_set_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    loaded = load_config(path, ["run.dir=${SCRATCH}/run", "model.path=$SCRATCH/m"])
    assert (str(loaded.run.dir), loaded.model.path) == ("/scratch/me/run", "/scratch/me/m")
    for word in ("$NOWHERE", "${NOWHERE}"):
        said = error_of(path, f"run.dir={word}/run")
        assert f"{word} is no variable of the environment; set it" in said


@pytest.mark.parametrize(
    "override",
    ["parallel.tp=2", "run.steps=900", "checkpoint.keep=9", "run.dir=b", "eval.export_best=true"],
)
def test_what_decides_no_number_may_change_on_resume(path: Path, override: str) -> None:
    before, now = load_config(path), load_config(path, [override])
    assert config_hash(before) == config_hash(now)
    check_resumable(before, now, path.parent)


@pytest.mark.parametrize(
    "override",
    ["model.path=n", "data.train=e", "data.responses=r.parquet", "eval.data=f", "eval.more={a: g}"],
)
def test_what_a_run_reads_may_lie_elsewhere(path: Path, override: str) -> None:
    """Its manifest has hashes of the content, which are compared instead."""
    key, _, _ = override.partition("=")
    there = {"data.responses": "s.parquet", "eval.more": "{a: h}"}.get(key, "z")
    before, now = load_config(path, [f"{key}={there}"]), load_config(path, [override])
    check_resumable(before, now, path.parent)
    assert find_changes(before, now) == {}
    settings = [decisive_settings(config, with_locations=True) for config in (before, now)]
    assert settings[0] != settings[1]


# They only say where something is to be seen.
NO_REMEDY = {"eval.data", "eval.holdout"}
# Remedies have the name of this key from their caller.
GIVEN = {("eval", "max_response_tokens")}
KEY = re.compile(r"\b([a-z]+)\.([a-z_]+)\b")


def named_by_remedies() -> set[tuple[str, str]]:
    """(section, key) of a run that any sentence of the package tells the user to raise or lower."""
    found = set()
    for file in Path(megatron_opsft.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            if re.search(r"\b([Rr]aise|[Ll]ower)\b", node.value):
                found |= set(KEY.findall(node.value))
    return {(section, key) for section, key in found if f"{section}.{key}" not in NO_REMEDY}


def test_every_key_that_a_remedy_names_may_change_on_resume(path: Path) -> None:
    config, seen = load_config(path), set()
    for section, key in named_by_remedies() | GIVEN:
        # A method is what a run is; what its keys contradict is found before the first step.
        keys = getattr(config, section) if section in Config.model_fields else None
        if section == "method" or keys is None or key not in type(keys).model_fields:
            continue
        old = getattr(keys, key)
        another = "full" if isinstance(old, str) else not old if isinstance(old, bool) else 7
        now = keys.model_copy(update={key: another})
        check_resumable(config, config.model_copy(update={section: now}), path.parent)
        seen.add(f"{section}.{key}")
    assert seen >= {
        *("rollout.gpu_memory_fraction", "rollout.batch_size", "rollout.kv_cache_bytes"),
        *("rollout.tp", "sync.bucket_mb", "verify.timeout_seconds", "eval.max_response_tokens"),
        *("data.prompts_per_step", "rollout.group_size", "train.max_tokens_per_microbatch"),
    }


@pytest.mark.parametrize(
    "override", ["sync.logprob_alarm=1", "run.device=cpu", "rollout.max_response_tokens=77"]
)
def test_so_may_others(path: Path, override: str) -> None:
    check_resumable(load_config(path), load_config(path, [override]), path.parent)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.weight_decay=1", r"optimizer\.weight_decay=0\.0, not 1\.0: "),
        ("data.train=[{path: d, weight: 2}]", r"data\.train='d', not \[{'path': 'd'"),
        (GRPO, r"method\.name="),
        ("run.steps=900", r"run\.steps=300, not 900: .*so the rate would jump"),
    ],
)
def test_what_decides_numbers_may_not(path: Path, override: str, said: str) -> None:
    """With a cosine schedule the learning rate of every step depends on the last one."""
    cosine = ["optimizer.schedule=cosine"]
    before, now = load_config(path, cosine), load_config(path, [*cosine, override])
    assert config_hash(before) != config_hash(now)
    check_resumable(before, before, path.parent)
    with pytest.raises(UserError, match=said):
        check_resumable(before, now, path.parent)


@pytest.mark.parametrize(
    ("positions", "keys", "prompt", "held_out"),
    [
        (512, ["eval.max_response_tokens=350"], 512 - 350, 350),
        (8192, [], 1024, 4096),  # of hf no more, whose cache grows with the longest response
        (8192, ["rollout.engine=vllm"], 1024, 8192 - 1024),
        (131072, ["rollout.engine=vllm"], 1024, 32768),
        (1024, [], 512, 512),  # half of it, where nobody says how long prompts may be
        (1024, ["data.max_prompt_tokens=128"], 128, 896),
        (8192, ["rollout.max_response_tokens=6000"], 1024, 6000),
        (4096, ["rollout.max_response_tokens=4000"], 96, 4000),
    ],
)
def test_prompts_and_held_out_responses_may_be_as_long_as_model_and_engine_allow(
    path: Path, positions: int, keys: list[str], prompt: int, held_out: int
) -> None:
    base = load_config(path, ["rollout.max_response_tokens=64", *keys])
    fitted = fit_lengths(base, positions)
    assert (fitted.data.max_prompt_tokens, fitted.eval.max_response_tokens) == (prompt, held_out)
    check_lengths(fitted, positions)
    check_resumable(fitted, base, path.parent)
    shorter = fitted.eval.model_copy(update={"max_response_tokens": 9})
    shorter.model_fields_set.add("max_response_tokens")
    resumed = fitted.model_copy(update={"eval": shorter})
    check_resumable(fitted, resumed, path.parent)
    assert find_changes(fitted, resumed) == {"eval.max_response_tokens": (held_out, 9)}


def test_prompts_and_responses_that_do_not_fit_are_one_line(path: Path) -> None:
    keys = ["data.max_prompt_tokens=128", "eval.max_response_tokens=4000"]
    told = load_config(path, keys)
    with pytest.raises(UserError, match=f"{' and '.join(keys)} together exceed"):
        check_lengths(fit_lengths(told, 512), 512)


def test_the_resolved_file_has_settings_of_a_method_and_more_evaluation_sets(path: Path) -> None:
    sets = "eval: {more: {aime: aime.jsonl, own: {data: own.jsonl, num_problems: 3}}}"
    path.write_text(MINIMAL + sets)
    config = load_config(path, [GRPO, "method.clip_high=0.28"])
    assert config.method.model_dump()["clip_high"] == 0.28
    more = [(each.name, each.data, each.num_problems) for each in config.eval.more]
    assert more == [("aime", "aime.jsonl", None), ("own", "own.jsonl", 3)]
    path.write_text(to_yaml(config), encoding="utf-8")
    again = load_config(path)
    assert again == config and type(again.method) is type(config.method)
    assert config_hash(again) == config_hash(config) and hash(again) == hash(config)


def test_the_directory_of_a_run_in_place_of_its_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"config file {tmp_path} is a directory; give a file"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").write_text(MINIMAL)
    said = f"to continue that run give {tmp_path}/config.yaml --resume"
    with pytest.raises(UserError, match=said):
        load_config(tmp_path)
