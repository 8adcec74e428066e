"""A run whose chat template is told not to think, on two ranks; what is made with its model."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ForkedCli
from processes import rank_preludes
from run_differences import read_lines
from small_run import CLOSED, QUICKSTART, SMALL_RUN, THINKING_OFF, thinking_model
from transformers import AutoTokenizer

from megatron_opsft.data.stored_responses import read_stored_responses

KEYS = [*SMALL_RUN, "run.steps=1", "optimizer.schedule=constant", "checkpoint.every=1"]
KEYS += ["data.prompts_per_step=2", "method.name=self_distillation", "method.responses=all"]
# In each rank: the prompts of the policy and of its teacher, as text.
WATCH = """
import json, os
from pathlib import Path
from megatron_opsft.data.prompts import PromptEncoder
encode, seen = PromptEncoder.encode, set()
def watch(self, *problem, **more):
    prompt = encode(self, *problem, **more)
    seen.add((self.template, self.tokenizer.decode(prompt)))
    Path({place!r}, os.environ["RANK"]).write_text(json.dumps(list(seen)))
    return prompt
PromptEncoder.encode = watch
"""


def train(place: Path, *more: str) -> list[str]:
    paths = [f"model.path={place / 'model'}", f"run.dir={place / 'run'}"]
    return ["train", QUICKSTART, *KEYS, *paths, *more]


@pytest.fixture(scope="module")
def place(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and a run of it with one step of two ranks."""
    place = tmp_path_factory.mktemp("place")
    thinking_model(place / "model")
    watch = WATCH.format(place=str(place))
    words = train(place, THINKING_OFF)
    runs = [cli.start(words, prelude + watch) for prelude in rank_preludes(2)]
    for ended in [run.wait() for run in runs]:
        assert ended.exit_code == 0, ended.stderr
    return place


def manifest_of(directory: Path) -> Any:
    return json.loads((directory / "manifest.json").read_text())


def test_every_prompt_of_both_ranks_and_the_card_s_are_told(place: Path) -> None:
    for rank in ("0", "1"):
        seen = json.loads((place / rank).read_text())
        templates = [template for template, _ in seen]
        assert {"r1", "concise"} == set(templates) and templates.count("r1") >= 50
        assert all(prompt.endswith(CLOSED) for _, prompt in seen)
    identity = manifest_of(place / "run")["identity"]
    assert identity["example_prompt"].count(CLOSED) == 2  # and the teacher's
    card = (place / "run/hf/README.md").read_text()
    assert "answer(messages, tokenizer_encode_kwargs={'enable_thinking': False}, max" in card
    assert f"{CLOSED}\n`````" in card


def test_a_resumed_run_keeps_its_arguments(cli: ForkedCli, place: Path) -> None:
    said = "was started with data.template_arguments={'enable_thinking': False}, not "
    others = {"data.template_arguments={enable_thinking: true}": "{'enable_thinking': True}: "}
    others |= {"data.template_arguments={}": "None: ", "run.seed=0": "None: "}
    for words, value in others.items():
        ended = cli.run(train(place, "run.steps=2", words, "--resume"))
        assert said + value + "a resumed run must keep it" in ended.error
    more = train(place, "run.steps=2", "run.show_samples=0", THINKING_OFF, "--resume")
    ended = cli.run(more)
    assert ended.exit_code == 0, ended.stderr
    assert [line["step"] for line in read_lines(place / "run/metrics.jsonl")] == [1, 2]
    assert manifest_of(place / "run")["adjusted"] == []


SMALL = ["limit=2", "samples=1", "max_tokens=16", "device=cpu", "judge=math"]


def test_an_evaluation_takes_the_run_s_arguments_or_others(
    cli: ForkedCli, place: Path, tmp_path: Path
) -> None:
    of_run, without = tmp_path / "of_run", tmp_path / "without"
    words = ["eval", "--model", place / "run", *SMALL]
    said = f'{place}/run was trained with template_arguments={{"enable_thinking": false}}, '
    ended = cli.run([*words, "--out", of_run])
    assert ended.exit_code == 0 and said + "taken from" in ended.stderr
    manifest = manifest_of(of_run)
    assert manifest["example_prompt"].endswith(CLOSED)
    assert manifest["identity"]["template_arguments"] == {"enable_thinking": False}
    ended = cli.run([*words, "--out", without, "--template-arguments", "{}", "name=without"])
    assert ended.exit_code == 0 and said + "not null as here" in ended.stderr
    manifest = manifest_of(without)
    assert manifest["example_prompt"].endswith("<think>\n")
    assert "template_arguments" not in manifest["identity"]
    refused = cli.run([*words, "--out", of_run, "template_arguments={}"]).error
    assert "with template_arguments.enable_thinking=false, not (not set)" in refused
    compared = cli.run(["eval", "compare", of_run, without, "--out", tmp_path / "compared"])
    said = "differs: template_arguments.enable_thinking: false (run); (not set) (without)"
    assert said in compared.stdout


def test_a_diagnosis_and_fixed_data_ask_with_the_arguments(
    cli: ForkedCli, place: Path, tmp_path: Path
) -> None:
    words = ["diagnose", "--original", place / "run", "--efficient", place / "model"]
    ended = cli.run([*words, "--out", tmp_path / "diagnosis", *SMALL])
    assert ended.exit_code == 0, ended.stderr
    manifest = manifest_of(tmp_path / "diagnosis/responses")
    assert manifest["example_prompt"].endswith(CLOSED)
    assert manifest["settings"]["template_arguments"] == {"enable_thinking": False}
    file = tmp_path / "rows.parquet"
    words = [
        *SMALL_RUN,
        f"model.path={place / 'model'}",
        THINKING_OFF,
        "verify.judge=own_judges:all_of_them",
    ]
    ended = cli.run(["data", "crst", QUICKSTART, *words, "--limit", "2", "--out", file])
    assert ended.exit_code == 0, ended.stderr
    rows = read_stored_responses(file)
    assert rows.manifest["template_arguments"] == {"enable_thinking": False}
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    for row in rows:
        assert tokenizer.decode(row.prompt_ids).endswith(CLOSED)
