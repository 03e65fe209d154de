"""Arrival processes: the rate asked for, the spread they promise, one pattern at every rate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowsim.workload import mixed
from flowsim.workload.arrivals import PROCESSES, arrival_times

EVERY = [
    "poisson",
    "deterministic",
    {"gamma": {"cv": 3.0}},
    {"weibull": {"shape": 0.6}},
    {"on_off": {"on_s": 2.0, "off_s": 6.0, "off_share": 0.1}},
    {"diurnal": {"profile": [[0, 1], [20, 4], [40, 0]], "period_s": 60}},
]


def times(process, rate_rps=10.0, n=50_000, seed=1):
    return arrival_times(process, np.random.default_rng(seed), rate_rps, n)


def test_every_shipped_process_is_tested_here():
    assert {next(iter(one)) if isinstance(one, dict) else one for one in EVERY} == set(PROCESSES)


@pytest.mark.parametrize("process", EVERY, ids=str)
def test_arrivals_start_at_zero_never_step_back_and_keep_the_rate(process):
    arrival_s = times(process)
    assert arrival_s[0] == 0.0
    assert (np.diff(arrival_s) >= 0.0).all()
    assert (len(arrival_s) - 1) / arrival_s[-1] == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("process", EVERY, ids=str)
def test_a_longer_workload_begins_with_the_shorter_one(process):
    assert np.array_equal(times(process, n=2000)[:500], times(process, n=500))


@pytest.mark.parametrize("process", EVERY[:4], ids=str)
def test_the_rate_stretches_one_pattern(process):
    assert times(process, rate_rps=5.0, n=500) == pytest.approx(2.0 * times(process, n=500))


@pytest.mark.parametrize(
    ("process", "cv"),
    [
        ("poisson", 1.0),
        ("deterministic", 0.0),
        ({"gamma": {"cv": 3.0}}, 3.0),
        ({"gamma": {"cv": 0.5}}, 0.5),
        ({"weibull": {"shape": 0.5}}, math.sqrt(5.0)),  # sqrt(gamma(1 + 2/k) / gamma(1 + 1/k)^2 - 1) at k = 1/2
    ],
)
def test_gaps_spread_as_the_process_says(process, cv):
    gaps_s = np.diff(times(process, n=200_000))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.03, abs=1e-9)


def test_bursts_come_while_the_process_is_on_and_hardly_while_it_is_off():
    arrival_s = times({"on_off": {"on_s": 2.0, "off_s": 6.0, "off_share": 0.1}}, n=100_000)
    on = (arrival_s % 8.0) < 2.0
    # expected arrivals per period: 2 w on and 6 x 0.1 w off
    assert on.mean() == pytest.approx(2.0 / 2.6, rel=0.02)


def test_a_rate_profile_is_followed_step_by_step_and_period_by_period(tmp_path):
    path = tmp_path / "rates.csv"
    path.write_text("t_s,rate\n0,1\n20,4\n40,0\n")
    arrival_s = times({"diurnal": {"profile": str(path), "period_s": 60}}, n=60_000)
    assert np.array_equal(
        arrival_s, times({"diurnal": {"profile": [[0, 1], [20, 4], [40, 0]], "period_s": 60}}, n=60_000)
    )
    phase_s = arrival_s % 60.0
    shares = [np.mean((phase_s >= low) & (phase_s < low + 20)) for low in (0, 20, 40)]
    assert shares == pytest.approx([0.2, 0.8, 0.0], abs=0.01)


@pytest.mark.parametrize(
    ("process", "message"),
    [
        ("poison", "did you mean 'poisson'"),
        ("nowhere.Process", "cannot be imported"),
        ({"gamma": {"c": 1}}, "unknown parameter 'c' of the arrivals gamma"),
        ({"gamma": {"cv": 0}}, "gamma.cv is 0"),
        ({"on_off": {"off_share": 2}}, "within 0..1"),
        ({"diurnal": {}}, "at least one step"),
        ({"diurnal": {"profile": [[0, 1], [0, 2]]}}, "seconds must rise"),
        ({"diurnal": {"profile": [[0, -1]]}}, "rate at second 0"),
        ({"diurnal": {"profile": "/nowhere.csv"}}, "cannot read the rate profile"),
        ({"diurnal": {"profile": [[0, 1], [50, 1]], "period_s": 40}}, "after the profile's last second"),
        (3, "must be a name"),
    ],
)
def test_a_process_that_is_not_there_or_out_of_range_is_named(process, message):
    with pytest.raises(ValueError, match=message):
        times(process, n=10)


def test_a_rate_file_with_a_bad_line_names_it(tmp_path):
    path = tmp_path / "rates.csv"
    path.write_text("t_s,rate\n0,1\n20,fast\n")
    with pytest.raises(ValueError, match=r"rates\.csv: line 3"):
        times({"diurnal": {"profile": str(path)}}, n=10)


def test_the_process_changes_arrivals_and_nothing_else():
    poisson, bursty = (
        mixed(num_requests=500, seed=3, arrivals=process) for process in ("poisson", {"gamma": {"cv": 4}})
    )
    assert [one.prompt_tokens for one in poisson] == [one.prompt_tokens for one in bursty]
    assert [one.slo_class for one in poisson] == [one.slo_class for one in bursty]
    assert [one.arrival_s for one in poisson] != [one.arrival_s for one in bursty]


def test_a_duration_is_filled_whatever_the_rate():
    requests = mixed(rate_rps=40.0, duration_s=300.0, seed=1)
    assert len(requests) == pytest.approx(12_000, rel=0.03)
    assert 299.0 < requests[-1].arrival_s < 300.0
    assert len(mixed(rate_rps=40.0, duration_s=300.0, num_requests=100)) == 100
