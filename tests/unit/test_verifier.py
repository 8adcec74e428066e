"""The verifier's pool: what it does with hangs, deaths and order; and a user's own judge: what it
gets and may return, and what is said of mistakes.
"""

import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_cli import ROOT, ForkedCli
from responses import rollout_of
from rows import write_rows
from small_run import QUICKSTART

from megatron_opsft.commands.evaluate.settings import JUDGE_KEYS
from megatron_opsft.config import VerifyConfig
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.records import FinishReason, Outcome, Problem
from megatron_opsft.run.start.checked_run import make_checked_run
from megatron_opsft.run.start.input import read_input
from megatron_opsft.verify.verifier import Verifier, check_judge, describe_judge, share_of_cores
from megatron_opsft.verify.worker import open_judge
from megatron_opsft.verify.worker_pool import VerifierPool

CORRECT, WRONG, ERROR = Outcome.CORRECT, Outcome.WRONG, Outcome.ERROR
EXAMPLE = "examples.own_judge:within_tolerance"
ROGUE = "own_judges:judge_or_misbehave"


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    return [one for one in process.children() if "verify.worker" in " ".join(one.cmdline())]


@pytest.mark.slow
def test_hung_and_dying_workers_are_replaced_and_cost_only_their_item() -> None:
    """Verdicts are in the order of the items; equal items are judged once."""
    texts = ["sleep 0.1", "hang", "print", "die", "hang", "exit", "ok 2"]
    items = [(text, "x") for text in texts] + [("hang", "other gold"), ("ok", "ok"), ("ok", "ok")]
    with VerifierPool(2, 1.0, judge=ROGUE) as pool:
        start = time.monotonic()
        verdicts = pool.judge(items)
        assert time.monotonic() - start < 60
        assert [v.outcome for v in pool.judge([("fine", "fine")] * 3)] == [CORRECT] * 3
    late = Outcome.TIMEOUT
    expected = [WRONG, late, WRONG, ERROR, late, ERROR, WRONG, late, CORRECT, CORRECT]
    assert [v.outcome for v in verdicts] == expected
    ended = {"die": "its process was ended by signal 9 (Killed); if it needs more than "}
    ended["die"] += "verify.memory_gb=1, raise that"
    ended["exit"] = "SystemExit: 3 (own_judges.py:56)"
    for (text, _), verdict in zip(items, verdicts, strict=True):
        assert verdict.answer == ended.get(text) or verdict.answer.rpartition(" ")[0] in (text, "")
    assert [verdict.answer for verdict in verdicts if verdict.outcome is ERROR] == [*ended.values()]
    assert verdicts[-1] == verdicts[-2]  # of one process, which names itself


def test_an_answer_too_large_for_what_is_left_is_judged_by_a_fresh_worker() -> None:
    items = [("keep 200", "x"), ("keep 400", "keep 400"), ("keep 2000", "x"), ("fine", "fine")]
    with VerifierPool(1, 30, judge=ROGUE, max_memory_bytes=600 * 2**20) as pool:
        verdicts = pool.judge(items)
    assert [v.outcome for v in verdicts] == [WRONG, CORRECT, ERROR, CORRECT]
    assert verdicts[2].answer == "it needs more memory than verify.memory_gb=0.585938; raise that"


@pytest.mark.parametrize(
    ("dies", "says"),
    [
        ("os._exit(3)", "its process ended with exit code 3 and without a verdict"),
        ("os._exit(0)", "its process ended with exit code 0 and without a verdict"),
        ("os.kill(os.getpid(), 4)", "its process was ended by signal 4 (Illegal instruction)"),
        (
            "os.abort()",
            "its process was ended by signal 6 (Aborted); if it needs more than "
            "verify.memory_gb=1, raise that",
        ),
        ("sys.exit(3)", "SystemExit: 3 (dying.py:4)"),
    ],
)
def test_a_judge_that_ends_its_process_says_how_and_blames_memory_only_if_it_can(
    dies: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "dying.py"
    file.write_text(f"import os, sys\n\ndef judge(text, gold, fields):\n    {dies}\n")
    with VerifierPool(1, 30, judge=f"{file}:judge") as pool:
        (verdict,) = pool.judge([("a", "a")])
    assert (verdict.outcome, verdict.answer) == (ERROR, says)


def failing_at(*problems: str) -> list[tuple[str, Outcome]]:
    return [(problem, ERROR) for problem in problems]


def test_a_judge_always_fails_if_it_has_no_verdict_on_enough_problems() -> None:
    """Eight, or all that there are; one problem with many responses is not enough."""
    late, cut = (str(7), Outcome.TIMEOUT), ("cut", Outcome.UNFINISHED)
    with Verifier(VerifyConfig(judge=ROGUE, workers=1)) as verifier:
        assert not verifier.always_fails([cut] * 99, 99)
        assert not verifier.always_fails(failing_at(*map(str, range(7))) * 20, 99)
        assert not verifier.always_fails([cut], 8)
        assert verifier.always_fails([late], 99)
        assert not verifier.always_fails([("8", WRONG), *failing_at("9")], 99)
        assert verifier.has_judged and not verifier.always_fails(failing_at(*"abcdefghijk"), 11)
    with Verifier(VerifyConfig(judge=ROGUE, workers=1)) as verifier:
        assert not verifier.always_fails([], 0)
        assert verifier.always_fails(failing_at("a", "b"), 2)
        assert "none of the responses to 2 problems could be judged; the first: why. " in str(
            verifier.refusal("why")
        )


def test_a_judge_in_a_file_that_no_path_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports its neighbours, and may be called as another module is. Its identity is of its
    name and content, wherever it lies.
    """
    names = []
    for folder in ("one", "two"):
        file = tmp_path / folder / "json.py"
        file.parent.mkdir()
        (file.parent / "a_neighbour.py").write_text("RIGHT = 'right'\n")
        file.write_text(
            "import a_neighbour, dataclasses\n"
            "@dataclasses.dataclass\nclass Answer:\n    text: 'str'\n"
            "def judge(text, gold, fields):\n    return Answer(text).text == a_neighbour.RIGHT\n"
        )
        config = VerifyConfig(judge=f"{file}:judge", workers=1)
        check_judge(config)
        pairs = [(text, Problem(id=text, text="", answer="x")) for text in ("right", "wrong")]
        assert outcomes(config, pairs) == [CORRECT, WRONG]
        names.append(describe_judge(config, ""))
    assert names[0] == names[1] and re.fullmatch(r"json.py:judge, sha256 [0-9a-f]{16}", names[0])
    monkeypatch.chdir(tmp_path)
    check_judge(VerifyConfig(judge="one/json.py:judge"))
    monkeypatch.setenv("HOME", str(tmp_path))
    check_judge(VerifyConfig(judge="~/one/json.py:judge"))
    with pytest.raises(UserError, match=r"none.py cannot be imported \(FileNotFoundError: .*\)$"):
        check_judge(VerifyConfig(judge=f"{tmp_path}/none.py:judge"))
    with pytest.raises(UserError, match=r"json.py has no function other; write .*FILE.py:function"):
        check_judge(VerifyConfig(judge="one/json.py:other"))


BIG_JUDGE = """
import mmap, os
IMPORTED = mmap.mmap(-1, {mib} << 20)  # address space alone, as most of a library's is
kept = []
def judge(text, gold, fields):
    if text.startswith("keep"):
        kept.append(mmap.mmap(-1, int(text.split()[1]) << 20))
    return Verdict(outcome=Outcome.CORRECT, answer=str(os.getpid()))
from megatron_opsft.records import Outcome, Verdict
"""


def test_what_a_judge_imports_is_not_counted_as_what_its_answers_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that imports torch would get a fresh process after every answer."""
    (tmp_path / "big.py").write_text(BIG_JUDGE.format(mib=560))
    monkeypatch.syspath_prepend(tmp_path)
    texts = ["a", "b", "keep 100", "c", "keep 200", "d"]
    with VerifierPool(1, 30, judge="big:judge") as pool:
        processes = [pool.judge([(text, "x")])[0].answer for text in texts]
    assert len(set(processes)) == 2 and processes[:-1] == processes[:1] * 5


def test_a_judge_that_needs_more_memory_than_it_may_have_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bigger.py").write_text(BIG_JUDGE.format(mib=1400))
    monkeypatch.syspath_prepend(tmp_path)
    said = r"^judge bigger:judge: what it imports takes 1\.4 GiB, and a worker has "
    with pytest.raises(UserError, match=said + r"verify.memory_gb=1; set verify.memory_gb=3$"):
        check_judge(VerifyConfig(judge="bigger:judge"))
    with pytest.raises(UserError, match=said + "verify_memory_gb=1.5; set verify_memory_gb=3$"):
        check_judge(VerifyConfig(judge="bigger:judge", memory_gb=1.5), JUDGE_KEYS)
    config = VerifyConfig(judge="bigger:judge", memory_gb=3, workers=1)
    check_judge(config)
    assert outcomes(config, [("a", Problem(id="p", text="", answer="x"))]) == [CORRECT]


def test_a_judge_that_forks_and_answers_twice_shifts_no_verdict() -> None:
    texts = ["fork", "sleep 0.3", "b", "fork", "sleep 0.3", "c"]
    with VerifierPool(1, 30, judge=ROGUE) as pool:
        verdicts = pool.judge([(text, "b") for text in texts])
        assert [v.outcome for v in pool.judge([("fork", "fork"), ("z", "a")])] == [CORRECT, WRONG]
    assert [v.answer.rpartition(" ")[0] for v in verdicts] == texts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sleep 9", "it took longer than verify_timeout=0.5; raise that"),
        ("die", "if it needs more than verify_memory_gb=1, raise that"),
    ],
)
def test_the_first_answer_that_was_not_judged_names_the_key(
    text: str, says: str, caplog: Any
) -> None:
    config = VerifyConfig(judge=ROGUE, workers=1, timeout_seconds=0.5)
    rollout = rollout_of(text, problem_id="p", sample_index=0, finish_reason=FinishReason.STOP)
    with caplog.at_level(logging.WARNING), Verifier(config, JUDGE_KEYS) as verifier:
        verifier.wait_until_ready()
        verifier.score([rollout], {"p": Problem(id="p", text="", answer="x")})
    assert says in caplog.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_a_worker_that_starts_or_waits_costs_no_verdict(number: int) -> None:
    """One that is killed is replaced; a scheduler's signal is none of its business."""
    with VerifierPool(1, 30, judge=ROGUE) as pool:
        for _ in range(2):
            while not (workers := workers_of(psutil.Process())):
                time.sleep(0.01)
            workers[0].send_signal(number)
            assert [v.outcome for v in pool.judge([("a", "a"), ("b", "a")])] == [CORRECT, WRONG]


PARENT = f"""
import sys
from megatron_opsft.verify.worker_pool import VerifierPool
pool = VerifierPool(2, 30, judge={ROGUE!r})
pool.judge([("sleep 0.2", str(n)) for n in range(4)])
assert "torch" not in sys.modules
print(flush=True)
pool.judge([("hang", "x"), ("hang", "y")])
"""


def test_workers_end_with_their_parent() -> None:
    words = [sys.executable, "-c", PARENT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"\n"
        time.sleep(0.3)
        workers = workers_of(psutil.Process(parent.pid))
        parent.kill()
    assert len(workers) == 2
    _, left = psutil.wait_procs(workers, timeout=20)
    assert all(worker.status() == psutil.STATUS_ZOMBIE for worker in left)


def test_workers_that_cannot_start_are_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = pytest.raises(UserError, match="4 verifier workers in a row ended with exit code -9 ")
    with VerifierPool(1, 30, judge="leaving:judge") as pool, said:
        pool.judge([("a", "a")])


@pytest.mark.parametrize(
    ("usable", "ranks", "environment", "workers"),
    [
        (12, "8", {"SLURM_CPUS_PER_TASK": "12"}, 12),
        (48, "8", {"SLURM_CPUS_PER_TASK": "48", "TORCHELASTIC_RUN_ID": "none"}, 6),
        (96, "1", {"SLURM_CPUS_PER_TASK": "96"}, 32),
        (4, "10000", {}, 1),
    ],
)
def test_cores_are_divided_by_the_ranks_that_share_them(
    usable: int, ranks: str, environment: dict[str, str], workers: int, monkeypatch: Any
) -> None:
    """SLURM with cores for each task, with torchrun inside; and no SLURM."""
    for name in ("SLURM_CPUS_PER_TASK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"LOCAL_WORLD_SIZE": ranks}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)), raising=False)
    assert share_of_cores() == workers


def test_verdicts_do_not_depend_on_what_came_before_nor_on_the_number_of_workers() -> None:
    """Distinct answers in two orders, and what the workers hold of them in the end."""
    forms = [(r"\frac{%d}{7}", r"\dfrac{%d}{7}"), (r"%d{,}000", "%d000"), (r"\text{(%d)}", "%d")]
    items, wanted = [], []
    for n in range(1, 101):
        wanted += [WRONG if n % 4 == 0 else CORRECT] * len(forms)
        items += [(rf"so \boxed{{{one % n}}}", gold % (n + (n % 4 == 0))) for one, gold in forms]
    shuffled, limit = random.Random(1).sample(items, len(items)), 1 << 30
    with VerifierPool(2, 60, max_memory_bytes=limit) as two, VerifierPool(1, 60) as one:
        first, second = two.judge(items), one.judge(shuffled)
        held = [worker.memory_info().rss for worker in workers_of(psutil.Process())]
    assert len(held) == 3 and max(held) < limit / 2
    assert dict(zip(shuffled, second, strict=True)) == dict(zip(items, first, strict=True))
    assert [v.outcome for v in first] == wanted


def outcomes(config: VerifyConfig, pairs: list[tuple[str, Problem]]) -> list[Outcome]:
    """Of finished responses to the problems; the same ones, cut off, are not judged."""
    rollouts = [
        rollout_of(text, problem_id=problem.id, sample_index=0, finish_reason=reason)
        for text, problem in pairs
        for reason in (FinishReason.STOP, FinishReason.LENGTH)
    ]
    problems = {problem.id: problem for _, problem in pairs}
    with Verifier(config) as verifier:
        verdicts = verifier.score(rollouts, problems)
        assert verifier.score(rollouts, problems) == verdicts
    assert {verdict.outcome for verdict in verdicts[1::2]} == {Outcome.UNFINISHED}
    return [verdict.outcome for verdict in verdicts[::2]]


def test_what_a_function_may_return_and_what_an_exception_becomes(caplog: Any) -> None:
    problem = Problem(id="p", text="", answer="x", fields={"answer": "x"})
    other = Problem(id="q", text="", answer="x", fields={"answer": "y"})
    config = VerifyConfig(workers=1, judge="own_judges:any_return")
    returned = ["true", "0.0", "1.0", "outcome", "none", "raise", "nan", "inf"]
    returned += ["numpy", "half", "fields"]
    with caplog.at_level(logging.WARNING, "megatron_opsft"):
        got = outcomes(config, [*((text, problem) for text in returned), ("fields", other)])
    wanted = [CORRECT, WRONG, CORRECT, Outcome.NO_ANSWER, ERROR, ERROR, ERROR, ERROR]
    assert got == [*wanted, CORRECT, CORRECT, CORRECT, WRONG]
    (message,) = [record.getMessage() for record in caplog.records]  # of two calls
    assert "4 of 12 responses could not be judged" in message
    assert "it returned NoneType, not a bool, a number, an Outcome or a Verdict" in message


def test_the_error_of_a_judge_names_the_line_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised in the function, in one that it calls, in a library; and by what it returns."""
    monkeypatch.chdir(tmp_path)
    Path("placed_judge.py").write_text(
        "import functools, json, unittest.mock\n\n\n"
        "def read(text):\n    return {}[text]\n\n\n"
        "def judge(text, gold, fields):\n"
        "    if text == 'library':\n        json.loads('{')\n"
        "    if text == 'returns':\n        return 'yes'\n"
        "    return read(text)\n\n\n"
        "decorated = unittest.mock.patch.dict({}, {})(judge)\n"
        "partly = functools.partial(judge)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("decorated", "partly"):
        message = open_judge(f"placed_judge:{name}")("called", "x").answer
        assert message == "KeyError: 'called' (placed_judge.py:5)"
    judge = open_judge("placed_judge:judge")
    said = {text: judge(text, "x").answer for text in ("called", "library", "returns")}
    assert said["called"] == "KeyError: 'called' (placed_judge.py:5)"
    assert said["library"].endswith(" (placed_judge.py:10)")
    assert said["returns"].endswith("an Outcome or a Verdict")


def test_a_judge_that_does_not_take_three_arguments_is_one_line_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("arguments.py").write_text(
        "two = lambda text, gold: True\n"
        "four = lambda text, gold, fields, more: True\n"
        "some = lambda text, *others: True\n"
        "class AnObject:\n    def __call__(self, text, gold, fields): return True\n"
        "an_object = AnObject()\n"
    )
    for name in ("two", "four"):
        said = rf"judge arguments:{name}: it is called as {name}\(text, gold, fields\), and takes"
        with pytest.raises(UserError, match=said):
            check_judge(VerifyConfig(judge=f"arguments:{name}"))
    for name in ("some", "an_object"):
        check_judge(VerifyConfig(judge=f"arguments:{name}"))


def test_a_judge_that_is_not_there_is_one_line_before_anything_is_written(
    cli: ForkedCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ["train", QUICKSTART, f"run.dir={tmp_path / 'run'}", "verify.judge=no_such:judge"]
    evaluate = ["eval", "model=tiny_reasoner", f"out={tmp_path / 'eval'}", "judge=no_such:judge"]
    for words in (train, evaluate):
        assert "judge no_such:judge: no_such cannot be imported" in cli.run(words).error
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    Path("broken_judge.py").write_text("import no_such_package\n")
    Path("other_judge.py").write_text("from math import pi\n")
    for name, said in {
        "broken_judge:judge": "No module named 'no_such_package'",
        "other_judge:judge": "other_judge.py has no function judge",
        "other_judge:pi": "other_judge.py has no function pi",
    }.items():
        with pytest.raises(UserError, match=f"^[^\n]*{said}[^\n]*$"):
            check_judge(VerifyConfig(judge=name))
    with pytest.raises(ValueError, match="'maths' is not a judge; write math, .*function "):
        VerifyConfig(judge="maths")
    with pytest.raises(ValueError, match=r"did you mean own\.judges:last_box\?"):
        VerifyConfig(judge="own.judges.last_box")


def test_the_example_s_columns_reach_it_in_training_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    rows = [{"problem": "p", "answer": "5"}, {"problem": "q", "answer": "5", "tolerance": 2}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    held_out = write_rows(
        tmp_path / "held_out.jsonl", [row | {"problem": 2 * row["problem"]} for row in rows]
    )
    words = [f"data.train={source}", f"eval.data={held_out}", f"verify.judge={EXAMPLE}"]
    model = ASSETS / TINY_REASONER
    config = load_config(Path(QUICKSTART), words)
    read = read_input(make_checked_run(config, read_model_shape(model), 1), model)
    assert read.held_out is not None
    for problems in (read.problems.problems, sorted(read.held_out.problems, key=lambda p: p.text)):
        pairs = [(text, problem) for text in ("It is 5.", "It is 6.") for problem in problems]
        got = outcomes(VerifyConfig(workers=1, judge=EXAMPLE), pairs)
        assert got == [CORRECT, CORRECT, WRONG, CORRECT]


def test_an_evaluation_is_of_one_judge_and_its_code(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rules = describe_judge(VerifyConfig(), "math-verify 0")
    assert re.fullmatch("math-verify 0, rules [0-9a-f]{16}", rules)
    own, code, said = VerifyConfig(judge="mine.judges:judge"), tmp_path / "mine/judges.py", set()
    code.parent.mkdir()
    for text in ("judge = bool\n", "judge = str\n"):
        code.write_text(text)
        said.add(describe_judge(own, ""))
    assert len(said) == 2
    assert all(line.startswith("mine.judges:judge, sha256 ") for line in said)
