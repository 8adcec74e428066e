"""The pages in a real browser: they show what they hold, and fetch nothing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_diagnosis import NUM_RESPONSES, make_diagnosis, write_diagnosis_page
from made_runs import (
    make_evaluation,
    make_run,
    measure,
    response,
    write_report,
    write_responses,
)
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from megatron_opsft.commands.report.page import write_page
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.records import Problem
from megatron_opsft.runtime.durable import json_lines

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
_FLAGS += ["--disable-background-networking", "--hide-scrollbars"]


class Chromium:
    """A real one without a window, asked through its driver. profile: a new directory."""

    def __init__(self, profile: Path) -> None:
        programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
        assert all(programs), "not installed: sudo bash tools/install_chromium.sh"
        options = webdriver.ChromeOptions()
        options.binary_location = str(programs[0])
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=programs[1])
        self.driver = webdriver.Chrome(options=options, service=service)

    def open(self, page: Path, *, width: int = 1280, dark: bool = False) -> None:
        """The page from disk; the width is that of what is seen, in CSS pixels."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        self.driver.get("about:blank")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(page.resolve().as_uri())

    def all(self, selector: str) -> list[WebElement]:
        """Elements of a CSS selector that are seen."""
        return [e for e in self.driver.find_elements(By.CSS_SELECTOR, selector) if e.is_displayed()]

    def one(self, selector: str, text: str = "") -> WebElement:
        """The first that is seen and holds the text."""
        found = [element for element in self.all(selector) if text in element.text]
        assert found, f"no {selector} with {text!r} is seen"
        return found[0]

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def messages(self) -> list[str]:
        """What the console says since the page was opened or the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def check(self, page: Path, width: int, dark: bool) -> None:
        """What holds of every page that was opened so: nothing is wider than the screen, or than
        what it is in, the theme is the system's, nothing was fetched, and nothing went wrong.
        """
        assert self.run("return document.documentElement.scrollWidth") == width
        tables = "[...document.querySelectorAll('table')]"
        edges = self.run(f"return {tables}.map((one) => one.getBoundingClientRect().right)")
        assert edges and max(edges) <= width
        ground = self.run("return getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
        assert self.messages() == []
        log = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e["params"]["request"] for e in log if e["method"] == "Network.requestWillBeSent"]
        urls = {request["url"].split("#")[0] for request in sent}
        assert {url for url in urls if not url.startswith("data:")} == {page.resolve().as_uri()}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    running = Chromium(tmp_path_factory.mktemp("profile"))
    yield running
    running.driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them crashed, and two evaluations."""
    at = tmp_path_factory.mktemp("page")
    runs = [make_run(at / "first"), make_run(at / "crashed", lr=2e-4, steps=2, finished=False)]
    made = [make_evaluation(at / f"eval{n}", f"model {n}", 300 - 200 * n, 6 + n) for n in (0, 1)]
    write_report(at / "report.html", made, runs)
    return at / "report.html"


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_every_part_without_an_error_or_a_request(
    chromium: Chromium, page: Path, width: int, dark: bool
) -> None:
    chromium.open(page, width=width, dark=dark)
    assert chromium.texts("nav a") == ["Result", "Tables", "Responses", "Curves", "Settings"]
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
    places = [chromium.one(".big"), *chromium.all("#result figure")[:3], *chromium.all(".pair h3")]
    assert len(places) == 6 and max(place.rect["y"] for place in places) < 850
    before, after = chromium.all(".pair article")
    assert before.rect["y"] == after.rect["y"] and before.rect["x"] < after.rect["x"]
    assert "</script><script>console.error('ran')</script>" in before.text
    chromium.open(tmp_path / "page.html", width=390)
    before, after = chromium.all(".pair article")
    assert before.rect["y"] < after.rect["y"]  # below each other
    assert chromium.messages() == []


@pytest.mark.parametrize(("width", "columns"), [(1280, 3), (1000, 2), (390, 1)])
def test_the_bar_of_tokens_fills_the_row_that_it_would_have_alone(
    chromium: Chromium, tmp_path: Path, width: int, columns: int
) -> None:
    """Three charts stand before it; its legend is beside it then."""
    run = make_run(tmp_path / "run")
    for path in (run / "rollouts").iterdir():
        measure(path, "2+5=7. Wait. 7.", 5, thinking=40, first_right=10)
    write_page(tmp_path / "page.html", [run])
    chromium.open(tmp_path / "page.html", width=width)
    *charts, bar = [figure.rect for figure in chromium.all("#result .plots figure")]
    assert len(charts) == 3 and len({chart["x"] for chart in charts}) == columns
    right = max(chart["x"] + chart["width"] for chart in charts)
    assert abs(bar["x"] + bar["width"] - right) < 1
    drawn = chromium.one("#result figure:has(.parts) svg").rect
    legend = chromium.one("#result .parts").rect
    assert (legend["x"] >= drawn["x"] + drawn["width"]) == (columns == 3)


def test_filters_search_and_theme(chromium: Chromium, page: Path) -> None:
    chromium.open(page)
    assert chromium.one("#count").text == "36 of 36 responses"
    Select(chromium.one("#verdict")).select_by_visible_text("wrong")
    assert chromium.one("#count").text.startswith("12 of 36")
    Select(chromium.one("#step")).select_by_visible_text("2")
    assert chromium.one("#count").text.startswith("4 of 36")
    chromium.one("#problem").send_keys("p-3", Keys.TAB)
    assert chromium.texts("#list button")[0].startswith("step 2, p-3 #1 wrong 51 tokens")
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
    wait = WebDriverWait(chromium.driver, 10)
    wait.until(lambda _: "4 of 36" in chromium.one("#count").text)
    assert chromium.texts("#detail mark") == ["correct in step 3"]
    chromium.one("#search").send_keys(" and nothing")
    wait.until(lambda _: "0 of 36" in chromium.one("#count").text)
    assert "No response passes" in chromium.one("#detail").text
    for theme in ("light", "dark", "light"):
        assert chromium.run("return document.documentElement.dataset.theme") == theme
        chromium.one("#theme").click()


def test_a_response_beside_its_group_another_step_and_run(chromium: Chromium, page: Path) -> None:
    chromium.open(page)
    runs = Select(chromium.all("#responses select")[0])
    for button, heads in (
        ("Its group", ["step 1, p-0 #0", "step 1, p-0 #1", "step 1, p-0 #2"]),
        ("Before and after", ["step 1, p-0 #0", "step 3, p-0 #0"]),
        ("In every run", ["first: step 1, p-0 #0", "crashed: step 1, p-0 #0"]),
    ):
        chromium.one("#detail button", button).click()
        assert chromium.texts("#detail h3") == heads
    places = [card.rect for card in chromium.all("#detail article")]
    assert places[0]["y"] == places[1]["y"] and places[0]["x"] < places[1]["x"]
    runs.select_by_visible_text("crashed")
    assert chromium.one("#count").text == "24 of 24 responses"
    steps = [option.text for option in Select(chromium.one("#step")).options]
    assert steps == ["all", "1", "2"]
    runs.select_by_visible_text("evaluation of model 1")
    Select(chromium.one("#verdict")).select_by_visible_text("wrong")
    assert chromium.one("#count").text == "6 of 20 responses"
    chromium.one("#detail button", "In every run").click()
    heads = [f"evaluation of model {n}: gsm8k, p7 #0" for n in (0, 1)]
    assert chromium.texts("#detail h3") == heads
    assert "No response to this problem is here of first, crashed." in chromium.one("#detail").text


def test_bins_of_lengths_filter(chromium: Chromium, page: Path) -> None:
    """Lengths are 33 to 35, 50 to 52 and 100 to 102."""
    chromium.open(page)
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


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_a_problem_with_both_answers_whose_parts_have_colours(
    chromium: Chromium, tmp_path: Path, width: int, dark: bool
) -> None:
    """Side by side, below each other on a phone; as a script draws it, and as the file has it."""
    made = [make_evaluation(tmp_path / n, n, t, 6) for n, t in (("old", 300), ("new", 100))]
    text = f"\N{GRINNING FACE} so 7. Wait, 7 again.</think>It is 7. {'long' * 99} <i>x</i>"
    for evaluation in made:
        problem = Problem(id="p5", text=f"What is p5? {'wide' * 99}<b>", answer="7")
        SampleFiles(evaluation).add_problems("gsm8k", [problem])
        path = evaluation / "samples/gsm8k.jsonl.gz"
        measure(path, text, text.index("7") + 1, thinking=60, first_right=20)
    write_report(tmp_path / "page.html", made)
    chromium.open(tmp_path / "page.html", width=width, dark=dark)
    assert chromium.one("#result .problem").text.startswith("What is p5? wide")
    chromium.one("#problem").send_keys("p5", Keys.TAB)
    assert chromium.one("#detail pre.problem").text.endswith("wide<b>")
    assert chromium.one("#detail p.problem").text == "gold answer: 7"
    heads = [f"evaluation of {name}: gsm8k, p5 #0" for name in ("old", "new")]
    assert chromium.texts("#detail article h3") == heads
    for place in ("#result .pair", "#detail .pair"):
        first, second = (card.rect for card in chromium.all(f"{place} article"))
        if width == 390:
            assert first["y"] + first["height"] <= second["y"] and first["x"] == second["x"]
        else:
            assert first["y"] == second["y"] and first["x"] + first["width"] <= second["x"]
        spans = chromium.all(f"{place} pre span")[:4]
        pieces = [(span.get_attribute("class"), span.text) for span in spans]
        assert pieces[:3] == [
            ("part-thinking", "\N{GRINNING FACE} so "),
            ("part-right", "7"),
            ("part-after", ". Wait, 7 again.</think>"),
        ]
        assert pieces[3][0] == "part-answer" and pieces[3][1].endswith("<i>x</i>")
        colours = {span.value_of_css_property("background-color") for span in spans}
        assert len(colours) == 4
    legend = ["thinking", "first right answer", "thinking after it", "answer"]
    assert chromium.texts("#result .text-parts span") == legend
    assert chromium.texts("#detail .text-parts span") == legend * 2
    said = "60 of thinking, 245 of answer, first right after 20, stated again 2 times"
    assert said in chromium.all("#detail article")[0].text
    (bar,) = chromium.all("#result figure svg")
    widths = [part.rect["width"] for part in chromium.all("#result figure .part")]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.1) and len(widths) == 6
    answers = "20, thinking after it 40, answer 242; new: thinking to the first right answer 20"
    assert answers in str(bar.get_attribute("aria-label"))
    chromium.one("#search").send_keys("again")
    wait = WebDriverWait(chromium.driver, 10)
    wait.until(lambda _: chromium.texts("#detail mark") == ["again"] * 2)
    chromium.check(tmp_path / "page.html", width, dark)
    Select(chromium.all("#responses select")[0]).select_by_visible_text("evaluation of new")
    assert chromium.texts("#detail article h3") == heads


def test_an_evaluation_of_an_earlier_release_opens(chromium: Chromium, tmp_path: Path) -> None:
    made = [make_evaluation(tmp_path / n, n, t, 6) for n, t in (("old", 300), ("new", 100))]
    write_report(tmp_path / "page.html", made)
    chromium.open(tmp_path / "page.html")
    assert chromium.texts("#detail pre") == ["old says 7", "new says 7"]
    assert not chromium.all(".text-parts") and not chromium.all(".part")
    assert [button.text for button in chromium.all("#detail button")] == [
        "This response",
        "Its group",
        "Side by side",
    ]
    chromium.one("#detail button", "This response").click()
    assert chromium.texts("#detail pre") == ["old says 7"]
    assert chromium.messages() == []


def test_parts_or_probabilities(chromium: Chromium, tmp_path: Path) -> None:
    """Where both are known, a button chooses."""
    run = make_run(tmp_path / "run", steps=1, problems=0)
    path = run / "rollouts/step_000001.jsonl.gz"
    row = response(1, "p-0", 0) | {"log_probs": [-0.1, -9.0], "piece_lengths": [2, 9]}
    write_responses(path, [row])
    measure(path, "4</think>4.", 1, thinking=3, first_right=1)
    write_page(tmp_path / "page.html", [run])
    chromium.open(tmp_path / "page.html")
    classes = "return [...document.querySelectorAll('#detail pre.response span')]"
    classes += ".map((one) => one.className)"
    parts = ["part-right", "part-after", "part-answer"]
    assert chromium.run(classes) == parts
    chromium.one("#detail button", "Probabilities").click()
    assert chromium.run(classes) == ["p0", "p5"] and chromium.all(".probabilities")
    chromium.one("#detail button", "Probabilities").click()
    assert chromium.run(classes) == parts and not chromium.all(".probabilities")


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_runs_of_other_problems_are_marked_on_the_first_screen(
    chromium: Chromium, tmp_path: Path, width: int, dark: bool
) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        manifest = {"identity": {"held_out_sha256": {"eval": run.name}}}
        (run / "manifest.json").write_text(json.dumps(manifest))
    write_page(tmp_path / "page.html", runs)
    chromium.open(tmp_path / "page.html", width=width, dark=dark)
    warning = chromium.one(".warning", "different held-out problems: a | b")
    assert warning.rect["y"] + warning.rect["height"] < 300
    chromium.check(tmp_path / "page.html", width, dark)


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_a_diagnosis_and_a_tapped_token_that_says_its_number(
    chromium: Chromium, tmp_path: Path, width: int, dark: bool
) -> None:
    rows = [*json_lines(make_diagnosis(tmp_path) / "tokens.jsonl")]
    write_diagnosis_page(tmp_path / "report.html", rows, "long", "short")
    chromium.open(tmp_path / "report.html", width=width, dark=dark)
    assert chromium.one("h1").text == "long against short"
    assert len(chromium.all("main pre")) == NUM_RESPONSES
    cloud, bars = (chromium.all(f"figure{kind} svg")[0] for kind in (".cloud", ":not(.cloud)"))
    assert cloud.get_attribute("aria-label") == "Largest first: Wait"
    assert bars.get_attribute("aria-label").startswith(
        "Sum of D_t by token (how often): Wait 14 (4)"
    )
    (in_cloud,) = chromium.all("figure.cloud text")
    assert cloud.rect["x"] <= in_cloud.rect["x"]
    assert in_cloud.rect["width"] < cloud.rect["width"] <= width
    # The word is seen on its shade: both themes have their own.
    shade = "rgba(196, 44, 62, 0.85)" if dark else "rgba(178, 24, 43, 0.85)"
    word = chromium.one("pre i.k9", "Wait")
    assert word.value_of_css_property("background-color") == shade
    assert max(bar.rect["width"] for bar in chromium.all("figure .bar")) > 50
    chromium.check(tmp_path / "report.html", width, dark)
    assert chromium.all("#told") == []
    word = chromium.all("pre i.k9")[0]  # of the response with the largest
    chromium.run("arguments[0].scrollIntoView({ block: 'center' })", word)
    word.click()
    told = chromium.one("#told").text
    assert told.startswith("Wait") and "D_t = 5; efficient: '</think>' 90 %, 'Wait' 10 %" in told
    chromium.one("#told").click()
    assert chromium.all("#told") == []
