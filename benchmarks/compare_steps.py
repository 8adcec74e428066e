"""`against_peers.py step`: both contenders live at once, each in its own process, and one waits
while the other takes its step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from peer_loop import PlainLoop, Question
from peer_ours import our_steps
from ranks import own_process

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config
from megatron_opsft.data.mixture import order_of
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.run.start.checked_run import make_checked_run
from megatron_opsft.run.start.input import read_input
from megatron_opsft.runtime.device import select_device

CONTENDERS = ("ours", "plain")


def step_config(args: argparse.Namespace, directory: Path) -> Config:
    """What both contenders follow."""
    settings = [f"run.dir={directory}/run", f"run.steps={1 + args.rounds}", "run.eval_every=0"]
    settings += ["checkpoint.every=0", "optimizer.lr=1e-9", f"run.device={args.device}"]
    return load_config(args.config, [*settings, *args.overrides])


def open_plain_loop(config: Config) -> tuple[PlainLoop, list[list[Question]]]:
    """The loop, and the problems of every step as a run would take them."""
    model_dir = resolve_model(config.model.path)
    given = read_input(make_checked_run(config, read_model_shape(model_dir), 1), model_dir)
    problems = given.problems.problems
    order = order_of(given.problems, config.data, config.run.seed)
    questions_of_steps = []
    for step in range(config.run.steps):
        chosen = [problems[index] for index in order.indices(step)]
        questions = [Question(list(given.encoder.encode(one)), one.answer) for one in chosen]
        questions_of_steps.append(questions)
    tokenizer, end_token_ids = given.encoder.tokenizer, given.settings.end_token_ids
    device = select_device(config.run.device)
    return PlainLoop(model_dir, tokenizer, end_token_ids, config, device), questions_of_steps


def plain_steps(config: Config) -> Iterator[dict[str, float]]:
    """Steps of the plain loop, one for every figure taken."""
    torch.manual_seed(config.run.seed)
    loop, questions_of_steps = open_plain_loop(config)
    for questions in questions_of_steps:
        yield loop.step(questions)


def serve_steps(args: argparse.Namespace) -> None:
    """Take a step for each line on standard input, and answer with its figures on standard output,
    which nothing else may write to.
    """
    torch.set_num_threads(args.threads)
    config = step_config(args, args.directory)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with ExitStack() as stack:
        is_ours = args.only == "ours"
        steps = stack.enter_context(our_steps(config)) if is_ours else plain_steps(config)
        for _ in sys.stdin:
            started = perf_counter()
            figures = next(steps)
            figures["seconds"] = perf_counter() - started
            print(json.dumps(figures), file=answers, flush=True)


class Contender:
    """A process that takes a step when it is told to."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self._process, self._errors = process, errors

    def step(self) -> dict[str, float]:
        """Its figures. Errors: `RuntimeError` with what the process said last."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print("step", file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            said = self._errors.read_text()[-4000:]
            raise RuntimeError(f"a contender ended with code {code}:\n{said}")
        figures: dict[str, float] = json.loads(line)
        return figures


@contextmanager
def open_contender(name: str, args: argparse.Namespace, directory: Path) -> Iterator[Contender]:
    """Start the process; it ends with its standard input."""
    directory.mkdir()
    errors = directory / "stderr.txt"
    command, environment = own_process(name, directory, args.threads)
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        ) as process,
    ):
        yield Contender(process, errors)


def compare_steps(args: argparse.Namespace) -> dict[str, Any]:
    """A first step that does not count and `--rounds` that do, of both contenders in turn."""
    rounds_of: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        config = step_config(args, Path(directory))
        contenders = {
            name: stack.enter_context(open_contender(name, args, Path(directory) / name))
            for name in CONTENDERS
        }
        for turn in range(1 + args.rounds):
            for name, contender in contenders.items():
                figures = contender.step()
                if turn > 0:
                    print(json.dumps({"contender": name, **figures}), flush=True)
                    rounds_of[name].append(figures)
    ours, plain = (_medians(rounds_of[name]) for name in CONTENDERS)
    timed = [key for key in plain if key.endswith("seconds")]
    return {
        "benchmark": "against_peers step",
        "device": config.run.device,
        "dtype": config.model.dtype,
        "threads": args.threads,
        "responses": config.data.prompts_per_step * config.rollout.group_size,
        "ours": ours,
        "plain": plain,
        "ratios": {"plain": {key: round(ours[key] / plain[key], 3) for key in timed}},
    }


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {
        key: round(statistics.median(figures[key] for figures in rounds), 4) for key in rounds[0]
    }
