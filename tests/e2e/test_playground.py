"""The playground in a browser: Chromium, driven as a person would.

Needs the extra `browser`, chromium and chromedriver: `pytest -m browser`. The tiny llama answers in
noise; where a test has to know what is said, and when, a scripted runner takes the model's place
behind a real scheduler.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from paged.scheduler.async_engine import AsyncEngine
from paged.scheduler.config import EngineConfig
from paged.scheduler.loading import LoadedEngine
from paged.server.settings import ServerSettings
from tests.e2e.live_server import live_server, serving
from tests.scheduler.fakes import make_engine
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.browser

ANSWER = (
    "Some **bold** text, <img src=x onerror=alert(1)> and:\n\n```python\nx = 1\n```\n- one\n- two\n"
)
CHAT = "v1/chat/completions"


class Page:
    """What a person sees of the playground and does to it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """Return the text of the last element that fits, "" if there is none."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''"
        text: str = self.run(script, selector)
        return text

    def number(self, selector: str) -> int:
        text = self.text(selector).replace(",", "")
        return int(text) if text.isdecimal() else 0

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any], seconds: float = 200) -> Any:
        """Wait until something holds, and return what it gave."""
        end = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < end, self.text("body")
            time.sleep(0.03)
        return result

    def open(self, width: int = 1440, height: int = 900, *, dark: bool = False) -> "Page":
        """Load the page anew, with nothing kept."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(self.url)
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.driver.get(self.url)
        self.driver.get_log("browser")
        return self

    def connected(self) -> "Page":
        self.until(lambda: self.find("#connection").get_attribute("data-state") == "live")
        self.until(lambda: self.run("return document.getElementById('model').value"))
        return self

    def say(self, text: str) -> None:
        self.find("#prompt").send_keys(text, "\ue007")  # Enter

    def answered(self) -> None:
        self.until(lambda: self.find("#send").is_displayed())

    def answer(self) -> str:
        return self.text(".message.assistant > .body")

    def complaints(self) -> list[str]:
        """Return errors of the page itself: of scripts, and of its security policy."""
        log = self.driver.get_log("browser")
        found = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
        # The server's errors are answers like others.
        return [message for message in found if "Failed to load resource" not in message]


def scripted(text: str, seconds: float, *, max_num_queued_reqs: int | None = None) -> Any:
    """Return a function that starts an engine which says `text` again and again.

    Args:
      text: one token per byte.
      seconds: that each token of each request takes.
      max_num_queued_reqs: as of `EngineConfig`.
    """
    data = text.encode()

    def next_token(request: Any) -> int:
        time.sleep(seconds)
        return data[len(request.output_token_ids) % len(data)]

    async def start() -> AsyncEngine:
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 2048}
        engine = make_engine(next_token, num_blocks=513, block_size=8, token_budget=256, **limits)
        loaded = LoadedEngine(
            engine=engine,
            checkpoint=SimpleNamespace(**vars(FakeEngine().checkpoint), name="org/scripted"),
            config=EngineConfig(
                **limits, max_num_batched_tokens=256, max_num_queued_reqs=max_num_queued_reqs
            ),
            max_model_len=2048,
            cache_info={},
        )
        running = AsyncEngine(loaded)
        running.start()
        return running

    return start


@pytest.fixture(scope="module")
def scripted_url() -> Iterator[str]:
    settings = ServerSettings(log_stats=False)
    with serving(scripted(ANSWER, 0.004, max_num_queued_reqs=1), settings) as url:
        yield url


@pytest.fixture
def page(driver: Any, scripted_url: str) -> Page:
    return Page(driver, scripted_url).open().connected()


@contextlib.contextmanager
def load(url: str, count: int) -> Iterator[threading.Event]:
    """Have `count` long requests with one prompt run; set the event to end them."""
    over = threading.Event()
    body = {"messages": [{"role": "user", "content": "Once. " * 40}], "max_tokens": 1000}

    def ask() -> None:
        with httpx.stream(
            "POST", f"{url}/{CHAT}", json=body | {"stream": True}, timeout=200
        ) as got:
            assert got.status_code == 200, got.read()
            for _ in got.iter_lines():
                if over.is_set():
                    return

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield over
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def small_url(tiny_model: Path) -> Iterator[str]:
    """The URL of a server of the tiny llama that compiles little."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=65,
        compilation_cache_dir=None,
    )
    with live_server(str(tiny_model), config, ServerSettings(log_stats=False)) as url:
        yield url


def state_of(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/engine/state", timeout=200).json()


def test_a_model_answers_and_leaves_blocks_behind(driver, small_url):
    page = Page(driver, small_url).open().connected()
    before = page.number("#num-free")
    page.find("#sampling-temperature").send_keys("0")
    page.find("#sampling-max_tokens").send_keys("20")
    page.say("Tell me something, whatever it may be.")
    page.answered()
    body = {
        "messages": [{"role": "user", "content": "Tell me something, whatever it may be."}],
        "temperature": 0,
        "max_tokens": 20,
    }
    usage = httpx.post(f"{small_url}/{CHAT}", json=body, timeout=200).json()["usage"]
    assert page.number("[data-figure=tokens] b") == usage["completion_tokens"]
    assert page.number("[data-figure=prompt] b") == usage["prompt_tokens"]
    assert "to first token" in page.text("[data-figure=ttft]")
    assert page.find(".sparkline").get_attribute("aria-label").startswith("Time between tokens")
    page.until(lambda: page.number("#num-cached") > 0)
    page.until(lambda: page.number("#num-free") < before)
    assert page.complaints() == []


def test_markdown_is_shown_and_markup_is_text(page):
    page.find("#sampling-max_tokens").send_keys(str(len(ANSWER)))
    page.say("Go")
    page.answered()
    body = ".message.assistant > .body"
    assert page.text(f"{body} strong") == "bold"
    assert page.text(f"{body} pre code") == "x = 1"
    assert page.find(f"{body} pre").get_attribute("data-language") == "python"
    assert [item.text for item in page.driver.find_elements("css selector", f"{body} li")] == [
        "one",
        "two",
    ]
    assert "<img src=x onerror=alert(1)>" in page.answer()
    assert page.driver.find_elements("css selector", f"{body} img") == []
    assert page.text(".remark") == "Cut at the limit of tokens"
    assert page.complaints() == []


def test_stopping_ends_the_request_and_the_talk_goes_on(page):
    page.say("Go on for long")
    page.until(lambda: len(page.answer()) > 20)
    assert not page.find("#send").is_displayed()
    page.until(lambda: state_of(page.url)["running"] == 1)
    page.find("#stop").click()
    page.answered()
    page.until(lambda: state_of(page.url)["running"] == 0)
    assert page.text(".remark") == "Stopped"
    part = page.answer()
    time.sleep(0.2)
    assert page.answer() == part
    # Escape does the same, and what had come is part of the conversation.
    page.say("And on")
    page.until(lambda: page.number("[data-figure=prompt] b") > 100)
    page.find("#prompt").send_keys("\ue00c")
    page.answered()
    page.find("#clear").click()
    assert page.find("#empty").is_displayed()
    assert page.complaints() == []


def test_blocks_are_seen_in_use_shared_and_cached(driver):
    # A server of its own: nothing has been in its cache.
    with serving(scripted(ANSWER, 0.02), ServerSettings(log_stats=False)) as url:
        page = Page(driver, url).open().connected()
        assert page.until(lambda: first_pixel(page)) == legend(page, "free")
        with load(url, 3) as over:
            page.until(lambda: page.number("#running") == 3)
            page.until(lambda: page.number("#num-shared") > 10 and page.number("#num-used") > 3)
            page.until(lambda: first_pixel(page) == legend(page, "three"))
            label = page.find("#blocks").get_attribute("aria-label")
            assert re.sub(r"\d+", "", label) == "KV blocks:  free,  cached,  used,  shared"
            assert sum(map(int, re.findall(r"\d+", label))) == 512
            rows = page.driver.find_elements("css selector", "#requests [data-state=running]")
            assert len(rows) == 3
            page.until(lambda: page.number("#output-rate") > 0)
            point_at_first_block(page)
            assert page.text("#block-tip") == "Block 1: shared by 3"
            over.set()
            page.until(lambda: page.number("#running") == 0)
        page.until(lambda: page.number("#num-cached") > 10 and page.number("#num-shared") == 0)
        assert first_pixel(page) == legend(page, "cached")
        assert page.text("#hit-rate").endswith("%")
        assert page.complaints() == []


def first_pixel(page: Page) -> list[int]:
    """Return the colour of block 1 in the picture."""
    found: list[int] = page.run(
        "const context = document.getElementById('blocks').getContext('2d');"
        "return [...context.getImageData(3, 3, 1, 1).data.slice(0, 3)]"
    )
    return found


def legend(page: Page, name: str) -> list[int]:
    """Return the colour of a state in the legend."""
    colour = page.find(f"[data-cell={name}]").value_of_css_property("background-color")
    return [int(part) for part in re.findall(r"\d+", colour)[:3]]


def point_at_first_block(page: Page) -> None:
    from selenium.webdriver import ActionChains

    canvas = page.find("#blocks")
    page.run("arguments[0].scrollIntoView()", canvas)
    x, y = 4 - canvas.size["width"] // 2, 4 - canvas.size["height"] // 2
    ActionChains(page.driver).move_to_element_with_offset(canvas, x, y).perform()


def test_looking_can_be_paused(page):
    page.find("#pause").click()
    with load(page.url, 1):
        time.sleep(1)
        assert page.number("#running") == 0
        page.find("#pause").click()
        page.until(lambda: page.number("#running") == 1)


def test_errors_are_shown_with_what_to_do(page):
    page.find("#sampling-temperature").send_keys("9")
    page.say("This cannot be")
    page.until(lambda: page.text(".error"))
    assert "Error 400" in page.text(".error")
    assert "temperature must be in [0, 2], got 9.0" in page.text(".error")
    page.find("#reset").click()
    page.find("#sampling-max_tokens").send_keys("5")
    with load(page.url, 5) as over:
        page.until(lambda: (page.number("#running"), page.number("#waiting")) == (4, 1))
        page.find(".error button").click()
        page.until(lambda: "Error 429" in page.text(".error"))
        assert "try again later" in page.text(".error")
        over.set()
        page.until(lambda: page.number("#running") == 0)
    page.until(lambda: page.text(".error button") == "Retry")
    page.find(".error button").click()
    page.until(lambda: page.answer() == "Some")
    assert page.text(".error") == ""


def test_a_lost_connection_is_told_and_found_again(driver):
    settings = ServerSettings(log_stats=False)
    with serving(scripted(ANSWER, 0.01), settings, shutdown_timeout=0.5) as url:
        page = Page(driver, url).open().connected()
        page.say("Go")
        page.until(lambda: page.answer())
    page.until(lambda: page.text("#connection") == "Connection lost, retrying")
    page.until(lambda: page.text(".error"))
    assert page.answer(), "what had come stays"
    page.say("Are you there?")
    page.until(lambda: "Connection lost" in page.text(".error"))


def test_the_key_is_asked_for_and_forgotten_with_the_tab(driver):
    settings = ServerSettings(log_stats=False, api_keys=("right",))
    with serving(scripted(ANSWER, 0), settings) as url:
        page = Page(driver, url).open()
        page.until(lambda: page.find("#key-dialog").is_displayed())
        assert page.text("#key-why") == "This server asks for a key."
        page.find("#key-input").send_keys("wrong", "\ue007")
        page.until(lambda: page.text("#key-why") == "The server does not accept this key.")
        page.find("#key-input").send_keys("right", "\ue007")
        page.connected()
        assert not page.find("#key-dialog").is_displayed()
        page.find("#sampling-max_tokens").send_keys("4")
        page.say("Go")
        page.answered()
        assert page.answer() == "Some"
        assert page.run("return sessionStorage.getItem('paged.key')") == "right"
        assert "right" not in page.run("return JSON.stringify({...localStorage}) + document.cookie")
        page.find("#key").click()
        page.find("#key-forget").click()
        page.until(lambda: page.find("#key-dialog").is_displayed())
        assert page.run("return sessionStorage.length") == 0


# Of every element with a text of its own: the contrast to what is behind it (WCAG 2.2, 1.4.3).
CONTRAST = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const luminance = (rgb) => rgb.slice(0, 3)
  .map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = channels(getComputedStyle(node).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const poor = [];
for (const node of document.querySelectorAll("body *")) {
  const hasText = [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim());
  if (!hasText || !node.checkVisibility() || node.matches(":disabled")) continue;
  const pair = [channels(getComputedStyle(node).color), behind(node)].map(luminance);
  const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  if (ratio < 4.5) poor.push(`${node.tagName} ${node.className} ${node.textContent} ${ratio}`);
}
return poor;
"""
NAMELESS = """
return [...document.querySelectorAll("button, input, select, textarea")]
  .filter((n) => n.checkVisibility() && !n.labels?.length && !n.ariaLabel && !n.textContent.trim())
  .map((n) => n.outerHTML);
"""


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read_and_controls_have_names(driver, scripted_url, dark):
    page = Page(driver, scripted_url).open(dark=dark).connected()
    page.find("#sampling-max_tokens").send_keys(str(len(ANSWER)))
    page.say("Go")
    page.answered()
    page.find("#sampling-temperature").send_keys("9")
    with load(page.url, 1):
        page.until(lambda: page.text("#requests .chip") == "running")
        page.say("This cannot be")
        page.until(lambda: page.text(".error"))
        assert page.run(CONTRAST) == []
        assert page.run(NAMELESS) == []


@pytest.mark.parametrize("width", [320, 390, 1024])
def test_narrow_screens_show_one_view_after_the_other(driver, scripted_url, width):
    page = Page(driver, scripted_url).open(width, 800).connected()
    assert page.find("#chat").is_displayed()
    page.find("#prompt").send_keys("x" * 300)
    views = {"engine": "#blocks", "sampling": "#sampling-top_p"}
    for view, inside in views.items():
        page.find(f".views [data-view={view}]").click()
        assert page.find(inside).is_displayed()
        assert page.find("#chat").is_displayed() == (width > 800)
        assert page.run("return document.documentElement.scrollWidth") <= width
    if width < 800:
        page.find(".views [data-view=chat]").click()
    assert page.find("#send").is_displayed()
    page.find("#sampling-max_tokens" if width > 800 else "#prompt").send_keys("1")
    page.find("#send").click()
    page.until(lambda: page.find("#stop").is_displayed() or page.answer())
    page.until(lambda: page.answer())
    page.find("#prompt").send_keys("\ue00c")
    page.answered()


def test_the_keyboard_reaches_everything(page):
    from selenium.webdriver import ActionChains

    reached = set()
    page.run("document.activeElement.blur()")
    for _ in range(60):
        ActionChains(page.driver).send_keys("\ue004").perform()  # Tab
        reached.add(page.run("return document.activeElement.id || document.activeElement.type"))
    assert {"prompt", "clear", "theme", "pause", "reset", "sampling-temperature"} - reached <= {
        "clear"  # disabled while there is nothing to clear
    }
    page.find("#theme").send_keys(" ")
    assert page.run("return document.documentElement.dataset.theme") == "light"
