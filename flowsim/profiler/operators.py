"""Each operator alone on fresh inputs: the call to time, its plain fp32 definition, and the memory it needs.

Needs torch (extra `profiler`). Knows the model and its operators by the trace's names; knows no timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from flowsim.profiler import plain
from flowsim.profiler.grid import Point
from flowsim.profiler.layer import Layer, Model
from flowsim.profiler.models import Rank

__all__ = ["Prepared", "check", "needed_bytes", "operator_names", "prepare"]

DENSE = ("gate_up_gemm", "act", "down_gemm")
MIXED = ("router_gemm", "experts")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
LAYER_TOLERANCE = 0.05  # a bf16 layer's roundings add up, and may flip the choice of an expert


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An operator with its inputs.

    `expected` is what the call should answer or, where there is an `output`, what that answers after a call.
    `experts` are those that a MoE call touches, 0 for other operators.
    """

    call: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
    expected: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
    output: Callable[[], torch.Tensor] | None = None
    experts: int = 0


def operator_names(rank: Rank, world: int) -> list[str]:
    """The operators of a model that can be measured here, in order, the whole layer last."""
    shapes = rank.shapes
    meet = world > 1
    names = ["embedding", "residual_add", "input_norm", "qkv_gemm"]
    names += ["qk_norm"] if shapes.qk_norm else []
    names += ["rope", "attention", "o_proj_gemm"]
    names += ["all_reduce_attention"] if meet else []
    names += ["post_attention_residual_add", "post_attention_norm", *(MIXED if shapes.experts else DENSE)]
    names += ["all_reduce_mlp"] if meet else []
    return [*names, "final_norm", "lm_head", "sampler", "whole_layer"]


def prepare(model: Model, point: Point) -> Prepared:
    """The operator of a point with random inputs.

    Raises:
        AssertionError: a name that no operator has.
    """
    builders = (_elementwise, _gemm, _ends, _of_context, _moe, _meeting)
    found = next((one for one in (build(model, point) for build in builders) if one is not None), None)
    assert found is not None, f"no operator {point.operator}"
    return found


def check(model: Model, point: Point) -> None:
    """Runs the operator once against its plain definition.

    Raises:
        ValueError: the relative error is too large for the model's number format (names operator and error).
    """
    with torch.inference_mode():
        prepared = prepare(model, point)
        answer = prepared.call()
        answer = prepared.output() if prepared.output else answer
        outputs = [one if isinstance(one, tuple) else (one,) for one in (answer, prepared.expected())]
        error = max(plain.relative_error(found, expected) for found, expected in zip(*outputs, strict=True))
    allowed = LAYER_TOLERANCE if point.operator == "whole_layer" else TOLERANCE[model.draw.dtype]
    if not error <= allowed:
        raise ValueError(
            f"{point.operator} on {model.kernels.name}: relative error {error:.2g} against plain fp32 in {point}; "
            f"at most {allowed:g} is allowed, so its times would mean nothing"
        )


def needed_bytes(model: Model, point: Point) -> int:
    """About how much memory a point's inputs and outputs take; an upper bound."""
    shapes, rank, element = model.shapes, model.rank, int(model.draw.dtype.itemsize)
    if point.sequences:
        return point.sequences * (shapes.hidden_size * element + shapes.vocab_size * (element + 8))
    heads = (rank.q_heads + 2 * rank.kv_heads) * shapes.head_dim
    columns = shapes.experts_per_token * (shapes.expert_intermediate_size + shapes.hidden_size)
    inner = (columns if shapes.experts else shapes.intermediate_size) // rank.tp
    per_token = 6 * shapes.hidden_size + 3 * heads + 4 * inner
    context = point.batch * (point.cached_tokens + point.new_tokens) * 2 * rank.kv_heads * shapes.head_dim
    workspace = 0
    if point.operator in ("attention", "whole_layer"):
        workspace = model.kernels.attention.workspace_bytes(point.batch, point.new_tokens, point.cached_tokens)
    return element * (point.tokens * per_token + context) + workspace


def _elementwise(model: Model, point: Point) -> Prepared | None:
    layer, draw, kernel, n = model.layers[0], model.draw, model.kernels.elementwise, point.tokens
    hidden, head_dim = model.shapes.hidden_size, model.shapes.head_dim
    norms = {"input_norm": layer.input_norm, "post_attention_norm": layer.post_norm, "final_norm": model.final_norm}
    name = point.operator
    if name in norms:
        x, weight = draw.normal(n, hidden), norms[name]
        return Prepared(call=lambda: kernel.norm(x, weight), expected=lambda: plain.norm(x, weight))
    if name in ("residual_add", "post_attention_residual_add"):
        x, residual = draw.normal(n, hidden), draw.normal(n, hidden)
        return Prepared(call=lambda: kernel.add(x, residual), expected=lambda: x.float() + residual.float())
    if name == "act" and not model.shapes.experts:
        x = draw.normal(n, layer.gate_up.shape[0])
        return Prepared(call=lambda: kernel.act(x), expected=lambda: plain.act(x))
    if name not in ("rope", "qk_norm"):
        return None
    q, k = (draw.normal(n, count, head_dim) for count in (layer.rank.q_heads, layer.rank.kv_heads))
    if name == "qk_norm":
        pairs = ((q, layer.q_norm), (k, layer.k_norm))
        return _both(*((kernel.norm, plain.norm, pair) for pair in pairs))
    positions = torch.arange(n, device=draw.device) % layer.rope_table.shape[0]
    return _both(*((kernel.rope, plain.rope, (one, layer.rope_table, positions)) for one in (q, k)))


def _both(
    *calls: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[torch.Tensor, ...]],
) -> Prepared:
    """Queries and keys, one after the other."""
    return Prepared(
        call=lambda: tuple(function(*given) for function, _, given in calls),
        expected=lambda: tuple(definition(*given) for _, definition, given in calls),
    )


def _gemm(model: Model, point: Point) -> Prepared | None:
    layer, name = model.layers[0], point.operator
    weights = {"qkv_gemm": layer.qkv, "o_proj_gemm": layer.o}
    if not model.shapes.experts:
        weights |= {"gate_up_gemm": layer.gate_up, "down_gemm": layer.down}
    if name not in weights:
        return None
    weight, bias = weights[name], layer.qkv_bias if name == "qkv_gemm" else None
    x = model.draw.normal(point.tokens, weight.shape[1])
    return Prepared(call=lambda: F.linear(x, weight, bias), expected=lambda: plain.linear(x, weight, bias))


def _ends(model: Model, point: Point) -> Prepared | None:
    draw, shapes = model.draw, model.shapes
    if point.operator == "embedding":
        tokens = draw.below(model.embedding.shape[0], point.tokens)
        return Prepared(
            call=lambda: F.embedding(tokens, model.embedding), expected=lambda: model.embedding.float()[tokens]
        )
    if point.operator == "lm_head":
        x = draw.normal(point.sequences, shapes.hidden_size)
        return Prepared(call=lambda: F.linear(x, model.lm_head), expected=lambda: plain.linear(x, model.lm_head))
    if point.operator == "sampler":
        logits, likeliest = (
            draw.normal(point.sequences, shapes.vocab_size),
            draw.below(shapes.vocab_size, point.sequences),
        )
        logits.scatter_(1, likeliest[:, None], 100.0)
        return Prepared(call=lambda: logits.float().argmax(-1), expected=lambda: likeliest)
    return None


def _of_context(model: Model, point: Point) -> Prepared | None:
    layer, draw = model.layers[0], model.draw
    batch, new, cached = point.batch, point.new_tokens, point.cached_tokens
    if point.operator == "whole_layer":
        return _whole_layer(model, layer, point)
    if point.operator != "attention":
        return None
    q_heads, kv_heads, head_dim = layer.rank.q_heads, layer.rank.kv_heads, model.shapes.head_dim
    q = draw.normal(batch, new, q_heads, head_dim)
    k, v = (draw.normal(batch, new, kv_heads, head_dim) for _ in range(2))
    keys, values = (draw.normal(batch, cached + new, kv_heads, head_dim) for _ in range(2))
    attend = model.kernels.attention.prepare(batch, new, cached)

    def call() -> torch.Tensor:
        keys[:, cached:] = k
        values[:, cached:] = v
        return attend(q, keys, values)

    def expected() -> torch.Tensor:
        whole = (torch.cat((past[:, :cached], now), dim=1) for past, now in ((keys, k), (values, v)))
        return plain.attention(q, *whole)

    return Prepared(call=call, expected=expected)


def _whole_layer(model: Model, layer: Layer, point: Point) -> Prepared:
    tokens = model.draw.below(model.embedding.shape[0], point.batch, point.new_tokens)
    work = model.start(tokens, cached=point.cached_tokens, layers=1)
    x, zeros = work.x, work.residual

    def call() -> torch.Tensor:
        work.x, work.residual = x, zeros
        for _, step in layer.steps:
            step(work, 0)
        return work.x

    return Prepared(
        call=call,
        output=lambda: work.x + work.residual,
        expected=lambda: plain.layer(layer, x, work.positions, work.caches[0], point.cached_tokens),
    )


def _moe(model: Model, point: Point) -> Prepared | None:
    layer, draw, shapes = model.layers[0], model.draw, model.shapes
    if point.operator not in MIXED:
        return None
    x = draw.normal(point.tokens, shapes.hidden_size)
    if point.operator == "router_gemm":
        return Prepared(
            call=lambda: layer.route(x)[0],
            expected=lambda: _top(plain.linear(x, layer.router).softmax(-1), shapes.experts_per_token),
        )
    scores, chosen = layer.route(x)
    return Prepared(
        call=lambda: layer.mix(x, scores, chosen),
        expected=lambda: plain.experts(x, scores, chosen, layer.gate_up, layer.down),
        experts=int(chosen.unique().numel()),
    )


def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
    best = scores.sort(-1, descending=True).values[:, :count]
    return best / best.sum(-1, keepdim=True)


def _meeting(model: Model, point: Point) -> Prepared | None:
    """The ranks' sum; of zeros, so that summing in place again and again stays finite."""
    if not point.operator.startswith("all_reduce"):
        return None
    x = torch.zeros(point.tokens, model.shapes.hidden_size, dtype=model.draw.dtype, device=model.draw.device)

    def call() -> torch.Tensor:
        model.layers[0].all_reduce(x)
        return x

    return Prepared(call=call, expected=lambda: torch.zeros_like(x))
