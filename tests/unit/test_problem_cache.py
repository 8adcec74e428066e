"""Problems and prompts that processes share: what `read` gives, read once, whatever happens."""

import fcntl
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked_cli import ROOT

from megatron_opsft.config import DataConfig
from megatron_opsft.data import problem_cache
from megatron_opsft.data.problem_cache import Encode, share_problems
from megatron_opsft.data.problems import ProblemSet, drop_unusable_prompts, load_problems
from megatron_opsft.data.prompts import PromptEncoder, load_tokenizer
from megatron_opsft.records import Message, Problem

MODEL = ROOT / "megatron_opsft/assets/tiny_reasoner"
LIMIT = 46  # tokens: some of the prompts are longer


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tokenizer=load_tokenizer(MODEL), template="r1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf/megatron_opsft/problems"


class Reader:
    """Reads `source`, and counts how often."""

    def __init__(self, source: Path) -> None:
        self.data = DataConfig(train=str(source), max_prompt_tokens=LIMIT)
        self.num_reads = 0

    def __call__(self, encode: Encode) -> ProblemSet:
        self.num_reads += 1
        loaded = load_problems(self.data.train, template=self.data.template)
        return drop_unusable_prompts(loaded, encode, self.data.max_prompt_tokens)

    def share(self, encoder: PromptEncoder, model: Path = MODEL) -> tuple[ProblemSet, Encode]:
        problems, knowing = share_problems(self.data, encoder, model, self)
        return problems, knowing.encode


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """Of real problems, one with letters of other scripts, one twice, and rows that are bad."""
    lines = (ROOT / "tests/data/train.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    lines += ['{"problem": "Grüße 你好 1+1", "answer": 2}', lines[0], "no JSON", '{"answer": 1}']
    source = tmp_path / "train.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    return Reader(source)


def same(shared: ProblemSet, alone: ProblemSet) -> bool:
    return (
        [*shared.problems] == [*alone.problems]
        and shared.problems[3:9:2] == alone.problems[3:9:2]
        and (shared.name, shared.rows, shared.bad_rows, shared.sha256)
        == (alone.name, alone.rows, alone.bad_rows, alone.sha256)
    )


def same_chats(shared: ProblemSet, alone: ProblemSet) -> bool:
    return [*shared.problems] == [*alone.problems] and shared.sha256 == alone.sha256


def test_what_is_shared_is_what_was_read_and_read_once(
    home: Path, reader: Reader, encoder: PromptEncoder
) -> None:
    alone = reader(encoder.encode)
    assert len(alone.problems) > 30 and len(alone.bad_rows) > 2
    for _ in range(2):
        problems, encode = reader.share(encoder)
        assert reader.num_reads == 2
        assert same(problems, alone)
        assert [encode(p) for p in alone.problems] == [encoder.encode(p) for p in alone.problems]
        another = Problem(id="x", text="another one", answer="1")
        assert encode(another) == encoder.encode(another)
    assert {file.suffix for file in home.iterdir()} == {".arrow", ".lock"}


def test_other_columns_are_shared_as_they_were_read(
    home: Path, encoder: PromptEncoder, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(
        '{"problem": "1 + 1?", "answer": 2, "tests": [{"in": "ü", "out": 0.5}], "none": null}\n'
        '{"problem": "2 + 1?", "answer": 3, "not": NaN}\n'
    )
    data = DataConfig(train=str(source))

    def share(with_fields: bool) -> ProblemSet:
        def read(encode: Encode) -> ProblemSet:
            loaded = load_problems(data.train, with_fields=with_fields)
            return drop_unusable_prompts(loaded, encode, 1024)

        problems, _ = share_problems(data, encoder, MODEL, read, with_fields=with_fields)
        assert same(problems, read(encoder.encode))
        return problems

    plain, full = share(False), share(True)
    assert [problem.fields for problem in plain.problems] == [{}, {}]
    assert [problem.fields for problem in full.problems] == [
        {"answer": 2, "tests": [{"in": "ü", "out": 0.5}], "none": None},
        {"answer": 3},
    ]
    assert plain.sha256 != full.sha256


def test_other_data_tokenizer_or_settings_are_another_set(
    home: Path, reader: Reader, encoder: PromptEncoder, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    source = Path(reader.data.train)

    def change_data() -> None:
        source.write_text(source.read_text(encoding="utf-8") + '\n{"problem": "x", "answer": 1}')

    def change_limit() -> None:
        reader.data = reader.data.model_copy(update={"max_prompt_tokens": LIMIT - 1})

    def change_model() -> None:
        (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")

    changes: list[Callable[[], None]] = [change_data, change_limit, change_model]
    reader.share(encoder, model)
    for number, change in enumerate(changes, start=2):
        change()
        reader.share(encoder, model)
        reader.share(encoder, model)
        assert reader.num_reads == number
    chat = PromptEncoder(tokenizer=encoder.tokenizer, template="chat")
    reader.share(chat, model)
    assert reader.num_reads == len(changes) + 2


def test_the_same_last_message_behind_others_is_another_prompt(
    home: Path, encoder: PromptEncoder, tmp_path: Path
) -> None:
    chats = [
        [{"role": "user", "content": "1+1?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
    ]
    rows = [{"prompt": chat, "answer": 2} for chat in chats]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = Reader(source)
    alone = reader(encoder.encode)
    assert [p.before for p in alone.problems] == [(), (Message("system", "Be brief."),)]
    problems, encode = reader.share(encoder)
    assert same_chats(problems, alone)
    first, second = (encode(problem) for problem in problems.problems)
    assert first != second
    assert [first, second] == [encoder.encode(problem) for problem in alone.problems]


def test_a_changed_template_file_is_another_set(
    home: Path, reader: Reader, encoder: PromptEncoder, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.jinja"
    reader.data = reader.data.model_copy(update={"template": str(file)})
    for number, text in enumerate(("{{ problem }} Answer:", "{{ problem }} = ?"), start=1):
        file.write_text(text)
        for _ in range(2):
            problems, _ = reader.share(encoder)
            assert problems.problems[0].text.endswith(text[-4:])
        assert reader.num_reads == number


def test_of_many_at_once_one_reads(home: Path, reader: Reader, encoder: PromptEncoder) -> None:
    together = threading.Barrier(6)

    def start(_: int) -> int:
        together.wait()
        return len(reader.share(encoder)[0].problems)

    with ThreadPoolExecutor(6) as ranks:
        counts = [*ranks.map(start, range(6))]
    assert len(set(counts)) == 1 and reader.num_reads == 1


def test_a_damaged_file_and_what_a_killed_process_leaves_are_replaced(
    home: Path, reader: Reader, encoder: PromptEncoder
) -> None:
    whole = reader.share(encoder)[0]
    (file,) = home.glob("*.arrow")
    content = file.read_bytes()
    file.with_suffix(".partial").write_bytes(content[:100])
    for damaged in (content[:-1000], b"", None):
        if damaged is None:
            file.unlink()
        else:
            file.write_bytes(damaged)
        assert reader.share(encoder)[0].sha256 == whole.sha256
        assert file.read_bytes() == content
    assert reader.num_reads == 4


def test_where_nothing_can_be_written_each_reads_for_itself(
    home: Path,
    reader: Reader,
    encoder: PromptEncoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = reader(encoder.encode)
    monkeypatch.setenv("HF_HOME", "/dev/null")
    problems, encode = reader.share(encoder)
    assert same(problems, alone) and reader.num_reads == 2
    assert encode(alone.problems[0]) == encoder.encode(alone.problems[0])
    assert "every rank tokenises the data for itself" in caplog.text


def test_one_that_never_ends_is_not_waited_for(
    home: Path, reader: Reader, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.share(encoder)
    (file,) = home.glob("*.arrow")
    file.unlink()
    monkeypatch.setattr(problem_cache, "PATIENCE_SECONDS", 0.3)
    with file.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert len(reader.share(encoder)[0].problems) > 30
    assert reader.num_reads == 2 and not file.exists()
