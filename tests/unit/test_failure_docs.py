"""docs/failures.md names keys, exit codes and files that are there."""

import re
from pathlib import Path

from megatron_opsft.config import Config
from megatron_opsft.errors import ANSWER_IS_NO
from megatron_opsft.launch.commands import FINAL_EXIT_CODES
from megatron_opsft.runtime.diagnosis import PEER_LOST_EXIT_CODE
from megatron_opsft.runtime.stop_signal import REQUEUE_EXIT_CODE

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/failures.md").read_text(encoding="utf-8")


def test_keys_and_their_defaults() -> None:
    named = set(re.findall(r"`((?:run|checkpoint|rollout|sync)\.[a-z_]+)`", DOCS)) - {"run.dir"}
    assert {"run.hang_minutes", "run.silence_seconds", "checkpoint.asynchronous"} <= named
    for name in named:
        section, key = name.split(".")
        assert key in Config.model_fields[section].annotation.model_fields, name
    config = Config.model_validate({"model": {"path": "x"}, "data": {"train": "x"}})
    assert f"`run.silence_seconds` ({config.run.silence_seconds:g})" in DOCS
    assert f"`run.hang_minutes` ({config.run.hang_minutes:g})" in DOCS
    assert config.checkpoint.asynchronous


def test_exit_codes() -> None:
    codes = dict(re.findall(r"^\| (\d+) \| .* \| (.*?) ?\|$", DOCS, re.MULTILINE))
    assert set(codes) == {"0", "1", "2", "3", "4", "69", "75"}
    starts_again = {int(code) for code, answer in codes.items() if answer == "yes"}
    assert starts_again == {1, PEER_LOST_EXIT_CODE}
    assert {int(code) for code in codes} - starts_again == {
        0,
        ANSWER_IS_NO,
        *FINAL_EXIT_CODES,
        REQUEUE_EXIT_CODE,
    }


def test_tools_exist() -> None:
    named = re.findall(r"python (tools/\w+\.py)", DOCS)
    assert len(named) == 1 and all((ROOT / name).is_file() for name in named)
