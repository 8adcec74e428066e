"""A real Chromium without a window, asked through its driver."""

import json
import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
_FLAGS += ["--disable-background-networking", "--hide-scrollbars"]


class Chromium:
    """profile: a new directory of its own."""

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
