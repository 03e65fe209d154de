"""A device made ready to measure one model: kernels chosen and checked, software and shapes named.

Needs torch (extra `profiler`). The one place that puts devices, kernels and models together.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flowsim.profiler import kernels as kernel_lists
from flowsim.profiler.grid import Point
from flowsim.profiler.layer import Kernels, Model, Weights
from flowsim.profiler.models import Rank, Shapes
from flowsim.profiler.operators import check, operator_names
from flowsim.profiler.timing import Ranks, free_bytes

__all__ = ["Bench", "open_bench"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ATTENTION_CHECKS = (Point("attention", 48), Point("attention", 16, 24, 2))
POINTWISE_CHECKS = ("input_norm", "residual_add", "rope", "act")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One rank of a model on one device; `identity` is what every row of its trace has in common."""

    device: torch.device
    ranks: Ranks
    model: Model
    identity: dict[str, str | int]
    say: Callable[[str], None]

    @property
    def operators(self) -> list[str]:
        """The operators that can be measured here."""
        return operator_names(self.model.rank, self.ranks.world)


def open_bench(
    shapes: Shapes,
    *,
    device: str,
    dtype: str,
    tp: int,
    gpu: str,
    threads: int,
    layers: int,
    say: Callable[[str], None],
) -> Bench:
    """Builds the model on the device and checks every operator against plain fp32.

    Args:
        device: cuda or cpu.
        dtype: bf16 or fp32; empty for bf16 on a GPU and fp32 on a CPU.
        tp: the degree whose shard is measured; under torchrun its number of processes.
        gpu: the name of the device in the trace; empty for the device's own.
        threads: of a CPU; 0 for torch's choice.
        layers: how many distinct layers to hold, at most; as many as fit in half of the free memory.
        say: takes a sentence for the user.

    Raises:
        ValueError: no such device, a TP degree that shapes or torchrun contradict, no room for a layer, or an
            operator that computes something else than it should.
    """
    where = _device(device)
    if threads:
        torch.set_num_threads(threads)
    ranks = Ranks(where)
    if ranks.world not in (1, tp):
        raise ValueError(f"--tp {tp} under torchrun with {ranks.world} processes; give --tp {ranks.world}")
    rank = shapes.rank(tp)
    number_format = DTYPES[dtype or ("bf16" if where.type == "cuda" else "fp32")]
    distinct = _layers_that_fit(rank, number_format.itemsize, where, layers)
    if distinct < min(layers, shapes.layers):
        say(f"{distinct} of {shapes.layers} layers fit in memory; a whole prefill runs through them in turn")
    model = _checked_model(rank, Weights(where, number_format), ranks, distinct, say)
    identity: dict[str, str | int] = {
        "model": shapes.name,
        "gpu": gpu or _device_name(where),
        "tp": tp,
        "software": _software(model.kernels, where, number_format, ranks.world),
        "source": f"flowsim collect; shapes {_digest(shapes)}",
    }
    return Bench(device=where, ranks=ranks, model=model, identity=identity, say=say)


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU (torch.cuda.is_available() is False); --device cpu works")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def _checked_model(rank: Rank, draw: Weights, ranks: Ranks, distinct: int, say: Callable[[str], None]) -> Model:
    """The model on the best kernels that compute what they should; ValueError where an operator does not."""
    shapes, device = rank.shapes, draw.device
    attention = kernel_lists.attention_kernels(device, draw.dtype, rank.q_heads, rank.kv_heads, shapes.head_dim)
    elementwise = kernel_lists.elementwise_kernels(device)
    experts = kernel_lists.experts_kernels() if shapes.experts else [None]
    kernels = Kernels(attention=attention[0], elementwise=elementwise[0], experts=experts[0])
    model = Model(rank, kernels, draw, ranks.all_reduce, distinct)
    _choose(model, "attention", attention, ATTENTION_CHECKS, say)
    names = [name for name in POINTWISE_CHECKS if name != "act" or not shapes.experts]
    _choose(model, "elementwise", elementwise, [Point(name, 16) for name in names], say)
    if shapes.experts:
        _choose(model, "experts", experts, [Point("experts", 16)], say)
    _check_all(model, ranks.world)
    return model


def _layers_that_fit(rank: Rank, element: int, device: torch.device, wanted: int) -> int:
    shapes = rank.shapes
    tables = (1 if shapes.tied_embeddings else 2) * shapes.vocab_size * shapes.hidden_size
    layer = element * (shapes.parameters - tables) // shapes.layers // rank.tp
    room = free_bytes(device) // 2 - element * tables // rank.tp
    if room < layer:
        raise ValueError(
            f"{shapes.name} at tp {rank.tp}: one layer and the embeddings need {layer + element * tables // rank.tp} "
            f"bytes, and half of the {free_bytes(device)} free bytes is too little; give a higher --tp"
        )
    return max(1, min(room // layer, wanted, shapes.layers))


def _choose(model: Model, family: str, found: Any, points: Any, say: Callable[[str], None]) -> None:
    """Takes the first kernel that computes what it should."""
    for kernel in found:
        model.use(replace(model.kernels, **{family: kernel}))
        try:
            for point in points:
                check(model, point)
            return
        except Exception as error:  # a package built for another torch or GPU fails in its own way
            if kernel is found[-1]:
                raise
            say(f"{family} kernel {kernel.name} is left out: {str(error).splitlines()[0]}")


def _check_all(model: Model, world: int) -> None:
    for name in operator_names(model.rank, world):
        if name in ("lm_head", "sampler"):
            check(model, Point(name, 0, sequences=3))
        elif name != "whole_layer":
            check(model, Point(name, 16))
        elif world == 1:  # among ranks the layer sums what its plain definition does not
            check(model, Point(name, 16, 24, 2))


def _software(kernels: Kernels, device: torch.device, dtype: torch.dtype, world: int) -> str:
    parts = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        parts.append(f"cuda {torch.version.cuda}")
        if world > 1:
            parts.append("nccl " + ".".join(map(str, torch.cuda.nccl.version())))
    else:
        parts.append(f"{torch.get_num_threads()} threads")
    return "; ".join([*parts, str(dtype).removeprefix("torch."), kernels.name])


def _device_name(device: torch.device) -> str:
    """The project's name of the device: `h100` of `NVIDIA H100 80GB HBM3`; unknown ones in lower case."""
    if device.type == "cpu":
        return "cpu"
    name = str(torch.cuda.get_device_name(device)).lower()
    known = re.search(r"\b(gb200|b200|h200|h100|h800|a100|a800|l40s|l4|rtx (?:pro )?\d{4})\b", name)
    return re.sub(r"[^a-z0-9]+", "", known.group() if known else name.removeprefix("nvidia "))


def _digest(shapes: Shapes) -> str:
    """Tells models of one name and other shapes apart."""
    return hashlib.sha256(repr(sorted(asdict(shapes).items())).encode()).hexdigest()[:8]
