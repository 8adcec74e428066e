"""Every method trains the tiny reasoner: rewards and advantages are what it makes of the responses
(by hand: tests/unit/test_methods.py), and a run that is killed resumes to the last bit, of every
method that carries something on.
"""

import json
from pathlib import Path
from typing import Any

import meter_by_hand
import numpy as np
import pytest
from forked_cli import ROOT, ForkedCli
from groups import columns
from jobs import run_training
from responses import facts, rollout_of
from rows import write_rows
from run_differences import compare_runs, read_lines
from small_run import QUICKSTART, SMALL_RUN
from transformers import AutoTokenizer
from world import World

from megatron_opsft.config.load import load_config
from megatron_opsft.data.stored_responses import StoredResponse, write_stored_responses
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.facts import read_references
from megatron_opsft.methods.settings import MethodState
from megatron_opsft.methods.updates import MethodRun
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER
from megatron_opsft.records import Outcome, Problem
from megatron_opsft.runtime.durable import json_lines

RUN = [
    *SMALL_RUN,
    "run.steps=2",
    "data.prompts_per_step=2",
    "eval.num_problems=1",
    "eval.max_response_tokens=8",
    "checkpoint.every=1",
    "checkpoint.asynchronous=false",
]
# What a run of this size needs; lengths here are some dozens of tokens, not thousands.
ASKED = ["method.lowest_target=8", "method.highest_target=60"]
MONITOR = ["lowest_target=16", "highest_target=64", "target_step=16"]
MONITOR = [f"method.{key}" for key in (*MONITOR, "monitor_problems=3", "monitor_samples=4")]
SETTINGS: dict[str, list[str]] = {
    "grpo": ["method.beta=0.04", "method.updates_per_batch=2", "method.overlong_buffer=40"],
    "dr_grpo": ["method.updates_per_batch=2"],
    "thinkprune": ["method.limits=64,50", "method.stage_steps=1", "method.beta=0.04"],
    "l1_exact": ASKED,
    "l1_max": ASKED,
    "er_rl": ["method.beta=0.01", "method.whiten=tokens"],
    "laser": ["method.target=40"],
    "laser_d": MONITOR,
    "laser_de": [*MONITOR, "method.updates_per_batch=2"],
    "kimi": ["method.updates_per_batch=2", "method.warmup_steps=1"],
    "dler": ["method.max_refills=2", "rollout.max_response_tokens=50"],
    "gdpo": ["method.target=40"],
    "short_rl": ["method.length_tolerance=2"],
    "a_dlp": ["method.reference_accuracy=0.5"],
    "gfpo": ["method.kept=3"],
    "self_distillation": ["method.refresh_every=2", "method.responses=all"],
}
SAMPLING = [name for name, method in METHODS.items() if not method().has_fixed_data]
FIXED = [*(METHODS.keys() - SAMPLING), "o1_pruner"]
# A stage is to have begun, or a teacher to be in the second step of its own.
LENGTHENED = {"thinkprune": ["run.steps=3"], "self_distillation": ["run.steps=4"]}
KILLED_AFTER = {"thinkprune": 2, "self_distillation": 3}
# The others' steps depend on no step before them: they make one here. One of each kind and state.
RESUMED = {"on_policy_sft", "grpo", "thinkprune", "kimi", "dler", "self_distillation"}
RESUMED |= {"crst", "o1_pruner", *{METHODS[name].state_class: name for name in SAMPLING}.values()}
# In the run's process: its prompts, and its directory as a kill after so many steps would leave it.
WATCH = """
import json, shutil
from pathlib import Path
from megatron_opsft.rollout.hf.engine import HfEngine
from megatron_opsft.run.record.recorder import RunRecorder
from megatron_opsft.run.start.session import Session

run_dir, killed_after, prompts = Path({run_dir!r}), {killed_after}, {{}}
made_prompt, checkpoint = Session.prompt_of, RunRecorder.checkpoint
HfEngine.sleep = lambda self: print("asleep")

def noted(self, problem, **which):
    prompt = made_prompt(self, problem, **which)
    prompts[problem.id] = self.sampler.encoder.tokenizer.decode(prompt)
    run_dir.with_name("prompts.json").write_text(json.dumps(prompts))
    return prompt

def copied(self, step, **how):
    checkpoint(self, step, **how)
    if step == killed_after:
        deleting = shutil.ignore_patterns(".partial_*")  # by a thread, now
        shutil.copytree(run_dir, run_dir.with_name("killed"), ignore=deleting)

Session.prompt_of, RunRecorder.checkpoint = noted, copied
"""


def run_and_resume(cli: ForkedCli, tmp_path: Path, name: str, keys: list[str]) -> Path:
    """The directory of a run; one killed on the way and resumed is equal, of methods in RESUMED."""
    run_dir, after = tmp_path / "whole", KILLED_AFTER.get(name, 1)
    words = ["train", QUICKSTART, *RUN, *LENGTHENED.get(name, []), f"method.name={name}", *keys]
    words += ["run.steps=1"] * (name in SAMPLING and name not in RESUMED)
    watch = WATCH.format(run_dir=str(run_dir), killed_after=after)
    ended = cli.run([*words, f"run.dir={run_dir}"], watch)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.count("asleep") == ended.stdout.count("\nstep ")  # while it trains
    if name not in RESUMED:
        return run_dir
    killed = tmp_path / "killed"
    assert max(path.name for path in killed.glob("checkpoints/*")) == f"step_{after:06d}"
    assert not (killed / "hf").exists()
    ended = cli.run([*words, f"run.dir={killed}", "--resume"])
    assert ended.exit_code == 0, ended.stderr
    assert f"{after} of {after + 1} steps are done" in ended.stdout
    assert compare_runs(run_dir, killed) == []
    return run_dir


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = read_lines(run_dir / "metrics.jsonl")
    assert lines
    return lines


def groups_of(run_dir: Path, step: int) -> list[list[dict[str, Any]]]:
    """Four responses to each problem that was drawn."""
    rows = list(json_lines(run_dir / f"rollouts/step_{step:06d}.jsonl.gz"))
    assert rows
    return [rows[first : first + 4] for first in range(0, len(rows), 4)]


def kept_state(run_dir: Path, step: int) -> Any:
    """The method's in the checkpoint after a step."""
    checkpoint = run_dir / f"checkpoints/step_{step:06d}/complete.json"
    return json.loads(checkpoint.read_text())["method_state"]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of O1-Pruner: the same for every problem."""
    file = tmp_path_factory.mktemp("references") / "references.jsonl"
    rows = json_lines(ROOT / "tests/data/train.jsonl")
    known = [{"problem_id": row["id"], "mean_tokens": 50, "accuracy": 0.75} for row in rows]
    return Path(write_rows(file, known))


@pytest.mark.parametrize("name", SAMPLING)
def test_rewards_and_advantages_are_the_method_s_and_a_killed_run_resumes(
    cli: ForkedCli, tmp_path: Path, references: Path, name: str
) -> None:
    """And prompts, of a held-out problem too, ask for the length that the method has drawn."""
    own = [f"method.references={references}"] if name == "o1_pruner" else SETTINGS.get(name, [])
    run_dir = run_and_resume(cli, tmp_path, name, own)
    config = load_config(run_dir / "config.yaml")
    run = MethodRun(config.method, seed=config.run.seed, references=read_references(references))
    prompts = json.loads((tmp_path / "prompts.json").read_text())
    assert sum("-test" in problem for problem in prompts) == 1
    for problem, prompt in prompts.items():
        suffix = run.prompt_change(problem, held_out="-test" in problem).suffix
        assert suffix in prompt and bool(suffix) == ("Think for" in prompt)
    for line in metrics_of(run_dir):
        if name.startswith("laser_d"):  # what its monitor has shown
            targets = kept_state(run_dir, line["step"])["targets"]
            assert any(targets.values())
            run.state = run.state.model_copy(update={"targets": targets})
        fours = groups_of(run_dir, line["step"])
        rows = [row for four in fours for row in four]
        problems = [Problem(id=four[0]["problem_id"], text="", answer="") for four in fours]
        responses = [
            facts(
                problem_index=number // 4,
                num_tokens=row["num_tokens"],
                outcome=Outcome(row["outcome"]),
                finished=row["finish_reason"] == "stop",
            )
            for number, row in enumerate(rows)
        ]
        limit = run.limit or config.rollout.max_response_tokens
        groups = run.groups(responses, problems, limit)
        weights = columns(run.credit(groups))
        assert [row["reward"] for row in rows] == pytest.approx(weights.rewards, abs=1e-9)
        assert [row["advantage"] for row in rows] == pytest.approx(weights.advantages, abs=1e-9)
        found = (line["reward_mean"], line["reward_std"], line["advantage_std"])
        expected = (np.mean(weights.rewards), np.std(weights.rewards), np.std(weights.advantages))
        assert found == pytest.approx(expected, abs=1e-9)
        idle = sum(not any(row["advantage"] for row in four) for four in fours)
        assert line["zero_advantage_groups"] == idle
        run.advance(groups, refills=0)
        if line["step"] == KILLED_AFTER.get(name, 1):
            check_checkpoint(name, tmp_path / "killed", run.state)


def check_checkpoint(name: str, killed: Path, state: MethodState) -> None:
    """The killed run's has the method's state, and a reference model that is another."""
    kept = kept_state(killed, state.step - 1)
    assert (kept["refills"] > 0) == (name == "dler")
    assert kept == {**state.model_dump(), "refills": kept["refills"]}
    if name in ("thinkprune", "self_distillation"):
        metadata = killed / f"checkpoints/step_{state.step - 1:06d}/.metadata"
        assert b"reference." in metadata.read_bytes()


@pytest.mark.parametrize("name", ["hmpo", "thinkprune"])
def test_rewards_go_by_the_length_of_the_thinking(
    cli: ForkedCli, tmp_path: Path, name: str
) -> None:
    """And nothing else does: sampling ends at the run's limit. A resumed run keeps the key."""
    keys = [*RUN, f"method.name={name}", "method.length_of=thinking", f"run.dir={tmp_path}"]
    keys += ["method.limits=50"] * (name == "thinkprune")
    ended = cli.run(["train", QUICKSTART, *keys])
    assert ended.exit_code == 0, ended.stderr
    method: Any = load_config(tmp_path / "config.yaml").method
    assert method.length_of == "thinking"
    other = method.model_copy(update={"length_of": "response"})
    thinking, whole = MethodRun(method, seed=0), MethodRun(other, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / TINY_REASONER)
    kept_apart = 0
    for line in metrics_of(tmp_path):
        assert line["length_limit"] == 64
        for rows in groups_of(tmp_path, line["step"]):
            responses = []
            for row in rows:
                given = {key: row[key] for key in ("text", "response_ids", "finish_reason")}
                use = meter_by_hand.measure(tokenizer, rollout_of(**given), row["gold"])
                said = row["token_use"]
                assert (said["num_thinking"], said["thinking"]) == (use.num_thinking, use.thinking)
                assert use.num_thinking <= row["num_tokens"] == len(row["response_ids"]) <= 64
                outcome, finished = Outcome(row["outcome"]), row["finish_reason"] == "stop"
                one = {"num_tokens": row["num_tokens"], "outcome": outcome, "finished": finished}
                responses.append(facts(**one, token_use=use))
            problem = Problem(id=rows[0]["problem_id"], text="", answer="")
            rewards, others = (
                columns(run.credit(run.groups(responses, [problem], 64))).rewards
                for run in (thinking, whole)
            )
            assert [row["reward"] for row in rows] == pytest.approx(rewards, abs=1e-9)
            kept_apart += rewards != others
    assert kept_apart > 0
    assert "by the length of the thinking on" in (tmp_path / "hf/README.md").read_text()
    keys.remove("method.length_of=thinking")
    error = cli.run(["train", QUICKSTART, *keys, "--resume"]).error
    assert "was started with method.length_of='thinking', not 'response'" in error


def test_problems_are_drawn_again_alike_on_two_ranks(world: World, tmp_path: Path) -> None:
    """None of GRPO's groups has equal rewards then, and all ranks draw the same problems."""
    keys = ["method.name=grpo", "method.max_refills=4", "rollout.max_response_tokens=50"]
    for ranks in (1, 2):
        words = [*RUN, *keys, f"run.dir={tmp_path}/{ranks}"]
        assert world.run(run_training, ranks, QUICKSTART, words) == [0] * ranks
    one, two = tmp_path / "1", tmp_path / "2"
    for step in (1, 2):
        groups = groups_of(one, step)
        assert len(groups) == 2
        assert all(len({row["outcome"] == "correct" for row in rows}) == 2 for rows in groups)
        assert groups == groups_of(two, step)
    for a, b in zip(metrics_of(one), metrics_of(two), strict=True):
        assert a["zero_advantage_groups"] == b["zero_advantage_groups"] == 0
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5) != 0
    assert kept_state(one, 2) == kept_state(two, 2)
    assert kept_state(one, 2)["refills"] > 0


# No response of two tokens is correct: DLER keeps no group of two draws of four problems. No pair
# of self-distillation has room.
NOTHING = {
    "dler": ["rollout.max_response_tokens=2", "method.max_refills=1"],
    "self_distillation": ["method.responses=all", "train.max_tokens_per_microbatch=9"],
    "grpo": [
        "method.beta=0",
        "verify.judge=own_judges:all_of_them",
        "rollout.max_response_tokens=400",
    ],
}
WHY = {
    "dler": "step 1 accepted none of 32 responses",
    "self_distillation": "step 1 left out 16 of 16 responses, so nothing was learned: with the "
    "teacher's prompt, or with the plain one, they are longer than a micro-batch (9 tokens); raise "
    "train.max_tokens_per_microbatch",
    "grpo": "step 1 trained on no token, so nothing was learned: all responses to each of its 4 "
    "problems got the same reward",
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_step_that_learns_from_nothing_changes_no_weight(
    cli: ForkedCli, tmp_path: Path, name: str
) -> None:
    keys = [*NOTHING[name], f"method.name={name}", "run.steps=1", "data.prompts_per_step=4"]
    ended = cli.run(["train", QUICKSTART, *RUN, *keys, f"run.dir={tmp_path}/a"])
    assert ended.exit_code == 0, ended.stderr
    (line,) = metrics_of(tmp_path / "a")
    # All that was sampled, also what a method drops: twice four groups of four.
    sampled = {"dler": (32, 1), "self_distillation": (16, 0), "grpo": (16, 0)}[name]
    assert (line["num_rollouts"], line["refills"]) == sampled
    assert line["zero_advantage_groups"] == 4
    assert (line["trained_tokens"], line["num_microbatches"], line["grad_norm"]) == (0, 0, 0)
    assert line.get("num_pairs_left_out", 16) == 16
    assert json.loads((tmp_path / "a/summary.json").read_text())["skipped_steps"] == 1
    why, last = [w for w in ended.stderr.splitlines() if "nothing was learned" in w.lower()]
    assert WHY[name] in why and "WARNING NOTHING WAS LEARNED: none of 1 step " in last


@pytest.mark.parametrize("name", sorted(FIXED))
def test_fixed_data_are_trained_on_once_an_epoch_and_a_killed_run_resumes(
    cli: ForkedCli, tmp_path: Path, name: str
) -> None:
    """Two steps take the file's 16 rows."""
    draw = np.random.default_rng(0)
    is_weighted = name == "o1_pruner"
    rows = [
        StoredResponse(
            problem_id=f"p{number}",
            prompt_ids=tuple(draw.integers(300, size=9).tolist()),
            response_ids=tuple(draw.integers(300, size=length).tolist()),
            advantage=float(draw.normal()) if is_weighted else 1.0,
            log_probs=tuple((-draw.random(length)).tolist()) if is_weighted else None,
        )
        for number, length in enumerate(draw.integers(5, 30, size=16).tolist())
    ]
    data = tmp_path / "data.parquet"
    write_stored_responses(data, rows, {})
    keys = [f"data.responses={data}", *["method.form=fixed"] * is_weighted]
    lines = metrics_of(run_and_resume(cli, tmp_path, name, keys))
    stored = np.array([row.advantage for row in rows])
    means = [line["reward_mean"] for line in lines]
    squares = [line["reward_std"] ** 2 + line["reward_mean"] ** 2 for line in lines]
    assert np.mean(means) == pytest.approx(stored.mean(), abs=1e-9)
    assert np.mean(squares) == pytest.approx((stored**2).mean(), abs=1e-9)
    # Nobody has judged them: no accuracy, which would be 1, no verdicts, nothing accepted.
    unknown = {"accuracy", "accept_rate", "num_accepted", "num_wrong", "refills", "length_limit"}
    assert all(line["num_rollouts"] == 8 and not unknown & set(line) for line in lines)
    assert sum(line["trained_tokens"] for line in lines) == sum(len(r.response_ids) for r in rows)


def test_grpo_without_its_parts_is_on_policy_sft_to_the_last_bit(
    cli: ForkedCli, tmp_path: Path
) -> None:
    """The end of the way: rewards, advantages, losses, gradient norms and weights."""
    parts = ("beta=0", "advantage=identity", "reward=truncation", "aggregation=max_accepted")
    as_ours = ["method.name=grpo", *(f"method.{part}" for part in parts)]
    for name, keys in (("ours", []), ("grpo", as_ours)):
        words = ["train", QUICKSTART, *RUN, "checkpoint.every=0", f"run.dir={tmp_path}/{name}"]
        ended = cli.run([*words, *keys])
        assert ended.exit_code == 0, ended.stderr
    assert compare_runs(tmp_path / "ours", tmp_path / "grpo") == []
    assert all(line["grad_norm"] > 0 for line in metrics_of(tmp_path / "ours"))
