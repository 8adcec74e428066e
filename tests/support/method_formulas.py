"""Rewards and advantages of every method by the papers' formulas, from lengths and verdicts as
`rollouts/` has them: nothing of the project's own code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = Any  # float64 [G]
ACCURACY_WANTED = 0.5  # A-DLP's
REFERENCE_TOKENS, REFERENCE_ACCURACY = 50, 0.75  # O1-Pruner's, of every problem
TARGET = 40  # LASER's and GDPO's
TOLERANCE = 2  # Short-RL's, in tokens
BUFFER, LIMIT = 40, 64  # DAPO's overlong shaping, of GRPO here
KEPT = 3  # GFPO's


@dataclass(frozen=True)
class Group:
    """n: lengths; c: 1 if correct; finished, answered: bool. asked: (tokens, exactly?) of L1."""

    n: Array
    c: Array
    finished: Array
    answered: Array
    asked: tuple[int, bool] | None


@dataclass
class State:
    """What methods keep from step to step."""

    step: int = 1
    price: float = 1e-3
    best_accuracy: float = 0.0
    is_open: bool = True  # Short-RL's length reward
    targets: dict[str, int | None] = field(default_factory=dict)


def group_of(rows: Sequence[dict[str, Any]], asked: tuple[int, bool] | None) -> Group:
    """rows: of one problem, in `rollouts/`."""
    outcomes = [row["outcome"] for row in rows]
    return Group(
        n=np.array([float(row["num_tokens"]) for row in rows]),
        c=np.array([float(outcome == "correct") for outcome in outcomes]),
        finished=np.array([row["finish_reason"] == "stop" for row in rows]),
        answered=np.array([o not in ("no_answer", "unfinished") for o in outcomes]),
        asked=asked,
    )


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def of_correct_lengths(g: Group) -> Array:
    correct = g.n[g.c == 1]
    return sigmoid((g.n - correct.mean()) / (correct.std() + 1e-7)) if correct.size else g.n


def l1(g: Group, state: State) -> Array:
    assert g.asked is not None
    target, exactly = g.asked
    if exactly:
        return g.c - 0.0003 * abs(target - g.n)
    return g.c * np.clip(0.0003 * (target - g.n) + 0.5, 0, 1)


def laser_within(g: Group, target: float) -> Array:
    wrong = np.where(g.answered, -0.5, -1.0)
    return np.where(g.c == 1, 1 + 0.5 * (g.n <= target), wrong)


def band(g: Group) -> str:
    share = round(g.c.sum()) / len(g.c)
    return "easy" if share >= 2 / 3 else "medium" if share >= 1 / 3 else "hard"


def laser_target(g: Group, state: State) -> float:
    found = state.targets[band(g)]
    return np.inf if found is None else found


def laser_de(g: Group, state: State) -> Array:
    target = laser_target(g, state)
    return laser_within(g, target) + 0.5 * (g.answered & (g.c == 0) & (g.n > target))


def choose_targets(groups: Sequence[Group], candidates: Sequence[int]) -> dict[str, int | None]:
    """The smallest candidate with P(n <= l) C >= 1, C the fewest correct of a band."""
    found: dict[str, int | None] = {}
    for name, share in (("easy", 2 / 3), ("medium", 1 / 3), ("hard", 0)):
        n = np.concatenate([[], *(g.n for g in groups if band(g) == name)])
        fewest = max(1, np.ceil(share * len(groups[0].n)))
        enough = [k for k in candidates if n.size and (n <= k).mean() * fewest >= 1]
        found[name] = min(enough, default=None)
    return found


def kimi(g: Group, state: State) -> Array:
    if state.step == 1 or g.n.max() == g.n.min():  # warm-up
        return g.c
    x = 0.5 - (g.n - g.n.min()) / (g.n.max() - g.n.min())
    return g.c + np.where(g.c == 1, x, np.minimum(0, x))


def mastery(g: Group, state: State) -> Array:
    middle, longest = np.median(g.n), g.n.max()
    if g.c.mean() < 1 or middle == longest:
        return g.c
    return 1 - np.maximum(g.n - middle, 0) / (longest - middle)


def short_rl(g: Group, state: State) -> Array:
    if not (state.is_open and g.c.any()):
        return g.c
    n = g.n[g.c == 1]
    over = (g.n - n.min()) / max(np.ptp(n), 1) * (g.n > n.min() + TOLERANCE)
    return np.where(g.c == 1, 1.5 - over, 0)


def smart(g: Group, state: State) -> Array:
    p = g.c.mean()
    if not 0 < p < 1:
        return g.c
    n = g.n[g.c == 1]
    best = g.n.min()
    if n.var() < g.n.var():
        best = (n.var() * g.n.mean() - g.n.var() * n.mean()) / (n.var() - g.n.var())
    beyond = np.maximum(g.n - np.clip(best, g.n.min(), g.n.max()), 0) * g.c
    # The longest correct one gets the group's mean: 1 - a max = p - a mean.
    return g.c - beyond * (1 - p) / ((beyond.max() - beyond.mean()) or 1)


REWARDS: dict[str, Callable[[Group, State], Array]] = {
    **dict.fromkeys(("on_policy_sft", "dr_grpo", "thinkprune"), lambda g, s: g.c),
    **dict.fromkeys(("dler", "ddca", "gfpo", "self_distillation"), lambda g, s: g.c),
    "grpo": lambda g, s: g.c + np.clip((LIMIT - BUFFER - g.n) / BUFFER, -1, 0),
    "o1_pruner": lambda g, s: REFERENCE_TOKENS / g.n - 1 + 2 * (g.c - REFERENCE_ACCURACY),
    "l1_exact": l1,
    "l1_max": l1,
    "er_rl": lambda g, s: g.c * (1 - 0.1 * of_correct_lengths(g)),
    "laser": lambda g, s: laser_within(g, TARGET),
    "laser_d": lambda g, s: laser_within(g, laser_target(g, s)),
    "laser_de": laser_de,
    "kimi": kimi,
    "mastery_gated": mastery,
    "gdpo": lambda g, s: g.c + (g.finished & (g.n <= TARGET)),
    "short_rl": short_rl,
    "a_dlp": lambda g, s: g.c - s.price * g.n,
    "smart_thinker": smart,
    "linear": lambda g, s: g.c - 0.25 * g.c.mean() * g.n / g.n.max(),
    "gr3": lambda g, s: g.c / (1 + 0.33 * g.n / g.n.mean()),
}


def normalized(r: Array) -> Array:
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6) if np.ptp(r) else 0 * r


def whitened_by_tokens(groups: Sequence[Group], values: Sequence[Array]) -> list[Array]:
    flat, n = np.concatenate(values), np.concatenate([g.n for g in groups])
    mean = (flat * n).sum() / n.sum()
    variance = (n * (flat - mean) ** 2).sum() / (n.sum() - 1)
    return [(v - mean) / np.sqrt(variance + 1e-8) if np.ptp(flat) else 0 * v for v in values]


def ddca(g: Group, r: Array) -> Array:
    s = of_correct_lengths(g)
    mean = s[g.c == 1].mean() if g.c.any() else 0
    return normalized(r) - 0.2 * g.c.mean() * (s - mean) * g.c


def gfpo(g: Group, r: Array) -> Array:
    kept = np.argsort(g.n, kind="stable")[:KEPT]
    found = np.zeros_like(r)
    found[kept] = (r[kept] - r[kept].mean()) / (r[kept].std() + 1e-6)
    return found


ADVANTAGES: dict[str, Callable[[Group, Array], Array]] = {
    **dict.fromkeys(("on_policy_sft", "o1_pruner"), lambda g, r: r),
    **dict.fromkeys(("dr_grpo", "kimi", "linear", "dler"), lambda g, r: r - r.mean()),
    "er_rl": lambda g, r: r - (r.sum() - r) / (len(r) - 1),
    "gdpo": lambda g, r: normalized(g.c) + normalized(1.0 * (g.finished & (g.n <= TARGET))),
    "ddca": ddca,
    "gfpo": gfpo,
    "self_distillation": lambda g, r: 0 * r + 1,  # all responses
}


def weigh(name: str, groups: Sequence[Group], state: State) -> tuple[list[Array], list[Array]]:
    """(rewards, advantages) of a step's groups; the state then is the next step's."""
    accuracy = np.concatenate([g.c for g in groups]).mean()
    state.is_open = bool(accuracy >= state.best_accuracy - 0.05)
    rewards = [REWARDS[name](g, state) for g in groups]
    of_group = ADVANTAGES.get(name, lambda g, r: normalized(r))
    advantages = [of_group(g, r) for g, r in zip(groups, rewards, strict=True)]
    if name in ("dler", "gdpo"):
        advantages = whitened_by_tokens(groups, advantages)
    if name == "a_dlp":
        state.price = max(0, state.price + 1e-3 * (accuracy - ACCURACY_WANTED))
    state.best_accuracy = max(state.best_accuracy, accuracy)
    state.step += 1
    return rewards, advantages
