"""An instance as the proxy before it knows it. Knows no policy and no router by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import simpy

from flowsim.core import Job, Reason, Request
from flowsim.events import Clock
from flowsim.instance import Instance
from flowsim.latency import Predictor
from flowsim.view import InstanceView

__all__ = ["Proxied"]


class Proxied:
    """An instance as the proxy knows it: a `flowsim.router.Server`, and the way in."""

    __slots__ = (
        "_env", "_predictor", "_promised", "_promised_s", "_unpriced", "fresh", "index", "instance", "is_up",
        "most_tokens", "pool", "requests", "view",
    )  # fmt: skip

    def __init__(self, env: Clock, index: int, pool: str, predictor: Predictor) -> None:
        self._env = env
        self._predictor = predictor
        self._unpriced: dict[int, int] = {}  # tokens of each prompt sent here that has no first token
        self._promised: dict[int, float] = {}  # likewise, those predicted by now, as somebody asked: their seconds
        self._promised_s = 0.0
        self.index = index
        self.pool = pool
        self.requests = 0
        self.is_up = True
        self.most_tokens = math.inf  # of context, prompt and answer, that those it hands over to can hold
        self.fresh: Callable[[], Instance]
        self.instance: Instance
        self.view: InstanceView

    def stands_for(self, fresh: Callable[[], Instance]) -> None:
        """Names what makes the instance, which needs the proxy's callbacks; after a failure it is made anew."""
        self.fresh = fresh
        self.renew()

    def renew(self) -> None:
        """The instance is made, with nothing in its queue and its memory."""
        self.instance = self.fresh()
        self.view = self.instance.view

    def expect(self, request: Request) -> None:
        """A request is on its way there."""
        self.requests += 1
        self._unpriced[request.id] = request.prompt_tokens

    def submit(self, request: Request) -> None:
        """Sends a request there."""
        self.expect(request)
        if request.prompt_tokens + request.output_tokens - 1 > self.most_tokens:
            self.instance.reject(Job(request), Reason.TOO_LARGE)
        else:
            self.instance.submit(request)

    def prefilled(self, request: Request) -> None:
        """A request has its first token, or will never have one."""
        if self._unpriced.pop(request.id, None) is not None:
            return
        alone_s = self._promised.pop(request.id, None)
        if alone_s is not None:
            self._promised_s -= alone_s
            if not self._promised:
                self._promised_s = 0.0  # sums of floats leave a rest

    def left(self, request: Request) -> None:
        """A request is no longer there: it ended, or is decoded elsewhere."""
        self.requests -= 1
        self.prefilled(request)

    def outstanding_s(self) -> float:
        """Predicted seconds of prefill sent here and not done (see `flowsim.router.Server`)."""
        for number, prompt_tokens in self._unpriced.items():
            alone_s = self._promised[number] = self._predictor.alone_s(prompt_tokens)
            self._promised_s += alone_s
        self._unpriced.clear()
        view, had_s = self.view, 0.0
        if view.running is not None:
            running = view.running
            had_s = min(running.done_s + max(0.0, self._env.now_s - running.since_s), running.predicted_s)
        for batch in view.suspended:
            had_s += batch.done_s
        return max(0.0, self._promised_s - had_s)

    def predicted_s(self, prompt_tokens: int) -> float:
        """Predicted seconds of one prompt alone here, to its first token."""
        return self._predictor.alone_s(prompt_tokens)

    def __repr__(self) -> str:
        return f"instance {self.index} of {self.pool}"

    def take_over(self, job: Job) -> None:
        """Sends a job there that another instance has lost."""
        request, instance = job.request, self.instance
        self.expect(request)
        most_tokens = max(instance.stage.most_tokens(request), job.prompt_tokens)
        if instance.kv.blocks(most_tokens) > instance.kv.total_blocks:
            instance.reject(job, Reason.TOO_LARGE)
            return
        if request.abandon_s < math.inf:
            left_s = max(0.0, request.arrival_s + request.abandon_s - self._env.now)
            simpy.Timeout(self._env, left_s).callbacks.append(lambda _: instance.abandon(job))
        instance.join(job)
