"""`@workload`: makes a function that draws or reads rows into one that answers requests.

The decorated function keeps its own keywords and gains those of `finish`: shaping, classes and SLOs. So a new
workload is one function that answers `Rows`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np

from flowsim.core import Request
from flowsim.names import unknown
from flowsim.workload.rows import Rows
from flowsim.workload.shaping import shape
from flowsim.workload.slo import assign_slos, classes_by_length

__all__ = ["finish", "workload"]


def finish(
    rows: Rows,
    *,
    window_s: Sequence[float] | None = None,
    resample: int | None = None,
    num_requests: int | None = None,
    rate_scale: float | None = None,
    rate_rps: float | None = None,
    duration_s: float | None = None,
    max_context_tokens: int | None = None,
    length_classes: Mapping[str, float] | None = None,
    slo: str = "auto",
    ttft_slo_s: float | Mapping[str, float] | None = None,
    tbt_slo_s: float | Mapping[str, float] | None = None,
    slo_scale: float = 1.0,
    abandon_s: float | None = None,
    model: str = "llama3-8b",
    isolated_s: Callable[[int], float] | None = None,
    seed: int = 0,
) -> list[Request]:
    """Requests of rows: shaped (`flowsim.workload.shaping.shape`), classed by `length_classes` (name -> the longest
    prompt in tokens) if given, with SLOs by rule (`flowsim.workload.slo.assign_slos`). `abandon_s`, if given, is
    when the client of a request that has not started gives up, in seconds after arrival.

    Raises:
        ValueError: a value out of its range.
    """
    rows = shape(
        rows,
        window_s=window_s,
        resample=resample,
        num_requests=num_requests,
        rate_scale=rate_scale,
        rate_rps=rate_rps,
        duration_s=duration_s,
        max_context_tokens=max_context_tokens,
        seed=seed,
    )
    if length_classes is not None:
        rows = classes_by_length(rows, length_classes)
    rows = assign_slos(
        rows,
        slo=slo,
        ttft_slo_s=ttft_slo_s,
        tbt_slo_s=tbt_slo_s,
        slo_scale=slo_scale,
        model=model,
        isolated_s=isolated_s,
    )
    if abandon_s is not None:
        if not abandon_s > 0.0:
            raise ValueError(f"abandon_s is {abandon_s}; it must be a number of seconds > 0 (inf for never)")
        rows = replace(rows, abandon_s=np.full(len(rows), float(abandon_s)))
    return rows.requests()


def workload(source: Callable[..., Rows]) -> Callable[..., list[Request]]:
    """Turns a function with keyword arguments that answers rows into one that answers requests.

    A keyword that both have (`seed`, `rate_rps`) goes to the function; `seed` and `model` go to both.
    """
    own, common = inspect.signature(source).parameters, inspect.signature(finish).parameters
    shared = [name for name in common if name not in own and name != "rows"]

    @functools.wraps(source)
    def requests(*arguments: Any, **options: Any) -> list[Request]:
        for name in options:
            if name not in own and name not in shared:
                raise ValueError(unknown("key", name, [*own, *shared], where=f"of {source.__name__}"))
        drawn = source(*arguments, **{name: value for name, value in options.items() if name in own})
        both = {name for name in ("seed", "model") if name in own and name in options}
        return finish(drawn, **{name: value for name, value in options.items() if name in shared or name in both})

    parameters = [*own.values(), *(common[name] for name in shared)]
    requests.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    requests.__annotations__ = get_type_hints(finish) | get_type_hints(source)
    return requests
