"""Requests that wait on one instance and move to another: who moves, where to, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import toy_latency, workload

from flowsim import Alone, Cluster, ComposedPolicy, Pool, Request, Result, SLOAware, TokenBudget, simulate
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.explain import explain
from flowsim.feasible import FeasibleSet
from flowsim.migration import Migrating
from flowsim.pool import Failure
from flowsim.report.series import waiting
from flowsim.report.story import Chronicle
from flowsim.router import FewestRequests, Move, RoundRobin

POLICIES = {
    "fcfs": lambda: ComposedPolicy("arrival", Alone(), "request"),
    "chunked": lambda: ComposedPolicy("slack_edf", TokenBudget(200), "pass"),
    "preemptive": lambda: ComposedPolicy("slack_edf", SLOAware(300), "operator"),
    "at_stops": lambda: ComposedPolicy("slack_edf", SLOAware(300), "layer", consult="stops"),
    "feasible": lambda: FeasibleSet(stops="layer"),
}


def run(requests: list[Request], cluster: Pool | Cluster, policy: str = "fcfs", router: object = None) -> Result:
    """`simulate` under `Migrating`, with the laws of a run checked; toy prompts take a second a token."""
    latency = toy_latency()
    router = router or Migrating()
    result = simulate(requests, policy=POLICIES[policy](), latency=latency, cluster=cluster, router=router)
    check_result(result, Cluster.of(cluster).hardware(latency))
    return result


def moves(result: Result) -> list[tuple[int, int, int, float]]:
    table = result.tables.get("migrations", {"request": np.empty(0)})
    return list(zip(*(column.tolist() for column in table.values()), strict=True)) if len(table["request"]) else []


def test_an_instance_with_nothing_to_do_takes_what_waits_elsewhere():
    result = run(workload((0.0, 10), (0.0, 4), (1.0, 5)), Pool(instances=2))  # in turn: 0, 1, 0
    assert moves(result) == [(2, 0, 1, 4.0)]
    assert result.requests.start_s.tolist() == [0.0, 0.0, 4.0]
    assert result.requests.migrations.tolist() == [0, 0, 1]
    assert result.requests.prefill_instance.tolist() == [0, 1, 1]
    assert result.summary()["migrations"] == {"count": 1, "requests": 1}


def test_a_request_that_comes_to_a_busy_instance_beside_an_idle_one_goes_there_at_once():
    result = run(workload((0.0, 10), (0.0, 2), (5.0, 3)), Pool(instances=2))
    assert moves(result) == [(2, 0, 1, 5.0)]
    assert result.requests.queued_s.tolist() == [0.0, 0.0, 0.0]


def test_who_is_late_all_the_same_lets_those_move_who_can_be_on_time():
    result = run(workload((0.0, 10), (0.0, 4), (1.0, 2, 3.0), (1.0, 1), (1.5, 2, 20.0)), Pool(instances=2))
    # at 5 s the second instance has nothing left; 2 is late by then, and 4 is not
    assert moves(result)[0] == (4, 0, 1, 5.0)


def test_what_its_own_instance_gives_up_moves_to_one_that_has_the_time():
    # in turn: 0 and 2 to the first instance, which gives up the longer; the second is busy until 3
    result = run(workload((0.0, 10, 11.0), (0.0, 3), (0.5, 10, 15.0)), Pool(instances=2), "feasible")
    assert moves(result) == [(2, 0, 1, 0.5)]
    assert result.requests.met_slo[[0, 2]].tolist() == [True, True]


def test_a_run_in_which_nothing_moves_says_so_and_has_no_table():
    result = run(workload((0.0, 1), (2.0, 1)), Pool(instances=2))
    assert result.summary()["migrations"] is None
    assert "migrations" not in result.tables
    assert "migrations" not in result.tables["requests"]


def test_nothing_moves_between_pools():
    cluster = Cluster(pools={"one": Pool(), "other": Pool()})
    assert moves(run(workload((0.0, 10), (0.0, 1), (1.0, 5)), cluster)) == []


def test_a_client_that_moved_still_gives_up_when_it_would_have():
    requests = [*workload((0.0, 20), (0.0, 4), (1.0, 20))]
    requests += [Request(id=3, arrival_s=1.5, prompt_tokens=9), Request(id=4, arrival_s=2.0, prompt_tokens=5)]
    requests += [Request(id=5, arrival_s=2.0, prompt_tokens=5, abandon_s=9.0)]
    result = run(requests, Pool(instances=2), router=Migrating(FewestRequests()))
    gone = result.requests[result.requests.reason == "abandoned"]
    assert (gone.finish_s.isna()).all()
    assert len(gone) == 1


def test_the_router_within_is_started_from_a_copy_so_that_runs_repeat():
    router = Migrating(RoundRobin())
    requests = workload((0.0, 10), (0.0, 4), (1.0, 5))
    first, second = (run(requests, Pool(instances=2), router=router) for _ in range(2))
    assert first.requests.equals(second.requests)


class Elsewhere(RoundRobin):
    """A router whose moves name an instance that it was not given."""

    def rebalance(self, servers, now_s):
        return [Move(next(iter(servers[0].view.waiting)), servers[0], "there")] if len(servers[0].view.waiting) else []


def test_a_move_must_be_between_servers_that_the_router_was_given():
    with pytest.raises(ValueError, match=r"Elsewhere\.rebalance answered .*; both ends must be servers"):
        run(workload((0.0, 10), (0.0, 4), (1.0, 5)), Pool(instances=2), router=Elsewhere())


class Everything(RoundRobin):
    """Moves whatever it sees to the next instance, whether or not that may be."""

    def rebalance(self, servers, now_s):
        work = [(job, server) for server in servers for job in server.view.waiting]
        work += [(server.view.running.head, server) for server in servers if server.view.running is not None]
        others = {server: servers[place - 1] for place, server in enumerate(servers)}
        return [Move(job, server, others[server]) for job, server in work]


ROWS = st.lists(
    st.tuples(
        st.floats(0.0, 60.0).map(lambda t: round(t, 1)),
        st.integers(1, 60),
        st.sampled_from([5.0, 30.0, 90.0, float("inf")]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    instances=st.integers(1, 4),
    policy=st.sampled_from(sorted(POLICIES)),
    router=st.sampled_from([Migrating, lambda: Migrating(FewestRequests()), Everything]),
    fails=st.booleans(),
)
def test_whatever_moves_the_laws_hold_and_every_wait_is_accounted_for(rows, instances, policy, router, fails):
    requests = [
        Request(id=number, arrival_s=row[0], prompt_tokens=row[1], ttft_slo_s=row[2])
        for number, row in enumerate(sorted(rows))
    ]
    failures = (Failure(at_s=20.0, instance=0, for_s=15.0),) if fails else ()
    result = run(requests, Pool(instances=instances, failures=failures), policy, router())
    assert (result.requests.outcome == "finished").all()
    for miss in explain(result):
        if miss.slack_s > 0.0:
            assert sum(miss.lost_s.values()) == pytest.approx(miss.slack_s, abs=1e-6)
    if not fails:
        table, spells = result.requests, waiting(result.tables)
        waited_s = np.bincount(spells.request, weights=spells.end_s - spells.start_s, minlength=len(table))
        stories = [Chronicle(result).story(number).seconds("waiting") for number in range(len(table))]
        assert waited_s == pytest.approx(np.array(stories), abs=1e-6)


def test_a_wait_is_told_of_the_instance_where_it_was():
    result = run(workload((0.0, 10), (0.0, 4), (1.0, 5)), Pool(instances=2))
    spells = [spell for spell in Chronicle(result).story(2).spells if spell.state == "waiting"]
    assert [(spell.instance, spell.start_s, spell.end_s) for spell in spells] == [(0, 1.0, 4.0)]
    assert [one.request for one in spells[0].behind] == [0]


def test_on_four_gpus_migration_serves_more_in_time_than_taking_turns(tmp_path):
    def attained(*router: str) -> float:
        load = ["policy=edf", "cluster.instances=4", "workload.rate_rps=30", "workload.num_requests=800"]
        setup = build(compose([*load, *router]))
        result = setup.run()
        check_result(result, setup.latency)
        result.save(tmp_path)
        assert Result.load(tmp_path).summary() == result.summary()
        return result.summary()["attainment"]

    turns = attained("router=round_robin")
    moving = attained("router=migrating", "router.within._target_=flowsim.router.RoundRobin")
    assert moving > turns + 0.05
