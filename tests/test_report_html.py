"""The page on runs: what is in the file; `test_report_browser.py` opens it."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, PrefillOnly, Request, Result, SLOAware, simulate
from flowsim.report import Full, Html, charts, measures, timeline_data
from flowsim.report.__main__ import main
from flowsim.report.html import Run, load_runs, write_page
from flowsim.workload import mixed

FCFS = ComposedPolicy("arrival", Alone(), "request")
FLOW = ComposedPolicy("slack_edf", SLOAware(2048), "operator")


def run(policy: ComposedPolicy = FLOW, *, seed: int = 3, **options: int) -> Result:
    latency = toy_latency(3e-4, layers=4, pass_s=0.007, request_s=0.0045, check_s=2e-5, switch_s=3e-4)
    requests = mixed(rate_rps=4, num_requests=200, seed=seed)
    return simulate(requests, policy=policy, latency=latency, cluster=PrefillOnly(**options))


class Page(HTMLParser):
    """A page's ids, what it refers to, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.refers: list[tuple[str, str]] = []
        self.text, self.raw, self._in = "", {}, ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        found = dict(attrs)
        self._in = found.get("id", tag) if tag in ("script", "style") else ""
        if "id" in found:
            self.ids.append(found["id"])
        self.refers += [
            (name, found[name]) for name in ("src", "href", "aria-controls", "aria-labelledby") if name in found
        ]

    def handle_data(self, data: str) -> None:
        if self._in:
            self.raw[self._in] = self.raw.get(self._in, "") + data
        else:
            self.text += f" {data}"

    @property
    def data(self) -> dict:
        return json.loads(self.raw["data"])

    @property
    def timelines(self) -> list[dict]:
        return [json.loads(text) for name, text in self.raw.items() if name.startswith("timeline-")]


def page(*results: Result, folder: Path, **options: object) -> Page:
    runs = [Run(f"run {number}", f"title {number}", result) for number, result in enumerate(results)]
    return Page(write_page(runs, folder / "report.html", **options))


def unpacked(column: dict[str, str]) -> np.ndarray:
    ((kind, text),) = column.items()
    return np.frombuffer(base64.b64decode(text), dtype=f"<{kind}")


def test_the_page_refers_to_nothing_outside_itself_and_to_what_is_there_inside(tmp_path):
    made = page(run(), folder=tmp_path)
    assert len(made.ids) == len(set(made.ids))
    for name, target in made.refers:
        if name in ("src", "href"):
            assert target == "data:,"
        else:
            assert target in made.ids
    assert "url(" not in made.raw["style"]
    assert "://" not in made.raw["style"] + made.source.rsplit("<script>", 1)[1]


def test_every_chart_has_a_place_on_the_page_and_every_place_a_chart(tmp_path):
    made = page(run(), run(FCFS), folder=tmp_path)
    assert set(made.data["figures"]) < set(made.ids)
    places = re.findall(r'class="plot" id="([\w-]+)"', made.source)
    assert set(places) - {"gantt"} == set(made.data["figures"])
    assert len(made.timelines) == 2


def test_the_timeline_holds_the_tables_to_the_last_bit(tmp_path):
    result = run(instances=2)
    (packed,) = page(result, folder=tmp_path).timelines
    order = np.argsort(result.tables["segments"]["start_s"], kind="stable")
    for name in ("start_s", "end_s", "batch", "instance", "first_op", "last_op"):
        assert np.array_equal(unpacked(packed["segments"][name]), result.tables["segments"][name][order])
    for name in ("arrival_s", "first_token_s"):
        assert np.array_equal(unpacked(packed["requests"][name]), result.tables["requests"][name])
    assert np.array_equal(unpacked(packed["flags"]["by"]), result.tables["preemptions"]["by"])
    first, members = unpacked(packed["first_member"]), unpacked(packed["members"])
    batches = result.tables["batches"]
    for number in range(0, len(first) - 1, 17):
        wanted = batches["request"][batches["batch"] == number]
        assert sorted(members[first[number] : first[number + 1]]) == sorted(wanted)
    assert packed["window_s"][0] < result.tables["requests"]["first_token_s"][packed["focus"]] < packed["window_s"][1]


def test_a_run_too_long_for_one_page_has_the_segments_around_its_window(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_data, "MOST_SEGMENTS", 50)
    result = run()
    (packed,) = page(result, folder=tmp_path, window_s=(20.0, 21.0)).timelines
    start_s = unpacked(packed["segments"]["start_s"])
    assert len(start_s) == 50
    assert packed["span_s"][0] == start_s[0] < 20 < 21 < packed["span_s"][1] < packed["end_s"]


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [Request(id=0, arrival_s=0.0, prompt_tokens=5)],
        [Request(id=0, arrival_s=0.0, prompt_tokens=5, ttft_slo_s=1.0)],
        [Request(id=row, arrival_s=1.0 * row, prompt_tokens=900_000, ttft_slo_s=1.0) for row in range(4)],
        [Request(id=row, arrival_s=1.0, prompt_tokens=5, slo_class='</script><b>"&\n{{ x }}') for row in range(3)],
        [Request(id=row, arrival_s=1.0, prompt_tokens=5, ttft_slo_s=1.0 + row) for row in range(3)],
    ],
    ids=["no request", "no SLO", "one", "all rejected", "an odd class", "an SLO each"],
)
def test_odd_runs_have_a_page_too_alone_and_beside_another(requests, tmp_path):
    result = simulate(requests, policy=FCFS, latency=toy_latency(), cluster=PrefillOnly(kv_blocks=10))
    for results in ((result,), (result, run()), (run(), result)):
        made = page(*results, folder=tmp_path)
        assert made.data["labels"] == [f"run {number}" for number in range(len(results))]
        assert made.raw["data"].count("</") == 0
        assert made.source.count("</script>") == 3 + len(results)


def test_a_run_that_was_ended_early_says_so_first(tmp_path):
    result = simulate(mixed(num_requests=100), policy=FCFS, latency=toy_latency(1e-4), horizon_s=5.0)
    made = page(Result(result.tables, {**result.run, "partial": True}), folder=tmp_path)
    assert "these are partial results" in made.text
    assert "requests did not finish" in made.text


def test_the_worst_requests_are_told_with_whom_they_waited_behind_and_who_paused_them(tmp_path):
    requests = workload((0.0, 100, 50.0), (15.0, 10, 30.0))
    result = checked(requests, ComposedPolicy("deadline", Alone(), "operator"), toy_latency())
    text = " ".join(page(result, folder=tmp_path).text.split())
    assert "Waited 5 s in all, while the GPU served #0 (default, 100 tokens) for 5 s." in text
    assert "Paused for #1 (default, 10 tokens) for 10 s." in text
    assert "alone on an idle instance it takes 100 s, more than its SLO." in text


def test_runs_of_one_workload_are_held_against_each_other_request_by_request():
    requests = workload((0.0, 100, 500.0), (0.0, 10, 30.0))
    first = checked(requests, FCFS, toy_latency())
    second = checked(requests, ComposedPolicy("deadline", Alone(), "request"), toy_latency())
    (row,) = measures.paired([first, second], ["default"])
    assert row.cells == ("", "50.0% sooner, 50.0% later, mean change −45 s")
    other = checked(workload((0.0, 99), (0.0, 10)), FCFS, toy_latency())
    assert measures.paired([first, other], ["default"]) == measures.paired([first], ["default"]) == []


def test_a_change_says_how_much_and_whether_it_is_for_the_better():
    requests = workload((0.0, 100, 500.0), (0.0, 10, 30.0))
    summaries = [
        checked(requests, policy, toy_latency()).summary()
        for policy in (FCFS, ComposedPolicy("deadline", Alone(), "request"))
    ]
    rows = {row.label: row for row in measures.cards(summaries)}
    attainment, mean = rows["SLO attainment"], rows["TTFT, mean"]
    assert (attainment.cells, attainment.changes, attainment.verdicts) == (
        ("50.00%", "100.00%"), ("+50.00 points",), ("better",),
    )  # fmt: skip
    assert (mean.cells, mean.changes, mean.verdicts) == (("105 s", "60 s"), ("−45 s (−42.9%)",), ("better",))
    assert rows["requests"].verdicts == ("",)
    assert "blocking, mean" not in rows, "a figure that no run has is left out"


def test_a_distribution_of_many_is_drawn_with_some_hundreds_of_its_points():
    values = np.random.default_rng(0).lognormal(size=100_000)
    x, share = charts.distribution(values, 200_000)
    assert len(x) < 500
    assert share[-1] == 0.5
    for value, part in zip(x, share, strict=True):
        assert part == (values <= value).sum() / 200_000


def test_columns_of_later_versions_are_shown_where_they_are_there(tmp_path):
    result = run()
    tables = {name: dict(table) for name, table in result.tables.items()}
    tables["requests"]["tbt_max_s"] = np.full(200, 0.03)
    tables["requests"]["from_the_future_s"] = np.zeros(200)
    assert "Longest time between tokens" not in page(result, folder=tmp_path).text
    assert "Longest time between tokens" in page(Result(tables, result.run), folder=tmp_path).text


def test_the_command_writes_one_page_on_several_runs_under_labels_that_tell_them_apart(tmp_path, capsys):
    for name in ("a/0", "b/0"):
        run(seed=len(name)).save(tmp_path / name)
    assert main([str(tmp_path / "a/0"), str(tmp_path / "b/0"), "--out", str(tmp_path / "new/page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/new/page.html\n"
    assert Page(tmp_path / "new/page.html").data["labels"] == ["0 (a/0)", "0 (b/0)"]
    assert main([str(tmp_path / "a/0"), "--window-s", "3", "4"]) == 0
    (packed,) = Page(tmp_path / "a/0/report.html").timelines
    assert packed["window_s"] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "not a run's folder"),
        (["."], "requests.csv, segments.csv"),
        (["a", "a"], "a run is given twice"),
        (["a", "--window-s", "4", "3"], "must begin at 0 s or later, and end after that"),
        (["a", "--out", "/dev/null/x/report.html"], "/dev/null"),
    ],
)
def test_the_command_refuses_a_mistake_in_one_sentence(arguments, complaint, tmp_path, monkeypatch, capsys):
    run().save(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_a_run_from_before_clusters_had_pools_is_read_and_summarised(tmp_path):
    result = run()
    result.save(tmp_path)
    path = tmp_path / "run.json"
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("pools", "partial")}
    path.write_text(json.dumps(old))
    (loaded,) = load_runs([tmp_path])
    now, then = loaded.result.summary(), result.summary()
    assert (now["gpus"], now["offered_load"], now["attainment"]) == (
        then["gpus"],
        then["offered_load"],
        then["attainment"],
    )
    assert main([str(tmp_path)]) == 0


def test_html_and_full_write_their_files_and_know_the_folders_configuration(tmp_path):
    result = run()
    (tmp_path / "config.yaml").write_text("model: llama3-8b\ngpu: a100\nworkload: {rate_rps: 8, slo: null}\n")
    assert [path.name for path in Full([1, 2]).write(result, tmp_path, "a on b, c")][-2:] == [
        "trace.json.gz",
        "report.html",
    ]
    (path,) = Html().write(result, tmp_path, "a on b, c")
    text = " ".join(Page(path).text.split())
    assert "workload.rate_rps 8" in text
    assert "workload.slo null" in text
    assert "latencies of llama3-8b on a100 from" in text
    assert "microsoft/vidur" in text
    with pytest.raises(ValueError, match="must be two seconds"):
        Html([1])
