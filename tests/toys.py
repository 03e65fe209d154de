"""Hardware and executors small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowsim import LatencyModel, Policy, PrefillOnly, Request, Result, Stops, simulate
from flowsim.check import check_result
from flowsim.core import Batch, Job
from flowsim.kv import KVPool
from flowsim.latency import Exact
from flowsim.testing import toy_latency
from flowsim.view import InstanceView

__all__ = ["checked", "operator_by_operator", "toy_latency", "workload"]

INF = math.inf


def workload(*rows: tuple[float, int] | tuple[float, int, float]) -> list[Request]:
    """Requests from (arrival_s, prompt_tokens[, ttft_slo_s])."""
    return [
        Request(id=number, arrival_s=row[0], prompt_tokens=row[1], ttft_slo_s=row[2] if len(row) > 2 else INF)
        for number, row in enumerate(rows)
    ]


def checked(requests: Sequence[Request], policy: Policy, latency: LatencyModel, **options: object) -> Result:
    """`simulate` with the laws of a run checked."""
    cluster = PrefillOnly(**options)  # type: ignore[arg-type]
    result = simulate(requests, policy=policy, latency=latency, cluster=cluster)
    check_result(result, latency)
    return result


def operator_by_operator(
    requests: Sequence[Request], policy: Policy, latency: LatencyModel, cluster: PrefillOnly, kv_blocks: int
) -> tuple[list[tuple[int, float, float]], dict[int, float]]:
    """One instance that steps through every operator and looks for a flag after each: the reference executor.

    Returns its segments (head's id, start_s, end_s) in order of their end, and the first token of each request.
    """
    latency = latency.bound(pass_tokens=cluster.pass_tokens, stops=policy.stops)
    kv = KVPool(kv_blocks, cluster.block_tokens)
    profile = latency.profile
    view = InstanceView(
        Exact(latency), kv, latency, max_batches=cluster.max_batches, layers=profile.layers, request_s=profile.request_s
    )
    coming = [request for request in requests if kv.blocks(request.prompt_tokens) <= kv_blocks]
    segments: list[tuple[int, float, float]] = []
    first_token_s: dict[int, float] = {}
    now_s, parked = 0.0, False
    while coming or view.waiting or view.suspended:
        now_s = _take_arrivals(coming, view, now_s)
        batch = policy.select(view)
        if batch is None:
            now_s, parked = max(now_s, coming[0].arrival_s), False
            continue
        now_s = _put_on(batch, view, kv, latency, now_s, parked)
        stops = batch.stops or policy.stops
        legal_s = [stop.at_s for stop in batch.timeline.boundaries(stops)[:-1]]
        flagged, begun_s = False, batch.done_s
        for number, step_s in _steps(batch, stops):
            now_s = batch.since_s + step_s - begun_s
            for at_s in sorted({request.arrival_s for request in coming if request.arrival_s <= now_s}):
                _take_arrivals(coming, view, at_s)
                flagged = flagged or policy.select(view) is not batch
            parked = flagged and any(abs(at_s - step_s) < 1e-9 for at_s in legal_s)
            if parked:
                batch.done_s, batch.operators, batch.suspended_at_s = step_s, number, now_s
                break
        view.now_s, view.running = now_s, None
        segments.append((batch.id, batch.since_s, now_s))
        if parked:
            view.suspended.add(batch)
        else:
            _credit(batch, view, kv, now_s + profile.request_s, first_token_s)
    return segments, first_token_s


def _steps(batch: Batch, stops: Stops) -> list[tuple[int, float]]:
    """(operators ended, seconds) after each operator not yet run, and after the last tail; where only a pass's
    end is a stop, its last operator ends with its tail."""
    steps, start_s = [], 0.0
    for one in batch.timeline.passes:
        layers_s = [start_s + one.head_s + one.ends_s[4] * layer for layer in range(one.layers)]
        ends_s = [layer_s + end_s for layer_s in layers_s for end_s in one.ends_s]
        start_s += one.total_s
        if not stops.operators:
            ends_s[-1] = start_s
        steps += [(len(steps) + place, end_s) for place, end_s in enumerate(ends_s, start=1)]
    steps.append((len(steps), start_s))
    return [step for step in steps if step[1] > batch.done_s + 1e-9 or step[1] == start_s]


def _take_arrivals(coming: list[Request], view: InstanceView, now_s: float) -> float:
    view.now_s = now_s
    while coming and coming[0].arrival_s <= now_s:
        job = Job(coming.pop(0))
        view.waiting.add(job)
        view.arrived.append(job)
    return now_s


def _put_on(batch: Batch, view: InstanceView, kv: KVPool, latency: LatencyModel, now_s: float, parked: bool) -> float:
    if batch in view.suspended:
        view.suspended.remove(batch)
    else:
        tokens = [(new, job.done_tokens) for job, new in batch.parts]
        batch.begin(0, now_s, 0.0)
        hardware = latency.stopping(batch.stops or latency.stops)
        batch.timeline, batch.predicted_s = hardware.timeline(tokens), Exact(hardware).batch_s(tokens)
        for job, _ in batch.parts:
            view.waiting.remove(job)
            if not job.done_tokens:
                kv.take(job.id, kv.blocks(job.prompt_tokens))
        now_s += latency.profile.switch_s if parked else 0.0
    batch.since_s, view.running = now_s, batch
    return now_s


def _credit(batch: Batch, view: InstanceView, kv: KVPool, first_s: float, first_token_s: dict[int, float]) -> None:
    for job, new in batch.parts:
        job.done_tokens += new
        if job.done_tokens < job.prompt_tokens:
            view.waiting.add(job)
        else:
            kv.give(job.id)
            first_token_s[job.id] = first_s
