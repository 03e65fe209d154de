"""Engines that decode: against an engine that steps plainly, on random cases, and by the laws of a run."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowsim import ComposedPolicy, LatencyModel, Request, Result, TokenBudget, load_profile, simulate
from flowsim.check import check_result
from flowsim.latency import NO_DECODES, Decodes
from flowsim.pool import Cluster, Pool

PRO = LatencyModel(load_profile("llama3-8b", "rtxpro6000"))
A100 = LatencyModel(load_profile("llama3-8b", "a100"))
SIZE = 16


@dataclass(eq=False)
class Sequence:
    request: Request
    target: int
    done: int = 0
    generated: int = 0
    held: int = 0


def plainly(requests, latency, *, tokens, seqs, blocks, ahead):
    """vLLM's rules, a step at a time, with `ahead` steps formed before they run; first token and finish of each."""
    coming, waiting, running, flight = deque(requests), [], [], []
    free, now_s, ends_s = blocks, 0.0, math.inf
    first_s, finish_s = {}, {}

    def plan():
        nonlocal free
        parts, decodes, room, evicted = [], [], tokens, False
        for one in list(running):
            if one not in running or one.done < one.target or one.generated >= one.request.output_tokens:
                continue
            need = -(-(one.request.prompt_tokens + one.generated) // SIZE)
            while one in running and need - one.held > free:
                last = [x for x in running if x.generated < x.request.output_tokens][-1]
                running.remove(last)
                free, last.held, last.done, evicted = free + last.held, 0, 0, True
                last.target = last.request.prompt_tokens + last.generated
                waiting.insert(0, last)
            if one in running:
                free, one.held = free - (need - one.held), need
        for one in running:
            if one.done == one.target and one.generated < one.request.output_tokens:
                decodes.append(one)
                room -= 1
        for one in running:
            if one.done < one.target and room > 0:
                parts.append((one, min(room, one.target - one.done)))
                room -= parts[-1][1]
        while waiting and room > 0 and not evicted and len(running) < seqs:
            one, need = waiting[0], -(-waiting[0].target // SIZE)
            if need > free:
                break
            waiting.pop(0)
            running.append(one)
            free, one.held = free - need, need
            parts.append((one, min(room, one.target)))
            room -= parts[-1][1]
        if not parts and not decodes:
            return None
        context = [one.request.prompt_tokens + one.generated for one in decodes]
        shape = Decodes(len(context), sum(context), max(context)) if context else NO_DECODES
        done = [(new, one.done) for one, new in parts]
        step_s = latency.timeline(done, 1.0, shape).total_s if parts else latency.iterations(shape, 1).total_s
        for one, new in parts:
            one.done += new
        out = decodes + [one for one, _ in parts if one.done == one.target]
        for one in out:
            one.generated += 1
        return step_s, [(one, one.generated) for one in out]

    while coming or waiting or running or flight:
        while coming and coming[0].arrival_s <= now_s:
            waiting.append(Sequence(coming[0], coming.popleft().prompt_tokens))
        while len(flight) <= ahead and (planned := plan()):
            flight.append(planned)
            if len(flight) == 1:
                ends_s = now_s + planned[0]
        if not flight:
            now_s = coming[0].arrival_s
            continue
        now_s = ends_s
        for one, count in flight.pop(0)[1]:
            first_s.setdefault(one.request.id, now_s + latency.profile.request_s)
            if count == one.request.output_tokens:
                finish_s[one.request.id] = now_s + latency.profile.request_s
                free += one.held
                running.remove(one)
        if flight:
            ends_s = now_s + flight[0][0]
    return first_s, finish_s


def served(requests, latency=PRO, *, policy=None, **pool) -> Result:
    """A run on one engine, with its laws checked."""
    cluster = Pool(**{"decode": "here", **pool})
    policy = policy or ComposedPolicy("arrival", TokenBudget(2048), "pass")
    result = simulate(requests, policy=policy, latency=latency, cluster=cluster)
    check_result(result, Cluster.of(cluster).hardware(latency))
    return result


@st.composite
def chats(draw, most_prompt=900, most_output=60):
    """Up to 20 requests with prompts and outputs of any size, some at the same instant."""
    gaps = draw(st.lists(st.sampled_from([0.0, 0.003, 0.04, 0.3]), min_size=1, max_size=20))
    arrival_s = np.cumsum(np.array(gaps) * math.pi / 3)
    return [
        Request(
            id=place,
            arrival_s=float(at_s),
            prompt_tokens=draw(st.integers(1, most_prompt)),
            output_tokens=draw(st.integers(1, most_output)),
        )
        for place, at_s in enumerate(arrival_s)
    ]


@settings(max_examples=40, deadline=None)
@given(
    requests=chats(),
    tokens=st.sampled_from([64, 300, 2048]),
    seqs=st.sampled_from([2, 5, 64]),
    blocks=st.sampled_from([61, 90, 2000]),
    ahead=st.sampled_from([0, 1]),
)
def test_the_engine_does_what_one_that_steps_plainly_does(requests, tokens, seqs, blocks, ahead):
    first_s, finish_s = plainly(requests, PRO, tokens=tokens, seqs=seqs, blocks=blocks, ahead=ahead)
    policy = ComposedPolicy("arrival", TokenBudget(tokens), "pass")
    table = served(requests, policy=policy, max_sequences=seqs, kv_blocks=blocks, async_steps=ahead).tables["requests"]
    assert table["first_token_s"].tolist() == pytest.approx([first_s[one.id] for one in requests], abs=1e-9)
    assert table["finish_s"].tolist() == pytest.approx([finish_s[one.id] for one in requests], abs=1e-9)
