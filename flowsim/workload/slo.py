"""Service-level objectives by rule: by column, by class preset, by isolated TTFT, by the user's own figures.

This module must not know arrivals or file formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flowsim.names import unknown
from flowsim.workload.rows import Rows

__all__ = ["TBT_SLO_S", "ClassSLO", "assign_slos", "check_scale", "class_slos", "classes_by_length"]

SLO_RULES = ("auto", "column", "preset", "isolated", "none")
ISOLATED_FACTOR = 5.0
ISOLATED_FLOOR_S = 0.25

Given = float | Mapping[str, float] | None
"""SLOs in seconds that a user states: one for all, by class, or none."""

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


def assign_slos(
    rows: Rows,
    *,
    slo: str = "auto",
    ttft_slo_s: Given = None,
    tbt_slo_s: Given = None,
    slo_scale: float = 1.0,
    model: str = "llama3-8b",
    isolated_s: Callable[[int], float] | None = None,
) -> Rows:
    """The rows with their SLOs by a rule.

    Args:
        rows: as read or drawn.
        slo: `column` keeps what the rows say; `preset` gives the model's SLOs of the classes text, image, search and
            file; `isolated` gives a TTFT SLO of max(0.25 s, 5 x isolated TTFT); `none` gives none. `auto` is `column`
            where the rows have SLOs, else `preset` where all classes have one for the model, else `isolated` where
            `isolated_s` is given, else `none`.
        ttft_slo_s: seconds for all, or for the classes it names; before the rule's.
        tbt_slo_s: the same for the time between tokens.
        slo_scale: multiplies every SLO.
        model: whose presets apply.
        isolated_s: prompt tokens to TTFT in seconds on an idle instance.

    Raises:
        ValueError: an unknown rule, model or class, or a figure out of its range.
    """
    if slo not in SLO_RULES:
        raise ValueError(unknown("slo rule", slo, SLO_RULES))
    check_scale(slo_scale)
    rule = _rule(rows, model, isolated_s) if slo == "auto" else slo
    classes = np.array(rows.slo_class, dtype=object)
    names = sorted(set(rows.slo_class))
    ttft_s, tbt_s = _by_rule(rows, rule, classes, names, model, isolated_s, ttft_slo_s)
    for key, given, column in (("ttft_slo_s", ttft_slo_s, ttft_s), ("tbt_slo_s", tbt_slo_s, tbt_s)):
        for name, seconds in _stated(key, given, names).items():
            column[classes == name] = seconds
    return replace(rows, ttft_slo_s=_scaled(ttft_s, slo_scale), tbt_slo_s=_scaled(tbt_s, slo_scale), has_slos=True)


def _scaled(slo_s: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        scaled_s = slo_s * scale
    if (scaled_s <= 0.0).any() or (np.isinf(scaled_s) & np.isfinite(slo_s)).any():
        raise ValueError(f"slo_scale {scale} makes an SLO of 0 or of no finite number of seconds")
    return scaled_s


def _rule(rows: Rows, model: str, isolated_s: Callable[[int], float] | None) -> str:
    """What `auto` stands for."""
    if rows.has_slos:
        return "column"
    presets = _TTFT_SLO_S.get(_ALIASES.get(model, model), {})
    if set(rows.slo_class) <= set(presets):
        return "preset"
    return "none" if isolated_s is None else "isolated"


def _by_rule(
    rows: Rows,
    rule: str,
    classes: NDArray[np.object_],
    names: list[str],
    model: str,
    isolated_s: Callable[[int], float] | None,
    stated: Given,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """TTFT and TBT SLOs of each row by a rule, unscaled."""
    if rule == "column":
        return rows.ttft_slo_s.copy(), rows.tbt_slo_s.copy()
    never = np.full(len(rows), math.inf)
    if rule == "isolated":
        if isolated_s is None:
            raise ValueError("slo=isolated needs isolated_s, for example latency.isolated_s of a LatencyModel")
        lengths, place = np.unique(rows.prompt_tokens, return_inverse=True)
        alone_s = np.array([isolated_s(length) for length in lengths.tolist()], dtype=np.float64)
        return np.maximum(ISOLATED_FLOOR_S, ISOLATED_FACTOR * alone_s)[place], never
    ttft_s, tbt_s = never.copy(), never.copy()
    if rule == "preset":
        has_own = set(names) if isinstance(stated, int | float) else set(stated or ())
        presets = {name: ClassSLO(ttft_s=math.inf, tbt_s=TBT_SLO_S.get(name, math.inf)) for name in names}
        if not set(names) <= has_own:
            presets |= class_slos(model)
        for name in names:
            if name not in presets or (name not in TBT_SLO_S and name not in has_own):
                raise ValueError(unknown("class", name, TBT_SLO_S, where="for slo=preset"))
            ttft_s[classes == name], tbt_s[classes == name] = presets[name].ttft_s, presets[name].tbt_s
    return ttft_s, tbt_s


def _stated(key: str, given: Given, names: list[str]) -> dict[str, float]:
    """The user's own SLOs by class, checked."""
    if given is None:
        return {}
    by_class = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
    for name, seconds in by_class.items():
        if name not in names and name not in TBT_SLO_S:  # a preset class may be absent by chance
            raise ValueError(unknown("class", name, names, where=f"in {key}"))
        if not isinstance(seconds, int | float) or not seconds > 0.0:
            raise ValueError(f"{key} of class {name} is {seconds!r}; it must be a number of seconds > 0 (inf for none)")
    return {name: float(seconds) for name, seconds in by_class.items()}


def classes_by_length(rows: Rows, bins: Mapping[str, float]) -> Rows:
    """The rows with classes by prompt length: each is the first bin whose bound, in tokens, its prompt does not exceed.

    Raises:
        ValueError: bounds that do not rise, or a prompt above the last one.
    """
    if not isinstance(bins, Mapping):
        raise ValueError(f"length_classes is {bins!r:.60}; it must be {{name: longest prompt in tokens, ...}}, rising")
    try:
        bounds = [float(str(bound).replace(".inf", "inf")) for bound in bins.values()]
    except ValueError:
        raise ValueError(f"length_classes are {dict(bins)}; upper bounds are numbers of tokens, or inf") from None
    if not bounds or any(not low < high for low, high in zip([0.0, *bounds], bounds, strict=False)):
        raise ValueError(f"length_classes are {dict(bins)}; upper bounds in tokens must rise, the last may be inf")
    longest = int(rows.prompt_tokens.max()) if len(rows) else 0
    if longest > bounds[-1]:
        raise ValueError(
            f"length_classes end at {bounds[-1]:g} tokens; a prompt has {longest}. Make the last bound inf"
        )
    names = list(map(str, bins))
    place = np.searchsorted(bounds, rows.prompt_tokens, side="left")
    return replace(rows, slo_class=[names[index] for index in place.tolist()])
