"""Many real ranks on one machine: they start, take a step, and are compared with one rank.

    python tools/many_ranks.py --ranks 64 examples/configs/quickstart.yaml \
        data.prompts_per_step=16 rollout.group_size=4 eval.num_problems=4 eval.samples_per_problem=1

Ranks are forked from a process that has imported everything, with the variables that a launcher
sets and no torchrun, and may open `--open-files` files. Prints one JSON line: seconds, the losses
of both, the most sockets and open files a rank has had, the least memory that was free. Exits with
1 where a rank failed or the losses differ by more than rounding.
"""

import argparse
import gc
import json
import os
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROUNDING = 1e-5  # of losses that float32 sums make in another order


def start_rank(rank: int, args: argparse.Namespace, num_ranks: int, port: int, run: Path) -> int:
    """Its process id; what it says goes to RUN-RANK.log."""
    if pid := os.fork():
        return pid
    log = os.open(f"{run}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.open_files, args.open_files))
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    words = ["train", args.config, *args.overrides, f"run.dir={run}", "run.steps=1"]
    sys.argv = ["megatron-opsft", *words, "run.device=cpu"]
    code = 1
    try:
        from megatron_opsft.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def count_files(pid: int) -> tuple[int, int]:
    """Sockets and all open files of a process; none of one that has gone."""
    try:
        links = [os.readlink(entry) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:  # also a file that was closed meanwhile
        return 0, 0
    return sum(link.startswith("socket:") for link in links), len(links)


def run_ranks(args: argparse.Namespace, num_ranks: int, run: Path) -> dict[str, float]:
    """What one run of so many ranks was like. Errors: SystemExit with a rank's last words."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begin = time.monotonic()
    ranks = {start_rank(r, args, num_ranks, port, run): r for r in range(num_ranks)}
    running, free_bytes = set(ranks), psutil.virtual_memory().available
    most = dict.fromkeys(range(num_ranks), (0, 0))
    failed = None
    while running:
        for pid in [*running]:
            sockets, files = count_files(pid)
            known = most[ranks[pid]]
            most[ranks[pid]] = max(known[0], sockets), max(known[1], files)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                failed = ranks[pid] if status and failed is None else failed
        free_bytes = min(free_bytes, psutil.virtual_memory().available)
        time.sleep(1)
    if failed is not None:
        logs = [path.read_text() for path in run.parent.glob(f"{run.name}-*.log")]
        said = [line for log in logs for line in log.splitlines() if line.startswith("error: ")]
        own = Path(f"{run}-{failed}.log").read_text()[-4000:]
        raise SystemExit("\n".join([f"rank {failed} failed", *said, own]))
    (line,) = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    others = [most[rank] for rank in range(1, num_ranks)] or [(0, 0)]
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "loss": json.loads(line)["loss"],
        "num_accepted": json.loads(line)["num_accepted"],
        "sockets_of_rank_0": most[0][0],
        "files_of_rank_0": most[0][1],
        "sockets_of_another": max(sockets for sockets, _ in others),
        "files_of_another": max(files for _, files in others),
        "least_free_gib": round(free_bytes / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--open-files", type=int, default=1024, help="Limit of each rank.")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from transformers import Qwen2ForCausalLM  # noqa: F401

    import megatron_opsft.train  # noqa: F401

    gc.freeze()  # no rank's collections copy what is imported
    with tempfile.TemporaryDirectory() as directory:
        one = run_ranks(args, 1, Path(directory) / "one")
        many = run_ranks(args, args.ranks, Path(directory) / "many")
    print(json.dumps({"ranks": args.ranks, **many, "loss_of_one_rank": one["loss"]}))
    if abs(many["loss"] - one["loss"]) > ROUNDING * abs(one["loss"]):
        raise SystemExit("error: the losses differ")


if __name__ == "__main__":
    main()
