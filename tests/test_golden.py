"""A small table of every shipped policy's results, so that a change of results is seen; beside `check_result`."""

from __future__ import annotations

import csv

import pytest
from regenerate_golden import COLUMNS, GOLDEN, POLICIES, golden_rows, golden_run

from flowsim.check import check_result


def golden() -> list[list[str]]:
    with GOLDEN.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gives_its_golden_results(policy):
    result, latency = golden_run(policy)
    check_result(result, latency)
    rows = [row for row in golden() if row[0] == policy]
    got = golden_rows(policy, result)
    assert [(name, int(request), int(preemptions)) for name, request, _, _, preemptions in rows] == [
        (name, request, preemptions) for name, request, _, _, preemptions in got
    ]
    for column in (2, 3):
        expected_s = [float(row[column]) for row in rows]
        assert [row[column] for row in got] == pytest.approx(expected_s, rel=1e-9), COLUMNS[column]


def test_the_golden_table_has_every_shipped_policy_and_tells_them_apart():
    header, *rows = golden()
    assert header == list(COLUMNS)
    schedules = {name: tuple(tuple(row[1:]) for row in rows if row[0] == name) for name in {row[0] for row in rows}}
    assert sorted(schedules) == POLICIES
    same = {"pass_sedf": "request_sedf", "vllm": "chunked_2k"}  # no prompt of two passes, and nothing decodes
    assert len(set(schedules.values())) == len(POLICIES) - len(same)
    for one, other in same.items():
        assert schedules[one] == schedules[other]
