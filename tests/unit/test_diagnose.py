"""`diagnose` on the shipped model and a disturbed copy of it; D_t, its memory, kinds of tokens."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_cli import ROOT, Finished, ForkedCli
from hf_configs import hf_config
from hf_reference import hf_model
from live_memory import LiveMemory
from made_diagnosis import make_diagnosis, write_diagnosis_page
from made_runs import HARM
from safetensors.torch import load_file, save_file
from tiny_models import SHAPES, samples, weights
from torch import Tensor
from transformers import Qwen2ForCausalLM

from megatron_opsft.commands.convert.run import open_source, write_source
from megatron_opsft.commands.diagnose import divergence
from megatron_opsft.commands.diagnose.divergence import NUM_PREFERRED, diverge, load_model
from megatron_opsft.commands.diagnose.kinds import kinds_of, stages_of
from megatron_opsft.commands.evaluate.inputs import EvalModel
from megatron_opsft.errors import UserError
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.records import Sample
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.durable import json_lines

ASSET = ROOT / "megatron_opsft/assets/tiny_reasoner"
NUM_RESPONSES = 12
SMALL = ["--limit", "6", "--samples", "2", "--max-tokens", "250", "--device", "cpu"]
KILLED = """
import os, signal
from megatron_opsft.commands.diagnose import run
left = [{left}]
class Counting(run.Journal):
    def append(self, *lines):
        super().append(*lines)
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
run.Journal = Counting
"""
KILLED_WHILE_SAMPLING = """
import os, signal
from megatron_opsft.data import stored_samples
stored_samples.SampleFiles.combine = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def efficient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = Path(shutil.copytree(ASSET, tmp_path_factory.mktemp("models") / "efficient"))
    draw = torch.Generator().manual_seed(0)
    values = load_file(directory / "model.safetensors")
    for name, value in values.items():
        noise = torch.randn(value.shape, generator=draw) * value.float().std()
        values[name] = value + (0.1 * noise).to(value.dtype) if value.dim() > 1 else value
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def diagnose(cli: ForkedCli, model: object, out: Path, *more: Any, prelude: str = "") -> Finished:
    words = ["diagnose", "--original", "tiny_reasoner", "--efficient", model, "--out", out]
    return cli.run([*words, *SMALL, *more], prelude)


@pytest.fixture(scope="module")
def whole(cli: ForkedCli, efficient: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diagnosis that nothing disturbed."""
    out = tmp_path_factory.mktemp("diagnosis") / "whole"
    ended = diagnose(cli, efficient, out)
    assert ended.exit_code == 0, ended.stderr
    assert "tiny_reasoner against efficient: " in ended.stdout
    return out


def outputs(out: Path) -> dict[str, bytes]:
    """All that must not depend on how it came about."""
    return {name: (out / name).read_bytes() for name in ("tokens.jsonl", "report.html")}


def test_every_token_of_every_response_is_there_and_counted(whole: Path, tmp_path: Path) -> None:
    there = {path.name for path in whole.iterdir()}
    assert there == {"manifest.json", "responses", *outputs(whole)}
    rows = list(json_lines(whole / "tokens.jsonl"))
    assert len(rows) == NUM_RESPONSES
    for row in rows:
        assert "".join(row["tokens"]).rstrip().endswith("sentence｜>")
        assert len(row["kl"]) == len(row["tokens"]) and 0 <= min(row["kl"]) < max(row["kl"])
        assert row["outcome"] in ("correct", "wrong", "no_answer") and row["alternatives"]
    kl = [value for row in rows for value in row["kl"]]
    first, *lines = write_diagnosis_page(
        tmp_path / "page.html", rows, "tiny_reasoner", "efficient"
    ).splitlines()
    assert f"{len(kl):,} tokens of 12 responses, D_t {fmean(kl):.4f} nats" in first
    by_kind, by_stage = "\n".join(lines).split("where in the response")
    for table in (by_kind, by_stage):
        rows_said = [
            line.replace(",", "").replace(" %", "")
            for line in table.splitlines()
            if line[-1:] == "%"
        ]
        columns = [line.split()[-3:] for line in rows_said]
        tokens, _, shares = ([float(n) for n in column] for column in zip(*columns, strict=True))
        assert sum(tokens) == len(kl) and sum(shares) == pytest.approx(100, abs=0.5)
    assert "after the first right answer" in by_stage


def test_the_page_is_made_of_the_tokens(tmp_path: Path) -> None:
    """Texts that mean harm stay texts; D_t may be 0 everywhere, as of a model and itself."""
    made = make_diagnosis(tmp_path)
    rows, out = [*json_lines(made / "tokens.jsonl")], made / "report.html"
    assert "60 tokens of 4 responses" in write_diagnosis_page(out, rows, "long", "short")
    page = out.read_text()
    assert "<h1>long against short</h1>" in page and page.count("<pre>") == 4
    assert page.count('class="k9" title="D_t = 5; efficient: &#39;&lt;/think&gt;&#39; 90 %') == 1
    cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd] .*?</t[hd]>", page)]
    # The token, how often D_t is large, the largest; under both models it and what is preferred.
    at = cells.index("Wait")
    assert cells[at : at + 8] == (
        ["Wait", "1", "5.000", "75.0 %", "10.0 %", "&lt;/think&gt;", "25.0 %", "90.0 %"]
    )
    assert cells[cells.index("2 nats") :][:3] == ["2 nats", "3", "5.0 %"]  # 2 itself is not above
    assert ">Wait: sum of D_t = 5 at 1 places</title>Wait</text>" in page
    assert "Largest first: Wait" in page
    assert HARM[:20] not in page and page.count("</script") == 2
    rows = [row | {"kl": [0.0] * len(row["kl"])} for row in rows]
    assert "0.0000 nats" in write_diagnosis_page(out, rows, "long", "short")


def test_kills_change_nothing(cli: ForkedCli, efficient: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for prelude in (KILLED_WHILE_SAMPLING, KILLED.format(left=5)):
        assert diagnose(cli, efficient, out, prelude=prelude).exit_code == -9
        assert not (out / "report.html").exists()
    with open(out / "tokens.jsonl", "ab") as torn:  # as a failing machine leaves it
        torn.write(b'{"problem_id": "p')
    assert (out / "tokens.jsonl").read_bytes().count(b"\n") == 5
    # To the end of all but those that were there: they were not read again.
    ended = diagnose(cli, efficient, out, prelude=KILLED.format(left=NUM_RESPONSES - 4))
    assert ended.exit_code == 0, ended.stderr
    assert outputs(out) == outputs(whole)
    assert " of 2 responses" in diagnose(cli, efficient, out, "--limit", "1").stdout


def test_misfits_are_one_line(cli: ForkedCli, efficient: Path, whole: Path, tmp_path: Path) -> None:
    before, out = outputs(whole), tmp_path / "out"
    bad = diagnose(cli, efficient, out, "--original", "/nowhere").error
    assert "--original=/nowhere" in bad and not out.exists()
    assert "unknown config key limits" in diagnose(cli, efficient, out, "--limits", "3").error
    then = f"are not those that this diagnosis was started with ({efficient}); set it back"
    said = diagnose(cli, "tiny_reasoner", whole).error
    assert f"the weights in tiny_reasoner {then}" in said
    bad = diagnose(cli, efficient, whole, "temperature=0.7").error
    assert "with temperature=0.6, not 0.7" in bad
    bad = diagnose(cli, efficient, whole / "responses", "--overwrite").error
    assert "holds something other" in bad and outputs(whole) == before
    path = Path(shutil.copytree(efficient, tmp_path / "model")) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 590}))
    assert "590" in diagnose(cli, path.parent, out).error


IDS = SimpleNamespace(decode=lambda ids: str(ids[0]))  # of a tokenizer


CPU = select_device("cpu")


def loaded(
    directory: Path, name: str, values: dict[str, Tensor] | None = None, device: Any = CPU
) -> Any:
    """values: written there first."""
    if values is not None:
        hf_model(name).config.save_pretrained(directory)
        save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    table = WeightTable(SHAPES[name], "te")
    model = EvalModel(name=name, directory=directory, tokenizer=IDS, end_tokens=(), table=table)
    return load_model(model, torch.float32, device)


@torch.no_grad()
def log_probs(sample: Sample, model: Any) -> Tensor:
    """float64 [response tokens, vocabulary]: of the next token where each was sampled."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_moe", "qwen3_5"])
def test_d_t_and_preferences_match_float64_softmax_and_are_0_of_a_model_and_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    draw = torch.Generator().manual_seed(1)
    noisy = {k: v + 0.02 * torch.randn(v.shape, generator=draw) for k, v in weights(name).items()}
    p, q = (loaded(tmp_path / key, name, v) for key, v in (("p", weights(name)), ("q", noisy)))
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", 7 * 301)  # divides no response's tokens
    for sample in samples(5, seed=3):
        log_p, log_q = log_probs(sample, p), log_probs(sample, q)
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert expected.min() > 1e-4  # far above what is compared
        ids = sample.prompt_ids, sample.response_ids
        kl, alternatives = diverge(p, q, IDS, *ids)
        assert kl == pytest.approx(expected.tolist(), abs=1e-5)
        largest = expected.topk(min(32, len(expected))).indices.tolist()
        assert [each["position"] for each in alternatives] == sorted(largest)
        for each in alternatives:
            in_p, in_q = (log[each["position"]].exp() for log in (log_p, log_q))
            likeliest = in_q.topk(NUM_PREFERRED).indices.tolist()
            sampled = sample.response_ids[each["position"]]
            both = {"original": in_p, "efficient": in_q}
            for token, told in (
                (sampled, each["probability"]),
                *zip(likeliest, each["preferred"], strict=True),
            ):
                assert told.get("token", str(sampled)) == str(token)
                assert {name: told[name] for name in both} == pytest.approx(
                    {name: float(shares[token]) for name, shares in both.items()}, abs=1e-5
                )
        kl, alternatives = diverge(p, p, IDS, *ids)
        assert set(kl) == {0.0} and alternatives == []


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_of_a_model_that_sees_the_language_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_checkpoint: bool
) -> None:
    """From its files, or as from a Megatron checkpoint from a stream of its tensors."""
    name, seen = "qwen3_5_tied", {"model.visual.merger.norm.weight": torch.ones(16)}
    shape = replace(SHAPES[name], architecture="Qwen3_5ForConditionalGeneration")
    of_text = weights(name)
    values = {
        key: of_text[key.replace("language_model.", "")] for key in WeightTable(shape).hf_shapes()
    }
    hf_config(shape).save_pretrained(tmp_path)
    save_file(values | seen, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = EvalModel(
        name=name, directory=tmp_path, tokenizer=IDS, end_tokens=(), table=WeightTable(shape, "te")
    )
    expected = hf_model(name).state_dict()
    monkeypatch.setattr(divergence, "is_dist_checkpoint", lambda path: is_checkpoint)
    found = load_model(model, torch.float32, CPU).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_megatron_checkpoint_is_the_model_that_was_converted(tmp_path: Path) -> None:
    name = "qwen3_moe"
    expected = loaded(tmp_path / "hf", name, weights(name)).state_dict()
    write_source(open_source(tmp_path / "hf"), tmp_path / "megatron", "megatron")
    found = loaded(tmp_path / "megatron", name).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are counted; accelerate finds none, and places everything in the CPU's memory."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def gpu(name: str) -> Any:
    """A device of a run on GPUs, whose tensors are on the device of that name."""
    return SimpleNamespace(is_cuda=True, torch_device=torch.device(name))


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("form", ["hf", "megatron"])
def test_over_several_gpus_a_model_is_distributed_by_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    here = loaded(tmp_path / "hf", "qwen2_tied", weights("qwen2_tied"))
    if form == "megatron":
        write_source(open_source(tmp_path / "hf"), tmp_path / "megatron", "megatron")
    asked = []
    make = Qwen2ForCausalLM.from_pretrained

    def noted(*given: Any, **options: Any) -> Any:
        asked.append(options["device_map"])
        return make(*given, **options)

    monkeypatch.setattr(Qwen2ForCausalLM, "from_pretrained", noted)
    model = loaded(tmp_path / form, "qwen2_tied", device=gpu("cpu"))
    assert asked == ["auto"]
    found, expected = model.state_dict(), here.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    (sample, *_) = samples(1, seed=3)
    kl, _ = diverge(here, model, IDS, sample.prompt_ids, sample.response_ids)
    assert set(kl) == {0.0}
    with pytest.raises(UserError, match="does not fit on the GPUs that diagnose sees"):
        loaded(tmp_path / form, "qwen2_tied", device=gpu("cuda"))


@pytest.mark.usefixtures("_two_gpus")
def test_without_accelerate_several_gpus_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if it were not installed
    with pytest.raises(UserError, match="pip install accelerate, or let it see one GPU"):
        loaded(tmp_path, "qwen2_tied", weights("qwen2_tied"), device=gpu("cpu"))


@pytest.mark.parametrize(
    ("tokens", "kinds"),
    [
        (
            "Wait·,· I· think·\n",
            "transition word·punctuation·first person singular·word·line break",
        ),
        (" We· and· us· and·mine", "first person plural·word·first person plural·word·word"),
        ("Al·tern·atively", "transition word·transition word·transition word"),
        ("Wait·ing", "word·word"),
        ("So· 12·+·=·.", "word·number·mathematics·mathematics·punctuation"),
        ("</think>·<|im_end|>·</s>", "end of thinking·end of response·end of response"),
        ("· ", "punctuation·punctuation"),
    ],
)
def test_kinds_of_tokens(tokens: str, kinds: str) -> None:
    assert "·".join(kinds_of(tokens.split("·"))) == kinds


def peak_bytes(vocab_size: int, num_tokens: int) -> int:
    """Of two models that have an output layer and nothing before it."""

    def stand_in() -> Any:
        head = torch.nn.Linear(8, vocab_size, bias=False)
        return SimpleNamespace(
            device=torch.device("cpu"),
            get_output_embeddings=lambda: head,
            base_model=lambda input_ids, use_cache: SimpleNamespace(
                last_hidden_state=torch.randn(1, input_ids.shape[1], 8)
            ),
        )

    p, q = stand_in(), stand_in()
    with LiveMemory() as memory:
        diverge(p, q, IDS, (1,), (1,) * num_tokens)
    return memory.peak_bytes


def test_memory_grows_with_no_vocabulary_and_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", 2**18)
    small, wide = peak_bytes(4096, 1000), peak_bytes(16384, 1000)
    assert small < 6 * 4 * 2**18 + 2**18 and wide < 1.05 * small
    assert peak_bytes(4096, 3000) - small < 4 * 256 * 2000  # a sixteenth of their logits


@pytest.mark.parametrize(
    ("tokens", "first_right_char", "letters"),
    [
        ("8-6=·2·.· Wait·</think>· 2", 5, "uuaaab"),
        ("8-6=·2·.· Wait·</think>· 2", None, "nnnnnb"),
        ("8-6=·2·.", 5, "uua"),
        ("so·</think>· it is ·2·.", 18, "uubbb"),
    ],
)
def test_stages_of_tokens(tokens: str, first_right_char: int | None, letters: str) -> None:
    """u: up to the first right answer; a: after it; b: behind the thinking; n: there is none."""
    name_of = {
        "u": "up to the first right answer",
        "a": "after the first right answer",
        "b": "answer behind the thinking",
        "n": "no right answer in the response",
    }
    stages = stages_of(tokens.split("·"), first_right_char)
    assert stages == [name_of[letter] for letter in letters]
