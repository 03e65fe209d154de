"""For your own tests: a View without a simulator, and a check that a policy conforms.

from flowsim.testing import check_policy
def test_my_policy_conforms():
    check_policy(MyPolicy())
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from functools import cache

from flowsim.check import check_result
from flowsim.contract import answer_breach, batch_breach, idle_breach
from flowsim.core import Batch, Job, Part, Request
from flowsim.kv import KVPool
from flowsim.latency import Exact, LatencyModel
from flowsim.policy import Policy
from flowsim.pool import PrefillOnly
from flowsim.profile import Attention, Dense, Profile, load_profile
from flowsim.sim import simulate
from flowsim.timeline import Stops
from flowsim.view import InstanceView

__all__ = ["check_policy", "check_result", "make_job", "make_view", "toy_latency"]


def toy_latency(
    token_s: float = 1.0,
    *,
    layers: int = 2,
    quadratic_s: float = 0.0,
    tail: bool = False,
    pass_s: float = 0.0,
    request_s: float = 0.0,
    check_s: float = 0.0,
    switch_s: float = 0.0,
) -> LatencyModel:
    """Hardware to check by hand: a prompt of n tokens takes n x token_s seconds, in 5 equal operators a layer.

    `quadratic_s` adds attention quadratic in new tokens, `tail` one more operator of a token's slope at a pass's end;
    `pass_s`, `request_s`, `check_s` and `switch_s` are 0 unless given.
    """
    slope = token_s / (5 * layers)
    measured = (1, 10**9)
    dense = [
        Dense(name, name, 0.0, (), (slope,), measured) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    ]
    if tail:
        dense.append(Dense("norm", "tail", 0.0, (), (slope,), measured))
    attention = Attention("attention", 0.0, slope, quadratic_s, 2 * quadratic_s, 0.0, measured)
    profile = Profile(
        path="toy.yaml",
        model="toy",
        gpu="toy",
        gpu_memory_bytes=1e12,
        weights_bytes=1.0,
        kv_bytes_per_token=1.0,
        max_context_tokens=10**9,
        layers=layers,
        hidden_size=1,
        dense={1: tuple(dense)},
        attention={1: attention},
        all_reduce={1: ()},
        pass_s=pass_s,
        request_s=request_s,
        check_s=check_s,
        switch_s=switch_s,
    )
    return LatencyModel(profile)


def make_job(
    id: int,  # noqa: A002 (the field's name)
    prompt_tokens: int,
    *,
    arrival_s: float = 0.0,
    ttft_slo_s: float = math.inf,
    slo_class: str = "default",
    done_tokens: int = 0,
) -> Job:
    """A job as it waits: with `done_tokens` > 0, between the chunks of its prefill."""
    job = Job(
        Request(id=id, arrival_s=arrival_s, prompt_tokens=prompt_tokens, ttft_slo_s=ttft_slo_s, slo_class=slo_class)
    )
    job.done_tokens = done_tokens
    return job


def make_view(
    *,
    now_s: float = 0.0,
    waiting: Iterable[Job] = (),
    suspended: Iterable[tuple[Sequence[Job], float]] = (),
    running: tuple[Sequence[Job], float] | None = None,
    latency: LatencyModel | None = None,
    kv_blocks: int = 10_000,
    max_batches: int = 128,
) -> InstanceView:
    """A View at one moment, with the exact predictor; what is there has come in the order of ids.

    Args:
        now_s: the time of the decision.
        waiting: jobs that wait.
        suspended: batches paused, each as (its jobs, the share of its time that has run, 0 to 1).
        running: the batch that runs, likewise; or None for a free GPU.
        latency: the hardware; Llama-3-8B on an A100 unless given.
        kv_blocks: KV blocks of the instance, of 16 tokens; what has started holds those of its prompt.
        max_batches: batches under way, at most.
    """
    latency = latency or _a100()
    kv = KVPool(kv_blocks)
    profile = latency.profile
    view = InstanceView(
        Exact(latency), kv, latency, max_batches=max_batches, layers=profile.layers, request_s=profile.request_s
    )
    view.now_s = now_s
    for job in waiting:
        if job.done_tokens:
            kv.take(job.id, kv.blocks(job.prompt_tokens))
        view.waiting.add(job)
    for jobs, share in suspended:
        batch = _under_way(jobs, share, latency, kv)
        batch.suspended_at_s = now_s
        view.suspended.add(batch)
    if running is not None:
        view.running = _under_way(*running, latency, kv)
        view.running.since_s = now_s
    started = [*view.suspended, *([view.running] if view.running is not None else [])]
    here = [*view.waiting, *(job for batch in started for job, _ in batch.parts)]
    view.arrived.extend(sorted(here, key=lambda job: job.id))
    return view


@cache
def _a100() -> LatencyModel:
    return LatencyModel(load_profile("llama3-8b", "a100"), stops=Stops.OPERATOR)


def _under_way(jobs: Sequence[Job], share: float, latency: LatencyModel, kv: KVPool) -> Batch:
    batch = Batch([Part(job, job.left_tokens) for job in jobs])
    tokens = [(part.tokens, part.job.done_tokens) for part in batch.parts]
    batch.begin(batch.id, math.nan, 0.0)
    batch.blocks, batch.slowest = 0, 1.0
    batch.timeline = latency.timeline(tokens)
    batch.predicted_s = Exact(latency).batch_s(tokens)
    batch.done_s, batch.operators = batch.timeline.next_stop(share * batch.timeline.total_s, Stops.OPERATOR)
    for job in jobs:
        if not kv.held(job.id):
            kv.take(job.id, kv.blocks(job.prompt_tokens))
            batch.blocks += kv.held(job.id)
    return batch


def check_policy(policy: Policy, *, situations: int = 300, runs: int = 5, seed: int = 0) -> None:
    """Tests that a policy conforms to the contract of `select`, over generated situations and short runs.

    In each situation its answer must be legal (running, suspended, or new and fitting), it must not idle a GPU
    that has work, answering must change nothing, and the answer must depend on the jobs and the time alone: not
    on the order in which jobs came into the queue, nor on how often it was asked. Then it runs short workloads,
    in which the laws of `check_result` must hold.

    Raises:
        AssertionError: the rule that was broken, and the situation or run in which it was.
        PolicyError: what the executor refuses.
    """
    stops = getattr(policy, "stops", None)
    if not isinstance(stops, Stops):
        raise AssertionError(f"policy.stops is {stops!r}; it must be a member of flowsim.Stops")
    for number in range(situations):
        _check_situation(policy, seed + number)
    latency = _a100()
    for number in range(runs):
        stream = random.Random(f"run {seed + number}")
        requests = _requests(stream, 60, spread_s=6.0)
        result = simulate(requests, policy=policy, latency=latency, cluster=PrefillOnly(kv_blocks=1500), seed=number)
        check_result(result, latency)


def _check_situation(policy: Policy, seed: int) -> None:
    view = _situation(seed, policy.stops, shuffle=False)
    before = _described(view)
    answer = policy.select(view)
    where = f"in situation {seed}: {before}"
    if _described(view) != before:
        raise AssertionError(f"select changed the view {where}; it became {_described(view)}")
    _check_answer(policy, view, answer, where)
    name = _named(answer)
    if _named(policy.select(view)) != name:
        raise AssertionError(f"asked twice, select chose {name}, then {_named(policy.select(view))} {where}")
    other = _named(policy.select(_situation(seed, policy.stops, shuffle=True)))
    if other != name:
        raise AssertionError(f"select chose {name}, and {other} with the queue filled in another order {where}")


def _check_answer(policy: Policy, view: InstanceView, answer: Batch | None, where: str) -> None:
    breach = answer_breach(answer)
    if breach is None and answer is None:
        breach = None if getattr(policy, "idles", False) else idle_breach(view)
    elif breach is None and answer is not view.running and answer not in view.suspended:
        assert answer is not None
        breach = batch_breach(answer, view)
    if breach is not None:
        raise AssertionError(f"select {breach.did}; allowed: {breach.allowed}. It did so {where}")


def _situation(seed: int, stops: Stops, *, shuffle: bool) -> InstanceView:
    """A moment on an instance: up to eight jobs wait, up to three batches are paused, one may run."""
    stream = random.Random(f"situation {seed}")
    jobs = [Job(request) for request in _requests(stream, 14, spread_s=3.0)]
    stream.shuffle(jobs)
    cut = stream.randint(0, 8)
    waiting, rest = sorted(jobs[:cut], key=lambda job: job.id), jobs[8:]
    for job in waiting:
        if stream.random() < 0.2:
            job.done_tokens = stream.randrange(job.prompt_tokens)
    paused = stream.randint(0, 3) if stops is not Stops.REQUEST else 0  # such a policy never has a suspended batch
    suspended = [([rest[place]], stream.random() * 0.9) for place in range(paused)]
    running = (rest[3 : 3 + stream.randint(1, 2)], stream.random() * 0.9) if stream.random() < 0.5 else None
    started = [job for job in waiting if job.done_tokens] + [job for jobs, _ in suspended for job in jobs]
    started += running[0] if running else []
    held = sum(-(-job.prompt_tokens // 16) for job in started)
    kv_blocks = held + stream.choice([10_000, 600, 40])
    if shuffle:
        stream.shuffle(waiting)
        stream.shuffle(suspended)
    return make_view(now_s=3.0, waiting=waiting, suspended=suspended, running=running, kv_blocks=kv_blocks)


def _requests(stream: random.Random, count: int, *, spread_s: float) -> list[Request]:
    """Short and long prompts, with tight, loose and no SLOs; some arrive together and are alike."""
    arrivals_s = sorted(round(stream.random() * spread_s, 1) for _ in range(count))
    requests = []
    for number, arrival_s in enumerate(arrivals_s):
        tokens, slo_s = stream.choice([(64, 0.25), (500, 0.25), (500, 2.0), (3000, 4.0), (9000, 6.0), (2000, math.inf)])
        kind = "interactive" if slo_s <= 1.0 else "batch"
        requests.append(Request(id=number, arrival_s=arrival_s, prompt_tokens=tokens, ttft_slo_s=slo_s, slo_class=kind))
    return requests


def _described(view: InstanceView) -> str:
    """Everything of a view that a policy must not change."""
    waiting = [(job.id, job.done_tokens, job.preemptions) for job in view.waiting]
    suspended = [(batch.id, batch.done_s, batch.number) for batch in view.suspended]
    running = view.running and (view.running.id, view.running.done_s, view.running.number)
    free = f"{view.free_blocks} KV blocks free"
    return f"t={view.now_s}, waiting {waiting}, suspended {suspended}, running {running}, {free}"


def _named(answer: Batch | None) -> str:
    if answer is None:
        return "nothing"
    parts = ", ".join(f"{tokens} tokens of {job.id}" for job, tokens in answer.parts)
    stops = f" with {answer.stops.value} stops" if answer.stops is not None else ""
    return f"{'a new batch' if answer.number < 0 else 'the batch'} of {parts}{stops}"
