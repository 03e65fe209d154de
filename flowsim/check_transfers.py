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
    due_s = transfers["bytes"] / link["bytes_per_s"]
    left_s = transfers["end_s"] - link["latency_s"]
    left_s = np.where(transfers["failed"], transfers["start_s"] + due_s, left_s)
    took_s = np.where(transfers["failed"], transfers["end_s"], left_s) - transfers["start_s"]
    hold("24 a transfer takes its bytes over the bandwidth", took_s >= due_s - SAME_S, took_s, due_s)
    began = np.flatnonzero(transfers["bytes"] > 0)
    for end in ("source", "target"):
        order = began[np.lexsort((transfers["start_s"][began], transfers[end][began]))]
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
    in_order = transfers["start_s"] >= transfers["asked_s"] - SAME_S
    hold("23 a transfer starts once it is asked for", in_order, transfers["start_s"], transfers["asked_s"])
    requeued = requests.get("requeued", np.zeros(len(requests["id"]))) > 0
    token_s = transfers["asked_s"] + _request_s(result.run["pools"], transfers["source"])  # that of the prefill
    first_s = requests["first_token_s"][transfers["request"]]
    is_first = np.abs(token_s - first_s) < SAME_S
    hold(
        "23 a transfer is asked for when its prefill ends",
        is_first | requeued[transfers["request"]],
        transfers["asked_s"],
        first_s,
    )
    done = requests["outcome"] == Outcome.FINISHED.value
    rows = np.flatnonzero(done[transfers["request"]])
    if len(rows):
        times_s = token_times_s(result.tables["steps"], result.tables["tokens"], requests["first_token_s"])
        of_row = [times_s[request] for request in transfers["request"][rows].tolist()]
        place = [int(np.abs(times - asked).argmin()) for times, asked in zip(of_row, token_s[rows], strict=True)]
        given_s = np.array([times[at] for times, at in zip(of_row, place, strict=True)])
        hold(
            "23 what is moved has its token of the prefill",
            np.abs(given_s - token_s[rows]) < SAME_S,
            given_s,
            token_s[rows],
        )
        next_s = np.array([times[at + 1] for times, at in zip(of_row, place, strict=True)])
        end_s = transfers["end_s"][rows]
        hold("23 decode starts after its transfer", next_s > end_s - SAME_S, next_s, end_s)
    handed = (requests["output_tokens"] > 1) & done & ~requeued
    handed &= _handing_over(result.run["pools"], requests["prefill_instance"])
    moved = np.isin(np.arange(len(handed)), transfers["request"][~transfers["failed"]])
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
