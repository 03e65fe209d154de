"""Plain fp32 definitions of the operators, to check what is timed; slow, and written another way on purpose.

Needs torch (extra `profiler`). Knows tensors and the layer's weights; no kernels.
"""

from __future__ import annotations

import math

import torch

from flowsim.profiler.layer import Layer

__all__ = ["act", "attention", "experts", "layer", "linear", "norm", "relative_error", "rope"]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root-mean-square norm."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x times the transposed weight, plus the bias."""
    out = torch.einsum("tk,nk->tn", x.float(), weight.float())
    return out if bias is None else out + bias.float()


def rope(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Halves as real and imaginary parts, turned by the position's angle."""
    half = heads.shape[-1] // 2
    turn = torch.complex(table[positions, :half].float(), table[positions, half:].float())[:, None]
    turned = torch.complex(heads[..., :half].float(), heads[..., half:].float()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def act(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half, times the second."""
    half = gate_up.shape[-1] // 2
    gate = gate_up[..., :half].float()
    return gate / (1.0 + (-gate).exp()) * gate_up[..., half:].float()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention, head by head; query i sees all keys but the last `new - 1 - i`."""
    new, total, repeat = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    hidden = torch.arange(total, device=q.device)[None] > torch.arange(new, device=q.device)[:, None] + total - new
    for head in range(q.shape[2]):
        keys, values = k[:, :, head // repeat].float(), v[:, :, head // repeat].float()
        scores = q[:, :, head].float() @ keys.transpose(1, 2) / math.sqrt(q.shape[3])
        out[:, :, head] = scores.masked_fill(hidden, -math.inf).softmax(-1) @ values
    return out


def experts(
    x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Token by token, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, picks in enumerate(chosen.tolist()):
        for place, expert in enumerate(picks):
            inner = act(x[token].float() @ gate_up[expert].float())
            out[token] += scores[token, place].float() * (inner @ down[expert].float())
    return out


def layer(
    one: Layer, x: torch.Tensor, positions: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], cached: int
) -> torch.Tensor:
    """A whole layer on a zero residual: the sum of its output and the residual. `cache` holds `cached` tokens."""
    residual = x.float()
    q, k, v = one.split(linear(norm(residual, one.input_norm), one.qkv, one.qkv_bias))
    if one.shapes.qk_norm:
        q, k = norm(q, one.q_norm), norm(k, one.k_norm)
    q, k = rope(q, one.rope_table, positions), rope(k, one.rope_table, positions)
    batch = cache[0].shape[0]
    q, k, v = (part.unflatten(0, (batch, -1)) for part in (q, k, v))
    keys, values = (torch.cat((past[:, :cached].float(), now), dim=1) for past, now in zip(cache, (k, v), strict=True))
    out = attention(q, keys, values).flatten(2).flatten(0, 1)
    residual = residual + linear(out, one.o)
    inner = norm(residual, one.post_norm)
    if one.shapes.experts:
        scores, chosen = one.route(inner.to(one.router.dtype))
        return residual + experts(inner, scores, chosen, one.gate_up, one.down)
    return residual + linear(act(linear(inner, one.gate_up)), one.down)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is expected; infinite for another shape."""
    if found.shape != expected.shape:
        return math.inf
    expected = expected.float()
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-12))
