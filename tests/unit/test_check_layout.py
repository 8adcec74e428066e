"""Layouts that a model cannot be cut into are refused before any process group is made."""

import pytest
from tiny_models import SHAPES

from megatron_opsft.config import ParallelConfig
from megatron_opsft.errors import UserError
from megatron_opsft.model.build import check_layout


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ("qwen2", {"tp": 3}, r"parallel\.tp=3 .* 4 attention heads"),
        ("qwen2", {"tp": 4}, r"parallel\.tp=4 .* 2 key/value heads"),
        ("qwen2", {"pp": 3}, r"parallel\.pp=3 x vpp=1 .* 4 layers"),
        ("qwen2", {"vpp": 2}, r"parallel\.vpp=2 needs parallel\.pp"),
        (
            "qwen3_moe",
            {"tp": 2},
            r"parallel\.tp=2 .*needs parallel\.sequence_parallel=true",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_named(
    model: str, parallel: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(SHAPES[model], ParallelConfig(**parallel))


def test_layouts_that_fit() -> None:
    check_layout(SHAPES["qwen2"], ParallelConfig(tp=2, pp=2, vpp=2))
    check_layout(SHAPES["mistral"], ParallelConfig(tp=2, pp=4))
    check_layout(SHAPES["qwen3_moe"], ParallelConfig(tp=2, pp=2, sequence_parallel=True))
    check_layout(SHAPES["qwen3_moe"], ParallelConfig(pp=2, vpp=2))
