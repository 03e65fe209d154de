"""Figures of a run, by definition: attainment, rates, load, and what has nothing to be computed from."""

from __future__ import annotations

import pytest
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, Request, Result, simulate
from flowsim.config import build, compose


def fcfs(**options):
    return ComposedPolicy("arrival", Alone(), "request", **options)


def test_a_ttft_equal_to_its_slo_meets_it():
    # 10 tokens take 10 s: the first is exactly on time, the second, which starts at 10, a hair late
    result = checked(workload((0.0, 10, 10.0), (0.0, 10, 19.999)), fcfs(), toy_latency())
    assert result.requests.met_slo.tolist() == [True, False]
    assert result.summary()["attainment"] == 0.5


def test_refused_requests_count_as_missed_and_requests_without_an_slo_do_not_count():
    # edge case: 10 requests with an SLO, 4 refused, 6 met, and 5 without an SLO
    rows = [(float(100 * at), 10, 10.0) for at in range(6)] + [(600.0, 900, 10.0)] * 4 + [(600.0, 10)] * 5
    result = checked(workload(*rows), fcfs(), toy_latency(), kv_blocks=10)
    figures = result.summary()
    assert figures["attainment"] == pytest.approx(0.6)
    assert figures["rejected"] == figures["rejected_by_reason"]["too_large"] == 4
    assert result.requests.met_slo.isna().sum() == 5


def test_rate_and_offered_load_are_of_the_arrivals_and_isolated_gpu_seconds():
    latency = toy_latency(request_s=3.0)
    result = checked(workload((0.0, 10), (40.0, 20), (80.0, 30)), fcfs(), latency)
    figures = result.summary()
    assert figures["rate_rps"] == pytest.approx(2 / 80)
    assert figures["offered_load"] == pytest.approx(2 / 80 * 20)  # request_s holds no GPU
    assert figures["utilisation"] == pytest.approx(60 / 113)  # until the last first token
    assert result.requests.ttft_s.tolist() == pytest.approx([13.0, 23.0, 33.0])


def test_impossible_counts_slos_under_the_isolated_ttft():
    result = checked(workload((0.0, 10, 9.0), (50.0, 10, 10.0)), fcfs(), toy_latency())
    assert result.summary()["impossible"] == 1


def test_a_class_has_its_own_figures():
    requests = [
        Request(id=0, arrival_s=0.0, prompt_tokens=10, ttft_slo_s=20.0, slo_class="chat"),
        Request(id=1, arrival_s=0.0, prompt_tokens=30, ttft_slo_s=20.0, slo_class="file"),
    ]
    figures = checked(requests, fcfs(), toy_latency()).summary()
    assert figures["attainment_by_class"] == {"chat": 1.0, "file": 0.0}
    assert figures["ttft_s_by_class"]["file"]["mean"] == pytest.approx(40.0)
    assert figures["longest_wait_s_by_class"] == {"chat": 0.0, "file": pytest.approx(10.0)}


def test_figures_without_anything_to_compute_them_from_are_none_under_the_same_keys():
    full = checked(workload((0.0, 10, 20.0), (1.0, 10, 20.0)), fcfs(), toy_latency()).summary()
    empty = checked(workload((0.0, 900, 1.0)), fcfs(), toy_latency(), kv_blocks=1).summary()
    assert set(empty) == set(full)
    assert empty["ttft_s"]["p99"] is None
    assert empty["rate_rps"] is empty["offered_load"] is None
    assert empty["attainment"] == 0.0
    assert empty["utilisation"] == 0.0
    none = checked(workload((0.0, 10)), fcfs(), toy_latency()).summary()
    assert none["attainment"] is None


def same(one, other):
    """Whether two columns are alike to the last bit and to the type of each object."""
    if one.dtype != object or other.dtype != object:
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return [(type(cell), cell) for cell in one.tolist()] == [(type(cell), cell) for cell in other.tolist()]


def test_a_run_is_read_as_it_was_written_to_the_last_bit(tmp_path):
    odd = ["NA", "nan", "None", "True", "1", "a, b", 'a "b"', "two\nlines", "naïve", " "]
    requests = [
        Request(id=row, arrival_s=row / 3, prompt_tokens=5 + 900 * (row == 3), slo_class=name, ttft_slo_s=2.0 + row)
        for row, name in enumerate(odd)
    ]
    hashed = [
        Request(id=0, arrival_s=0.1, prompt_tokens=40, prefix_hashes=(2**63, 7)),
        Request(id=1, arrival_s=0.2, prompt_tokens=4),
    ]
    decoded = ["cluster=pd", "workload=azure_conv", "workload.num_requests=50"]
    results = [
        checked(requests, fcfs(), toy_latency(), kv_blocks=10),
        checked([], fcfs(), toy_latency()),
        simulate(hashed, policy=fcfs(), latency=toy_latency(), horizon_s=0.15),
        simulate(requests, policy=fcfs(), latency=toy_latency(), horizon_s=9.0, warmup_s=1.0),
        build(compose(decoded)).run(),
    ]
    for number, result in enumerate(results):
        again = Result.load(result.save(tmp_path / str(number)))
        assert list(again.tables) == list(result.tables)
        for name, table in result.tables.items():
            assert list(again.tables[name]) == list(table)
            for column, cells in table.items():
                assert same(again.tables[name][column], cells), (number, name, column)
        assert again.summary() == result.summary()


def test_a_file_that_does_not_hold_a_table_is_named(tmp_path):
    folder = checked(workload((0.0, 10), (1.0, 20)), fcfs(), toy_latency()).save(tmp_path)
    path = folder / "segments.csv"
    text = path.read_text()
    for damaged in (
        text.replace("finished", "fin").replace("0.0", "x"),
        text.replace("\n0,", "\n,"),
        text + "1,2,3,4,5,6,7,8,9,10,11,12\n",
    ):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"segments\.csv: "):
            Result.load(folder)
