"""The executor of one instance: asks its policy, sleeps to the end of a segment, stops where it may.

The only module, with `cluster`, that knows SimPy. It knows no policy by name. One simulator event per
uninterrupted segment: an arrival that changes the policy's answer moves the segment's end to the next legal
stop, and the timer set before is ignored when it fires.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import simpy

from flowsim.contract import Breach, answer_breach, batch_breach, idle_breach, left_breach
from flowsim.core import Batch, Job, Outcome, PolicyError, Reason, Request
from flowsim.events import Later
from flowsim.kv import KVPool
from flowsim.latency import LatencyModel, Predictor
from flowsim.log import Ended, Log
from flowsim.names import unknown
from flowsim.policy import CONSULTS, Policy, Polling, View
from flowsim.timeline import INSTANT_S, Stop
from flowsim.view import InstanceView

__all__ = ["Instance"]

_OUTCOMES = {outcome: float(place) for place, outcome in enumerate(Outcome)}
_REASONS = {reason: float(place) for place, reason in enumerate(Reason)}
_ENDED = {ended: float(place) for place, ended in enumerate(Ended)}


class Instance:
    """One tensor-parallel group: a GPU's queue, its KV pool and the batch it runs.

    Args:
        env: the simulation's clock and event queue.
        index: the instance's number in its pool.
        policy: decides what runs.
        latency: how long it takes.
        predictor: what the policy believes about that.
        kv: the instance's KV blocks.
        log: where everything is written.
        max_batches: batches under way, running and suspended, at most.
        slowest: draws, for each batch, the factor by which its slowest rank is off.
        ended: called with each request and the second at which it finished (or was rejected).
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        *,
        policy: Policy,
        latency: LatencyModel,
        predictor: Predictor,
        kv: KVPool,
        log: Log,
        max_batches: int,
        slowest: Callable[[], float],
        ended: Callable[[Request, float], None],
    ) -> None:
        self.env = env
        self.index = index
        self.policy = policy
        self.latency = latency
        self.predictor = predictor
        self.kv = kv
        self.log = log
        self.ended = ended
        self.view = InstanceView(predictor, kv, max_batches=max_batches, request_s=latency.profile.request_s)
        self._slowest = slowest
        self._idles = bool(getattr(policy, "idles", False))
        self._admit: Callable[[View, Job], bool] | None = getattr(policy, "admit", None)
        consult = getattr(policy, "consult", "events")
        if not isinstance(consult, Polling) and consult not in CONSULTS:
            raise PolicyError(unknown("consult", consult, CONSULTS, where="of the policy") + ", or a Polling")
        if self._admit is not None and not callable(self._admit):
            raise PolicyError(f"policy.admit is {self._admit!r}; it must be a function admit(view, job) -> bool")
        self._period_s = consult.period_s if isinstance(consult, Polling) else None
        self._at_stops = consult == "stops"
        self._deciding = False  # a decision is due later in this instant
        self._polling = False  # a poll is due
        self._timer: simpy.Event | None = None  # the one that counts; those set before are ignored
        self._stop: Stop | None = None  # where the running batch is when the timer fires
        self._barrier_s = 0.0  # of which the last part is the ranks' barrier
        self._flagged_s = math.nan
        self._flagged_for: Job | None = None
        self._parked_s = math.nan  # when a batch was last paused
        self._suspended_blocks = 0

    # ---------------------------------------------------------------- arrivals and decisions

    def submit(self, request: Request) -> None:
        """A request arrives; it waits, or is rejected: what the whole KV pool cannot hold, what is not admitted."""
        view = self.view
        view.now_s = self.env.now
        job = Job(request)
        if self.kv.blocks(job.prompt_tokens) > self.kv.total_blocks:
            self._reject(job, Reason.TOO_LARGE)
            return
        if self._admit is not None and not self._admit(view, job):
            self._reject(job, Reason.ADMISSION)
            return
        view.waiting.add(job)
        if request.abandon_s < math.inf:
            simpy.Timeout(self.env, request.abandon_s).callbacks.append(lambda _: self._abandon(job))
        if self._period_s is not None:
            self._poll_later(self._period_s)
        elif not (self._at_stops and view.running is not None):
            self._wake()

    def _reject(self, job: Job, reason: Reason) -> None:
        self._log_request(job, math.nan, math.nan, Outcome.REJECTED, reason)
        self.ended(job.request, self.env.now)

    def _abandon(self, job: Job) -> None:
        """The client of a request that has not started gives up; those behind it may fit now."""
        view = self.view
        if job not in view.waiting or job.done_tokens:
            return
        view.now_s = self.env.now
        view.waiting.remove(job)
        self._reject(job, Reason.ABANDONED)
        if view.running is None and view.waiting and self._period_s is None:
            self._wake()

    def _poll_later(self, period_s: float) -> None:
        """Decides at the next multiple of the period, and then at each while there is work."""
        if not self._polling:
            self._polling = True
            number = math.ceil((self.env.now - INSTANT_S) / period_s)
            Later(self.env, self._poll, max(0.0, number * period_s - self.env.now))

    def _poll(self, _event: simpy.Event) -> None:
        self._polling = False
        self._decide()
        view, period_s = self.view, self._period_s
        assert period_s is not None
        if view.running is not None or view.waiting or view.suspended:
            self._polling = True
            number = math.floor((self.env.now + INSTANT_S) / period_s) + 1
            Later(self.env, self._poll, number * period_s - self.env.now)

    def _wake(self) -> None:
        """Decides, but only once everything else that happens at this instant is in."""
        if self._deciding:
            return
        if self.env.peek() > self.env.now:
            self._decide()
        else:
            self._deciding = True
            Later(self.env, self._decide_later)

    def _decide_later(self, _event: simpy.Event) -> None:
        self._deciding = False
        self._decide()

    def _decide(self) -> None:
        """One decision: start something on a free GPU, or flag the batch that runs."""
        running = self.view.running
        if running is None:
            batch = self._ask()
            if batch is not None:
                self._start(batch)
            elif not self._idles:
                self._must_not(idle_breach(self.view))
        elif self._flagged_for is None and not self._at_stops:  # no second signal while stopping
            answer = self._ask()
            if answer is not running:
                self._flag(running, answer)

    def _ask(self) -> Batch | None:
        view, log = self.view, self.log
        view.now_s = self.env.now
        began_s = perf_counter()
        answer = self.policy.select(view)
        log.scheduler_wall_s += perf_counter() - began_s
        log.decisions += 1
        if answer is not None and type(answer) is not Batch:
            self._must_not(answer_breach(answer))
        return answer

    # ---------------------------------------------------------------- one batch on the GPU

    def _start(self, batch: Batch) -> None:
        """Puts a new or a suspended batch on the GPU."""
        if batch in self.view.suspended:
            self._resume(batch)
        else:
            self._must_not(batch_breach(batch, self.view))
            self._begin(batch)
        self.view.running = batch
        self._run_to(batch, self._next_stop(batch) if self._at_stops else batch.timeline.end)

    def _begin(self, batch: Batch) -> None:
        """Takes KV blocks and jobs for a new batch, and lays out its timeline."""
        view, kv, log, now_s = self.view, self.kv, self.log, self.env.now
        batch.number = log.num_batches
        log.num_batches += 1
        # taking over from a batch that was paused at this very instant costs a switch
        batch.switch_s = self.latency.profile.switch_s if self._parked_s == now_s else 0.0
        batch.since_s = now_s + batch.switch_s
        tokens = [(part.tokens, part.job.done_tokens) for part in batch.parts]
        slowest = self._slowest()
        batch.timeline = self.latency.timeline(tokens, slowest)
        batch.predicted_s = self.predictor.batch_s(tokens)
        for position, (job, new) in enumerate(batch.parts):
            view.waiting.remove(job)
            if not job.done_tokens:
                kv.take(job.id, kv.blocks(job.prompt_tokens))
                job.start_s = batch.since_s
            batch.blocks += kv.held(job.id)
            log.batches.add((batch.number, self.index, job.id, position, new, job.done_tokens, slowest))
        self._log_kv()

    def _resume(self, batch: Batch) -> None:
        now_s = self.env.now
        waited_s = now_s - batch.suspended_at_s
        self.view.suspended.remove(batch)
        self._suspended_blocks -= batch.blocks
        batch.resumes += 1
        batch.since_s = now_s
        batch.switch_s = 0.0
        batch.suspended_s += waited_s
        batch.suspended_at_s = math.nan
        for job, _ in batch.parts:
            job.suspended_s += waited_s
        self._log_kv()

    def _flag(self, running: Batch, answer: Batch | None) -> None:
        """Signals the running batch to stop at its next legal stop."""
        self._raise_flag(answer)
        stop = self._next_stop(running)
        if self.latency.tp > 1 and stop is not running.timeline.end and self.policy.stops.operators:
            # the first rank to see the flag makes its next checkpoint the common one, where all ranks meet
            stop = running.timeline.next_stop(stop.at_s + 2 * INSTANT_S, self.policy.stops)
            if stop is not running.timeline.end:
                self._barrier_s = self.latency.barrier_s
        self._run_to(running, stop)

    def _raise_flag(self, answer: Batch | None) -> None:
        """Notes from when on, and for whom, the running batch is to stop."""
        if answer is None:
            self._must_not(idle_breach(self.view))
            raise AssertionError("an idle answer while a batch runs is a breach")
        self._flagged_s = self.env.now
        self._flagged_for = answer.head

    def _next_stop(self, batch: Batch) -> Stop:
        """The next legal stop from now on, never the one where the batch resumed."""
        done_s = batch.done_s + max(2 * INSTANT_S, self.env.now - batch.since_s)
        return batch.timeline.next_stop(done_s, self.policy.stops)

    def _run_to(self, batch: Batch, stop: Stop) -> None:
        """Sets the timer for a place on the running batch's timeline, unless it is set for that already."""
        if stop is self._stop:
            return
        self._stop = stop
        delay_s = batch.since_s - self.env.now + stop.at_s - batch.done_s + self._barrier_s
        self._timer = timer = simpy.Timeout(self.env, max(0.0, delay_s))
        timer.callbacks.append(self._on_timer)

    def _on_timer(self, event: simpy.Event) -> None:
        """The running batch is at its end, at the stop it was flagged for, or at one where the policy is asked."""
        if event is not self._timer:
            return  # a batch that was flagged meanwhile
        batch, stop = self.view.running, self._stop
        assert batch is not None, f"instance {self.index}: a timer fired with nothing running"
        assert stop is not None
        self.view.now_s = self.env.now
        at_end = stop is batch.timeline.end
        if not at_end and self._flagged_for is None:
            if self.env.peek() > self.env.now:
                self._consult_at(batch, stop)
            else:
                Later(self.env, lambda _: self._consult_at(batch, stop))
        else:
            self._stopped(batch, stop, at_end=at_end)

    def _consult_at(self, batch: Batch, stop: Stop) -> None:
        """Asks the policy at a stop (`consult="stops"`); the batch goes on, or is stopped there and then."""
        answer = self._ask()
        if answer is batch:
            self._run_to(batch, batch.timeline.next_stop(stop.at_s + 2 * INSTANT_S, self.policy.stops))
            return
        self._raise_flag(answer)
        self._stopped(batch, stop, at_end=False)

    def _stopped(self, batch: Batch, stop: Stop, *, at_end: bool) -> None:
        """The batch leaves the GPU: for good at its end, or suspended at a stop."""
        self.view.running = self._stop = None
        if self._flagged_for is not None:
            self._acknowledge(batch, self._flagged_for, paused=not at_end)
        if at_end:
            unfinished = any(new < job.left_tokens for job, new in batch.parts)
            self._log_segment(batch, stop, Ended.PASS if unfinished else Ended.FINISHED)
            self._finish(batch)
        else:
            self._log_segment(batch, stop, Ended.PAUSED)
            self._suspend(batch, stop)
        self._barrier_s = 0.0
        self._wake()

    def _acknowledge(self, batch: Batch, by: Job, *, paused: bool) -> None:
        """Ends the wait of whom the batch was flagged for."""
        now_s = self.env.now
        if math.isnan(by.start_s):
            by.blocked_s += now_s - self._flagged_s
        for job, _ in batch.parts:
            job.preemptions += 1
        self.log.preemptions.add((self.index, self._flagged_s, now_s, batch.number, batch.id, by.id, paused))
        self._flagged_for = None

    def _suspend(self, batch: Batch, stop: Stop) -> None:
        batch.done_s, batch.operators = stop
        batch.suspended_at_s = self._parked_s = self.env.now
        self._suspended_blocks += batch.blocks
        self.view.suspended.add(batch)
        self._log_kv()

    def _finish(self, batch: Batch) -> None:
        """Credits the batch's tokens: a prompt that is complete emits its first token, a cut one waits again."""
        first_token_s = self.env.now + self.latency.profile.request_s
        for job, new in batch.parts:
            job.done_tokens += new
            if job.done_tokens < job.prompt_tokens:
                self.view.waiting.add(job)
                continue
            self.kv.give(job.id)
            self._log_request(job, first_token_s, first_token_s, Outcome.FINISHED)
            self.ended(job.request, first_token_s)
        self._log_kv()

    def close(self, now_s: float, *, drained: bool) -> None:
        """The run is over: what has not finished is logged as such, and a running segment as cut.

        Raises:
            PolicyError: nothing more would happen (`drained`), and work is left by a policy that must not idle.
        """
        view = self.view
        running = view.running
        if drained and not self._idles:
            self._must_not(left_breach(view))
        if running is not None and running.since_s < now_s:
            end_s = min(now_s, running.since_s + running.timeline.total_s - running.done_s)
            self.log.segments.add(
                (self.index, running.number, running.since_s, end_s, running.operators, running.operators,
                 running.tokens, _ENDED[Ended.CUT], running.switch_s, 0.0)
            )  # fmt: skip
        for batch in view.suspended:
            for job, _ in batch.parts:
                job.suspended_s += now_s - batch.suspended_at_s
        under_way = [job for batch in (running, *view.suspended) if batch for job, _ in batch.parts]
        for job in [*view.waiting, *under_way]:
            self._log_request(job, math.nan, math.nan, Outcome.UNFINISHED)

    def _must_not(self, breach: Breach | None) -> None:
        """Raises for a breach of the contract of `select`."""
        if breach is not None:
            where = f"t={self.env.now:.6f} s, instance {self.index}: {type(self.policy).__name__}"
            raise PolicyError(f"{where} {breach.did}. Allowed: {breach.allowed}.")

    # ---------------------------------------------------------------- the log

    def _log_segment(self, batch: Batch, stop: Stop, ended: Ended) -> None:
        end_s = self.env.now - self._barrier_s
        self.log.segments.add(
            (self.index, batch.number, batch.since_s, end_s, batch.operators, stop.operators, batch.tokens,
             _ENDED[ended], batch.switch_s, self._barrier_s)
        )  # fmt: skip

    def _log_kv(self) -> None:
        self.log.kv.add((self.env.now, self.index, self.kv.free_blocks, self._suspended_blocks))

    def _log_request(
        self, job: Job, first_token_s: float, finish_s: float, outcome: Outcome, reason: Reason | None = None
    ) -> None:
        self.log.requests.add(
            (job.id, job.start_s, first_token_s, finish_s, job.blocked_s, job.preemptions, job.suspended_s,
             self.index, _OUTCOMES[outcome], math.nan if reason is None else _REASONS[reason])
        )  # fmt: skip
