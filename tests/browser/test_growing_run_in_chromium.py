"""An open page of a run under way follows it and keeps its place."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import Chromium
from made_runs import make_run, response, write_responses
from selenium.common.exceptions import JavascriptException, StaleElementReferenceException
from selenium.webdriver.support.ui import Select, WebDriverWait

from megatron_opsft.report.page.write import write_page

_RELOADING = [StaleElementReferenceException, JavascriptException, AssertionError]

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_page_of_a_growing_run_follows(chromium: Chromium, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, finished=False)
    page = tmp_path / "page.html"
    write_page(page, [run], reload_seconds=0.3)
    chromium.open(page)
    count = "return document.getElementById('count').textContent"

    # Once more where the page is read again between finding an element and acting on it.
    wait = WebDriverWait(chromium.driver, 15, 0.1, _RELOADING)

    def on_the_page(act: Callable[[], object]) -> None:
        wait.until(lambda _: act() is None)

    def darken() -> None:
        if chromium.run("return document.documentElement.dataset.theme") != "dark":
            chromium.one("#theme").click()

    on_the_page(darken)
    on_the_page(lambda: chromium.one("[role=tab]", "Responses").click())
    on_the_page(lambda: Select(chromium.one("#verdict")).select_by_visible_text("wrong"))
    wait.until(lambda _: chromium.run(count) == "8 of 24 responses")
    rows = [response(3, f"p-{n}", sample) for n in range(4) for sample in range(3)]
    write_responses(run / "rollouts/step_000003.jsonl.gz", rows)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "loss": 0.1}) + "\n")
    write_page(page, [run])  # the last page: nothing reloads it
    wait.until(lambda _: chromium.run(count) == "12 of 36 responses")
    assert chromium.all("[role=tabpanel]")[0].get_attribute("id") == "responses"
    assert chromium.run("return document.documentElement.dataset.theme") == "dark"
    assert Select(chromium.one("#verdict")).first_selected_option.text == "wrong"
    assert chromium.run("return page.reload_seconds") is None
    assert chromium.messages() == []
    assert set(chromium.requests()) == {page.resolve().as_uri()}
