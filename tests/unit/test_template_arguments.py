"""What a chat template is given besides the messages: prompts, refusals, settings."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jinja2.meta
import pytest
from forked_cli import ForkedCli
from small_run import CLOSED, QUICKSTART, SMALL_RUN, THINKING_OFF, thinking_model
from test_prompts import CHATML, write_model_dir
from transformers.utils.chat_template_utils import _compile_jinja_template

from megatron_opsft.commands.evaluate.settings import load_settings
from megatron_opsft.config import Config
from megatron_opsft.config.load import (
    check_resumable,
    config_hash,
    find_changes,
    load_config,
    to_yaml,
)
from megatron_opsft.data.chat_template import names_read
from megatron_opsft.data.prompts import PromptEncoder, load_tokenizer, teacher_of
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.records import Problem
from megatron_opsft.run.record.summary import model_card
from megatron_opsft.run.start.checked_run import make_checked_run
from megatron_opsft.run.start.input import read_input
from megatron_opsft.runtime.owned_directory import flatten

# The end is Qwen3's to the letter; `content` is set before it is read, as there.
QWEN3 = (
    "{%- for message in messages %}\n"
    "    {%- if message.content is string %}\n"
    "        {%- set content = message.content %}\n"
    "    {%- else %}\n"
    "        {%- set content = '' %}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endif %}"
)
ONE = Problem(id="1", text="1 + 1?", answer="2")
FALSE = {"enable_thinking": False}


def encoder_of(directory: Path, template: str, arguments: Any, name: str = "chat") -> PromptEncoder:
    tokenizer = load_tokenizer(write_model_dir(directory, chat_template=template))
    return PromptEncoder(tokenizer=tokenizer, template=name, template_arguments=arguments)


def check(encoder: PromptEncoder) -> None:
    encoder.check(option="model.path", section="data.")


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (None, ""),
        ({"enable_thinking": True}, ""),
        (FALSE, "<think>\n\n</think>\n\n"),
        ({"enable_thinking": 0}, ""),  # 0 is not false, says Jinja
    ],
)
def test_thinking_is_turned_off_as_in_qwen3(tmp_path: Path, arguments: Any, end: str) -> None:
    encoder = encoder_of(tmp_path, QWEN3, arguments)
    check(encoder)
    expected = f"<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n{end}"
    prompt = encoder.encode(ONE)
    assert encoder.tokenizer.decode(prompt) == expected
    think = encoder.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert [token for token in prompt if token in think] == (think if end else [])
    assert encoder.example == expected.replace("1 + 1?", "1") and not encoder.opens_think


def test_a_teacher_s_prompts_have_the_same_arguments(tmp_path: Path) -> None:
    teacher = teacher_of(encoder_of(tmp_path, QWEN3, FALSE, "r1"), "concise")
    text = teacher.tokenizer.decode(teacher.encode(ONE))
    assert "concisely" in text and text.endswith("assistant\n<think>\n\n</think>\n\n")


def test_values_are_any_json(tmp_path: Path) -> None:
    tools = {"tools": [{"name": "add", "max": 2.5}, None, True], "none": {}}
    template = CHATML + "{{ options | tojson }} {{ options.tools[0].name }} {{ date_string }}"
    encoder = encoder_of(tmp_path, template, {"options": tools, "date_string": "3 May"})
    check(encoder)
    assert encoder.example.endswith(f"assistant\n{json.dumps(tools)} add 3 May")


NO_EFFECT = "has no effect: the chat template of .*model does not read it; it reads "


@pytest.mark.parametrize(
    ("name", "template", "says"),
    [
        ("thinking", QWEN3, f"thinking {NO_EFFECT}enable_thinking$"),
        ("content", QWEN3, f"content {NO_EFFECT}enable_thinking$"),
        ("enable_thinking", CHATML, f"enable_thinking {NO_EFFECT}no argument$"),
        ("x", "{% set x = 1 %}{{ x }}" + QWEN3, f"x {NO_EFFECT}enable_thinking$"),
        ("x", "{% set x = x | default(1) %}{{ x }}" + CHATML, None),
        *[
            (name, QWEN3, f"{name} has its value from transformers.*model reads enable_thinking.$")
            for name in ("messages", "tools", "documents", "add_generation_prompt", "bos_token")
        ],
        *[
            (name, QWEN3, f"{name} has its value from transformers")
            for name in ("chat_template", "tokenize", "strftime_now", "range", "pad_token")
        ],
    ],
)
def test_what_a_template_does_not_read_or_transformers_sets_is_refused(
    tmp_path: Path, name: str, template: str, says: str | None
) -> None:
    encoder = encoder_of(tmp_path / "model", template, {name: False})
    told = pytest.raises(UserError, match=f"^data.template_arguments: {says}") if says else None
    with told or nullcontext():
        check(encoder)


def test_of_several_chat_templates_the_default_one_must_read_it(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": QWEN3}, {"name": "default", "template": CHATML}]
    with pytest.raises(UserError, match=f"enable_thinking {NO_EFFECT}no argument$"):
        check(encoder_of(tmp_path / "model", several, FALSE))
    several = [{"name": "rag", "template": CHATML}, {"name": "default", "template": QWEN3}]
    check(encoder_of(tmp_path / "model", several, FALSE))


def test_a_template_that_is_none_is_called_that_whatever_it_is_given(tmp_path: Path) -> None:
    broken = encoder_of(tmp_path, "{% for m in messages %}", FALSE)
    with pytest.raises(UserError, match=r"^model.path: the model's chat template refuses it \(T"):
        check(broken)
    with pytest.raises(UserError, match=r"^model.path: the tokenizer of .* has no chat template;"):
        encoder_of(tmp_path, None, FALSE)


@pytest.mark.parametrize(
    ("template", "read", "unread"),
    [
        ("{{ x }}", "x", "y"),
        ("{% set x = x if x is defined else 1 %}{{ x }}", "x", ""),
        ("{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}", "x", ""),
        ("{% set x = 1 %}{{ x }}", "", "x"),
        ("{% if 1 %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", "", "x"),
        (
            "{% if 0 %}{% set x = 1 %}{% elif 0 %}{% set x = 2 %}{% else %}{% set x = 3 %}"
            "{% endif %}{{ x }}",
            "",
            "x",
        ),
        ("{% if 0 %}{% set x = 1 %}{% elif 0 %}{% set x = 2 %}{% endif %}{{ x }}", "x", ""),
        ("{% if a %}{% set x = 1 %}{% endif %}{{ x }}{{ a }}", "ax", ""),
        ("{% for m in [1] %}{% set x = m %}{% endfor %}{{ x }}", "x", "m"),
        (
            "{% for m in a if m == b %}{{ m }}{{ loop.index }}{% else %}{{ c }}{% endfor %}",
            "abc",
            "",
        ),
        ("{% macro f(y, z=b) %}{{ y }}{{ z }}{{ x }}{% endmacro %}{{ f(1) }}", "bx", "fyz"),
        (
            "{% macro f(y) %}{{ caller() }}{{ y }}{% endmacro %}"
            "{% call f(a) %}{{ x }}{% endcall %}",
            "ax",
            "y",
        ),
        ("{% with y = x %}{{ y }}{% endwith %}", "x", "y"),
        ("{% set y %}{{ x }}{% endset %}{{ y }}", "x", "y"),
        ("{% filter upper %}{{ x }}{% endfilter %}", "x", ""),
        ("{% set ns = namespace(y=x) %}{% set ns.y = a %}{{ ns.y }}", "a", "y"),
        ("{% generation %}{{ x }}{% endgeneration %}", "x", ""),
    ],
)
def test_the_names_that_a_template_reads_are_those_that_change_what_it_writes(
    template: str, read: str, unread: str
) -> None:
    compiled = _compile_jinja_template(template)
    tree = compiled.environment.parse(template)
    found = names_read(tree) - compiled.environment.globals.keys()
    assert found <= jinja2.meta.find_undeclared_variables(tree)
    assert set(read) <= found and not found & set(unread)
    for name in read + unread:
        changes = False
        for values in ({}, dict.fromkeys("abcfxyz", "p")):
            changes |= compiled.render(values) != compiled.render(values | {name: "q"})
        assert changes == (name in read), name


def config_of(words: str = "", *more: str) -> Config:
    overrides = ["model.path=m", "data.train=arithmetic", *more]
    return load_config(None, overrides + [f"data.template_arguments={words}"] * bool(words))


@pytest.mark.parametrize(
    "value",
    [
        {"options": {"a.b": [1, 2.5, None, True, "1e5", "a: b #c", "'"], "": {}}, "x": "off"},
        FALSE,
    ],
)
def test_arguments_are_the_same_from_a_file_a_word_and_python(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "run.yaml"
    tree = {"model": {"path": "m"}, "data": {"train": "x", "template_arguments": value}}
    path.write_text(json.dumps(tree))
    config = load_config(path)
    assert config.data.template_arguments == value
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    assert config_hash(load_config(path)) == config_hash(config)
    assert load_settings(None, [], {"model": "m", "out": "o", "template_arguments": value})
    if value == FALSE:
        for words in ("{enable_thinking: false}", '{"enable_thinking":false}'):
            assert config_of(words).data.template_arguments == value
            settings = load_settings(None, [f"template_arguments={words}", "model=m", "out=o"])
            assert settings.template_arguments == value


def test_no_arguments_are_null() -> None:
    nothing = config_of()
    for words in ("{}", "null", "None"):
        assert config_of(words) == nothing and config_of(words).data.template_arguments is None
    assert hash(nothing) == hash(config_of("{}"))


@pytest.mark.parametrize("words", ["[enable_thinking]", "enable_thinking", "1", "true", "{1: 2}"])
def test_what_is_no_mapping_of_names_is_one_line(words: str) -> None:
    said = "^config key data.template_arguments=.*: write a mapping of names, such as {enable_thin"
    with pytest.raises(UserError, match=said):
        config_of(words)


def test_a_number_that_json_does_not_have_is_refused() -> None:
    for words in ("{x: .nan}", "{x: [.inf]}"):
        with pytest.raises(UserError, match=r"^config key data.template_arguments.*finite"):
            config_of(words)


def test_a_resumed_run_must_keep_its_arguments_and_zero_is_not_false(tmp_path: Path) -> None:
    values = ["{}", "{x: 0}", "{x: false}", "{x: 0.0}", "{y: false}", "{x: {y: 0}}", "{x: {}}"]
    for old in values:
        for new in values:
            before, now = config_of(old), config_of(new)
            if old == new:
                check_resumable(before, now, tmp_path)
                continue
            assert list(find_changes(before, now)) == ["data.template_arguments"]
            assert config_hash(before) != config_hash(now)
            said = "was started with data.template_arguments=.*: a resumed run must keep it; set"
            with pytest.raises(UserError, match=said):
                check_resumable(before, now, tmp_path)


def test_an_empty_value_is_told_from_none_in_the_identity_of_an_evaluation() -> None:
    arguments = {"x": {}, "y": {"z": {}, "n": 0}}
    flat = {"template_arguments.x": "{}", "template_arguments.y.z": "{}"}
    flat["template_arguments.y.n"] = "0"
    assert flatten({"template_arguments": arguments, "data": {}}) == flat


def test_the_first_prompt_and_the_card_have_the_arguments(tmp_path: Path) -> None:
    model = thinking_model(tmp_path / "model")
    keys = [*SMALL_RUN, f"model.path={model}", "run.dir=runs/a"]
    measured = {"accuracy": None, "mean_response_tokens": None}
    summary = {"base": measured, "final": measured, "steps": 1, "model_step": 1}
    for more, end, call in (
        (
            [THINKING_OFF],
            CLOSED,
            "answer(messages, tokenizer_encode_kwargs={'enable_thinking': False}, ",
        ),
        ([], CLOSED.removesuffix("\n</think>\n\n"), "answer(messages, max_new_tokens=1024)"),
    ):
        config = load_config(Path(QUICKSTART), [*keys, *more])
        run_input = read_input(make_checked_run(config, read_model_shape(model), 1), model)
        messages, prompt = run_input.example()
        assert prompt.endswith(end)
        card = model_card(summary, config, messages, prompt)
        assert f"print({call}" in card and f"\n{prompt}\n`````" in card
        assert "| accuracy | - | - |\n\n```python" in card  # nothing was evaluated
    ends = [{"accuracy": n / 12, "samples": 12, "mean_response_tokens": 9.0} for n in (6, 7)]
    card = model_card(summary | dict(zip(("base", "final"), ends, strict=True)), config, [], "")
    interval = "95 % interval -28.5 to +45.2 points; it holds 0, so this may be chance"
    told = f"Accuracy: +8.3 points; n = 12 responses at each end; {interval}."
    assert f"| accuracy | 50.0 % | 58.3 % |\n\n{told}\n\n```python" in card
    chat = [message._asdict() for message in messages]
    rendered = run_input.encoder.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False, **FALSE
    )
    assert rendered == prompt + "\n</think>\n\n"


def test_a_start_shows_the_prompt_or_refuses_an_argument(cli: ForkedCli, tmp_path: Path) -> None:
    model = thinking_model(tmp_path / "model")
    words = ["train", QUICKSTART, "--check", *SMALL_RUN, "verify.judge=math"]
    words += [f"model.path={model}", f"run.dir={tmp_path / 'run'}"]
    shown = cli.run([*words, THINKING_OFF])
    assert shown.exit_code == 0, shown.stderr
    assert "<think>\n" in shown.stdout and shown.stdout.count("</think>") == 1
    assert "</think>" not in cli.run(words).stdout
    refused = cli.run([*words, "data.template_arguments={thinking: false}"]).error
    assert refused == (
        "error: data.template_arguments: thinking has no effect: the chat template of "
        f"{model} does not read it; it reads enable_thinking"
    )
    evaluation = ["eval", "--model", "tiny_reasoner", "--out", tmp_path / "eval", "limit=2"]
    refused = cli.run([*evaluation, "--template-arguments", "{enable_thinking: false}"]).error
    assert refused.startswith("error: template_arguments: enable_thinking has no effect:")
    assert refused.endswith("does not read it; it reads no argument")
    assert not (tmp_path / "eval").exists()
