"""The report in a real browser, without a screen: it draws, asks for nothing, fits narrow windows and dark ones."""

import os
import shutil
import time
from itertools import pairwise

import pytest
from report_run import write_run

from trl_ulorl.cli import main

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")
HOSTILE = '<script>window.hacked = 1</script><img src="https://example.com/x.png" onerror="window.hacked = 1">'
SCHEMES = {"light": "rgb(246, 247, 249)", "dark": "rgb(20, 24, 29)"}
CHARTS = """() => [...document.querySelectorAll("[data-chart]")].map((node) => {
    const box = node.getBoundingClientRect();
    const marks = [...node.querySelectorAll(".trace path, .trace .point, .points path, .fills path")];
    const drawn = marks.some((mark) => mark.getBBox().width + mark.getBBox().height > 0);
    const frame = node.closest(".card").getBoundingClientRect();
    return {name: node.dataset.chart, drawn, height: box.height, fits: box.right <= frame.right + 1 && box.left >= frame.left - 1};
})"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: `pip install playwright`"
    )
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser on PATH ({', '.join(BROWSERS)}): on Debian, `apt-get install chromium`")
    with sync_api.sync_playwright() as playwright:
        # As root there is no sandbox, and what is opened is our own page.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments, timeout=120_000)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, num_groups=200, texts=(HOSTILE, "abc " * 400, "x" * 3000))
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def opened(browser, path, *, width, scheme):
    """Open the page, and return it with what it said on the console and what it asked for."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(120_000)
    said, asked = [], []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    return page, said, asked


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_in_a_browser(browser, page_path, width, scheme):
    page, said, asked = opened(browser, page_path, width=width, scheme=scheme)
    for details in page.locator("details").all():
        details.evaluate("node => { node.open = true; }")
    assert said == []
    assert asked == [page_path.as_uri()]
    charts = page.evaluate(CHARTS)
    assert len(charts) == 18
    assert [
        chart["name"] for chart in charts if not (chart["drawn"] and chart["fits"] and chart["height"] > 100)
    ] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == SCHEMES[scheme]
    assert page.evaluate("window.hacked") is None
    assert HOSTILE[:10] in page.inner_text("main")
    page.context.close()


def test_charts_follow_the_scheme_while_the_page_is_open(browser, page_path):
    page, said, _ = opened(browser, page_path, width=800, scheme="light")
    ink = "getComputedStyle(document.querySelector('.xtick text')).fill"
    assert page.evaluate(ink) == "rgb(31, 41, 51)"
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{ink} === 'rgb(228, 231, 235)'")
    line = page.evaluate(
        "getComputedStyle(document.querySelector('[data-chart=accuracy] .js-line:last-child')).stroke"
    )
    assert line == "rgb(109, 185, 240)"
    assert said == []
    page.context.close()


def test_headings_and_tables_are_told_to_screen_readers(browser, page_path):
    page, _, _ = opened(browser, page_path, width=1400, scheme="light")
    levels = [int(name[1]) for name in page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(n => n.tagName)")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    unlabelled = page.evaluate(
        "[...document.querySelectorAll('[role=img]')].filter(n => !document.getElementById(n.getAttribute('aria-labelledby')))"
    )
    assert unlabelled == []
    assert page.evaluate("[...document.querySelectorAll('thead th')].every(n => n.scope === 'col')")
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map(n => n.id)).size") == page.evaluate(
        "document.querySelectorAll('[id]').length"
    )
    page.context.close()


def test_a_long_run_has_a_small_report_in_seconds(browser, tmp_path):
    write_run(tmp_path, num_steps=10_000, num_groups=25_000, texts=["word " * 1000] * 64)
    started = time.process_time()
    assert main(["report", str(tmp_path)]) == 0
    assert time.process_time() - started < 30
    page_path = tmp_path / "report.html"
    assert page_path.stat().st_size < 10e6
    page, said, _ = opened(browser, page_path, width=1400, scheme="light")
    assert said == []
    assert all(chart["drawn"] for chart in page.evaluate(CHARTS))
    assert "each point is the mean of 17 successive log entries, 10,000 in all" in page.inner_text("footer")
    page.context.close()
