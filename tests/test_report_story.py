"""What became of single requests: spells end to end, behind whom, paused by whom."""

from __future__ import annotations

import pytest
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, PrefillOnly, Request, SLOAware, TokenBudget, simulate
from flowsim.metrics import Result
from flowsim.report.story import Chronicle, tell, worst
from flowsim.testing import toy_latency as latency_of
from flowsim.workload import mixed


def busy(policy: ComposedPolicy, *, instances: int = 2) -> Result:
    """An overloaded run on two instances, with every overhead."""
    latency = latency_of(3e-4, layers=4, pass_s=0.007, request_s=0.0045, check_s=2e-5, switch_s=3e-4)
    requests = mixed(rate_rps=4, num_requests=300, seed=2)
    return simulate(requests, policy=policy, latency=latency, cluster=PrefillOnly(instances=instances))


POLICIES = {
    "fcfs": ComposedPolicy("arrival", Alone(), "request"),
    "chunked": ComposedPolicy("arrival", TokenBudget(2048), "pass"),
    "flowprefill": ComposedPolicy("slack_edf", SLOAware(2048), "operator"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_spells_of_every_request_lie_end_to_end_and_sum_to_its_ttft(name):
    result = busy(POLICIES[name])
    chronicle, requests = Chronicle(result), result.tables["requests"]
    suspended = 0
    for row in range(len(requests["id"])):
        story = chronicle.story(row)
        assert story.spells[0].start_s == requests["arrival_s"][row]
        assert [one.end_s for one in story.spells[:-1]] == [one.start_s for one in story.spells[1:]]
        assert story.spells[-1].end_s == pytest.approx(requests["first_token_s"][row] - 0.0045)
        assert story.seconds("suspended") == pytest.approx(requests["suspended_s"][row])
        suspended += any(one.state == "suspended" for one in story.spells)
        for spell in story.spells:
            assert sum(one.seconds for one in spell.behind) <= spell.length_s + 1e-9
            assert (spell.by is not None) == (spell.state == "suspended")
    assert bool(suspended) == (name == "flowprefill")


def test_a_request_waits_behind_the_one_that_runs_and_its_victim_knows_who_paused_it():
    # 100 tokens take 100 s in operators of 10 s; the second comes at 15 with less slack and takes 10 s
    policy = ComposedPolicy("deadline", Alone(), "operator")
    result = checked(workload((0.0, 100, 500.0), (15.0, 10, 30.0), (16.0, 20, 900.0)), policy, toy_latency())
    chronicle = Chronicle(result)
    long, short, last = (chronicle.story(row) for row in range(3))
    assert [(one.state, one.start_s, one.end_s) for one in long.spells] == [
        ("running", 0.0, 20.0),
        ("suspended", 20.0, pytest.approx(30.0)),
        ("running", pytest.approx(30.0), pytest.approx(110.0)),
    ]
    ((by),) = long.paused_by()
    assert (by.request, by.seconds) == (1, pytest.approx(10.0))
    assert [(one.request, one.seconds) for one in short.behind("waiting")] == [(0, pytest.approx(5.0))]
    assert [(one.request, one.seconds) for one in last.behind("waiting")] == [
        (0, pytest.approx(84.0)),
        (1, pytest.approx(10.0)),
    ]
    told = " ".join(tell(long, result.tables["requests"]))
    assert "Paused for #1 (default, 10 tokens) for 10 s." in told
    assert "First token after 110 s, 0.22 times its SLO; alone on an idle instance it takes 100 s." in told


def test_one_that_never_gets_a_first_token_has_spells_until_it_gave_up_or_the_run_ended():
    requests = [
        Request(id=0, arrival_s=0.0, prompt_tokens=100, ttft_slo_s=500.0),
        Request(id=1, arrival_s=1.0, prompt_tokens=10, abandon_s=5.0),
        Request(id=2, arrival_s=2.0, prompt_tokens=10),
        Request(id=3, arrival_s=50.0, prompt_tokens=1000),
    ]
    cluster = PrefillOnly(kv_blocks=20)
    policy = ComposedPolicy("arrival", Alone(), "request")
    result = simulate(requests, policy=policy, latency=toy_latency(), cluster=cluster, horizon_s=50.0)
    chronicle = Chronicle(result)
    running, gone, waiting, refused = (chronicle.story(row) for row in range(4))
    assert [(one.state, one.start_s, one.end_s) for one in running.spells] == [("running", 0.0, 50.0)]
    assert [(one.state, one.start_s, one.end_s) for one in gone.spells] == [("waiting", 1.0, 6.0)]
    assert [(one.request, one.seconds) for one in waiting.behind("waiting")] == [(0, 48.0)]
    assert refused.spells == ()
    assert tell(refused, result.tables["requests"])[-1] == "No first token: rejected (too_large)."
    with pytest.raises(ValueError, match="request 4 is not in the run; it has requests 0 to 3"):
        chronicle.story(4)


def test_the_worst_are_those_with_the_largest_multiple_of_their_slo_or_else_of_the_ttft_alone():
    policy = ComposedPolicy("arrival", Alone(), "request")
    result = checked(workload((0.0, 10, 20.0), (0.0, 10, 10.0), (0.0, 10)), policy, toy_latency())
    assert worst(result.tables["requests"]) == [(1, pytest.approx(2.0)), (0, pytest.approx(0.5))]
    result = checked(workload((0.0, 10), (0.0, 10)), policy, toy_latency())
    assert worst(result.tables["requests"], 1) == [(1, pytest.approx(2.0))]
