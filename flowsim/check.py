"""What must hold of every run whatever the policy; `docs/invariants.md` numbers the laws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.check_layers import check_layers, completes, layers_of
from flowsim.check_migrations import came_s, check_migrations
from flowsim.check_transfers import check_transfers
from flowsim.core import Outcome
from flowsim.latency import NO_DECODES, Decodes, LatencyModel
from flowsim.law import SAME_S, hold
from flowsim.log import Columns, Ended
from flowsim.metrics import Result
from flowsim.timeline import Iterations, Stops, Timeline
from flowsim.tokens import token_times_s

__all__ = ["check_result"]

Array = npt.NDArray[Any]


def check_result(result: Result, latency: LatencyModel | Mapping[str, LatencyModel] | None = None) -> None:
    """Checks the laws of a run.

    Args:
        result: any run's result.
        latency: the hardware it ran on, or that of each pool by name; with it, segments are checked against
            timelines too.

    Raises:
        AssertionError: the law broken, with both sides.
    """
    _check_outcomes(result)
    _check_tokens(result)
    _check_gpus(result)
    _check_preemptions(result)
    _check_kv(result)
    if "steps" in result.tables:
        _check_decodes(result)
    if "layers" in result.tables:
        check_layers(result.tables)
    if "transfers" in result.tables:
        check_transfers(result)
    if "migrations" in result.tables:
        check_migrations(result)
    if latency is not None:
        for name, pool in result.run["pools"].items():
            _check_timelines(result, pool, latency if isinstance(latency, LatencyModel) else latency[name])


def _check_outcomes(result: Result) -> None:
    """One outcome each; arrival <= start <= first token <= finish; rejections have a reason."""
    requests = result.tables["requests"]
    outcome = requests["outcome"]
    hold(
        "1 every request has one outcome",
        np.isin(outcome, [one.value for one in Outcome]),
        outcome,
        "an outcome",
    )
    done = outcome == Outcome.FINISHED.value
    for earlier, later in (
        ("arrival_s", "start_s"),
        ("start_s", "first_token_s"),
        ("first_token_s", "finish_s"),
    ):
        a, b = requests[earlier][done], requests[later][done]
        hold(f"2 {earlier} <= {later}", a <= b + SAME_S, a, b)
    reasons = np.array([reason is not None for reason in requests["reason"].tolist()], dtype=bool)
    hold(
        "1 the rejected have a reason, no others",
        reasons == (outcome == Outcome.REJECTED.value),
        outcome,
        requests["reason"],
    )


def _check_tokens(result: Result) -> None:
    """The tokens computed for a request are its prompt, no more and no less; none for a rejected one."""
    requests, batches = result.tables["requests"], result.tables["batches"]
    done = requests["outcome"] == Outcome.FINISHED.value
    tokens = batches["tokens"] * completes(result.tables)
    computed = np.bincount(batches["request"], weights=tokens, minlength=len(done))
    prompt = requests["prompt_tokens"]
    if "evictions" in requests:
        prompt = prompt - requests["cached_tokens"] + requests["recomputed_tokens"]
    elif "requeued" in requests:
        prompt = prompt + requests["recomputed_tokens"]
    lost = np.zeros(len(done))
    if "requeued" in requests:  # what then fitted no other instance; of one that was decoded, any part
        lost = np.where(np.isnan(requests["first_token_s"]), requests["recomputed_tokens"], computed)
    wanted = np.where(done, prompt, np.where(requests["outcome"] == Outcome.REJECTED.value, lost, computed))
    hold("3 prefilled tokens == prompt tokens", computed == wanted, computed, wanted)


def _check_gpus(result: Result) -> None:
    """A GPU runs one segment at a time, and does not idle while it has work that it could do."""
    requests, segments = result.tables["requests"], result.tables["segments"]
    for instance, idles in _instances(result, "idles"):
        rows = segments["instance"] == instance
        begin_s = (segments["start_s"] - segments["switch_s"])[rows]
        end_s = (segments["end_s"] + segments["barrier_s"])[rows]
        hold("26 nothing runs on an instance that is down", ~_down(result, instance, begin_s, end_s), begin_s, end_s)
        hold("4 a segment ends after it begins", begin_s <= end_s + SAME_S, begin_s, end_s)
        hold("4 one GPU never runs two segments", end_s[:-1] <= begin_s[1:] + SAME_S, end_s[:-1], begin_s[1:])
        if idles:
            continue
        gaps = np.flatnonzero(begin_s[1:] > end_s[:-1] + SAME_S)
        gaps = gaps[~_down(result, instance, end_s[:-1][gaps], begin_s[1:][gaps])]
        gaps = gaps[~_holding(result, instance, end_s[:-1][gaps], begin_s[1:][gaps])]
        gap_begin_s, gap_end_s = end_s[:-1][gaps], begin_s[1:][gaps]
        mine = requests["prefill_instance"] == instance
        mine &= ~np.isnan(requests["start_s"])
        if "requeued" in requests:
            mine &= requests["requeued"] == 0  # the others waited elsewhere too
        order = np.argsort(requests["start_s"][mine], kind="stable")
        start_s, arrival_s = requests["start_s"][mine][order], came_s(result)[mine][order]
        earliest_s = np.append(np.minimum.accumulate(arrival_s[::-1])[::-1], np.inf)
        waited_s = earliest_s[np.searchsorted(start_s, gap_end_s - SAME_S)]
        hold("5 never idle while a job waits that fits", waited_s >= gap_end_s - SAME_S, gap_begin_s, waited_s)
        _check_suspended(segments, rows, gap_begin_s)


def _instances(result: Result, key: str) -> Iterator[tuple[int, Any]]:
    """Every instance, with a figure of its pool."""
    for pool in result.run["pools"].values():
        first, last = pool["instances"]
        for instance in range(first, last + 1):
            yield instance, pool[key]


def _down(result: Result, instance: int, begin_s: Array, end_s: Array) -> Array:
    """Which stretches of time an instance was down in; what it ran never is."""
    down = np.zeros(len(begin_s), dtype=bool)
    if "failures" in result.tables:
        table = result.tables["failures"]
        mine = table["instance"] == instance
        for at_s, until_s in zip(table["at_s"][mine].tolist(), table["until_s"][mine].tolist(), strict=True):
            down |= (at_s < end_s - SAME_S) & (until_s > begin_s + SAME_S)
    return down


def _holding(result: Result, instance: int, begin_s: Array, end_s: Array) -> Array:
    """In which gaps an instance holds KV of prefills that have ended and wait to be moved: what waits may not fit."""
    held = np.zeros(len(begin_s), dtype=bool)
    if "transfers" in result.tables:
        table = result.tables["transfers"]
        mine = table["source"] == instance
        for asked_s, moved_s in zip(table["asked_s"][mine].tolist(), table["end_s"][mine].tolist(), strict=True):
            held |= (asked_s < end_s) & (moved_s > begin_s)
    return held


def _check_suspended(segments: Columns, rows: Array, gap_begin_s: Array) -> None:
    """No batch of an instance is between two of its segments when a gap begins."""
    order = np.lexsort((segments["start_s"][rows], segments["batch"][rows]))
    batch = segments["batch"][rows][order]
    same = batch[1:] == batch[:-1]
    paused_s = np.sort((segments["end_s"] + segments["barrier_s"])[rows][order][:-1][same])
    resumed_s = np.sort(segments["start_s"][rows][order][1:][same])
    suspended = np.searchsorted(paused_s, gap_begin_s, side="right") - np.searchsorted(
        resumed_s, gap_begin_s, side="right"
    )
    hold("5 never idle while a batch is suspended", suspended == 0, gap_begin_s, suspended)


def _check_preemptions(result: Result) -> None:
    """A flag is acknowledged after it is raised; every pause has one."""
    table, segments = result.tables["preemptions"], result.tables["segments"]
    hold(
        "6 flagged <= stopped",
        table["flagged_s"] <= table["stopped_s"] + SAME_S,
        table["flagged_s"],
        table["stopped_s"],
    )
    pauses = int((segments["ended"] == Ended.PAUSED.value).sum())
    hold("6 every pause was flagged", pauses == int(table["paused"].sum()), pauses, int(table["paused"].sum()))


def _check_kv(result: Result) -> None:
    """Blocks are never more than there are, and all of them are free at the end."""
    kv = result.tables["kv"]
    cached = result.tables["requests"].get("cached_tokens")
    shares = cached is not None and bool(cached.any())  # then two suspended batches can hold, and count, one block
    for instance, total in enumerate(result.run["kv_blocks"]):
        rows = kv["instance"] == instance
        free, suspended = kv["free_blocks"][rows], kv["suspended_blocks"][rows]
        counted = free if shares else free + suspended
        hold("7 free + suspended <= total", (free >= 0) & (suspended >= 0) & (counted <= total), counted, total)
        unfinished = (result.tables["requests"]["outcome"] == Outcome.UNFINISHED.value).any()
        if len(free) and not unfinished:
            hold("7 all blocks come back", bool(free[-1] == total and suspended[-1] == 0), int(free[-1]), total)


def _check_timelines(result: Result, pool: Mapping[str, Any], latency: LatencyModel) -> None:
    """A pool's segments lie end to end on their batch's timeline, and pause only where its policy may stop."""
    laid = [name for name in ("batches", "steps", "layers", "stops") if name in result.tables]
    tables = {name: _of_pool(result.tables[name], pool) for name in laid}
    usual, own = Stops(pool["stops"]), _own_stops(tables)
    bound = latency.bound(pass_tokens=pool["pass_tokens"], stops=usual)
    timelines = _timelines(tables, bound)
    reached: dict[int, tuple[int, float]] = {}
    table = _of_pool(result.tables["segments"], pool)
    columns = ("batch", "start_s", "end_s", "first_op", "last_op", "ended")
    for number, start_s, end_s, first, last, ended in zip(*(table[name].tolist() for name in columns), strict=True):
        timeline, stops = timelines.get(number), own.get(number, usual)
        if timeline is None:  # a run of decodes that was cut in its first step
            cut = ended in (Ended.CUT.value, Ended.FAILED.value)
            hold("8 only what was cut lacks its timeline", cut, number, ended)
            continue
        at = reached.get(number, (0, 0.0))
        hold("8 a segment begins where its batch stopped", first == at[0], first, at[0])
        if ended == Ended.PAUSED.value:
            to_s = timeline.at(last, stops)
            legal = timeline.next_stop(to_s, stops).operators == last and to_s < timeline.total_s
            hold("9 pauses are at legal stops", legal, (number, last), stops.value)
        elif ended not in (Ended.FAILED.value, Ended.CUT.value):
            to_s = timeline.total_s
            hold(
                "8 a batch ends with its last operator",
                last == timeline.end.operators,
                last,
                timeline.end.operators,
            )
        else:
            continue
        hold(
            "8 segments sum to the timeline",
            abs(end_s - start_s - (to_s - at[1])) < SAME_S,
            end_s - start_s,
            to_s - at[1],
        )
        reached[number] = (last, to_s)


def _of_pool(table: Columns, pool: Mapping[str, Any]) -> Columns:
    """The rows of a pool's instances."""
    first, last = pool["instances"]
    rows = (table["instance"] >= first) & (table["instance"] <= last)
    return {name: cells[rows] for name, cells in table.items()}


def _own_stops(tables: Mapping[str, Columns]) -> Mapping[int, Stops]:
    """By the number of the batch, its stops; those that have their policy's are not in it."""
    table = tables.get("stops")
    if table is None:
        return {}
    named = zip(table["batch"].tolist(), table["stops"].tolist(), strict=True)
    return {number: Stops(name) for number, name in named}


def _timelines(tables: Mapping[str, Columns], latency: LatencyModel) -> Mapping[int, Timeline | Iterations]:
    """The timeline of every batch; of a run of decodes that part of it which ran."""
    batches = tables["batches"]
    parts: dict[int, list[tuple[int, int]]] = {}
    slowest: dict[int, float] = {}
    decodes: dict[int, Decodes] = {}
    counts: dict[int, int] = {}
    columns = ("batch", "tokens", "cached_tokens", "slowest_rank")
    for number, new, cached, factor in zip(*(batches[name].tolist() for name in columns), strict=True):
        parts.setdefault(number, []).append((new, cached))
        slowest[number] = factor
    if "steps" in tables:
        steps = tables["steps"]
        names = ("batch", "steps", "slowest_rank", "decodes", "context_tokens", "longest_tokens")
        for number, count, factor, *context in zip(*(steps[name].tolist() for name in names), strict=True):
            decodes[number], counts[number], slowest[number] = Decodes(*context), count, factor
    made: dict[int, Timeline | Iterations] = {}
    groups, own = layers_of(tables), _own_stops(tables)
    for number, tokens in parts.items():
        factor, beside = slowest[number], decodes.get(number, NO_DECODES)
        if number in groups:
            made[number] = latency.layered(tokens, groups[number], factor, beside)
        else:
            made[number] = latency.stopping(own.get(number, latency.stops)).timeline(tokens, factor, beside)
    for number in decodes.keys() - parts.keys():
        made[number] = latency.iterations(decodes[number], counts[number], slowest[number])
    return made


def _check_decodes(result: Result) -> None:
    """Every token asked for comes out once, the first and the last when the request table says, and in order; no
    instance stands idle while it holds a sequence."""
    requests, tables = result.tables["requests"], result.tables
    times = token_times_s(tables["steps"], tables["tokens"], requests["first_token_s"])
    done = np.flatnonzero(requests["outcome"] == Outcome.FINISHED.value)
    decoded = np.array([row for row in done.tolist() if row in times], dtype=np.int64)
    single = np.setdiff1d(done, decoded)
    hold("21 what gets one token was asked for one", requests["output_tokens"][single] == 1, single, 1)
    count = np.array([len(times[row]) for row in decoded.tolist()])
    wanted = requests["output_tokens"][decoded]
    hold("21 generated tokens == output tokens", count == wanted, count, wanted)
    for place, column in ((0, "first_token_s"), (-1, "finish_s")):
        out_s, said_s = np.array([times[row][place] for row in decoded.tolist()]), requests[column][decoded]
        hold(f"21 {column} is a token's", np.abs(out_s - said_s) < SAME_S, out_s, said_s)
    smallest_s = np.array([np.diff(times[row]).min(initial=np.inf) for row in decoded.tolist()])
    hold("21 tokens come out one after another", smallest_s > 0.0, smallest_s, 0.0)
    _check_sequences(result)


def _check_sequences(result: Result) -> None:
    """No gap between the segments of an instance lies inside a request that it alone served, unless that waited."""
    requests, segments = result.tables["requests"], result.tables["segments"]
    alone = (requests["prefill_instance"] == requests["decode_instance"]) & (requests["evictions"] == 0)
    alone &= requests["outcome"] == Outcome.FINISHED.value
    if "requeued" in requests:
        alone &= requests["requeued"] == 0
    request_s = result.run["request_s"]
    for instance in range(result.run["instances"]):
        rows = segments["instance"] == instance
        begin_s = np.sort((segments["start_s"] - segments["switch_s"])[rows])
        end_s = np.sort((segments["end_s"] + segments["barrier_s"])[rows])
        gaps = np.flatnonzero(begin_s[1:] > end_s[:-1] + SAME_S)
        middle_s = 0.5 * (begin_s[1:] + end_s[:-1])[gaps]
        mine = alone & (requests["prefill_instance"] == instance)
        after = np.searchsorted(middle_s, requests["start_s"][mine])
        before = np.searchsorted(middle_s, requests["finish_s"][mine] - request_s)
        hold("22 never idle while a sequence is held", after == before, after, before)
