"""An open page of a run under way follows it and keeps its place."""

import json
from pathlib import Path

import pytest
from chromium import Chromium
from made_runs import make_run, response, write_responses
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.support.ui import Select, WebDriverWait

from megatron_opsft.report.page.write import write_page

# In one piece, so that no reload comes between finding an element and acting on it.
_CHOOSE = """
if (document.documentElement.dataset.theme !== "dark") document.getElementById("theme").click();
const tabs = [...document.querySelectorAll("[role=tab]")];
tabs.find((tab) => tab.textContent.includes("Responses")).click();
const verdict = document.getElementById("verdict");
verdict.value = [...verdict.options].find((option) => option.text === "wrong").value;
verdict.dispatchEvent(new Event("input", {bubbles: true}));
verdict.dispatchEvent(new Event("change", {bubbles: true}));
return document.getElementById("count").textContent;
"""

_SEEN = """
const panel = document.getElementById("curves");
const marks = [...panel.querySelector("svg").querySelectorAll("text[text-anchor=middle]")];
return [marks.map((mark) => mark.textContent).join(" "), panel.querySelector("details").open,
  document.querySelector("#settings details").open];
"""
_LOOK_CLOSER = f"""
const tabs = [...document.querySelectorAll("[role=tab]")];
tabs.find((tab) => tab.textContent === "Curves").click();
document.querySelector("#curves details summary").click();
document.querySelector("#settings details summary").click();
document.querySelector("#curves button[title=nearer]").click();
window.before_reload = true;
{_SEEN}"""

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_page_of_a_growing_run_follows(chromium: Chromium, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, finished=False)
    page = tmp_path / "page.html"
    write_page(page, [run], reload_seconds=1.5)
    chromium.open(page)
    wait = WebDriverWait(chromium.driver, 30, 0.1, [WebDriverException])  # as the page may be going
    wait.until(lambda _: chromium.run(_CHOOSE) == "8 of 24 responses")
    rows = [response(3, f"p-{n}", sample) for n in range(4) for sample in range(3)]
    write_responses(run / "rollouts/step_000003.jsonl.gz", rows)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "loss": 0.1}) + "\n")
    write_page(page, [run])  # the last page: nothing reloads it
    count = "return document.getElementById('count').textContent"
    wait.until(lambda _: chromium.run(count) == "12 of 36 responses")
    assert chromium.all("[role=tabpanel]")[0].get_attribute("id") == "responses"
    assert chromium.run("return document.documentElement.dataset.theme") == "dark"
    assert Select(chromium.one("#verdict")).first_selected_option.text == "wrong"
    assert chromium.run("return page.reload_seconds") is None
    assert chromium.messages() == []
    assert set(chromium.requests()) == {page.resolve().as_uri()}


def test_zoom_and_opened_details_outlive_a_reload(chromium: Chromium, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=9, finished=False)
    page = tmp_path / "page.html"
    write_page(page, [run])
    chromium.open(page)
    before = chromium.run("tabs.children[1].click();" + _SEEN)
    assert before[1:] == [False, True]
    write_page(page, [run], reload_seconds=1.5)
    chromium.open(page)
    wait = WebDriverWait(chromium.driver, 30, 0.1, [WebDriverException])
    chosen = wait.until(lambda _: chromium.run(_LOOK_CLOSER))
    assert chosen[1:] == [True, False] and chosen[0] != before[0]
    write_page(page, [run])  # the last page: nothing reloads it
    wait.until(
        lambda _: chromium.run("return !window.before_reload && page.reload_seconds === null")
    )
    assert chromium.run(_SEEN) == chosen
    assert chromium.messages() == []
