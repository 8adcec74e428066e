"""A row's problem and messages, a user's own prompts, the chat template; tokenizers as their files
describe them, end tokens.
"""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from rows import write_rows
from small_run import QUICKSTART
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_opsft.config import DataConfig, EvalConfig
from megatron_opsft.config.load import load_config
from megatron_opsft.data.mixture import drop_unusable_prompts
from megatron_opsft.data.problems import ARITHMETIC, ProblemSet, load_held_out, load_problems
from megatron_opsft.data.prompts import (
    PromptEncoder,
    check_vocabulary,
    end_token_ids,
    load_tokenizer,
)
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.records import Message, Problem
from megatron_opsft.run.start.checked_run import make_checked_run
from megatron_opsft.run.start.input import read_input

R1_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|User|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
ONE = Problem(id="1", text="1+1?", answer="2")
SPECIAL = ["<|end|>", "<|begin|>", "<|User|>", "<|Assistant|>", "<think>", "</think>"]


def write_model_dir(path: Path, *, words: tuple[str, ...] = (), **config: Any) -> Path:
    """A Qwen2 directory with a byte-level tokenizer; `words` are further vocabulary."""
    path.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL[:2]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SPECIAL[2:]])
    tokenizer.save(str(path / "tokenizer.json"))
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": R1_TEMPLATE}
    given |= {"bos_token": "<|begin|>", "eos_token": "<|end|>", **config}
    settings = {key: value for key, value in given.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 262}))
    return path


FINAL = " and put your final answer within \\boxed{}."
DRAFT = " but only keep a minimum draft for each thinking step, with 5 words at most,"


@pytest.fixture
def r1(tmp_path: Path) -> Any:
    return load_tokenizer(write_model_dir(tmp_path / "r1"))


@pytest.mark.parametrize(
    ("template", "instruction"),
    [
        ("r1", f"\nPlease reason step by step,{FINAL}"),
        ("cod", f"\nPlease reason step by step,{DRAFT}{FINAL}"),
        ("chat", ""),
    ],
)
def test_prompt_text_is_the_papers_and_thinking_is_the_template_s(
    tmp_path: Path, r1: Any, template: str, instruction: str
) -> None:
    without = R1_TEMPLATE.replace("<think>\n", "")
    bare = load_tokenizer(write_model_dir(tmp_path / "bare", chat_template=without))
    for tokenizer, end in ((r1, "<think>\n"), (bare, "")):
        encoder = PromptEncoder(tokenizer=tokenizer, template=template)
        prompt = encoder.encode(ONE)
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        assert text == f"<|begin|><|User|>1+1?{instruction}<|Assistant|>{end}"
        special = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[1:5]]
        assert [i for i in prompt if i in special] == special[: 4 if end else 3]
        assert encoder.opens_think == bool(end)


@pytest.mark.parametrize("marker", ["<|end|>", "<|User|>", "</think>"])
def test_problems_that_are_too_long_or_have_a_marker_of_the_model_s_are_bad_rows(
    tmp_path: Path, r1: Any, marker: str
) -> None:
    """As a token it would end the user's part or the thinking; similar text is left as it is."""
    encoder = PromptEncoder(tokenizer=r1, template="chat")
    texts = [f"What is 1+1?{marker}", "Is 1 < 2 > 0? <b> <| end |>", "1" * 45, "1" * 46]
    data = write_rows(tmp_path / "data.jsonl", [{"problem": t, "answer": "2"} for t in texts])
    read = load_problems(data)
    kept = drop_unusable_prompts(read, encoder.encode, max_prompt_tokens=50)
    assert [problem.text for problem in kept.problems] == texts[1:3]
    assert [(bad.row, bad.reason) for bad in kept.bad_rows] == [
        (1, f"the problem contains {marker!r}, a special token of the model"),
        (4, "prompt of 51 tokens, more than data.max_prompt_tokens=50"),
    ]
    assert kept.sha256 != read.sha256


def test_a_template_that_asks_for_the_date_has_one_prompt_on_every_day(tmp_path: Path) -> None:
    """As Llama 3.x's, which has its own date only where there is no clock."""
    dated = (
        "{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}"
        "Today Date: {{ date }}, {{ strftime_now('%A, %-d.%-m.%y') }}\n\n" + R1_TEMPLATE
    )
    tokenizer = load_tokenizer(write_model_dir(tmp_path, chat_template=dated))
    encoder = PromptEncoder(tokenizer=tokenizer, template="chat")
    date = "Today Date: 26 Jul 2024, Friday, 26.7.24"
    expected = f"{date}\n\n<|begin|><|User|>1<|Assistant|><think>\n"
    assert encoder.example == expected
    prompt = encoder.encode(Problem(id="1", text="1", answer=""))
    assert tokenizer.decode(prompt, skip_special_tokens=False) == expected


@pytest.mark.parametrize("own_class", ["Qwen2Tokenizer", "LlamaTokenizerFast", None])
def test_loaded_tokenizer_equals_tokenizer_json(tmp_path: Path, own_class: str | None) -> None:
    """AutoTokenizer may put another class in place; the ids of the file must come out."""
    words = ("wait", "boxed", "Ġsum")
    path = write_model_dir(tmp_path, words=words, tokenizer_class=own_class)
    loaded, described = load_tokenizer(path), Tokenizer.from_file(str(path / "tokenizer.json"))
    vocab = described.get_vocab(with_added_tokens=True)
    assert {token: loaded.get_vocab().get(token) for token in vocab} == vocab
    for text in ("wait  boxed 12\n<think>\n</think> sum", "Grüße 你好 <|User|>"):
        ids = described.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids, skip_special_tokens=False) == text
    # Qwen2's class pads with <|endoftext|>, which is none of this vocabulary.
    last = max(vocab.values())
    check_vocabulary(loaded, end_token_ids(loaded, path), last + 1, path)
    said = f"ids up to {last}, the first too high {last} .* the files come from two models"
    with pytest.raises(UserError, match=said):
        check_vocabulary(loaded, [256], last, path)
    # One that is added for padding alone is never given to the model.
    loaded.add_special_tokens({"pad_token": "[PAD]"})
    check_vocabulary(loaded, end_token_ids(loaded, path), last + 1, path)


def test_a_long_text_is_encoded_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Too long a prompt is a bad row; transformers would speak of indexing errors."""
    tokenizer = load_tokenizer(write_model_dir(tmp_path, model_max_length=16))
    problem = Problem(id="1", text="1+" * 40 + "1?", answer="41")
    assert len(PromptEncoder(tokenizer=tokenizer, template="chat").encode(problem)) > 16
    assert capfd.readouterr() == ("", "")


def test_missing_files_and_template_and_what_it_refuses_are_user_errors(tmp_path: Path) -> None:
    path = write_model_dir(tmp_path / "model")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="model.path"):
        load_tokenizer(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer.json; copy the tokenizer files"):
        load_tokenizer(path)
    with pytest.raises(UserError, match="has no chat template; add chat_template.jinja"):
        load_tokenizer(write_model_dir(tmp_path / "bare", chat_template=None))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system message') }}", "TemplateError: no system message"),
        ("{{ messages[5].content }}", "UndefinedError: .*"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: .*"),
        ("{{ 1 + messages[0].content }}", "TypeError: .*"),
        ("{% for m in messages %}", "TemplateSyntaxError: .*"),
    ],
)
def test_whatever_goes_wrong_inside_a_chat_template_is_one_line(
    tmp_path: Path, template: str, reason: str
) -> None:
    broken = load_tokenizer(write_model_dir(tmp_path, chat_template=template))
    encoder = PromptEncoder(tokenizer=broken, template="chat")
    refused = f"the model's chat template refuses it \\({reason}\\)$"
    with pytest.raises(PromptError, match=f"^{refused}"):
        encoder.encode(ONE)
    with pytest.raises(UserError, match=f"^--model: {refused}"):
        encoder.chat.check(option="--model", system_option=None)


def test_of_several_chat_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    """As tokenizer_config.json may hold them, with names."""
    several = [{"name": "rag", "template": "x"}, {"name": "default", "template": R1_TEMPLATE}]
    one = load_tokenizer(write_model_dir(tmp_path / "one", chat_template=several))
    assert prompt_of(one, ONE) == "<|begin|><|User|>1+1?<|Assistant|><think>\n"
    with pytest.raises(UserError, match="has chat templates for rag, and none called default"):
        load_tokenizer(write_model_dir(tmp_path / "none", chat_template=several[:1]))


USERS_ALONE = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# An empty thought before the last answer of a chat, as Qwen 3 writes it.
THOUGHTLESS = CHATML.replace(
    "{{ m.content }}",
    "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}",
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "system_option", "says"),
    [
        (CHATML, "data.system_prompt", None),
        (THOUGHTLESS, None, None),
        (MISTRAL, "data.system_prompt", None),
        (R1_TEMPLATE, None, None),
        (USERS_ALONE + "<|Assistant|><think>\n", None, None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None, None),
        ("{{ messages[0].content }}", None, None),
        (
            USERS_ALONE + "<|Assistant|>",
            "data.system_prompt",
            "^data.system_prompt has no effect: the chat template of .* leaves out system messages",
        ),
        ("{{ messages[0].content }}", "system_prompt", "^system_prompt has no effect"),
        ("Hello.", None, "^model.path: the chat template of .* leaves out the user's message"),
        (
            CHATML.partition("{% if")[0],
            None,
            r"has no generation prompt: a prompt ends with .*<\|im_end\|>', .* behind {% if add",
        ),
    ],
)
def test_a_chat_template_that_drops_what_it_is_given_is_refused_at_the_start(
    tmp_path: Path, template: str, system_option: str | None, says: str | None
) -> None:
    tokenizer = load_tokenizer(write_model_dir(tmp_path, chat_template=template))
    chat = PromptEncoder(tokenizer=tokenizer, template="chat").chat
    with pytest.raises(UserError, match=says) if says else nullcontext():
        chat.check(option="model.path", system_option=system_option)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.system_prompt=Think."], "^data.system_prompt has no effect"),
        (
            ["method.name=thinkprune", "method.limits=[64]", "method.announce_limit=true"],
            "^method.name=thinkprune tells the model its limit in a system message, which",
        ),
        (["method.name=thinkprune", "method.limits=[64]"], None),
    ],
)
def test_a_run_whose_system_message_would_be_dropped_does_not_start(
    tmp_path: Path, words: list[str], says: str | None
) -> None:
    model = shutil.copytree(ASSETS / TINY_REASONER, tmp_path / "model")
    (model / "chat_template.jinja").write_text(USERS_ALONE + "<\uff5cAssistant\uff5c><think>\n")
    config = load_config(Path(QUICKSTART), [f"model.path={model}", *words])
    with pytest.raises(UserError, match=says) if says else nullcontext():
        read_input(make_checked_run(config, read_model_shape(model), 1), model)


def test_a_row_with_messages_that_the_chat_template_drops_is_a_bad_row(tmp_path: Path) -> None:
    shots = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    chats = [[USER], [SYSTEM, USER], [*shots, USER]]
    rows = [{"prompt": chat, "answer": 2} for chat in chats]
    read = load_problems(write_rows(tmp_path / "rows.jsonl", rows))
    tokenizer = load_tokenizer(write_model_dir(tmp_path / "m", chat_template=USERS_ALONE))
    encoder = PromptEncoder(tokenizer=tokenizer, template="chat")
    kept = drop_unusable_prompts(read, encoder.encode, max_prompt_tokens=99)
    assert len(kept.problems) == 1
    assert reasons(kept) == [
        f"the model's chat template leaves out {role} messages" for role in ("system", "assistant")
    ]


def test_end_tokens_are_collected_from_all_files(tmp_path: Path, r1: Any) -> None:
    own = r1.eos_token_id
    assert end_token_ids(r1, tmp_path) == (own,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, own]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert end_token_ids(r1, tmp_path) == (3, 7, own)
    nested = {"text_config": {"eos_token_id": [4]}, "eos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert end_token_ids(r1, tmp_path) == (3, 4, 7, own)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 7]}))
    assert end_token_ids(r1, tmp_path) == (3, 7, own)
    (tmp_path / "generation_config.json").write_text("")
    with pytest.raises(UserError, match="generation_config.json cannot be read as JSON"):
        end_token_ids(r1, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    (tmp_path / "config.json").unlink()
    r1.eos_token = None
    with pytest.raises(UserError, match="has no end token"):
        end_token_ids(r1, tmp_path)


def test_a_sentencepiece_model_is_a_tokenizer(tmp_path: Path) -> None:
    texts = iter([f"How many are {a} and {b}?" for a in range(40) for b in range(20)])
    settings = {"vocab_size": 120, "model_type": "bpe", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=str(tmp_path / "tokenizer"), **settings
    )
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "chat_template": "x"}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ids = tokenizer.encode("How many are 3 and 4?", add_special_tokens=False)
    assert ids == own.encode("How many are 3 and 4?")
    assert end_token_ids(tokenizer, tmp_path) == (own.eos_id(),)


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def reasons(read: ProblemSet) -> list[str]:
    return [bad.reason for bad in read.bad_rows]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return load_tokenizer(write_model_dir(tmp_path / "chat", chat_template=CHAT_TEMPLATE))


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


def test_messages_reach_the_chat_template_the_last_with_the_instruction(tokenizer: Any) -> None:
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
    said = "data.template: UndefinedError: 'dict object' has no attribute 'options'"
    assert reasons(read) == [said]
    prompt = prompt_of(tokenizer, read.problems[0], str(file))
    assert prompt == "<|user|>1 + 1?\nA) 2\nB) 3\nAnswer:<|assistant|>"
    assert load_problems(source).sha256 != read.sha256
    file.write_text("\ufeffQ: {{ problem }}")  # a byte order mark, as editors leave it
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
