"""Every call of the package into vLLM, Megatron, TransformerEngine, Triton and torch, against the
signatures of the packages that a GPU run has.
"""

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from foreign_calls import (
    BOUND,
    Call,
    Source,
    check_mentions,
    described,
    find,
    imported_calls,
    mismatch,
    override_problems,
    unnamed_calls,
)
from instance_calls import (
    ATTRIBUTES,
    CPU_ONLY,
    HOLDERS,
    INSTANCE_CALLS,
    plain_methods,
    targets,
)

pytestmark = pytest.mark.gpu_contract
PACKAGE = Path(__file__).parents[2] / "megatron_opsft"
FILES = {p.relative_to(PACKAGE).as_posix(): Source.of(p) for p in sorted(PACKAGE.rglob("*.py"))}
ON_GPUS = {file: source for file, source in FILES.items() if file not in CPU_ONLY}
# torch and its tensors are everywhere; objects of the others only where they are imported.
NAMING = [
    file
    for file, source in ON_GPUS.items()
    if any(name.split(".")[0] in BOUND and not name.startswith("torch") for name in source.modules)
]


def all_calls() -> Iterator[tuple[str, Call, str]]:
    """File, call and the dotted name of what it reaches."""
    for file, source in ON_GPUS.items():
        for call, name in imported_calls(source):
            yield file, call, name
        listed = INSTANCE_CALLS.get(file, {})
        for call in source.calls:
            for name in targets(listed.get(call.called, "")):
                yield file, call, name


def test_every_name_of_another_package_is_there() -> None:
    wrong = [f"{f}: {problem}" for f, s in ON_GPUS.items() for problem in check_mentions(s)]
    assert wrong == []


def test_every_call_binds(note: Callable[[str, list[str]], None]) -> None:
    wrong = []
    bound: Counter[str] = Counter()
    for file, call, name in all_calls():
        if problem := mismatch(call.node, name):
            wrong.append(f"{file}:{call.line}: {name}({described(call.node)}): {problem}")
        bound[f"{name}({described(call.node)})"] += 1
    assert wrong == []
    for package in BOUND:
        lines = [f"{n} x {text}" for text, n in bound.items() if text.startswith(package)]
        note(f"calls bound to {package}", sorted(lines, key=lambda line: line.split(" x ")[1]))
    assert sum(bound.values()) > 350


def test_every_call_on_an_instance_is_named() -> None:
    unknown = [
        f"{file} {problem}"
        for file in {*NAMING, *HOLDERS}
        for problem in unnamed_calls(FILES[file], INSTANCE_CALLS.get(file, {}), plain_methods())
    ]
    assert unknown == [], "give each a line in tests/gpu_contract/instance_calls.py"


def test_every_named_call_is_still_made() -> None:
    made = {file: {call.called for call in source.calls} for file, source in FILES.items()}
    gone = [f"{f}: {c}" for f, calls in INSTANCE_CALLS.items() for c in calls if c not in made[f]]
    assert gone == []


def test_subclasses_can_be_called_as_their_bases_are(
    note: Callable[[str, list[str]], None],
) -> None:
    problems, checked = [], []
    for source in ON_GPUS.values():
        for node, bases in source.classes:
            for base in bases:
                if base.split(".")[0] in ("vllm", "megatron"):
                    problems += override_problems(node, find(base))
                    checked.append(f"{node.name}({base})")
    assert problems == []
    assert checked
    note("subclasses of other packages' classes", checked)


def test_every_attribute_that_is_read_is_there() -> None:
    missing = []
    for name, attributes in ATTRIBUTES.items():
        owner = find(name)
        there = {*dir(owner), *inspect.signature(owner).parameters}
        if dataclasses.is_dataclass(owner):
            there |= {field.name for field in dataclasses.fields(owner)}
        there |= {
            *re.findall(r"^ +self\.(\w+)(?:: .*)? = ", inspect.getsource(owner), re.MULTILINE)
        }
        missing += [f"{name}.{a}" for a in attributes if a not in there]
    assert missing == []


def break_call(before: str, after: str, file: str = "rollout/vllm/engine.py") -> Source:
    """A file with one change that breaks it."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    assert before in text
    return Source(text.replace(before, after))


def problems_of(source: Source, file: str = "rollout/vllm/engine.py") -> list[str]:
    """What binding finds in a file."""
    listed = INSTANCE_CALLS[file]
    named = [(call, n) for call in source.calls for n in targets(listed.get(call.called, ""))]
    found = [mismatch(call.node, name) for call, name in [*named, *imported_calls(source)]]
    return [problem for problem in found if problem]


def test_broken_calls_are_seen() -> None:
    assert problems_of(FILES["rollout/vllm/engine.py"]) == []
    for before, after in [
        ("use_tqdm_on_load=False", "with_tqdm=False"),
        ("prompt_logprobs=0", "prompt_log_probs=0"),
        ("llm_engine.step()", "llm_engine.step(1, 2, 3)"),
        ('tags=["weights"]', 'labels=["weights"]'),
    ]:
        assert len(problems_of(break_call(before, after))) >= 1, after
    step = "model/passes.py"
    for before, after in [
        ("packed_seq_params=packed", "packed_sequences=packed"),
        ("start_param_sync(force_sync=True)", "start_param_sync(force=True)"),
        ("data_iterator=", "data_iterators="),
        ('qkv_format="thd"', 'layout="thd"'),
    ]:
        assert len(problems_of(break_call(before, after, step), step)) >= 1, after


def test_a_new_call_without_a_name_and_a_name_that_is_gone_are_seen() -> None:
    source = break_call("self._llm.reset_prefix_cache()", "self._llm.forget_everything()")
    named = INSTANCE_CALLS["rollout/vllm/engine.py"]
    assert "self._llm.forget_everything" in " ".join(unnamed_calls(source, named, plain_methods()))
    # A name that Python's own objects have too does not hide a call on one of vLLM's.
    source = break_call("self._llm.reset_prefix_cache()", "self._llm.clear()")
    assert "self._llm.clear" in " ".join(unnamed_calls(source, named, plain_methods()))
    source = break_call(
        "from vllm import SamplingParams", "from vllm import Sampling as SamplingParams"
    )
    assert "vllm.Sampling" in " ".join(check_mentions(source))


def test_a_subclass_that_lacks_a_method_is_seen() -> None:
    base = "vllm.distributed.weight_transfer.base.WeightTransferEngine"
    text = "class Lacking:\n    def update_weights(self, info): pass\n"
    ((node, _),) = Source(text).classes
    problems = " ".join(override_problems(node, find(base)))
    assert "receive_weights" in problems or "start_weight_update" in problems
    assert "update_info" in problems
