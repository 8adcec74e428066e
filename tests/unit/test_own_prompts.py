"""A user's own rows and prompts: dotted fields, chat messages, a Jinja file, a system prompt."""

from pathlib import Path
from typing import Any

import pytest
from rows import write_rows
from test_prompts import write_model_dir

from megatron_opsft.config import DataConfig, EvalConfig
from megatron_opsft.data.problems import ARITHMETIC, ProblemSet, load_held_out, load_problems
from megatron_opsft.data.prompts import PromptEncoder, load_tokenizer
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.records import Message, Problem

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def reasons(read: ProblemSet) -> list[str]:
    return [bad.reason for bad in read.bad_rows]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    return load_tokenizer(write_model_dir(path, chat_template=CHAT_TEMPLATE))


def prompt_of(tokenizer: Any, problem: Problem, template: str = "chat", **more: str) -> str:
    method = {key: more.pop(key) for key in ("system", "suffix") if key in more}
    encoder = PromptEncoder(tokenizer=tokenizer, template=template, **more)
    return str(tokenizer.decode(encoder.encode(problem, **method)))


def test_dotted_names_reach_into_objects_in_training_and_evaluation(tmp_path: Path) -> None:
    row = {"data": {"q": "1+1?"}, "reward_model": {"ground_truth": "2", "style": "rule"}}
    source = write_rows(tmp_path / "rows.jsonl", [row, {"data": None, "reward_model": {}}])
    fields = {"problem_field": "data.q", "answer_field": "reward_model.ground_truth"}
    read = load_problems(source, **fields)
    assert [(p.text, p.answer) for p in read.problems] == [("1+1?", "2")]
    assert reasons(read) == ["no data.q"]
    held_out = load_held_out(DataConfig(train="x"), EvalConfig(data=source, **fields))
    assert held_out is not None and held_out.problems == read.problems
    with pytest.raises(UserError, match=r"it has data.q, reward_model.ground_truth, reward_model"):
        load_problems(write_rows(tmp_path / "one.jsonl", [row]), problem_field="data.question")
    dotted = write_rows(tmp_path / "dot.jsonl", [{"problem": "p", "a.b": 1, "a": {"b": 2}}])
    assert load_problems(dotted, answer_field="a.b").problems[0].answer == "1"


def test_chat_messages_are_a_problem_and_what_is_none_is_a_bad_row(tmp_path: Path) -> None:
    shots = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    bad: list[Any] = [[], shots, [USER, SYSTEM, USER], ["1 + 1?"], [{"role": "tool"}]]
    bad += [[{"role": "user", "content": content}] for content in ([], " ")]
    surrogate = [{**USER, "content": "\ud83d"}]
    chats = [[USER], [SYSTEM, *shots, USER], *bad, surrogate]
    rows = [{"prompt": value, "answer": 2} for value in chats]
    one, other = (read := load_problems(write_rows(tmp_path / "rows.jsonl", rows))).problems
    assert one.text == other.text == "1 + 1?" and one.before == ()
    assert other.before == tuple(Message(**message) for message in [SYSTEM, *shots])
    *chats, unicode = reasons(read)
    assert unicode == "a text is not valid Unicode: half of a surrogate pair"
    assert len(chats) == len(bad) and all("prompt is not a chat: write" in each for each in chats)


def test_messages_reach_the_chat_template_with_the_instruction_in_the_last(
    tokenizer: Any,
) -> None:
    before = (Message("user", "2 + 2?"), Message("assistant", "4"))
    chat = Problem(id="1", text="1 + 1?", answer="2", before=before)
    shots = "<|user|>2 + 2?<|assistant|>4<|user|>1 + 1?"
    assert prompt_of(tokenizer, chat) == f"{shots}<|assistant|>"
    told = prompt_of(tokenizer, chat, "r1", system_prompt="Think.", suffix="!")
    assert told.startswith(f"<|system|>Think.{shots}\nPlease reason step by step")
    assert told.endswith("\\boxed{}.!<|assistant|>")
    # A row's own system message stands for the system prompt; what a method says is added to it.
    own = Problem(id="1", text="1 + 1?", answer="2", before=(Message("system", "Be brief."),))
    both = prompt_of(tokenizer, own, system_prompt="Think.", system="In 9 tokens.")
    assert both == "<|system|>Be brief.\n\nIn 9 tokens.<|user|>1 + 1?<|assistant|>"


def test_what_the_chat_template_refuses_is_a_prompt_error(tmp_path: Path) -> None:
    refusing = "{{ raise_exception('no system message') }}"
    strict = load_tokenizer(write_model_dir(tmp_path, chat_template=refusing))
    with pytest.raises(PromptError, match=r"refuses it \(TemplateError: no system message\)"):
        prompt_of(strict, Problem(id="1", text="1 + 1?", answer="2"))


def test_a_jinja_file_makes_the_user_s_message_of_the_row(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "prompt.jinja"
    file.write_text("{{ problem }}{% for o in row.options %}\n{{ o }}{% endfor %}\nAnswer:")
    rows = [
        {"question": "1 + 1?", "options": ["A) 2", "B) 3"], "answer": "A"},
        {"question": "2 + 1?", "answer": "B"},
        {"question": [SYSTEM, USER], "options": [], "answer": "A"},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    read = load_problems(source, template=str(file))
    assert [p.text for p in read.problems] == ["1 + 1?\nA) 2\nB) 3\nAnswer:", "1 + 1?\nAnswer:"]
    assert read.problems[1].before == (Message("system", "Be brief."),)
    (reason,) = reasons(read)
    assert reason == "data.template: UndefinedError: 'dict object' has no attribute 'options'"
    prompt = prompt_of(tokenizer, read.problems[0], str(file))
    assert prompt == "<|user|>1 + 1?\nA) 2\nB) 3\nAnswer:<|assistant|>"
    assert load_problems(source).sha256 != read.sha256
    file.write_text("Q: {{ problem }}")
    assert load_problems(ARITHMETIC, template=str(file)).problems[0].text.startswith("Q: ")
    file.write_text("{{ problem.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match="no usable row.*SecurityError"):
        load_problems(source, template=str(file))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        ("{{ problem ", "is not a Jinja template: unexpected end of template"),
        ("Solve it.", "uses neither problem nor row"),
        ("{{ row.options }}", "has no attribute 'options'; a row of arithmetic has no columns"),
    ],
)
def test_a_wrong_jinja_file_is_one_line(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "prompt.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"^data.template(={file})?:? [^\n]*{reason}[^\n]*$"):
        load_problems(ARITHMETIC, template=str(file))
