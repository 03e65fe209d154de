"""The contract of `select`, checked on the answers of a policy. Knows no policy by name, no simulator.

Each function answers what is wrong with an answer and what is allowed, or None: the executor makes a PolicyError of
it, `flowsim.testing.check_policy` an AssertionError.
"""

from __future__ import annotations

from typing import NamedTuple

from flowsim.core import Batch, Part
from flowsim.names import unknown
from flowsim.policy import CONSULTS, Policy, Polling
from flowsim.timeline import Stops
from flowsim.view import InstanceView

__all__ = ["Breach", "answer_breach", "batch_breach", "idle_breach", "left_breach", "policy_breach"]


TO_THE_END = "where batches run to their ends (cluster.async_steps=1, or cluster.expert_parallel)"


class Breach(NamedTuple):
    """What a policy did, and what it may do."""

    did: str
    allowed: str


def policy_breach(policy: Policy, *, pausable: bool) -> Breach | None:
    """A policy that says something of itself which the executor cannot follow, such as stops where none are made."""
    consult, admit = getattr(policy, "consult", "events"), getattr(policy, "admit", None)
    if not isinstance(consult, Polling) and consult not in CONSULTS:
        return Breach(f"says {unknown('consult', consult, CONSULTS)}", "these, or a Polling")
    if admit is not None and not callable(admit):
        return Breach(f"has admit {admit!r:.60}", "a function admit(view, job) -> bool")
    if not pausable and (policy.stops.operators or consult != "events"):
        did = f"stops at {policy.stops.value} and is consulted at {consult}"
        return Breach(did, f"stops=pass or request and consult=events {TO_THE_END}")
    return None


def answer_breach(answer: object) -> Breach | None:
    """An answer that is neither a batch nor None."""
    if answer is None or isinstance(answer, Batch):
        return None
    return Breach(f"chose {answer!r:.60}, a {type(answer).__name__}", "a Batch, or None")


def batch_breach(batch: Batch, view: InstanceView) -> Breach | None:
    """A new batch that may not start now."""
    if batch.number >= 0:
        return Breach(f"chose batch {batch.number}, which has ended", "a suspended batch or a new one")
    decoding = view.decodes
    for job in batch.decodes:
        if decoding.get(job.id) is not job and not (job in view.waiting and not job.left_tokens):
            allowed = "jobs of view.decoding, or of view.waiting with no tokens left, once each"
            return Breach(f"decodes request {job.id}, which has no KV here to decode from", allowed)
    waiting, parts, layers = view.waiting.by_id, batch.parts, batch.layers
    done_layers = 0
    if layers is not None:
        if type(layers) is not range:
            return Breach(f"chose layers {layers!r:.60}", "a range of them, such as range(0, 8), or None for all")
        done_layers = layers.start
        if layers.step != 1 or not 0 <= done_layers < layers.stop <= view.layers:
            return Breach(f"chose layers {layers}", f"a range within the model's {view.layers} layers")
        if not parts:
            return Breach("chose layers for decodes alone, which go through all", "layers=None")
    if batch.stops is not None:
        breach = _stops_breach(batch, batch.stops, view)
        if breach is not None:
            return breach
    for part in parts:
        if type(part) is not Part or type(part.tokens) is not int:
            return Breach(f"made a batch of {parts!r:.80}", "Part(job, tokens) with whole tokens")
        job, new = part
        if waiting.get(job.id) is not job:
            return Breach(f"chose request {job.id}, which does not wait", "jobs of view.waiting, once each")
        if not job.left_tokens:
            did = f"prefills request {job.id}, which was prefilled elsewhere"
            return Breach(did, "to decode it: Batch(parts, decodes=[it, ...])")
        if not 1 <= new <= job.prompt_tokens - job.done_tokens:
            return Breach(f"gave request {job.id} {new} tokens", f"1 to {job.left_tokens}, what is left of its prompt")
        if job.done_layers != done_layers or (done_layers and new != job.layered_tokens):
            at = f"request {job.id} has {job.done_layers} layers of {job.layered_tokens} tokens done"
            return Breach(
                f"gave {new} tokens layers from {done_layers} on; {at}", "to go on from there, with all of them"
            )
    members = len(parts) + len(batch.decodes)
    if members > 1 and len({job for job, _ in parts}.union(batch.decodes)) < members:
        return Breach(f"chose a request twice, in {batch!r:.80}", "jobs of view.waiting, once each")
    if view.fits(parts, batch.decodes):
        return None
    return Breach(
        f"chose a batch needing {view.blocks(batch.parts, batch.decodes)} KV blocks; {view.free_blocks} are free, "
        f"{len(view.suspended)} batches suspended, {view.sequences} sequences",
        f"batches that fit: ask view.fits(parts) first (at most {view.max_batches} batches and "
        f"{view.max_sequences:g} sequences under way)",
    )


def _stops_breach(batch: Batch, stops: Stops, view: InstanceView) -> Breach | None:
    """A batch whose own stops are none, or that cannot have them."""
    if type(stops) is not Stops:
        return Breach(f"gave a batch the stops {stops!r:.60}", "a member of flowsim.Stops, or None for its policy's")
    if batch.decodes or batch.layers is not None:
        return Breach("gave stops to a batch that decodes, or goes through some layers only", "stops=None")
    if stops.operators and not view.pausable:
        return Breach(f"gave a batch stops at {stops.value}", f"none within a pass {TO_THE_END}")
    return None


def idle_breach(view: InstanceView) -> Breach | None:
    """Choosing nothing while there is something that could run."""
    if view.running is not None:
        return Breach("chose nothing while a batch runs", "the running batch, a suspended one or a new one")
    if view.suspended:
        return Breach(f"chose nothing while {len(view.suspended)} batches are suspended", "one of them")
    if view.decodes:
        return Breach(f"chose nothing while {len(view.decodes)} sequences decode", "a batch with some of them")
    if view.waiting and all(view.fits([Part(job, job.left_tokens)]) for job in view.waiting):
        return Breach(f"chose nothing while {len(view.waiting)} jobs wait that all fit", "one of them; or set `idles`")
    return None


def left_breach(view: InstanceView) -> Breach | None:
    """Work that is left when nothing more will happen."""
    if not view.waiting and not view.suspended and not view.decodes:
        return None
    left = f"{len(view.waiting)} jobs waiting, {len(view.decodes)} decoding and {len(view.suspended)} batches suspended"
    return Breach(f"left {left} for ever", "None only while nothing can run; or set `idles`")
