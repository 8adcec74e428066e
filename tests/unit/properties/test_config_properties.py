"""Overrides and files: what is accepted is what was written, the rest is one line."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from megatron_opsft.config import Config
from megatron_opsft.config.load import config_hash, load, load_config, to_yaml
from megatron_opsft.config.yaml_text import parse_yaml
from megatron_opsft.errors import UserError

BASE = {"model": {"path": "m"}, "data": {"train": "d"}}
SECTIONS = load(Config, None, options=BASE).model_dump()
KEYS = [(section, key) for section, keys in SECTIONS.items() for key in keys]
PLAIN = st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn", "Co", "Zl", "Zp"])
WORDS = st.text(PLAIN, min_size=1, max_size=12)
STARTS = tuple("-?:,[]{}#&*!|>'\"%@`~=<")  # which mean something to YAML


def accepted(overrides: list[str]) -> Config | None:
    """None where it was refused, in one line."""
    try:
        return load_config(None, ["model.path=m", "data.train=d", *overrides])
    except UserError as error:
        assert "\n" not in str(error)
        return None


@given(st.integers(0, 10**15), st.integers(0, 4), st.booleans())
def test_integers_are_what_was_written(number: int, zeros: int, sign: bool) -> None:
    config = accepted([f"run.seed={'+' * sign}{'0' * zeros}{number}"])
    assert config is not None and config.run.seed == number


@given(st.floats(min_value=0, allow_infinity=False, allow_subnormal=False))
def test_floats_are_what_was_written(number: float) -> None:
    for text in (repr(number), f"{number:.17e}", f"{number:.17g}", f"00{number!r}"):
        config = accepted([f"optimizer.weight_decay={text}"])
        assert config is not None and config.optimizer.weight_decay == number


@given(WORDS)
@example("a #b")
@example("12:30")
@example("2024-02-30")
@example("0o17")
@example("1e-6")
def test_text_is_what_was_written(word: str) -> None:
    config = accepted([f"data.train={word}"])
    if config is not None and not word.strip().startswith(STARTS):
        assert config.data.train == word.strip(" ")


@given(st.sampled_from(["", *(f"{section}.{key}=" for section, key in KEYS)]), st.text())
@example("run.dir=", "!!timestamp x")
@example("run.seed=", "1" * 5000)
def test_no_override_ends_in_a_traceback(key: str, text: str) -> None:
    accepted([key + text])


@given(st.text(max_size=40))
@example("run: {dir: 2024-02-30}")
@example("run: {? [1] : 2}")
@example("&a [*a]")
def test_no_file_ends_in_a_traceback(text: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            load_config(path)
        except UserError as error:
            assert "\n" not in str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
@example({("data", "train"): "010", ("run", "wandb_project"): "1:30", ("model", "path"): "~"})
def test_any_tree_is_accepted_or_refused_in_one_line(values: dict[tuple[str, str], Any]) -> None:
    tree: dict[str, Any] = {section: dict(keys) for section, keys in BASE.items()}
    for (section, key), value in values.items():
        tree.setdefault(section, {})[key] = value
    try:
        config = load(Config, None, options=tree)
    except UserError as error:
        assert "\n" not in str(error)
        return
    again = load(Config, None, options=parse_yaml(to_yaml(config)))
    assert again == config and config_hash(again) == config_hash(config)
    for (section, key), value in values.items():
        got = getattr(getattr(config, section), key)
        assert not isinstance(value, bool) or got == value or (value is False and got == "off")
        assert value is not None or got is None
