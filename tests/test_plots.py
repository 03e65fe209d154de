"""The figures: what each shows, and that it can be printed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, LatencyModel, load_profile
from flowsim.config import build, compose
from flowsim.report import plots
from flowsim.report.blocked import Blocked, worst_blocked
from flowsim.report.series import heads
from flowsim.report.style import label, looks

POLICIES = ("flowprefill", "chunked_2k", "chunked_8k", "fcfs", "mine", "theirs", "a_third")


def table(seeds: int = 3) -> pd.DataFrame:
    """Seven policies at four settings of everything, a row per seed."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "policy": policy, "seed": seed, "rate_rps": rate, "slo_scale": rate / 4, "chunk_tokens": 512 * rate,
            "attainment": 1.0 / (1.0 + rate * (place + 1) / 20), "goodput_rps": 8.0 - place + rng.normal(0.0, 0.1),
            "ttft_s": rate + rng.random(), "blocking_s": rng.exponential(0.01), "difference": place - 3 + rng.random(),
            "workload": f"workload {rate}", "bound_rps": 9.0, "stops": policy,
        }
        for place, policy in enumerate(POLICIES) for rate in (1, 2, 4, 8) for seed in range(seeds)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def run() -> object:
    requests = workload((0.0, 50_000, 9.0), (0.1, 100, 0.2), (0.2, 100, 0.2), (0.3, 200))
    return checked(requests, ComposedPolicy("slack_edf", Alone(), "operator"), toy_latency(1e-4))


@functools.cache
def decoded() -> object:
    given = ["cluster=pd", "workload=azure_conv", "workload.num_requests=60", "workload.tbt_slo_s=0.02"]
    return build(compose(given)).run()


FIGURES: dict[str, Callable[..., object]] = {
    "attainment": lambda **more: plots.attainment(table(), **more),
    "slo_scale": lambda **more: plots.slo_scale(table(), **more),
    "parameter": lambda **more: plots.parameter(table(), "chunk_tokens", ["ttft_s", "attainment"], "policy", **more),
    "goodput": lambda **more: plots.goodput(table(), bound="bound_rps", **more),
    "goodput_over": lambda **more: plots.goodput(table(), over="workload", bound="bound_rps", **more),
    "blocking": lambda **more: plots.blocking(table(), **more),
    "differences": lambda **more: plots.differences(table(), against="flowprefill", **more),
    "matrix": lambda **more: plots.matrix(table(), **more),
    "ttft_cdf": lambda **more: plots.ttft_cdf(run(), **more),
    "tbt_cdf": lambda **more: plots.tbt_cdf(decoded(), **more),
    "worst_blocking": lambda **more: plots.worst_blocking(run(), **more),
    "timeline": lambda **more: plots.timeline(run(), (0.05, 3.0), **more),
}


@pytest.mark.parametrize("kind", FIGURES)
@pytest.mark.parametrize("width_in", [plots.COLUMN_IN, plots.PAGE_IN])
def test_a_figure_has_its_width_and_its_fonts_inside_and_is_written_the_same_twice(kind, width_in, tmp_path):
    first, again = (
        plots.save(FIGURES[kind](width_in=width_in, title="a $ title"), tmp_path / name) for name in ("a.pdf", "b.pdf")
    )
    content = first.read_bytes()
    assert content == again.read_bytes()
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", content)
    assert float(box[1]) == pytest.approx(72.0 * width_in)
    assert float(box[2]) < 72.0 * 9.5, "it fits a page"
    assert b"/FontFile2" in content
    assert b"/Type3" not in content


@pytest.mark.parametrize("kind", FIGURES)
def test_everything_drawn_lies_inside_its_figure_and_axes_say_what_they_show(kind):
    figure = FIGURES[kind]()
    with plots.style():
        figure.draw_without_rendering()
        inside = figure.get_tightbbox()
    width_in, height_in = figure.get_size_inches()
    assert inside.x0 >= -0.01
    assert inside.y0 >= -0.01
    assert inside.x1 <= width_in + 0.01
    assert inside.y1 <= height_in + 0.01
    assert any(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes)


def test_lines_are_means_over_seeds_with_their_intervals():
    figure = plots.parameter(table(), "rate_rps", "ttft_s")
    (container,) = figure.axes[0].containers
    (line,) = [one for one in figure.axes[0].lines if one.get_marker() == "o"]
    means = table().groupby("rate_rps").ttft_s.mean()
    assert line.get_xdata().tolist() == means.index.tolist()
    assert line.get_ydata().tolist() == pytest.approx(means.tolist())
    spread = table().groupby("rate_rps").ttft_s.agg(["std", "count"])
    from scipy.stats import t

    halves = t.ppf(0.975, spread["count"] - 1) * spread["std"] / np.sqrt(spread["count"])
    lengths = [part[1][1] - part[0][1] for part in container.lines[2][0].get_segments()]
    assert lengths == pytest.approx((2 * halves).tolist())


def test_one_row_per_point_brings_its_own_interval():
    own = table(seeds=1).assign(
        attainment_low=lambda t: t.attainment - 0.1, attainment_high=lambda t: t.attainment + 0.05
    )
    figure = plots.attainment(own[own.policy == "fcfs"])
    (container,) = figure.axes[0].containers
    lengths = [part[1][1] - part[0][1] for part in container.lines[2][0].get_segments()]
    assert lengths == pytest.approx([0.15] * 4)


@pytest.mark.parametrize("letters", [30, 60])
def test_long_names_and_a_long_title_stay_within_a_column_and_leave_the_axes_their_height(letters):
    names = [f"{number} of Llama3-70B at TP 4, hopeless requests refused, with poly3"[:letters] for number in range(4)]
    long = pd.concat(table(seeds=1).assign(policy=name) for name in names)
    figure = plots.attainment(long, title="A title that is longer than one column of a paper is wide, by some")
    with plots.style():
        figure.draw_without_rendering()
    box, width = figure.legends[0].get_window_extent(), figure.get_figwidth() * figure.dpi
    assert 0 <= box.x0 < box.x1 <= width
    height = figure.axes[0].get_position().height * figure.get_figheight()
    assert height > plots.COLUMN_IN / 3


def test_an_interval_wider_than_the_axis_leaves_the_figure_whole():
    wild = pd.DataFrame({"policy": "x", "rate_rps": [1, 1, 2, 2], "attainment": [0.2, 0.9, 0.1, 0.8]})
    figure = plots.attainment(wild)  # two seeds: the 95 % interval is some thirteen standard errors long
    with plots.style():
        figure.draw_without_rendering()
    box = figure.axes[0].get_position()
    assert box.width > 0.5
    assert box.height > 0.4
    assert figure.axes[0].get_ylim() == (0.0, 1.0)


def test_the_strictest_scale_that_meets_the_target_is_marked():
    points = pd.DataFrame({"policy": "x", "slo_scale": [0.5, 1.0, 2.0], "attainment": [0.8, 0.95, 1.0]})
    axes = plots.slo_scale(points).axes[0]
    crosses = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "x"]
    assert crosses == pytest.approx([0.5 + 0.5 * 0.1 / 0.15])


def test_series_are_told_apart_without_colour():
    found = list(looks([f"policy {number}" for number in range(30)]).values())
    assert len({(str(one.line), one.marker) for one in found}) == 30
    assert len({(one.colour, one.hatch) for one in found}) == 30


def test_a_policy_looks_the_same_whichever_others_a_figure_shows():
    assert looks(["fcfs", "flowprefill"])["fcfs"] == looks(["mine", "chunked_2k", "fcfs"])["fcfs"]
    assert len(set(looks(POLICIES).values())) == len(POLICIES)


def test_bars_are_as_long_as_the_means_and_none_is_lost():
    axes = plots.goodput(table()).axes[0]
    means = table().groupby("policy", sort=False).goodput_rps.mean()
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(means.tolist())


def test_a_column_that_is_missing_is_named_beside_what_is_near():
    with pytest.raises(ValueError, match=r"unknown column 'attanment'.*did you mean 'attainment'"):
        plots.attainment(table(), y="attanment")


def test_a_figure_in_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown format of a figure 'jpeg'"):
        plots.save(FIGURES["goodput"](), tmp_path / "a.jpeg")
    with pytest.raises(ValueError, match=r"unknown report.format 'pfd'; did you mean 'pdf'"):
        plots.Plots("pfd")


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        ("rate_rps", "rate [requests/s]"),
        ("token_budget_tokens", "token budget [tokens]"),
        ("output_tokens_per_s", "output [tokens/s]"),
        ("longest_wait_s", "longest wait [s]"),
        ("preemptions", "preemptions"),
    ],
)
def test_an_axis_says_its_unit(column, shown):
    assert label(column) == shown


def test_an_empty_table_is_refused():
    for draw in (plots.attainment, plots.goodput, plots.blocking, plots.differences, plots.matrix):
        with pytest.raises(ValueError, match="the table to draw has no rows"):
            draw(table().iloc[:0])


def blocked(order: str, stops: str, rows: list[tuple[float, ...]]) -> Blocked | None:
    return worst_blocked(checked(workload(*rows), ComposedPolicy(order, Alone(), stops), toy_latency(1e-4)))


def test_the_worst_blocked_waited_longest_for_its_slo_behind_a_later_deadline():
    urgent_behind_long = [(0.0, 50_000, 90.0), (0.1, 100, 0.55), (0.2, 100, 0.5), (0.3, 100, 80.0)]
    found = blocked("arrival", "request", urgent_behind_long)
    assert (found.request, found.behind) == (2, 0)
    assert found.from_s == 0.2
    assert found.behind_s == pytest.approx(found.to_s - found.from_s)
    assert found.behind_s < found.waited_s, "for the rest it waited behind an earlier deadline"
    preempting = blocked("deadline", "operator", urgent_behind_long)
    assert preempting is None or preempting.behind_s < 0.1 * found.behind_s


def test_nobody_is_blocked_where_the_earlier_deadline_always_runs():
    assert blocked("deadline", "request", [(0.0, 1000, 1.0), (0.1, 1000, 5.0), (0.2, 1000, 9.0)]) is None
    assert blocked("arrival", "request", [(0.0, 1000, 1.0)]) is None


def test_without_slos_a_short_prompt_behind_a_long_one_is_the_one_that_is_blocked():
    found = blocked("arrival", "request", [(0.0, 100), (5.0, 50_000), (5.1, 2000), (5.2, 100)])
    assert (found.request, found.behind) == (3, 1)


def test_a_request_that_no_schedule_could_have_served_in_time_is_not_the_worst_blocked():
    found = blocked("arrival", "request", [(0.0, 50_000, 900.0), (0.1, 40_000, 0.001), (0.2, 100, 0.5)])
    assert found.request == 2


def test_the_gpus_row_is_as_full_as_the_gpu_was():
    result = run()
    row = plots.timeline(result, (-1.0, 1e6)).axes[0].collections[0]
    widths = [float(path.vertices[:, 0].max() - path.vertices[:, 0].min()) for path in row.get_paths()]
    assert sum(widths) == pytest.approx(result.summary()["utilisation"] * result.summary()["simulated_s"])


def test_a_window_that_is_empty_is_refused():
    with pytest.raises(ValueError, match="two seconds, the earlier one first"):
        plots.timeline(run(), (3.0, 3.0))


def test_drawing_leaves_matplotlibs_settings_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    FIGURES["attainment"]()
    assert dict(mpl.rcParams) == before


def test_decodes_alone_are_neither_less_urgent_nor_anybodys_colour():
    requests = [
        replace(one, output_tokens=400) for one in workload((0.0, 100, 9.0), (0.1, 100, 0.05), (0.2, 9000, 9.0))
    ]
    policy = build(compose(["policy=hybrid_chunked"])).policy
    result = checked(requests, policy, LatencyModel(load_profile("llama3-8b", "a100")), decode="here")
    assert (heads(result.tables)[result.tables["segments"]["batch"]] < 0).any(), "some batches only decode"
    found = worst_blocked(result)
    assert found is None or found.behind >= 0
    names = [text.get_text() for text in plots.worst_blocking(result).legends[0].get_texts()]
    assert "decodes alone" in names


def test_a_run_that_decodes_is_drawn_with_its_tbt_and_another_is_not(tmp_path):
    names = [path.name for path in plots.Plots().write(decoded(), tmp_path, "a run")]
    assert names == ["ttft.png", "tbt.png", "worst_blocking.png"]
    assert [path.name for path in plots.Plots().write(run(), tmp_path, "a run")] == ["ttft.png", "worst_blocking.png"]
    with pytest.raises(ValueError, match="nothing was decoded"):
        plots.tbt_cdf(run())


def test_the_mark_of_a_tbt_slo_is_at_the_share_of_requests_within_it():
    figure = plots.tbt_cdf(decoded())
    low_s, high_s = figure.axes[0].get_xlim()
    assert sum(low_s <= tick <= high_s for tick in figure.axes[0].get_xticks()) >= 3
    requests = decoded().requests
    several = requests[requests.output_tokens > 1]
    (mark,) = [line for line in figure.axes[0].lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert mark.get_xdata()[0] == 0.02
    assert mark.get_ydata()[0] == pytest.approx((several.tbt_mean_s <= 0.02).mean())
    assert 0.0 < mark.get_ydata()[0] < 1.0
