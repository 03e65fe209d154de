"""Laws of runs in which prompts go through the model a group of layers at a time (`layers.csv`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowsim.core import Outcome
from flowsim.law import hold
from flowsim.log import Columns

__all__ = ["check_layers", "completes", "layers_of"]

Array = npt.NDArray[Any]


def layers_of(tables: Mapping[str, Columns]) -> dict[int, range]:
    """By the number of the batch, the layers that its prompts go through; batches through all are not in it."""
    table = tables.get("layers")
    if table is None:
        return {}
    columns = (table[name].tolist() for name in ("batch", "first_layer", "last_layer"))
    return {batch: range(first, last) for batch, first, last in zip(*columns, strict=True)}


def completes(tables: Mapping[str, Columns]) -> Array:
    """Of each row of `batches`, whether the batch takes its tokens through the model's last layer."""
    parts = tables["batches"]["batch"]
    table = tables.get("layers")
    if table is None:
        return np.ones(len(parts), dtype=bool)
    return ~np.isin(parts, table["batch"][table["last_layer"] < table["layers"]])


def check_layers(tables: Mapping[str, Columns]) -> None:
    """Each group of a prompt's layers begins where the one before it ended, with the same tokens, and the last one that
    a finished request had ends with the model's last layer; only a loss of KV starts anew."""
    requests, parts = tables["requests"], tables["batches"]
    layers, most = layers_of(tables), int(tables["layers"]["layers"].max())
    never = np.zeros(len(requests["id"]), dtype=np.int64)
    lost = requests.get("evictions", never) + requests.get("requeued", never)
    at: dict[int, tuple[int, int, int]] = {}  # by request: layers done, of which tokens, times begun anew
    columns = ("batch", "request", "tokens")
    for batch, request, tokens in sorted(zip(*(parts[name].tolist() for name in columns), strict=True)):
        group = layers.get(batch, range(most))
        done, of_tokens, anew = at.get(request, (0, 0, 0))
        if done and not group.start:
            done, anew = 0, anew + 1
        hold("28 layers go on where they stopped", group.start == done, (batch, request, group), done)
        if done:
            hold("28 the tokens of all groups are the same", of_tokens == tokens, (batch, request, tokens), of_tokens)
        at[request] = (group.stop % most, tokens, anew)
    for request, (done, _, anew) in at.items():
        hold("28 only lost KV is begun anew", anew <= lost[request], (request, anew), lost[request])
        ended = requests["outcome"][request] != Outcome.FINISHED.value or not done
        hold("28 a finished prompt has been through all layers", ended, (request, done), most)
