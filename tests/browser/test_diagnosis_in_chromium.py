"""The page of a diagnosis in a real browser: both themes, a phone's width, nothing fetched."""

from pathlib import Path

import pytest
from chromium import Chromium
from made_diagnosis import NUM_RESPONSES, make_diagnosis

from megatron_opsft.diagnose.page import write_page


@pytest.fixture(scope="module")
def diagnosis_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_diagnosis(tmp_path_factory.mktemp("made"))
    write_page(directory, "long", "short")
    return directory / "report.html"


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_without_an_error_a_request_or_an_overflow(
    chromium: Chromium, diagnosis_page: Path, width: int, dark: bool
) -> None:
    chromium.open(diagnosis_page, width=width, dark=dark)
    assert chromium.one("h1").text == "long against short"
    assert len(chromium.all("main pre")) == NUM_RESPONSES
    said = chromium.one("figure svg").get_attribute("aria-label")
    assert said.startswith("Sum of D: 'Wait' 14 (4); ")
    # The word is seen on its shade: both themes have their own.
    shade = "rgba(196, 44, 62, 0.85)" if dark else "rgba(178, 24, 43, 0.85)"
    word = chromium.one("pre i.k9", "Wait")
    assert word.value_of_css_property("background-color") == shade
    assert max(bar.rect["width"] for bar in chromium.all("figure .bar")) > 50
    chromium.check(diagnosis_page, width, dark)


def test_a_tapped_token_says_its_number(chromium: Chromium, diagnosis_page: Path) -> None:
    chromium.open(diagnosis_page, width=390)
    assert chromium.all("#told") == []
    word = chromium.all("pre i.k9")[0]  # of the response with the largest
    chromium.run("arguments[0].scrollIntoView({ block: 'center' })", word)
    word.click()
    told = chromium.one("#told").text
    assert told.startswith("Wait") and "D = 5; efficient: '</think>' 90 %, 'Wait' 10 %" in told
    chromium.one("#told").click()
    assert chromium.all("#told") == []
