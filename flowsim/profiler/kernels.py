"""The kernels a measurement runs on: attention, element-wise operators and experts, the best that is installed.

Needs torch (extra `profiler`). Knows tensors only: no model, no timing. Token tensors are (tokens, ...); attention
takes (batch, tokens, heads, head_dim) and is causal, new tokens last: query i sees the cached tokens and new
tokens 0..i.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

__all__ = ["AttentionKernel", "Elementwise", "Experts", "Run", "attention_kernels", "elementwise_kernels"]

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FLASHINFER_WORKSPACE_BYTES = 256 * 2**20


class AttentionKernel(Protocol):
    """An attention implementation; `name` goes into the trace's `software`."""

    name: str

    def prepare(self, batch: int, new: int, cached: int) -> Run:
        """All that an engine does once per pass, not per layer (masks, plans); returns the call to time."""
        ...

    def workspace_bytes(self, batch: int, new: int, cached: int) -> int:
        """Memory beyond queries, keys, values and output."""
        ...


class TorchAttention:
    """torch's scaled_dot_product_attention: its flash kernel on a GPU, a prepared mask on a CPU."""

    def __init__(self, device: torch.device, q_heads: int) -> None:
        self.name = "torch-sdpa"
        self._device = device
        self._q_heads = q_heads

    def prepare(self, batch: int, new: int, cached: int) -> Run:
        if cached == 0:
            return lambda q, k, v: self._call(q, k, v, is_causal=True)
        if self._device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            bias = causal_lower_right(new, new + cached)
        else:
            bias = torch.ones(new, new + cached, dtype=torch.bool, device=self._device).tril(cached)
        return lambda q, k, v: self._call(q, k, v, attn_mask=bias)

    def workspace_bytes(self, batch: int, new: int, cached: int) -> int:
        scores = batch * self._q_heads * new * (new + cached)  # what it needs if it falls back to its plain kernel
        return 4 * scores if self._device.type == "cpu" else new * (new + cached) * bool(cached)

    def _call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: object) -> torch.Tensor:
        heads_first = [one.transpose(1, 2) for one in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads_first, enable_gqa=q.shape[2] != k.shape[2], **how)
        return out.transpose(1, 2)


class FlashAttention:
    """The flash-attn package, whose causal mask is aligned to the last token."""

    def __init__(self, device: torch.device, q_heads: int, kv_heads: int, head_dim: int) -> None:
        self._function = import_module("flash_attn").flash_attn_func
        self.name = f"flash-attn {_version('flash_attn')}"

    def prepare(self, batch: int, new: int, cached: int) -> Run:
        return lambda q, k, v: self._function(q, k, v, causal=True)

    def workspace_bytes(self, batch: int, new: int, cached: int) -> int:
        return 0


class FlashInfer:
    """The flashinfer package: a ragged batch, planned once per pass as engines do."""

    def __init__(self, device: torch.device, q_heads: int, kv_heads: int, head_dim: int) -> None:
        self._wrapper = import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
        self.name = f"flashinfer {_version('flashinfer-python')}"
        self._device, self._heads = device, (q_heads, kv_heads, head_dim)
        self._workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def prepare(self, batch: int, new: int, cached: int) -> Run:
        ends = torch.arange(batch + 1, dtype=torch.int32, device=self._device)
        wrapper = self._wrapper(self._workspace, "NHD")  # one each, as a plan belongs to its wrapper
        wrapper.plan(ends * new, ends * (new + cached), *self._heads, causal=True, q_data_type=torch.bfloat16)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return wrapper.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view_as(q)

        return run

    def workspace_bytes(self, batch: int, new: int, cached: int) -> int:
        return 0  # allocated once


def attention_kernels(
    device: torch.device, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int
) -> list[AttentionKernel]:
    """The attention implementations present, best first; the last, torch's, always is."""
    found: list[AttentionKernel] = []
    if device.type == "cuda" and dtype == torch.bfloat16:
        for kernel in (FlashAttention, FlashInfer):
            # not installed, or built for another torch
            with suppress(ImportError, OSError, AttributeError):
                found.append(kernel(device, q_heads, kv_heads, head_dim))
    return [*found, TorchAttention(device, q_heads)]


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """The bandwidth-bound operators; all return new tensors."""

    name: str
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    act: Callable[[torch.Tensor], torch.Tensor]


RMS_EPSILON = 1e-5


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, RMS_EPSILON)


def _add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return x + residual


def _rope(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates halves (GPT-NeoX): heads (tokens, heads, head_dim), table (positions, head_dim): cosines, sines."""
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def _act(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def elementwise_kernels(device: torch.device) -> list[Elementwise]:
    """Element-wise operators, best first: fused by torch.compile on a GPU (one kernel each), then plain torch."""
    eager = Elementwise(name="eager", norm=_norm, add=_add, rope=_rope, act=_act)
    if device.type != "cuda":
        return [eager]
    fused = {
        key: torch.compile(function, dynamic=True)
        for key, function in (("norm", _norm), ("add", _add), ("rope", _rope), ("act", _act))
    }
    return [Elementwise(name="inductor", **fused), eager]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a MoE layer: (tokens, router scores, gate_up weights, down weights, act) to (tokens, hidden).

    Scores are (tokens, k) weights and (tokens, k) expert numbers.
    """

    name: str
    run: Callable[..., torch.Tensor]


def experts_kernels() -> list[Experts]:
    """Grouped GEMMs where torch has them, then a loop over the experts."""
    loop = Experts(name="loop", run=lambda *given: _experts(_loop_mm, *given))
    if not hasattr(F, "grouped_mm"):
        return [loop]
    return [Experts(name="torch-grouped-mm", run=lambda *given: _experts(_grouped_mm, *given)), loop]


def _experts(
    matmul: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Tokens sorted by expert, two grouped GEMMs, and the weighted sum back in token order."""
    flat = chosen.flatten()
    order = flat.argsort()
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0).to(torch.int32)
    token = order // chosen.shape[1]
    out = matmul(act(matmul(x[token], gate_up, ends)), down, ends)
    by_token = torch.empty_like(out)
    by_token[order] = out
    return (by_token.view(*chosen.shape, -1) * scores.unsqueeze(-1)).sum(1)


def _grouped_mm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, weights, offs=ends)


def _loop_mm(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], weights.shape[2], dtype=x.dtype, device=x.device)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weights[expert], out=out[start:end])
        start = end
    return out


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
