"""The page of a benchmark in a browser: legible on a desk and on a telephone."""

import pytest

from paged.server.bench_chart import Chart, Series
from paged.server.bench_page import render, run_page
from paged.server.bench_timeline import Timeline, latency_fields

pytestmark = pytest.mark.browser

SETTINGS = {"settings": {"seed": 0}, "versions": {"paged": "1"}}

# Of what is seen: how wide the page is, and the smallest text in pixels.
LOOK = """
const sizes = [...document.querySelectorAll("text, td, th, li, span, figcaption")].map(each => {
  const drawn = each.tagName == "text" ? each.getScreenCTM() : {a: 1, b: 0};
  const scale = Math.hypot(drawn.a, drawn.b);  // some are turned
  return parseFloat(getComputedStyle(each).fontSize) * scale;
});
return [document.documentElement.scrollWidth, innerWidth, Math.min(...sizes), sizes.length];
"""


def run() -> str:
    timelines = [
        Timeline(
            num_prompt_tokens=10,
            num_output_tokens=20,
            sent=0.5 * index,
            arrivals=[0.5 * index + 0.1 * k for k in range(1, 21)],
            finished=True,
        )
        for index in range(30)
    ]
    result = latency_fields(timelines) | SETTINGS
    return run_page(
        "a/long-model-name at http://127.0.0.1:8000", {"Requests": 30}, result, timelines
    )


def sweep() -> str:
    names = [f"p99, random-output-len {index}00" for index in range(6)]
    points = [(1.0, 10.0), (2.0, 30.0)]
    chart = Chart("Time to first token", "rate", "ms", [Series(name, points) for name in names])
    columns = [f"column {index}" for index in range(12)]
    return render("A sweep", {}, [("Points", columns, [columns] * 5)], [chart], SETTINGS)


@pytest.mark.parametrize("page", [run, sweep])
@pytest.mark.parametrize("width", [400, 1200])
def test_page_fits_and_its_texts_can_be_read(driver, tmp_path, page, width):
    file = tmp_path / "page.html"
    file.write_text(page(), encoding="utf-8")
    metrics = {"width": width, "height": 2000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        driver.get(file.as_uri())
        scroll_width, inner_width, smallest, num_texts = driver.execute_script(LOOK)
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert inner_width == width
    assert scroll_width <= width, "a table scrolls, not the page"
    assert num_texts > 20
    assert smallest >= 10
