"""Prompt and judge of a run go with the model that it trained."""

import json
import logging
from pathlib import Path

import pytest

from megatron_opsft.commands.evaluate.settings import EvalSettings, load_settings
from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.config.run_prompt import SECTIONS, settings_of_run
from megatron_opsft.errors import UserError

OF_RUN = ["data.template=chat", "data.system_prompt=Be brief."]
PLACES = ["", "hf", "checkpoints/step_000005", "best/step_000005"]


def settings_of(model: Path | str, *words: str) -> EvalSettings:
    return load_settings(None, [f"model={model}", "out=o", *words])


def config_of(model: Path | str, *words: str) -> Config:
    given = [f"model.path={model}", "data.train=arithmetic", "run.dir=elsewhere"]
    return load_config(None, [*given, *words])


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The directory of a run, as far as anybody asks it for its settings."""
    config = config_of("tiny_reasoner", *OF_RUN)
    for place in PLACES:
        (tmp_path / "a" / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / "a/config.yaml").write_text(to_yaml(config))
    (tmp_path / "a/manifest.json").write_text(json.dumps({"config_hash": "abc"}))
    return tmp_path / "a"


@pytest.mark.parametrize("place", PLACES)
def test_a_model_of_a_run_is_evaluated_and_trained_on_with_the_run_s_prompt_and_judge(
    trained: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = trained / place
    settings = settings_of(model)
    config = config_of(model)
    for prompt in (settings, config.data):
        assert (prompt.template, prompt.system_prompt) == ("chat", "Be brief.")
    assert caplog.messages == [  # once, though both take it
        f"{model} was trained with {key}, taken from {trained / 'config.yaml'}"
        for key in ('template="chat"', 'system_prompt="Be brief."')
    ]
    assert config_of(model) == config


def test_what_differs_and_is_not_given_is_taken(trained: Path) -> None:
    """From whatever directory of the run the model is in."""
    now = dict.fromkeys(SECTIONS) | {"template": "r1", "judge": "math"}
    taken = {"template": "chat", "system_prompt": "Be brief."}
    for place in PLACES:
        model = str(trained / place)
        assert settings_of_run(model, now, ()) == taken
        assert settings_of_run(model, now, ("template",)) == {"system_prompt": "Be brief."}
        assert settings_of_run(model, {**now, **taken}, ()) == {}
    (trained / "other").mkdir()
    assert settings_of_run(str(trained / "other"), now, ()) == {}


def test_what_is_given_wins_and_one_line_says_so(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = settings_of(trained, "template=r1", "system_prompt=Be brief.", "judge=a:b")
    assert (settings.template, settings.judge) == ("r1", "a:b")
    assert caplog.messages == [
        f'{trained} was trained with template="chat", not "r1" as here',
        f'{trained} was trained with judge="math", not "a:b" as here',
    ]


def test_arguments_of_the_chat_template_go_with_the_model(
    tmp_path: Path, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also none of them, where the user says so; and 0 is another value than false."""
    caplog.set_level(logging.INFO)
    file = trained / "config.yaml"
    words = "data.template_arguments={enable_thinking: false}"
    file.write_text(to_yaml(config_of("tiny_reasoner", *OF_RUN, words)))
    false = {"enable_thinking": False}
    assert settings_of(trained / "hf").template_arguments == false
    assert config_of(trained).data.template_arguments == false
    assert config_of(trained, words).data.template_arguments == false
    none = settings_of(trained, "template_arguments={}", "template=chat", "system_prompt=Be brief.")
    assert none.template_arguments is None
    zero = config_of(trained, "data.template_arguments={enable_thinking: 0}")
    assert zero.data.template_arguments == {"enable_thinking": 0}
    said = 'was trained with template_arguments={"enable_thinking": false}'
    lines = [line for line in caplog.messages if "template_arguments" in line]
    assert lines == [
        f"{trained / 'hf'} {said}, taken from {file}",
        f"{trained} {said}, taken from {file}",
        f"{trained} {said}, not null as here",
        f'{trained} {said}, not {{"enable_thinking": 0}} as here',
    ]


def test_a_run_of_an_earlier_release_has_no_arguments(trained: Path) -> None:
    file = trained / "config.yaml"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "template_arguments" not in line]
    assert len(kept) == len(lines) - 1
    file.write_text("".join(kept))
    assert settings_of(trained).template_arguments is None
    given = settings_of(trained, "template_arguments={x: 1}")
    assert (given.template, given.template_arguments) == ("chat", {"x": 1})


def test_a_model_that_no_run_holds_has_the_defaults(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the working directory is a run's."""
    (trained / "b").mkdir()
    monkeypatch.chdir(trained)
    models = ("tiny_reasoner", "Qwen/Qwen3-0.6B", "b")
    assert {settings_of(model).template for model in models} == {"r1"}


def test_a_run_whose_settings_cannot_be_read_is_an_error(trained: Path) -> None:
    (trained / "config.yaml").write_text("data: {template: chat}")
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        settings_of(trained)


def test_a_run_s_own_function_judges_only_where_it_is_given(trained: Path) -> None:
    """Else a model from elsewhere could have any function of this machine called."""
    file = trained / "config.yaml"
    file.write_text(file.read_text().replace("judge: math", "judge: os:system"))
    with pytest.raises(UserError, match="judged by the function os:system.*give judge=os:system"):
        settings_of(trained)
    settings = settings_of(trained, "judge=math")
    assert (settings.judge, settings.template) == ("math", "chat")
