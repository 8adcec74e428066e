"""The response that a page shows before and after."""

from typing import Any

import pytest

from megatron_opsft.commands.report.page_sections import example_of

FIELDS = ("step", "problem_id", "sample_index", "num_tokens")


def responses(rows: list[tuple[object, ...]]) -> dict[str, Any]:
    return {"fields": FIELDS, "rows": rows, "problems": {}}


@pytest.mark.parametrize("damaged", ["12", "many", None, [3]])
def test_a_row_whose_length_is_no_number_is_no_example(damaged: object) -> None:
    whole = [(1, "a", 0, 100), (1, "b", 0, 90), (2, "a", 0, 10), (2, "b", 0, damaged)]
    same = responses(whole)
    assert [row["num_tokens"] for row in example_of(same, same)] == [100, 10]
    alone = responses([(1, "a", 0, damaged), (2, "a", 0, 10)])
    assert example_of(alone, alone) == []
