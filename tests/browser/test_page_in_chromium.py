"""The page in a real browser: it shows what it holds, and fetches nothing."""

from pathlib import Path

import pytest
from chromium import Chromium
from made_runs import make_run, response, write_responses
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from megatron_opsft.report.page import write_page

PARTS = ["Result", "Tables", "Responses", "Curves", "Settings"]


@pytest.fixture
def opened(chromium: Chromium, page: Path) -> Chromium:
    """The page, newly opened."""
    chromium.open(page)
    return chromium


def texts(chromium: Chromium, selector: str) -> list[str]:
    return [element.text for element in chromium.all(selector)]


def wait_for_count(chromium: Chromium, text: str) -> None:
    WebDriverWait(chromium.driver, 10).until(lambda _: text in chromium.one("#count").text)


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_every_part_without_an_error_or_a_request(
    chromium: Chromium, page: Path, width: int, dark: bool
) -> None:
    chromium.open(page, width=width, dark=dark)
    assert texts(chromium, "nav a") == PARTS
    for link in chromium.all("nav a"):
        link.send_keys(Keys.ENTER)
        part = link.get_attribute("href").split("#")[1]
        assert len(chromium.one(f"#{part}").text) > 50
        top = chromium.run(f"return document.getElementById('{part}').getBoundingClientRect().top")
        assert -1 < top < 900
    colours = chromium.run(
        "return ['.c0 .curve', '.c1 .curve'].map((one) =>"
        " getComputedStyle(document.querySelector('figure ' + one)).stroke)"
    )
    assert len(set(colours)) == 2
    assert "</script><script>console.error('ran')</script>" in chromium.one("pre.response").text
    assert chromium.run("return document.images.length") == 0
    chromium.check(page, width, dark)


def test_the_first_screen_is_the_answer(chromium: Chromium, tmp_path: Path) -> None:
    """Of a run: length and accuracy before and after, both curves, and a problem twice."""
    write_page(tmp_path / "page.html", [make_run(tmp_path / "run")])
    chromium.open(tmp_path / "page.html")
    assert texts(chromium, ".big")[:2] == [
        "80.0\n→\n77.0\n-3.7 %",
        "50.0 %\n→\n75.0 %\n+25.0 points",
    ]
    places = [chromium.one(".big"), *chromium.all("#result figure")[:3], *chromium.all(".pair h3")]
    assert len(places) == 6 and max(place.rect["y"] for place in places) < 850
    before, after = chromium.all(".pair article")
    assert before.rect["y"] == after.rect["y"] and before.rect["x"] < after.rect["x"]
    assert "</script><script>console.error('ran')</script>" in before.text
    chromium.open(tmp_path / "page.html", width=390)
    before, after = chromium.all(".pair article")
    assert before.rect["y"] < after.rect["y"]  # below each other
    assert chromium.messages() == []


def test_filters_search_and_theme(opened: Chromium) -> None:
    chromium = opened
    assert chromium.one("#count").text == "36 of 36 responses"
    Select(chromium.one("#verdict")).select_by_visible_text("wrong")
    assert chromium.one("#count").text.startswith("12 of 36")
    Select(chromium.one("#step")).select_by_visible_text("2")
    assert chromium.one("#count").text.startswith("4 of 36")
    chromium.one("#problem").send_keys("p-3", Keys.TAB)
    assert texts(chromium, "#list button")[0].startswith("step 2, p-3 #1 wrong 51 tokens")
    assert len(chromium.all("#list button")) == 1
    assert "wrong: read 8, expected answer: 7" in chromium.one("#detail").text
    chromium.one("#clear").click()
    assert chromium.one("#count").text == "36 of 36 responses"
    chromium.one("#from").send_keys("101", Keys.TAB)
    assert chromium.one("#count").text.startswith("8 of 36")
    chromium.one("#clear").click()
    for name, words in (("Shortest", "33 tokens"), ("Longest", "102 tokens"), ("Random", "tokens")):
        chromium.one("button", name).click()
        assert words in chromium.one("#detail").text
    chromium.one("#search").send_keys("CORRECT in step 3")
    wait_for_count(chromium, "4 of 36")
    assert texts(chromium, "#detail mark") == ["correct in step 3"]
    chromium.one("#search").send_keys(" and nothing")
    wait_for_count(chromium, "0 of 36")
    assert "No response passes" in chromium.one("#detail").text
    for theme in ("light", "dark", "light"):
        assert chromium.run("return document.documentElement.dataset.theme") == theme
        chromium.one("#theme").click()


def test_group_before_and_after_and_other_runs(opened: Chromium) -> None:
    chromium = opened
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


def test_bins_of_lengths_filter(opened: Chromium) -> None:
    """Lengths are 33 to 35, 50 to 52 and 100 to 102."""
    chromium = opened
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


def test_another_run_and_two_models_beside_each_other(opened: Chromium) -> None:
    chromium = opened
    Select(chromium.all("#responses select")[0]).select_by_visible_text("crashed")
    assert chromium.one("#count").text == "24 of 24 responses"
    steps = [option.text for option in Select(chromium.one("#step")).options]
    assert steps == ["all", "1", "2"]
    Select(chromium.all("#responses select")[0]).select_by_visible_text("evaluation of model 1")
    Select(chromium.one("#verdict")).select_by_visible_text("wrong")
    assert chromium.one("#count").text == "6 of 20 responses"
    chromium.one("#detail button", "In every run").click()
    assert texts(chromium, "#detail h3") == [
        f"evaluation of model {n}: gsm8k, p7 #0" for n in (0, 1)
    ]
    assert "No response to this problem is here of first, crashed." in chromium.one("#detail").text


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
    chromium.open(tmp_path / "page.html")
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
    chromium.one("#list button", "p-0 #1").click()
    assert not chromium.all(".probabilities") and not chromium.all("pre.response span")
    assert chromium.messages() == []
