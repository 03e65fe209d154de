"""What must hold of KV on its way between instances; `docs/invariants.md` numbers the laws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowsim.core import Outcome
from flowsim.law import SAME_S, hold
from flowsim.log import Columns
from flowsim.metrics import Result
from flowsim.tokens import token_times_s

__all__ = ["check_transfers"]


def check_transfers(result: Result) -> None:
    """Prefill, then transfer, then decode; a link carries one transfer at a time, as fast as it may; what is handed
    over goes from a pool to the one that decodes for it.

    Raises:
        AssertionError: the law broken, with both sides.
    """
    transfers, requests = result.tables["transfers"], result.tables["requests"]
    pools, link = result.run["pools"], result.run["link"]
    _check_order(result, transfers, requests)
    left_s = transfers["end_s"] - link["latency_s"]
    took_s = left_s - transfers["start_s"]
    due_s = transfers["bytes"] / link["bytes_per_s"]
    hold("24 a transfer takes its bytes over the bandwidth", took_s >= due_s - SAME_S, took_s, due_s)
    for end in ("source", "target"):
        order = np.lexsort((transfers["start_s"], transfers[end]))
        start_s, end_s, instance = transfers["start_s"][order], left_s[order], transfers[end][order]
        apart = (start_s[1:] >= end_s[:-1] - SAME_S) | (instance[1:] != instance[:-1])
        hold(f"24 the link of a {end} carries one transfer at a time", apart, start_s[1:], end_s[:-1])
    pool_of = {
        instance: name
        for name, pool in pools.items()
        for instance in range(pool["instances"][0], pool["instances"][1] + 1)
    }
    wanted = [pools[pool_of[source]]["decode"] for source in transfers["source"].tolist()]
    got = [pool_of[target] for target in transfers["target"].tolist()]
    hold("25 KV goes to the pool that decodes", np.array(wanted) == np.array(got), np.array(got), np.array(wanted))


def _check_order(result: Result, transfers: Columns, requests: Columns) -> None:
    """A transfer is asked for when a prefill ends, starts then or later, and the next token comes after it."""
    ended_s = requests["first_token_s"][transfers["request"]] - _request_s(result.run["pools"], transfers["source"])
    first = np.zeros(len(ended_s), dtype=bool)
    first[np.unique(transfers["request"], return_index=True)[1]] = True  # a later one is of a recomputed prefill
    hold(
        "23 a transfer is asked for when its prefill ends",
        (np.abs(transfers["asked_s"] - ended_s) < SAME_S) | ~first,
        transfers["asked_s"],
        ended_s,
    )
    in_order = transfers["start_s"] >= transfers["asked_s"] - SAME_S
    hold("23 a transfer starts once it is asked for", in_order, transfers["start_s"], transfers["asked_s"])
    done = requests["outcome"][transfers["request"]] == Outcome.FINISHED.value
    times_s = {}
    if done.any():
        times_s = token_times_s(result.tables["steps"], result.tables["tokens"], requests["first_token_s"])
    rows = np.flatnonzero(done & first)
    second_s = np.array([times_s[request][1] for request in transfers["request"][rows].tolist()])
    end_s = transfers["end_s"][rows]
    hold("23 decode starts after its transfer", second_s > end_s - SAME_S, second_s, end_s)
    handed = (requests["output_tokens"] > 1) & (requests["outcome"] == Outcome.FINISHED.value)
    handed &= _handing_over(result.run["pools"], requests["prefill_instance"])
    moved = np.isin(np.arange(len(handed)), transfers["request"])
    hold("23 what decodes elsewhere was transferred", moved | ~handed, moved, handed)


def _request_s(pools: Mapping[str, Any], instances: Any) -> Any:
    seconds = np.zeros(len(instances))
    for pool in pools.values():
        seconds[(instances >= pool["instances"][0]) & (instances <= pool["instances"][1])] = pool["request_s"]
    return seconds


def _handing_over(pools: Mapping[str, Any], instances: Any) -> Any:
    """Whether each instance, None for none, is of a pool that another decodes for."""
    over = {
        instance
        for pool in pools.values()
        if pool["decode"] in pools
        for instance in range(pool["instances"][0], pool["instances"][1] + 1)
    }
    return np.array([instance in over for instance in instances.tolist()], dtype=bool)
