"""`task=capacity`: the fewest instances that carry a workload, and what they cost."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
from toys import toy_latency, workload

from flowsim import Alone, Cluster, ComposedPolicy, Pool
from flowsim.capacity import Capacity, overall, size, worst_class
from flowsim.config import Setup, build, compose
from flowsim.report.plots import NoReport
from flowsim.router import RoundRobin, TwoTrack

PRICE = {"usd_per_hour": 2.0, "source": "assumed", "date": "2026-01-01"}


def bursts(requests: int, cluster: Cluster | Pool | None = None, gap_s: float = 20.0) -> Setup:
    """Every 20 s four prompts of 4 s with an SLO of 5 s: on n instances n of four are on time, and all end in time."""
    rows = [(gap_s * (number // 4), 4, 5.0) for number in range(requests)]
    return replace(
        build(compose(["workload.num_requests=1"])),
        requests=workload(*rows),
        policy=ComposedPolicy("arrival", Alone(), "request"),
        latency=toy_latency(),
        router=RoundRobin(),
        cluster=cluster or Pool(instances=7),
    )


@pytest.mark.parametrize(("attainment", "instances"), [(0.2, 1), (0.5, 2), (0.74, 3), (0.9, 4), (1.0, 4)])
def test_the_fewest_instances_that_attain_are_found_and_one_fewer_would_not(attainment, instances):
    found = size(bursts(40), attainment)
    assert found.instances == {"prefill": instances}
    assert found.attainment == pytest.approx(instances / 4)
    assert found.attainment >= attainment
    if instances > 1:
        assert found.one_fewer < attainment
    else:
        assert found.one_fewer is None


def test_the_cost_of_a_million_requests_is_that_of_the_gpus_while_they_arrive():
    found = size(bursts(44), 1.0, price=PRICE)
    assert found.gpus == 4
    rate_rps = 43 / 200.0  # 44 requests in 11 bursts, the last 200 s after the first
    assert found.usd_per_million == pytest.approx(4 * 2.0 / 3600.0 * 1e6 / rate_rps)


def test_what_no_allowed_number_can_carry_has_no_answer_and_says_why():
    found = size(bursts(40), 1.0, most=3)
    assert (found.instances, found.usd_per_million) == (None, None)
    assert found.why == "3 instances of each pool attain 75.00%"


def test_without_any_slo_there_is_nothing_to_size_for():
    setup = bursts(4)
    setup = replace(setup, requests=[replace(one, ttft_slo_s=float("inf")) for one in setup.requests])
    with pytest.raises(ValueError, match="no request has a TTFT SLO"):
        size(setup, 0.9)


def test_per_class_counts_the_worst_class():
    setup = bursts(40)
    # a class of its own for the last of each burst, which is late on three instances
    requests = [replace(one, slo_class="last" if one.id % 4 == 3 else "other") for one in setup.requests]
    setup = replace(setup, requests=requests)
    assert size(setup, 0.7, share=overall).instances == {"prefill": 3}
    assert size(setup, 0.7, share=worst_class).instances == {"prefill": 4}


def test_of_several_pools_none_of_the_answer_can_lose_an_instance():
    cluster = Cluster(pools={"realtime": Pool(), "batch": Pool()})
    setup = bursts(80, cluster)
    # of each burst one prompt is long and has time: one instance for these, three for the others
    requests = [replace(one, prompt_tokens=19, ttft_slo_s=19.5) if one.id % 4 == 0 else one for one in setup.requests]
    setup = replace(setup, requests=requests, router=TwoTrack(threshold_tokens=5))
    found = size(setup, 1.0)
    assert found.instances == {"realtime": 3, "batch": 1}
    assert (found.gpus, found.attainment) == (4, 1.0)
    assert found.one_fewer < 1.0


def test_where_tokens_are_decoded_the_tbt_slo_counts_too():
    overrides = ["cluster=pd", "workload=azure_conv", "workload.num_requests=30", "workload.ttft_slo_s=100"]
    shares = [overall(build(compose([*overrides, f"workload.tbt_slo_s={slo_s}"])).run()) for slo_s in ("1e-6", "100")]
    assert shares == [pytest.approx(0.0, abs=0.2), 1.0]  # who gets one token waits for no second


def test_the_task_writes_a_row_per_gpu_and_says_what_does_not_fit(tmp_path, capsys):
    config = compose(
        [
            "model=llama3-70b",
            "gpu=h100",
            "tp=4",
            "workload.num_requests=60",
            "workload.rate_rps=4",
            "workload.slo_scale=4",
        ]
    )
    task = Capacity(gpus=[{"gpu": "a100", "tp": 1}, {"gpu": "h100", "tp": 4}], prices={"h100": PRICE}, attainment=0.8)
    answers = task(build(config), title="t", report=NoReport(), folder=tmp_path, quiet=False)
    out = capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "capacity.csv").read_text().splitlines()))
    told = json.loads((tmp_path / "capacity.json").read_text())
    assert answers == 1
    assert [(row["gpu"], row["tp"]) for row in rows] == [("a100", "1"), ("h100", "4")]
    assert "has data for tp" in rows[0]["why"]
    assert f"a100: {rows[0]['why'][:20]}" in out.replace("\n", " ")
    assert told["prices"]["h100"]["source"] == "assumed"
    assert int(rows[1]["gpus"]) == 4 * int(rows[1]["instances"])


def test_every_shipped_price_has_a_source_and_a_date():
    prices = compose(["task=capacity"]).task.prices
    assert {"a100", "h100", "h200"} <= set(prices)
    for price in prices.values():
        assert price.usd_per_hour > 0
        assert price.source
        assert str(price.date).startswith("20")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"attainment": 0.0}, "task.attainment is 0.0; it must be above 0"),
        ({"most_instances": 0}, "task.most_instances is 0"),
        ({"gpus": [{"gpus": "a100"}]}, "unknown key of task.gpus"),
        ({"gpus": [{"tp": 2}]}, "an entry is a GPU's name"),
        ({"prices": {"a100": {"usd_per_hour": 1.0}}}, "it needs usd_per_hour, and its source and date"),
        ({"prices": {"a100": {**PRICE, "usd_per_hour": -1}}}, "task.prices.a100.usd_per_hour is -1"),
    ],
)
def test_capacity_says_which_argument_is_wrong(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        Capacity(**arguments)
