"""`rollout.speculative`: a mapping that vLLM alone takes, and what follows from it."""

from pathlib import Path

import pytest
import yaml

from megatron_opsft.config.identity import check_resumable, config_hash
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.errors import UserError

KEYS = ["run.dir=/tmp/run", "run.steps=1", "model.path=m", "data.train=arithmetic"]
NGRAM = "rollout.speculative={method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 3}"
RECORD = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


def test_a_mapping_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    config = load_config(None, [*KEYS, "rollout.engine=vllm", NGRAM])
    assert config.rollout.speculative == RECORD
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(config))
    assert load_config(written) == config
    assert yaml.safe_load(written.read_text())["rollout"]["speculative"] == RECORD


def test_another_record_is_another_run() -> None:
    keys = [*KEYS, "rollout.engine=vllm"]
    plain, ngram = load_config(None, keys), load_config(None, [*keys, NGRAM])
    longer = load_config(None, [*keys, NGRAM.replace("4", "5")])
    assert len({config_hash(config) for config in (plain, ngram, longer)}) == 3
    with pytest.raises(UserError, match="started with rollout.speculative="):
        check_resumable(ngram, longer, Path("run"))
    unseeded = load_config(None, [*keys, "rollout.seeded=false"])
    with pytest.raises(UserError, match="started with rollout.seeded=False, not True"):
        check_resumable(unseeded, plain, Path("run"))
