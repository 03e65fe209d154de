"""The executor of one instance: asks its policy, sleeps to the end of a segment, stops where it may.

Knows no policy by name. One simulator event per uninterrupted segment: an arrival that changes the policy's answer
moves the segment's end to the next legal stop, and the timer set before is ignored when it fires.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import simpy

from flowsim.contract import Breach, answer_breach, batch_breach, idle_breach, left_breach, policy_breach
from flowsim.core import Batch, Job, Outcome, PolicyError, Reason, Request
from flowsim.events import Alarm, Clock, Later, Poller
from flowsim.kv import Blocks
from flowsim.latency import LatencyModel, Predictor
from flowsim.lockstep import Lockstep
from flowsim.log import Ended, Log
from flowsim.policy import Policy, Polling, View
from flowsim.record import held_by, log_unfinished, request_row, segment_row
from flowsim.stage import PrefillStage, Stage, has_started, taken_up
from flowsim.timeline import INSTANT_S, Stop
from flowsim.view import InstanceView

__all__ = ["Instance"]


class Instance:
    """One tensor-parallel group: a GPU's queue, its KV pool and the batch it runs.

    Args:
        env: the simulation's clock and event queue.
        index: the instance's number in its pool.
        policy: decides what runs.
        latency: how long it takes.
        predictor: what the policy believes about that.
        memory: makes the instance's KV blocks.
        log: where everything is written.
        max_batches: batches under way, running and suspended, at most.
        max_sequences: sequences that hold KV, at most.
        stage: makes what the instance's batches do to jobs; prefills that end with the first token unless given.
        async_steps: 1 where a batch is planned while the one before it runs, as asynchronous engines do: an arrival
            is then seen when a batch ends, and is in the one after the next.
        slowest: draws, for each batch, the factor by which its slowest rank is off.
        group: the clock of the ranks that this one steps together with; its batches then run to their ends.
        prefilled: called with each request that decodes here, when its first token is out.
        ended: called with each request and the second at which it finished (or was rejected).
    """

    def __init__(
        self,
        env: Clock,
        index: int,
        *,
        policy: Policy,
        latency: LatencyModel,
        predictor: Predictor,
        memory: Callable[[], Blocks],
        log: Log,
        max_batches: int,
        slowest: Callable[[], float],
        ended: Callable[[Request, float], None],
        max_sequences: float = math.inf,
        stage: Callable[[Instance], Stage] = PrefillStage,
        async_steps: int = 0,
        group: Lockstep | None = None,
        prefilled: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self.env = env
        self.index = index
        self.policy = policy
        self.latency = latency
        self.predictor = predictor
        self.kv = kv = memory()
        self._most_tokens = kv.total_blocks * kv.block_tokens
        self.log = log
        self.ended = ended
        self.prefilled = prefilled
        limits = {"max_batches": max_batches, "max_sequences": max_sequences}
        profile, pausable = latency.profile, not async_steps and group is None
        self.view = InstanceView(
            predictor, kv, latency, layers=profile.layers, request_s=profile.request_s, pausable=pausable, **limits
        )
        self.slowest = slowest
        self.stage = stage(self)
        self._plans_ahead = async_steps > 0
        self._group = group
        if group is not None:
            group.join(self)
        self._planned: Batch | None = None
        self._select = policy.select
        self._idles = bool(getattr(policy, "idles", False))
        self._admit: Callable[[View, Job], bool] | None = getattr(policy, "admit", None)
        self._must_not(policy_breach(policy, pausable=pausable))
        consult = getattr(policy, "consult", "events")
        self._poller = Poller(env, consult.period_s, self._poll) if isinstance(consult, Polling) else None
        self._at_stops = consult == "stops"
        self._deciding = False  # a decision is due later in this instant
        self._timer = Alarm(env, self._on_timer)  # the one that counts; those set before are ignored
        self._stop: Stop | None = None  # where the running batch is when the timer fires
        self._barrier_s = 0.0  # of which the last part is the ranks' barrier
        self.flagged_for: Job | None = None  # whom the running batch is being stopped for
        self._flagged_s = self._parked_s = math.nan  # when a batch was last flagged, and last paused
        self._suspended_blocks = 0

    def submit(self, request: Request) -> None:
        """A request arrives; it waits, or is rejected: what the whole KV pool cannot hold, what is not admitted."""
        view = self.view
        view.now_s = self.env.now_s
        job = Job(request)
        if self.stage.most_tokens(request) > self._most_tokens:
            return self.reject(job, Reason.TOO_LARGE)
        if self._admit is not None and not self._admit(view, job):
            return self.reject(job, Reason.ADMISSION)
        view.arrived.append(job)
        if request.abandon_s < math.inf:
            simpy.Timeout(self.env, request.abandon_s).callbacks.append(lambda _: self.abandon(job))
        return self.join(job)

    def join(self, job: Job) -> None:
        """A job waits here from now on: a new one, or one whose prefill was done elsewhere and whose KV has come."""
        view = self.view
        view.now_s = self.env.now_s
        view.waiting.add(job)
        if self._poller is not None:
            self._poller.wake()
        elif view.running is None or not (self._at_stops or self._plans_ahead):
            self._wake()

    def release(self, job: Job) -> None:
        """Takes back the KV blocks of a job that was handed over; freed blocks wake an idle instance."""
        self.view.now_s = self.env.now_s
        self.kv.give(job.id)
        self.log_kv()
        if self.view.running is None and self.view.waiting and self._poller is None:
            self._wake()

    def reject(self, job: Job, reason: Reason) -> None:
        """A request ends before it began."""
        self.log_request(job, math.nan, Outcome.REJECTED, reason)
        self.ended(job.request, self.env.now_s)

    def abandon(self, job: Job) -> None:
        """The client of a request that has not started gives up; those behind it may fit now."""
        view = self.view
        if job not in view.waiting or has_started(job):
            return
        view.now_s = self.env.now_s
        view.waiting.remove(job)
        self.reject(job, Reason.ABANDONED)
        if view.running is None and view.waiting and self._poller is None:
            self._wake()

    def _poll(self) -> bool:
        """Decides; answers whether there is work to go on polling for."""
        self._decide()
        view = self.view
        return view.running is not None or bool(view.waiting) or bool(view.suspended) or bool(view.decodes)

    def _wake(self) -> None:
        """Decides, but only once everything else that happens at this instant is in."""
        if self._deciding or (self._group is not None and self._group.busy and self.view.running is None):
            return
        if self.env.has_more():
            self._deciding = True
            Later(self.env, self._decide_later)
        else:
            self._decide()

    def _decide_later(self, _event: simpy.Event) -> None:
        self._deciding = False
        self._decide()

    def _decide(self) -> None:
        """One decision: start something on a free GPU, or flag the batch that runs."""
        view = self.view
        running = view.running
        if running is None:
            self.stage.make_room()
            batch = self._ask()
            if batch is None and view.evicted:  # nothing is left to run: what lost its blocks may start again
                view.evicted = False
                batch = self._ask()
            if batch is not None:
                if batch.number >= 0 and batch in view.suspended:
                    self._resume(batch)
                else:
                    self._begin(batch, view.now_s)
                self._run(batch)
            elif not self._idles:
                self._must_not(idle_breach(view))
        elif self._plans_ahead:
            self._plan(running)
        elif self.flagged_for is None and view.pausable and not self._at_stops:  # no second signal while stopping
            answer = self._ask()
            if answer is not running:
                self._flag(running, answer)

    def _ask(self) -> Batch | None:
        view, log = self.view, self.log
        view.now_s = self.env.now_s
        began_s = perf_counter()
        answer = self._select(view)
        log.scheduler_wall_s += perf_counter() - began_s
        log.decisions += 1
        if type(answer) is not Batch and answer is not None:
            self._must_not(answer_breach(answer))
        return answer

    def _begin(self, batch: Batch, at_s: float) -> None:
        """Takes KV blocks and jobs for a new batch that runs from `at_s` on, and lays out its timeline."""
        self._must_not(batch_breach(batch, self.view))
        log = self.log
        # taking over from a batch that was paused at this very instant costs a switch
        switch_s = self.latency.profile.switch_s if self._parked_s == at_s else 0.0
        batch.begin(log.num_batches, at_s + switch_s, switch_s)
        log.num_batches += 1
        self.stage.take(batch)
        self.log_kv()

    def _run(self, batch: Batch) -> None:
        self.view.running = batch
        if self._plans_ahead:
            self.stage.advance(batch)
            self._wake()
        if self._group is not None:
            self._group.run(self, batch)
        else:
            self._run_to(batch, self._next_stop(batch) if self._at_stops else batch.timeline.end)

    def _plan(self, running: Batch) -> None:
        """Chooses and takes the batch that follows the one that runs, as if that had ended."""
        self.view.running = None
        self.stage.make_room()
        batch = self._ask()
        if batch is not None:
            self._begin(batch, running.since_s + running.timeline.total_s)
        self.view.running, self._planned = running, batch

    def _resume(self, batch: Batch) -> None:
        self.view.suspended.remove(batch)
        self._suspended_blocks -= batch.blocks
        taken_up(batch, self.view.now_s)
        self.log_kv()

    def _flag(self, running: Batch, answer: Batch | None) -> None:
        """Signals the running batch to stop at its next legal stop."""
        self._raise_flag(answer)
        stop, stops = self._next_stop(running), running.stops or self.policy.stops
        if self.latency.tp > 1 and stop is not running.timeline.end and stops.operators:
            # the first rank to see the flag makes its next checkpoint the common one, where all ranks meet
            stop = running.timeline.next_stop(stop.at_s + 2 * INSTANT_S, stops)
            if stop is not running.timeline.end:
                self._barrier_s = self.latency.barrier_s
        self._run_to(running, stop)

    def _raise_flag(self, answer: Batch | None) -> None:
        """Notes from when on, and for whom, the running batch is to stop."""
        self._must_not(idle_breach(self.view) if answer is None else None)
        assert answer is not None
        self._flagged_s = self.view.now_s
        self.flagged_for = answer.head

    def _next_stop(self, batch: Batch) -> Stop:
        """The next legal stop from now on, never the one where the batch resumed."""
        if batch.decodes and batch.parts:
            return batch.timeline.end  # its decodes are in its first pass: nothing to take up later
        done_s = batch.done_s + max(2 * INSTANT_S, self.view.now_s - batch.since_s)
        return batch.timeline.next_stop(done_s, batch.stops or self.policy.stops)

    def _run_to(self, batch: Batch, stop: Stop) -> None:
        """Sets the timer for a place on the running batch's timeline, unless it is set for that already."""
        if stop is self._stop:
            return
        self._stop = stop
        timer = self._timer
        if timer.is_set:
            self._timer = timer = Alarm(self.env, self._on_timer)
        delay_s = batch.since_s - self.view.now_s + stop.at_s - batch.done_s + self._barrier_s
        timer.set(delay_s if delay_s > 0.0 else 0.0)

    def _on_timer(self, event: simpy.Event) -> None:
        """The running batch is at its end, at the stop it was flagged for, or at one where the policy is asked."""
        if event is not self._timer:
            return  # a batch that was flagged meanwhile
        view, stop = self.view, self._stop
        batch = view.running
        assert batch is not None and stop is not None, f"instance {self.index}: a timer fired with nothing running"  # noqa: PT018
        view.now_s = self.env.now_s
        at_end = stop is batch.timeline.end
        if not at_end and self.flagged_for is None:
            if self.env.has_more():
                Later(self.env, lambda _: self._consult_at(batch, stop))
            else:
                self._consult_at(batch, stop)
        else:
            self._stopped(batch, stop, at_end=at_end)

    def _consult_at(self, batch: Batch, stop: Stop) -> None:
        """Asks the policy at a stop (`consult="stops"`); the batch goes on, or is stopped there and then."""
        if self.view.running is not batch:
            return  # the instance has failed in this instant
        answer = self._ask()
        if answer is batch:
            self._run_to(batch, batch.timeline.next_stop(stop.at_s + 2 * INSTANT_S, batch.stops or self.policy.stops))
            return
        self._raise_flag(answer)
        self._stopped(batch, stop, at_end=False)

    def _stopped(self, batch: Batch, stop: Stop, *, at_end: bool) -> None:
        """The batch leaves the GPU: for good at its end, or after any step if it only decodes; else suspended."""
        view, log = self.view, self.log
        view.running = self._stop = None
        met_s, self._barrier_s = self._barrier_s, 0.0
        paused = not at_end and bool(batch.parts)
        if self.flagged_for is not None:
            self._acknowledge(batch, self.flagged_for, paused=paused)
        end_s, operators = view.now_s - met_s, stop.operators
        if paused:
            log.segments.add(segment_row(self.index, batch, end_s, operators, Ended.PAUSED, met_s))
            self._suspend(batch, stop)
        else:
            complete = self.stage.end(batch, operators)
            ended = Ended.FINISHED if at_end and complete else Ended.PASS
            log.segments.add(segment_row(self.index, batch, end_s, operators, ended, met_s))
            self.log_kv()
        if self._planned is not None:
            planned, self._planned = self._planned, None
            planned.since_s = self.env.now_s
            self._run(planned)
        elif view.waiting.by_id or view.suspended.by_id or view.decodes:
            self._wake()

    def _acknowledge(self, batch: Batch, by: Job, *, paused: bool) -> None:
        """Ends the wait of whom the batch was flagged for; to end a run of decodes early is no preemption."""
        self.flagged_for = None
        if not batch.parts:
            return
        now_s = self.view.now_s
        if math.isnan(by.start_s):
            by.blocked_s += now_s - self._flagged_s
        for job, _ in batch.parts:
            job.preemptions += 1
        self.log.preemptions.add((self.index, self._flagged_s, now_s, batch.number, batch.id, by.id, paused))

    def _suspend(self, batch: Batch, stop: Stop) -> None:
        batch.done_s, batch.operators = stop
        batch.suspended_at_s = self._parked_s = self.view.now_s
        batch.blocks = sum([self.kv.held(job.id) for job, _ in batch.parts])
        self._suspended_blocks += batch.blocks
        self.view.suspended.add(batch)
        self.log_kv()

    def halt(self) -> tuple[Batch | None, Batch | None]:
        """Nothing more happens here; answers what ran, and what was planned behind it."""
        halted = self.view.running, self._planned
        self.view.running = self._planned = None
        self._timer = Alarm(self.env, self._on_timer)
        return halted

    def over(self) -> None:
        """The step of the group that this rank's batch was in is over."""
        batch = self.view.running
        assert batch is not None
        now_s = self.view.now_s = self.env.now_s
        self._barrier_s = now_s - batch.since_s - batch.timeline.total_s
        self._stopped(batch, batch.timeline.end, at_end=True)

    def wake(self) -> None:
        """Looks for something to run, after a step of the group in which this rank had nothing."""
        if self.view.waiting:
            self._wake()

    def close(self, now_s: float, *, drained: bool) -> None:
        """The run is over: what has not finished is logged as such, and a running segment as cut.

        Raises:
            PolicyError: nothing more would happen (`drained`), and work is left by a policy that must not idle.
        """
        view, running = self.view, self.view.running
        if drained and not self._idles:
            self._must_not(left_breach(view))
        jobs = [*held_by(running), *held_by(self._planned), *view.waiting, *self.stage.under_way()]
        log_unfinished(self.log, self.index, running, view.suspended, now_s, jobs)

    def _must_not(self, breach: Breach | None) -> None:
        """Raises for a breach of the contract of `select`."""
        if breach is not None:
            where = f"t={self.env.now_s:.6f} s, instance {self.index}: {type(self.policy).__name__}"
            raise PolicyError(f"{where} {breach.did}. Allowed: {breach.allowed}.")

    def log_kv(self) -> None:
        self.log.kv.add((self.view.now_s, self.index, self.kv.free_blocks, self._suspended_blocks))

    def log_request(self, job: Job, finish_s: float, outcome: Outcome, reason: Reason | None = None) -> None:
        self.log.requests.add(request_row(self.index, job, finish_s, outcome, reason))
