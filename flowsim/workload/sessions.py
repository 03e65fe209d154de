"""Multi-turn sessions with shared system prompts, for prefix-cache studies; hash ids are synthesised.

A session's turns grow one context: its system prompt, then each turn's new tokens and the answers before. Its blocks'
ids are those of a cache that names a block by all that precedes it. This module must not know SLOs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flowsim.workload.arrivals import arrival_times
from flowsim.workload.define import workload
from flowsim.workload.rows import Rows
from flowsim.workload.synthetic import streams

__all__ = ["sessions"]


@workload
def sessions(
    *,
    rate_rps: float = 0.5,
    num_sessions: int = 500,
    mean_turns: float = 4.0,
    think_s: float = 20.0,
    system_prompts: int = 4,
    system_tokens: int = 1024,
    turn_tokens: float = 200.0,
    answer_tokens: float = 250.0,
    block_tokens: int = 16,
    max_prompt_tokens: int = 32_768,
    arrivals: Any = "poisson",
    seed: int = 0,
) -> Rows:
    """Chat sessions: each prompt is the whole conversation so far, so that all but the new turn can come from a cache.

    Args:
        rate_rps: new sessions per second.
        num_sessions: how many sessions.
        mean_turns: turns of a session, geometric, at least 1.
        think_s: mean seconds between two turns of a session, exponential. The gap does not wait for an answer.
        system_prompts: how many different system prompts there are; a session has one of them, all alike.
        system_tokens: tokens of a system prompt.
        turn_tokens, answer_tokens: mean tokens of a turn and of its answer, geometric.
        block_tokens: tokens of a hashed block; only full blocks have an id.
        max_prompt_tokens: a session ends before a prompt longer than this.
        arrivals: of sessions, as in `quantiles`.
        seed: of the draws.

    Raises:
        ValueError: an argument out of its range.
    """
    for name, value in (("mean_turns", mean_turns), ("turn_tokens", turn_tokens), ("answer_tokens", answer_tokens)):
        if not 1.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it must be a finite number >= 1")
    for name, count in (
        ("num_sessions", num_sessions),
        ("system_prompts", system_prompts),
        ("block_tokens", block_tokens),
    ):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be a whole number of at least 1")
    if not 0.0 <= think_s < math.inf or not 0 <= system_tokens < max_prompt_tokens:
        raise ValueError("think_s must be finite and >= 0, and system_tokens within 0..max_prompt_tokens")
    arrival_rng, shape_rng, turn_rng, answer_rng = streams(seed)
    begins_s = arrival_times(arrivals, arrival_rng, rate_rps, num_sessions).tolist()
    drawn: list[tuple[float, int, int, tuple[int, ...]]] = []
    names = _BlockNames()
    for session, begin_s in enumerate(begins_s):
        system = int(shape_rng.integers(system_prompts))
        turns = int(shape_rng.geometric(1.0 / mean_turns))
        at_s, context = begin_s, system_tokens
        for _ in range(turns):
            prompt = context + int(turn_rng.geometric(1.0 / turn_tokens))
            answer = int(answer_rng.geometric(1.0 / answer_tokens))
            if prompt > max_prompt_tokens:
                break
            shared = system_tokens // block_tokens
            ids = names.of(system, session, min(shared, prompt // block_tokens), prompt // block_tokens)
            drawn.append((at_s, prompt, answer, ids))
            at_s += float(shape_rng.exponential(think_s))
            context = prompt + answer
    if not drawn:
        raise ValueError(
            f"no session has a prompt of at most max_prompt_tokens, {max_prompt_tokens}; "
            f"system_tokens is {system_tokens} and turn_tokens {turn_tokens:g}"
        )
    drawn.sort(key=lambda row: row[0])
    times, prompts, answers, hashes = zip(*drawn, strict=True)
    return Rows.of(
        np.array(times, dtype=np.float64),
        np.array(prompts, dtype=np.int64),
        output_tokens=np.array(answers, dtype=np.int64),
        slo_class=["chat"] * len(drawn),
        prefix_hashes=list(hashes),
    )


class _BlockNames:
    """Whole numbers for blocks: the same for the same place of the same system prompt, or of the same session."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int, int], int] = {}

    def of(self, system: int, session: int, shared: int, blocks: int) -> tuple[int, ...]:
        keys = [("system", system, place) for place in range(shared)]
        keys += [("session", session, place) for place in range(shared, blocks)]
        return tuple(self._ids.setdefault(key, len(self._ids)) for key in keys)
