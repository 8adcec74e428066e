"""Config files: every mistake is one line that names the key, the value and the fix."""

import re
from pathlib import Path

import pytest

from megatron_opsft.config.identity import check_resumable, config_hash
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.config.reference import reference_table
from megatron_opsft.errors import UserError
from megatron_opsft.rollout.limits import check_lengths, fit_lengths

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
    assert config.optimizer.lr == 1e-7
    assert (config.data.prompts_per_step, config.rollout.group_size) == (64, 8)
    assert config.rollout.max_response_tokens == 3500
    assert (config.rollout.temperature, config.rollout.top_p) == (1.0, 0.95)
    assert (config.method.name, config.method.aggregation) == ("on_policy_sft", "max_accepted")


def test_overrides_are_yaml_and_win_over_the_file(path: Path) -> None:
    path.write_text(MINIMAL + "optimizer: {lr: 1.0e-3}\n")
    config = load_config(
        path, ["optimizer.lr=2e-6", "parallel.vpp=2", "run.tensorboard=false", "model.path=a/b"]
    )
    assert config.optimizer.lr == 2e-6
    assert config.parallel.vpp == 2
    assert config.run.tensorboard is False
    assert config.model.path == "a/b"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer.lrr=1e-6", ["optimizer.lrr", "did you mean optimizer.lr?"]),
        ("optimiser.lr=1e-6", ["optimiser", "did you mean optimizer?"]),
        ("train.zzz=5", ["train.zzz", "cross_entropy"]),
        ("run.steps=many", ["run.steps='many'", "integer"]),
        ("rollout.top_p=1.5", ["rollout.top_p=1.5", "less than or equal to 1"]),
        ("optimizer.lr", ["optimizer.lr", "section.key=value"]),
        ("lr=1", ["names no section", "did you mean optimizer.lr=1?"]),
        ("train.lr=1", ["train.lr in the command line", "did you mean optimizer.lr?"]),
        ("rollout.prompts_per_step=1", ["did you mean data.prompts_per_step?"]),
        ("no_such=1", ["section.key=value"]),
        ("optimizer.lr=[", ["optimizer.lr=["]),
    ],
)
def test_wrong_override_is_named(path: Path, override: str, parts: list[str]) -> None:
    message = error_of(path, override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data: {train: d}\n", "model"),
        ("model: {}\ndata: {train: d}\n", "model.path"),
        ("model: {path: m}\ndata: [d]\n", "data"),
        ("- 1\n", "sections"),
        ("model: {path: m\n", "cannot be read"),
        (MINIMAL + "optimizer: {lr: fast}\n", "optimizer.lr='fast'"),
        (MINIMAL + "optimizer:\n", "optimizer"),
        (MINIMAL + "method: 3\n", "config section method must hold keys, not 3"),
        (MINIMAL + "optimizer: {lr: 1, momentun: 2}\n", "optimizer.momentun"),
        (MINIMAL + "1: 2\n", "1"),
        (MINIMAL + "run: {steps: 1}\nrun: {seed: 3}\n", "the key run is there twice"),
    ],
)
def test_wrong_file_is_named(path: Path, text: str, part: str) -> None:
    path.write_text(text)
    assert part in error_of(path)
    assert "nowhere.yaml does not exist" in error_of(path.with_name("nowhere.yaml"))


def test_a_file_needs_only_what_its_base_has_otherwise(path: Path, tmp_path: Path) -> None:
    path.write_text(MINIMAL + "optimizer: {lr: 1e-3, beta1: 0.8}\n")
    (tmp_path / "sub").mkdir()
    other = tmp_path / "sub/other.yaml"
    other.write_text("base: ../run.yaml\noptimizer: {lr: 2e-3}\nrun: {steps: 7}\n")
    config = load_config(other, ["run.seed=3"])
    assert (config.optimizer.lr, config.optimizer.beta1) == (2e-3, 0.8)
    assert (config.run.steps, config.run.seed, config.model.path) == (7, 3, "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: run.yaml\n", "run.yaml is a base of itself"),
        ("base: none.yaml\n", "none.yaml does not exist"),
        ("base: [a]\n", "base=['a'] must be the path of a file"),
    ],
)
def test_a_wrong_base_is_one_line(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    assert message in error_of(path)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.steps=1_000", 1000),
        ("run.wandb_project=007", "007"),
        ("run.dir='a #1'", Path("a #1")),
        ("run.dir=a#1", Path("a#1")),
    ],
)
def test_a_value_is_what_was_written(path: Path, override: str, value: object) -> None:
    section, key = override.partition("=")[0].split(".")
    assert getattr(getattr(load_config(path, [override]), section), key) == value


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("run.steps=1:30", "run.steps='1:30'"),
        ("run.dir=runs/a #1", "'#1' for a comment; put the value in quotes"),
        ("run.dir=#1", "comment"),
        ("run.seed=" + "1" * 5000, "digits"),
        ("run.dir=" + "[" * 3000, "nested too deeply"),
        ("run.steps=!!int x", "does not fit its !!tag"),
        ("run.tensorboard=!!bool x", "does not fit its !!tag"),
        ("run.dir={a: 1, a: 2}", "the key a is there twice"),
    ],
)
def test_what_yaml_stumbles_over_is_one_line(path: Path, override: str, part: str) -> None:
    assert part in error_of(path, override)


@pytest.mark.parametrize(
    "override",
    ["run.steps=true", "data.prompts_per_step=on", "parallel.vpp=true", "run.max_minutes=no"]
    + ["optimizer.lr=.inf", "optimizer.eps=inf", "sync.logprob_alarm=nan"],
)
def test_neither_a_truth_value_nor_infinity_is_a_number(path: Path, override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"config key {re.escape(key)}=.*(finite|number|integer)"):
        load_config(path, [override])


def test_greedy_decoding_is_for_evaluations_with_one_sample(path: Path) -> None:
    """Of a group of equal responses nothing is learned, and of equal samples one is enough."""
    with pytest.raises(UserError, match="rollout.temperature=0: all responses to a problem"):
        load_config(path, ["rollout.temperature=0"])
    with pytest.raises(UserError, match="eval.temperature=0: .* set eval.samples_per_problem=1"):
        load_config(path, ["eval.temperature=0"])
    greedy = ["eval.temperature=0", "eval.samples_per_problem=1"]
    assert load_config(path, greedy).eval.temperature == 0
    more = "eval.more={hard: {data: hard.jsonl, samples_per_problem: 2}}"
    with pytest.raises(UserError, match="eval.temperature=0"):
        load_config(path, [*greedy, more])


def test_home_is_expanded_in_every_key_that_names_a_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    overrides = ["run.dir=~/x", "model.path=~/m", "data.train=~/a.jsonl", "eval.data=~/b.jsonl"]
    loaded = load_config(path, overrides)
    assert loaded.run.dir == Path("/home/somebody/x")
    assert loaded.model.path == "/home/somebody/m"
    assert (loaded.data.train, loaded.eval.data) == (
        "/home/somebody/a.jsonl",
        "/home/somebody/b.jsonl",
    )


@pytest.mark.parametrize("override", ["parallel.tp=2", "run.steps=900", "checkpoint.keep=9"])
def test_what_may_change_on_resume(path: Path, override: str) -> None:
    before, now = load_config(path), load_config(path, [override])
    check_resumable(before, now, path.parent)
    assert config_hash(before) == config_hash(now)


@pytest.mark.parametrize(
    "override",
    ["optimizer.lr=1", "rollout.group_size=2", "method.aggregation=sequence", "method.name=grpo"],
)
def test_what_may_not_change_on_resume(path: Path, override: str) -> None:
    before, now = load_config(path), load_config(path, [override])
    with pytest.raises(UserError, match=override.split("=")[0].replace(".", r"\.")):
        check_resumable(before, now, path.parent)
    assert config_hash(before) != config_hash(now)


def test_steps_of_a_cosine_schedule_may_not_change_on_resume(path: Path) -> None:
    """The learning rate of every step depends on the last one."""
    before, longer = (
        load_config(path, ["optimizer.schedule=cosine", f"run.steps={n}"]) for n in (300, 900)
    )
    check_resumable(before, before, path.parent)
    with pytest.raises(UserError, match=r"run.steps=300, not 900: .*so the rate would jump"):
        check_resumable(before, longer, path.parent)


def test_reference_lists_every_key_of_the_resolved_file(path: Path) -> None:
    table = reference_table()
    tree = load_config(path).model_dump()
    for section, keys in tree.items():
        for key in keys:
            assert f"| `{section}.{key}` |" in table


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.name=grop"], "method.name='grop': did you mean grpo? there are: on_policy_sft, "),
        (["method.name=[1]"], "method.name=[1]: there are: on_policy_sft, grpo"),
        (
            ["method.name=grpo", "method.bta=1"],
            "the command line: did you mean method.beta?",
        ),
        (["method.name=grpo", "method.zzz=1"], "the command line: there are: name, "),
        (["method.beta=1"], "unknown config key method.beta"),
        (["method.name=grpo", "method.kl=k4"], "config key method.kl='k4': Input should be 'k1', "),
        (["method.name=grpo", "rollout.group_size=1"], "rollout.group_size=1 leaves nothing to "),
        (["method.name=grpo", "method.updates_per_batch=3"], "=3 does not divide data.prompts_per"),
    ],
)
def test_wrong_method_is_one_line(path: Path, overrides: list[str], message: str) -> None:
    assert message in error_of(path, *overrides)


def test_settings_of_a_method_survive_the_resolved_file(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["method.name=grpo", "method.clip_high=0.28"])
    assert config.method.model_dump()["clip_high"] == 0.28
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(config), encoding="utf-8")
    again = load_config(resolved)
    assert again == config and type(again.method) is type(config.method)
    assert config_hash(again) == config_hash(config)


def test_a_wrong_key_is_looked_for_where_it_was_typed(path: Path) -> None:
    path.write_text(MINIMAL + "optimizer: {momentun: 2}\n")
    with pytest.raises(UserError, match=rf"optimizer.momentun in {path}: "):
        load_config(path, ["optimizer.lr=1"])


def test_prompts_take_the_room_that_the_model_has_unless_they_are_told(path: Path) -> None:
    path.write_text(MINIMAL)
    base = load_config(path, ["rollout.max_response_tokens=64", "eval.max_response_tokens=350"])
    assert fit_lengths(base, 512).data.max_prompt_tokens == 512 - 350
    assert fit_lengths(base, 131072) == base
    check_lengths(fit_lengths(base, 512), 512)
    told = load_config(path, ["eval.max_response_tokens=4000", "data.max_prompt_tokens=128"])
    message = "data.max_prompt_tokens=128 and eval.max_response_tokens=4000 together exceed"
    with pytest.raises(UserError, match=message):
        check_lengths(fit_lengths(told, 512), 512)
    check_resumable(fit_lengths(base, 512), base, path.parent)


@pytest.mark.parametrize(
    ("positions", "keys", "prompt", "held_out"),
    [
        (8192, [], 1024, 4096),  # of hf no more, whose cache grows with the longest response
        (8192, ["rollout.engine=vllm"], 1024, 8192 - 1024),
        (131072, ["rollout.engine=vllm"], 1024, 32768),
        (1024, [], 512, 512),  # half of it, where nobody says how long prompts may be
        (1024, ["data.max_prompt_tokens=128"], 128, 896),
        (8192, ["rollout.max_response_tokens=6000"], 1024, 6000),
        (4096, ["rollout.max_response_tokens=4000"], 96, 4000),
    ],
)
def test_held_out_responses_may_be_as_long_as_model_and_engine_allow(
    path: Path, positions: int, keys: list[str], prompt: int, held_out: int
) -> None:
    path.write_text(MINIMAL)
    base = load_config(path, ["rollout.max_response_tokens=64", *keys])
    fitted = fit_lengths(base, positions)
    assert (fitted.data.max_prompt_tokens, fitted.eval.max_response_tokens) == (prompt, held_out)
    check_lengths(fitted, positions)
    check_resumable(fitted, base, path.parent)
    shorter = load_config(
        path, ["rollout.max_response_tokens=64", *keys, "eval.max_response_tokens=9"]
    )
    with pytest.raises(UserError, match="eval.max_response_tokens"):
        check_resumable(fitted, shorter, path.parent)


def test_more_evaluation_sets_are_a_mapping_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        MINIMAL + "eval: {more: {aime: aime.jsonl, own: {data: own.jsonl, num_problems: 3}}}"
    )
    config = load_config(path)
    assert [(each.name, each.data, each.num_problems) for each in config.eval.more] == [
        ("aime", "aime.jsonl", None),
        ("own", "own.jsonl", 3),
    ]
    assert hash(config) == hash(load_config(path))
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config
    for wrong in ("{a b: x.jsonl}", "{a: {split: test}}", "{a: {data: x, steps: 1}}", "x.jsonl"):
        with pytest.raises(UserError, match="eval.more"):
            load_config(path, [f"eval.more={wrong}"])
