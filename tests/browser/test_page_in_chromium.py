"""The page in a real browser: it shows what it holds, and fetches nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
from chromium import Chromium
from made_runs import make_run, response, write_responses
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from megatron_opsft.report.page.write import write_page

# Of each colour of the legend with the text on it, as they are seen.
_CONTRASTS = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const seen = (...colours) => {
  for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
  const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
};
const ground = getComputedStyle(document.querySelector("pre.response")).backgroundColor;
return [...document.querySelectorAll(".probabilities span")].map((one) => {
  const style = getComputedStyle(one);
  const pair = [seen(ground, style.backgroundColor), seen(style.color)];
  return Math.max(...pair) / Math.min(...pair);
});
"""

pytestmark = [pytest.mark.browser, pytest.mark.slow]
TABS = ["Summary", "Curves", "Settings", "Responses", "Evaluations"]


@pytest.fixture
def tab(chromium: Chromium, page: Path) -> Callable[[str], Chromium]:
    """The page, newly opened at a tab."""

    def at(name: str) -> Chromium:
        chromium.open(page)
        chromium.one("[role=tab]", name).click()
        return chromium

    return at


def texts(chromium: Chromium, selector: str) -> list[str]:
    return [element.text for element in chromium.all(selector)]


def wait_for_count(chromium: Chromium, text: str) -> None:
    WebDriverWait(chromium.driver, 10).until(lambda _: text in chromium.one("#count").text)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_tab_without_an_error_or_a_request(
    chromium: Chromium, page: Path, width: int, dark: bool
) -> None:
    chromium.open(page, width=width, dark=dark)
    assert texts(chromium, "[role=tab]") == TABS
    for name in TABS:
        chromium.one("[role=tab]", name).click()
        (panel,) = chromium.all("[role=tabpanel]")
        assert panel.get_attribute("id") == name.lower() and len(panel.text) > 50
        # Nothing is wider than the screen.
        assert chromium.run("return document.documentElement.scrollWidth") == width
    ground = chromium.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert chromium.messages() == []
    assert chromium.requests() == [page.resolve().as_uri()]


def test_the_theme_is_toggled(chromium: Chromium, page: Path) -> None:
    chromium.open(page)
    themes = []
    for _ in range(3):
        themes.append(chromium.run("return document.documentElement.dataset.theme"))
        chromium.one("#theme").click()
    assert themes == ["light", "dark", "light"]


def test_tabs_by_keyboard(chromium: Chromium, page: Path) -> None:
    chromium.open(page)
    chromium.one("[role=tab]", "Summary").send_keys(Keys.ARROW_RIGHT)
    assert chromium.driver.switch_to.active_element.text == "Curves"
    chromium.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT, Keys.NULL)
    assert chromium.all("[role=tabpanel]")[0].get_attribute("id") == "summary"


def test_the_summary_sorts(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Summary")
    names = lambda: [t.split()[0] for t in texts(chromium, "[aria-label=runs] tbody tr")]  # noqa: E731
    assert names() == ["first", "crashed"]
    chromium.one("th button", "steps").click()
    assert names() == ["crashed", "first"]
    chromium.one("th button", "steps").click()
    assert names() == ["first", "crashed"]
    row = chromium.one("[aria-label=runs] tbody tr", "first").text
    assert "50.0 % 75.0 % 80 77 -3.7 % 25.0 %" in row


def test_curves_are_read_and_zoomed(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Curves")
    figure = chromium.one("figure", "Accuracy")  # the first of that name
    plot = figure.find_element("css selector", "svg")
    values = figure.find_element("css selector", ".values")
    assert len(figure.find_elements("css selector", "path.curve")) == 4
    plot.send_keys(Keys.ARROW_RIGHT)
    assert values.text == "step 0: first, held-out 50.0 %, crashed, held-out 50.0 %"
    plot.send_keys(Keys.ARROW_RIGHT)
    assert values.text == "step 1: first 40.0 %, crashed 40.0 %"
    ticks = lambda: [e.text for e in plot.find_elements("css selector", "text[text-anchor=middle]")]  # noqa: E731
    whole = ticks()
    plot.send_keys("+")
    near = ticks()
    assert near != whole and "3" not in near
    plot.send_keys("0")
    assert ticks() == whole
    actions = ActionChains(chromium.driver)
    actions.move_to_element_with_offset(plot, -100, 0).click_and_hold().move_by_offset(120, 0)
    actions.release().perform()
    assert ticks() != whole
    chromium.one("button", "whole").click()
    assert ticks() == whole


def test_settings_that_differ(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Settings")
    rows = texts(chromium, "[aria-label='settings that differ'] tbody tr")
    assert rows == ["optimizer.lr 0.0001 0.0002", "run.steps 3 2"]


def test_filters_and_search(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Responses")
    assert chromium.one("#count").text == "36 of 36 responses"
    Select(chromium.one("#verdict")).select_by_visible_text("wrong")
    assert chromium.one("#count").text.startswith("12 of 36")
    Select(chromium.one("#step")).select_by_visible_text("2")
    assert chromium.one("#count").text.startswith("4 of 36")
    chromium.one("#problem").send_keys("p-3", Keys.TAB)
    assert texts(chromium, "#list button")[0].startswith("step 2, p-3 #1 wrong 51 tokens")
    assert len(chromium.all("#list button")) == 1
    assert "wrong: read 8, to be found was 7" in chromium.one("#detail").text
    chromium.one("#clear").click()
    assert chromium.one("#count").text == "36 of 36 responses"
    chromium.one("#from").send_keys("101", Keys.TAB)
    assert chromium.one("#count").text.startswith("8 of 36")
    chromium.one("#clear").click()
    chromium.one("#search").send_keys("CORRECT in step 3")
    wait_for_count(chromium, "4 of 36")
    assert texts(chromium, "#detail mark") == ["correct in step 3"]
    chromium.one("#search").send_keys(" and nothing")
    wait_for_count(chromium, "0 of 36")
    assert "No response passes" in chromium.one("#detail").text


def test_harmful_texts_are_texts(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Responses")
    assert "</script><script>console.error('ran')</script>" in chromium.one("pre.response").text
    assert chromium.run("return document.images.length") == 0
    assert chromium.messages() == []


def test_group_before_and_after_and_other_runs(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Responses")
    heads = lambda: texts(chromium, "#detail h3")  # noqa: E731
    assert heads() == ["step 1, p-0 #0"]
    chromium.one("#detail button", "Its group").click()
    assert heads() == ["step 1, p-0 #0", "step 1, p-0 #1", "step 1, p-0 #2"]
    chromium.one("#detail button", "Before and after").click()
    assert heads() == ["step 1, p-0 #0", "step 3, p-0 #0"]
    chromium.one("#detail button", "In every run").click()
    assert heads() == ["first: step 1, p-0 #0", "crashed: step 1, p-0 #0"]
    places = [card.rect for card in chromium.all("#detail article")]
    assert places[0]["y"] == places[1]["y"] and places[0]["x"] < places[1]["x"]


def test_shortest_longest_random(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Responses")
    chromium.one("button", "Shortest").click()
    assert "33 tokens" in chromium.one("#detail").text
    chromium.one("button", "Longest").click()
    assert "102 tokens" in chromium.one("#detail").text
    seen = set()
    for _ in range(20):
        chromium.one("button", "Random").click()
        seen.add(chromium.one("#detail h3").text)
    assert len(seen) > 5


def test_bins_of_lengths_filter(tab: Callable[[str], Chromium]) -> None:
    """Lengths are 33 to 35, 50 to 52 and 100 to 102."""
    chromium = tab("Responses")
    bins = [
        b for b in chromium.all(".bin") if ": 0 correct, 0 not" not in b.get_attribute("aria-label")
    ]
    label = bins[0].get_attribute("aria-label")
    assert label == "30 to 34 tokens: 4 correct, 4 not"
    bins[0].send_keys(Keys.ENTER)
    assert chromium.one("#count").text.startswith("8 of 36")
    assert len(chromium.all(".bin.on")) == 1
    chromium.one(".bin.on").send_keys(Keys.ENTER)
    assert chromium.one("#count").text == "36 of 36 responses"


def test_another_run_is_read(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Responses")
    Select(chromium.all("#responses select")[0]).select_by_visible_text("crashed")
    assert chromium.one("#count").text == "24 of 24 responses"
    steps = [option.text for option in Select(chromium.one("#step")).options]
    assert steps == ["all", "1", "2"]


def test_responses_of_two_models_beside_each_other(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Responses")
    Select(chromium.all("#responses select")[0]).select_by_visible_text("evaluation of model 1")
    Select(chromium.one("#verdict")).select_by_visible_text("wrong")
    assert chromium.one("#count").text == "6 of 20 responses"
    chromium.one("#detail button", "In every run").click()
    assert texts(chromium, "#detail h3") == [
        f"evaluation of model {n}: gsm8k, p7 #0" for n in (0, 1)
    ]
    assert "No response to this problem is here of first, crashed." in chromium.one("#detail").text


def test_curves_of_more_sets(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Curves")
    figure = chromium.one("figure", "Accuracy on hard")
    figure.find_element("css selector", "svg").send_keys(Keys.ARROW_RIGHT)
    values = figure.find_element("css selector", ".values").text
    assert values == "step 0: first, held-out 25.0 %, crashed, held-out 25.0 %"


def test_evaluations(tab: Callable[[str], Chromium]) -> None:
    chromium = tab("Evaluations")
    rows = texts(chromium, "[aria-label=gsm8k] tbody tr")
    assert rows[0].startswith("model 0 60.0 % [") and rows[1].startswith("model 1 70.0 % [")
    scatter = chromium.one("figure", "Pareto front")
    assert len(scatter.find_elements("css selector", "circle")) == 2
    assert len(scatter.find_elements("css selector", "path.front")) == 1
    assert len(chromium.all("figure")) == 2 * 4  # gsm8k and overall: points and three curves


def test_tokens_are_coloured_by_probability_where_it_was_saved(
    chromium: Chromium, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", steps=1, problems=0)
    rows = [response(1, "p-0", sample) for sample in range(2)]
    signs = "ab\n\N{GRINNING FACE}e<i>f"
    rows[0] |= {"text": signs, "log_probs": [-0.1, -1.0, -9.0, -0.3, 0.0]}
    rows[0] |= {"piece_lengths": [2, 2, 0, len(signs) - 4, 4]}  # the end token's are not shown
    write_responses(run / "rollouts/step_000001.jsonl.gz", rows)
    write_page(tmp_path / "page.html", [run])
    contrasts = []
    for dark in (False, True):
        chromium.open(tmp_path / "page.html", dark=dark)
        chromium.one("[role=tab]", "Responses").click()
        tokens = chromium.run(
            "return [...document.querySelectorAll('pre.response span')]"
            ".map((one) => [one.className, one.textContent, one.title])"
        )
        assert tokens == [
            ["p0", "ab", "probability 90.5 %"],
            ["p2", "\n\N{GRINNING FACE}", "probability 36.8 %"],
            ["p1", "e<i>f", "probability 74.1 %"],
        ]
        assert len(chromium.all(".probabilities span")) == 6
        contrasts += chromium.run(_CONTRASTS)
    assert min(contrasts) >= 4.5  # WCAG AA
    chromium.one("#list button", "p-0 #1").click()
    assert not chromium.all(".probabilities") and not chromium.all("pre.response span")
    assert chromium.messages() == []
