"""Layered prefill (arXiv 2510.08055): prompts go through the model a group of layers at a time, whole, while every
sequence that decodes goes through all layers in each step.

Sources of the rules are in docs/policies.md. This module knows no simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

from flowsim.batching import filled
from flowsim.core import Batch, Job, Part
from flowsim.policy import View
from flowsim.queue import Order, indexed

__all__ = ["LayerGroups"]


@indexed()
def _furthest(job: Job, _view: View) -> int:
    """Who has been through the most layers; that changes only while it runs."""
    return -job.done_layers


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Prompts that start together go through the model in groups of layers, one group a step, and nothing else starts
    until they have been through the last; the sequences that decode go through all layers in every step.

    Those are the prompts first in the queue's order with `tokens` tokens together, the last one cut to fit; its rest
    is among the next. n tokens take ceil(n / `group_tokens`) groups of like size (the first ones a layer larger where
    they cannot be), at most one a layer: a step then computes about as much of prompts as one with a chunk of
    `group_tokens` would. What starts, and when, is otherwise as with `flowsim.batching.TokenBudget`; decodes take
    nothing of `tokens`.

    Raises:
        ValueError: `tokens` or `group_tokens` below 1.
    """

    tokens: int = 8192
    group_tokens: int = 512

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("group_tokens", self.group_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"LayerGroups({name}={value!r}): must be a whole number of at least 1")

    def form(self, head: Job, view: View, order: Order) -> Batch | None:
        if view.running is not None and view.running.parts:
            return view.running
        decodes = view.decoding
        begun = _begun(view, order)
        if begun:
            done_layers = begun[0].job.done_layers
            return Batch(begun, decodes, self._group(done_layers, begun, view.layers))
        parts, joining = filled(view, order, self.tokens)
        if view.running is not None and not parts and not joining:
            return view.running
        layers = self._group(0, parts, view.layers) if parts else None
        return Batch(parts, [*decodes, *joining], layers) if parts or joining or decodes else None

    def _group(self, done_layers: int, parts: list[Part], layers: int) -> range | None:
        """The layers that these tokens go through next; None for all of the model's."""
        groups = min(layers, math.ceil(sum(part.tokens for part in parts) / self.group_tokens))
        size, larger = divmod(layers, groups)
        ends = (size * (group + 1) + min(group + 1, larger) for group in range(groups))
        end = next(end for end in ends if end > done_layers)
        return None if groups == 1 and not done_layers else range(done_layers, end)


def _begun(view: View, order: Order) -> list[Part]:
    """The prompts that are between two groups, in an order; those at the same layer as the furthest."""
    furthest = view.waiting.first(_furthest)
    if furthest is None or not furthest.done_layers:
        return []
    together = takewhile(lambda job: job.done_layers == furthest.done_layers, view.waiting.by(_furthest))
    return [Part(job, job.layered_tokens) for job in sorted(together, key=lambda job: (order(job, view), job.id))]
