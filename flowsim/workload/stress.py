"""Online sessions that stream their answers, and a burst of long documents: the stress test of hybrid schedulers.

A closed loop, as sessions are: each waits for its answer, thinks, and asks again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flowsim.core import Request
from flowsim.workload.closed_loop import ClosedLoop
from flowsim.workload.synthetic import streams

__all__ = ["SessionsAndBurst", "stress_mixed"]


class SessionsAndBurst:
    """A closed loop and, beside it, requests that arrive when they do."""

    def __init__(self, loop: ClosedLoop, burst: Sequence[Request]) -> None:
        self._loop = loop
        self._burst = burst

    def __len__(self) -> int:
        return len(self._loop) + len(self._burst)

    def first(self) -> list[Request]:
        """The sessions' first requests, and the burst."""
        return [*self._loop.first(), *self._burst]

    def after(self, request: Request, finish_s: float) -> Request | None:
        """The session's next request; nothing follows a document."""
        return self._loop.after(request, finish_s) if request.id < len(self._loop) else None


def stress_mixed(
    *,
    users: int = 200,
    turns: int = 12,
    think_s: float = 5.0,
    prompt_tokens: Sequence[int] = (200, 1500),
    answer_tokens: Sequence[int] = (100, 400),
    ttft_slo_s: float = 0.3,
    tbt_slo_s: float = 0.03,
    documents: int = 20,
    document_tokens: int = 65_536,
    document_answer_tokens: int = 200,
    documents_at_s: float = 30.0,
    seed: int = 0,
) -> SessionsAndBurst:
    """Sessions of class `online`, and a burst of documents of class `document` that have no SLO.

    Args:
        users: sessions at a time; each starts within its first time of thinking.
        turns: requests of each session.
        think_s: mean seconds between an answer's last token and the next question, exponential.
        prompt_tokens, answer_tokens: [least, most] of an online request, uniform.
        ttft_slo_s, tbt_slo_s: of online requests.
        documents: of the burst; `document_tokens` each, with answers of `document_answer_tokens`.
        documents_at_s: when all of them arrive.
        seed: of the draws.

    Raises:
        ValueError: an argument out of its range.
    """
    for name, count in (("users", users), ("turns", turns), ("document_tokens", document_tokens)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"workload.{name} is {count!r}; it must be a whole number, at least 1")
    if not isinstance(documents, int) or documents < 0:
        raise ValueError(f"workload.documents is {documents!r}; it must be a whole number, at least 0")
    if not 0.0 <= think_s < math.inf or not 0.0 <= documents_at_s < math.inf:
        raise ValueError(f"think_s is {think_s} and documents_at_s {documents_at_s}; both must be finite and >= 0")
    for name, pair in (("prompt_tokens", prompt_tokens), ("answer_tokens", answer_tokens)):
        if len(pair) != 2 or not 1 <= pair[0] <= pair[1]:
            raise ValueError(f"workload.{name} is {list(pair)}; it must be [least, most], at least 1")
    thinking, prompts, answers, _ = streams(seed)
    n = users * turns
    lengths = prompts.integers(prompt_tokens[0], prompt_tokens[1] + 1, n).tolist()
    outputs = answers.integers(answer_tokens[0], answer_tokens[1] + 1, n).tolist()
    templates = [
        Request(
            id=row, arrival_s=0.0, prompt_tokens=length, output_tokens=output, ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s, slo_class="online",
        )
        for row, (length, output) in enumerate(zip(lengths, outputs, strict=True))
    ]  # fmt: skip
    document = Request(
        id=n, arrival_s=documents_at_s, prompt_tokens=document_tokens, output_tokens=document_answer_tokens,
        slo_class="document",
    )  # fmt: skip
    loop = ClosedLoop(templates, (thinking.standard_exponential(n) * think_s).tolist(), users)
    return SessionsAndBurst(loop, [replace(document, id=n + number) for number in range(documents)])
