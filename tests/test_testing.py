"""`flowsim.testing`: conforming policies pass, and each way of breaking the contract is named."""

from __future__ import annotations

import pytest

from flowsim import Alone, Batch, ComposedPolicy, Part, PolicyError, Stops
from flowsim.config import CONF, compose, make
from flowsim.testing import check_policy, make_job, make_view

SHIPPED = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_policy_conforms(name):
    check_policy(make(compose([f"policy={name}"]), "policy"), situations=150, runs=2)


class Fine:
    """First come first served: the policy that each of the broken ones below differs from in one way."""

    stops = Stops.OPERATOR

    def select(self, view):
        started = view.running or next(iter(view.suspended), None)
        fitting = [job for job in view.waiting if view.fits([Part(job, job.left_tokens)])]
        return started or (Batch([Part(fitting[0], fitting[0].left_tokens)]) if fitting else None)


class Idle(Fine):
    def select(self, view):
        return view.running


class Overfull(Fine):
    def select(self, view):
        jobs = list(view.waiting)
        return view.running or (Batch([Part(jobs[0], jobs[0].left_tokens)]) if jobs else super().select(view))


class Greedy(Fine):
    def select(self, view):
        jobs = list(view.waiting)
        return Batch([Part(jobs[0], jobs[0].left_tokens + 1)]) if jobs else super().select(view)


class Fickle(Fine):
    def __init__(self):
        self.asked = 0

    def select(self, view):
        self.asked += 1
        jobs = list(view.waiting)
        if view.running or view.suspended or len(jobs) < 2:
            return super().select(view)
        fitting = [job for job in jobs if view.fits([Part(job, job.left_tokens)])] or [None]
        job = fitting[self.asked % len(fitting)]
        return job and Batch([Part(job, job.left_tokens)])


class Meddling(Fine):
    def select(self, view):
        for job in view.waiting:
            job.preemptions += 1
        return super().select(view)


class ByQueue(Fine):
    """Takes what happened to come into the queue first."""

    def select(self, view):
        jobs = list(view.waiting.by_id.values())
        if view.running or view.suspended or not jobs or not view.fits([Part(jobs[0], jobs[0].left_tokens)]):
            return super().select(view)
        return Batch([Part(jobs[0], jobs[0].left_tokens)])


class Stopless(Fine):
    stops = "operator"


def test_a_plain_policy_that_keeps_the_contract_conforms():
    check_policy(Fine(), situations=100, runs=2)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Idle(), "chose nothing"),
        (Overfull(), "KV blocks"),
        (Greedy(), "what is left of its prompt"),
        (Fickle(), "asked twice"),
        (Meddling(), "changed the view"),
        (ByQueue(), "filled in another order"),
        (Stopless(), "must be a member"),
    ],
)
def test_each_broken_rule_is_named(policy, rule):
    with pytest.raises(AssertionError, match=rule):
        check_policy(policy)


def test_a_view_needs_no_simulator():
    urgent, long = make_job(0, 200, arrival_s=1.0, ttft_slo_s=0.5), make_job(1, 8000, ttft_slo_s=6.0)
    policy = ComposedPolicy("slack_edf", Alone(), "operator")
    view = make_view(now_s=1.1, waiting=[urgent], running=([long], 0.5))
    assert policy.select(view).head is urgent
    assert 0.2 < view.left_s(view.running) < 0.4
    late = make_view(now_s=1.6, waiting=[make_job(0, 200, arrival_s=1.0, ttft_slo_s=0.5)], running=([long], 0.5))
    assert policy.select(late) is late.running


def test_the_executor_names_time_policy_choice_and_what_was_allowed():
    from toys import checked, toy_latency, workload

    with pytest.raises(PolicyError, match=r"t=3\.000000 s, instance 0: Greedy gave request 0 11 tokens.*1 to 10"):
        checked(workload((3.0, 10)), Greedy(), toy_latency())
    with pytest.raises(PolicyError, match=r"Idle chose nothing while 1 jobs wait that all fit"):
        checked(workload((3.0, 10)), Idle(), toy_latency())
    with pytest.raises(PolicyError, match=r"needing 4 KV blocks; 3 are free"):
        checked(workload((0.0, 32), (0.0, 32)), Pair(), toy_latency(), kv_blocks=3)


class Pair(Fine):
    def select(self, view):
        parts = [Part(job, job.left_tokens) for job in view.waiting]
        return view.running or (Batch([parts[0]]) if len(parts) == 1 else Batch(parts[:2]) if parts else None)
