"""ChatML for a base model that has no chat template: its text, its end, where it stays."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ForkedCli
from run_differences import read_lines
from small_run import QUICKSTART, SMALL_RUN
from test_prompts import R1_TEMPLATE, write_model_dir
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from megatron_opsft.commands.evaluate.inputs import open_model
from megatron_opsft.commands.evaluate.settings import load_settings
from megatron_opsft.data.chatml import chatml_end, chatml_files
from megatron_opsft.data.prompts import PromptEncoder, end_token_ids, load_tokenizer
from megatron_opsft.errors import UserError
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.records import Problem

ONE = Problem(id="1", text="1+1?", answer="2")


def base_model(path: Path, *tokens: str, **config: Any) -> Path:
    """A tokenizer without a chat template, with these special tokens besides."""
    write_model_dir(path, chat_template=None, **config)
    file = path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.save(str(file))
    return path


def prompt_of(path: Path, **more: Any) -> str:
    tokenizer = load_tokenizer(path, chat_template="chatml")
    encoder = PromptEncoder(tokenizer=tokenizer, template="chat", **more)
    encoder.check(option="model.path", section="data.")
    return str(tokenizer.decode(encoder.encode(ONE), skip_special_tokens=False))


def test_a_message_ends_with_im_end_or_with_the_end_token_of_the_model(tmp_path: Path) -> None:
    user, head = "<|im_start|>user\n1+1?", "<|im_start|>assistant\n"
    plain, both = base_model(tmp_path / "a"), base_model(tmp_path / "b", "<|im_end|>")
    assert prompt_of(plain) == f"{user}<|end|>\n{head}"
    assert prompt_of(both) == f"{user}<|im_end|>\n{head}"
    said = f"<|im_start|>system\nBe brief.<|im_end|>\n{user}<|im_end|>\n{head}"
    assert prompt_of(both, system_prompt="Be brief.") == said
    for path, names in ((plain, ["<|end|>"]), (both, ["<|end|>", "<|im_end|>"])):
        tokenizer = load_tokenizer(path, chat_template="chatml")
        ends = end_token_ids(tokenizer, path)
        assert tokenizer.convert_ids_to_tokens(ends) == names
    # Without the key the same tokenizer has one end.
    (both / "chat_template.jinja").write_text(R1_TEMPLATE)
    tokenizer = load_tokenizer(both)
    assert chatml_end(tokenizer) is None
    ends = end_token_ids(tokenizer, both)
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|end|>"]
    assert chatml_files(tokenizer, ends, both) == {}


def test_a_prompt_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    path = base_model(tmp_path / "a")
    file = path / "tokenizer.json"
    tree = json.loads(file.read_text())
    (begin,) = (token["id"] for token in tree["added_tokens"] if token["content"] == "<|begin|>")
    single = [
        {"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    special = {"<|begin|>": {"id": "<|begin|>", "ids": [begin], "tokens": ["<|begin|>"]}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": special,
    }
    file.write_text(json.dumps(tree))
    assert prompt_of(path).startswith("<|begin|><|im_start|>user\n")


def test_what_cannot_be_a_chat_is_refused(tmp_path: Path) -> None:
    for key, option in (("data.chat_template", "model.path"), ("chat_template", "--model")):
        with pytest.raises(UserError, match=f"has no chat template; .* set {key}=chatml$"):
            load_tokenizer(base_model(tmp_path / "a"), option=option)
        own = write_model_dir(tmp_path / "own")
        with pytest.raises(UserError, match=f"^{key}=chatml is for a model without .*{key}=.$"):
            load_tokenizer(own, option=option, chat_template="chatml")
    endless = base_model(tmp_path / "endless", eos_token=None)
    with pytest.raises(UserError, match="has no <.im_end.> and no eos_token; set eos_token"):
        load_tokenizer(endless, chat_template="chatml")
    assert prompt_of(base_model(tmp_path / "b", "<|im_end|>", eos_token=None))


@pytest.mark.parametrize("tokens", [(), ("<|im_start|>", "<|im_end|>")])
def test_a_model_keeps_template_and_ends_wherever_it_is_loaded(
    tmp_path: Path, tokens: tuple[str, ...]
) -> None:
    base = base_model(tmp_path / "base", *tokens)
    (base / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": 256}')
    tokenizer = load_tokenizer(base, chat_template="chatml")
    ends = end_token_ids(tokenizer, base)
    assert len(ends) == (2 if tokens else 1)
    trained = Path(shutil.copytree(base, tmp_path / "trained"))
    for name, content in chatml_files(tokenizer, ends, base).items():
        (trained / name).write_bytes(content)
    again = load_tokenizer(trained)
    assert end_token_ids(again, trained) == ends
    asked = [{"role": "user", "content": ONE.text}]
    texts = [
        one.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        for one in (tokenizer, again, AutoTokenizer.from_pretrained(trained))
    ]
    assert texts == [prompt_of(base)] * 3 == [prompt_of(trained)] * 3
    written = json.loads((trained / "generation_config.json").read_text())
    assert written == {"temperature": 0.7, "eos_token_id": list(ends) if tokens else 256}


def test_a_run_of_a_base_model_and_what_is_made_with_it(cli: ForkedCli, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(ASSETS / TINY_REASONER, base)
    (base / "chat_template.jinja").unlink()
    keys = [*SMALL_RUN, "verify.judge=math", "run.steps=1", "checkpoint.every=1"]
    keys += ["optimizer.schedule=constant", f"model.path={base}", f"run.dir={run}"]
    words = ["train", QUICKSTART, *keys]
    assert "for a base model set data.chat_template=chatml" in cli.run(words).error
    chatml = "data.chat_template=chatml"
    shown = cli.run([*words, chatml, "--check"])
    assert shown.exit_code == 0 and "<|im_start|>assistant" in shown.stdout, shown.stderr
    ended = cli.run([*words, chatml])
    assert ended.exit_code == 0, ended.stderr
    head = "<\uff5cend\u2581of\u2581sentence\uff5c>\n<|im_start|>assistant\n"
    identity = json.loads((run / "manifest.json").read_text())["identity"]
    assert identity["example_prompt"].endswith(head)
    assert f"{head}\n`````" in (run / "hf/README.md").read_text()
    # Everywhere the same template, end tokens and tokenizer.
    models = [open_model(str(path)) for path in (run, run / "checkpoints/step_000001")]
    models.append(open_model(str(base), chat_template="chatml"))
    assert len({model.tokenizer.chat_template for model in models}) == 1
    assert len({model.end_tokens for model in models}) == 1
    assert not (base / "chat_template.jinja").exists()
    more = [*words, "run.steps=2", "--resume"]
    said = "was started with data.chat_template='chatml', not None: a resumed run must keep it"
    assert said in cli.run([*more, "data.chat_template="]).error
    assert cli.run([*more, chatml]).exit_code == 0
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2]
    # An evaluation of the run, and of its baseline by the same settings.
    out = tmp_path / "eval"
    small = ["limit=2", "samples=1", "max_tokens=8", "device=cpu"]
    assert load_settings(None, [f"model={run}", "out=o"]).chat_template == "chatml"
    ended = cli.run(["eval", "--model", run, "--baseline", base, "--out", out, *small])
    assert ended.exit_code == 0, ended.stderr
    for place in (out, out / "baseline"):
        assert json.loads((place / "manifest.json").read_text())["example_prompt"].endswith(head)
    words = ["diagnose", "--original", base, "--efficient", run, "--out", tmp_path / "d", *small]
    assert "set chat_template=chatml" in cli.run(words).error
    assert cli.run([*words, "chat_template=chatml"]).exit_code == 0
