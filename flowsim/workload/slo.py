"""Service-level objectives by class: the presets of the FlowPrefill paper.

This module must not know arrivals or lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["TBT_SLO_S", "ClassSLO", "check_scale", "class_slos"]

TBT_SLO_S = {"text": 0.1, "image": 0.1, "search": 0.2, "file": 0.2}

_TTFT_SLO_S = {
    "llama3-8b": {"text": 0.25, "image": 0.5, "search": 4.0, "file": 6.0},
    "qwen2.5-14b": {"text": 0.4, "image": 0.8, "search": 6.5, "file": 9.0},
    "llama3-70b": {"text": 1.0, "image": 2.0, "search": 15.0, "file": 18.0},
}
_ALIASES = {"llama3.1-8b": "llama3-8b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSLO:
    """The SLOs of one class, in seconds: time to first token, and time between tokens."""

    ttft_s: float
    tbt_s: float


def class_slos(model: str) -> dict[str, ClassSLO]:
    """The SLOs of the classes text, image, search and file for `model` (FlowPrefill, arXiv 2602.16603).

    The time between tokens is the same for every model. `llama3.1-8b` is another name of `llama3-8b`.

    Raises:
        ValueError: no preset for this model; those that have one are listed.
    """
    ttft_slo_s = _TTFT_SLO_S.get(_ALIASES.get(model, model))
    if ttft_slo_s is None:
        known = ", ".join([*_TTFT_SLO_S, *_ALIASES])
        raise ValueError(
            f"model {model!r} has no SLO preset; these have one: {known}. "
            "Give workload.ttft_slo_s, a mapping class -> seconds, instead"
        )
    return {name: ClassSLO(ttft_s=ttft_s, tbt_s=TBT_SLO_S[name]) for name, ttft_s in ttft_slo_s.items()}


def check_scale(slo_scale: float) -> None:
    """Refuse an SLO scale that is not a finite number above 0.

    Raises:
        ValueError: as said.
    """
    if not 0.0 < slo_scale < math.inf:
        raise ValueError(f"slo_scale is {slo_scale}; it must be a finite number > 0 (1 leaves SLOs as they are)")
