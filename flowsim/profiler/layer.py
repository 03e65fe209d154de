"""A transformer with random weights, one tensor-parallel rank of it: its layers' operators, run in order.

Needs torch (extra `profiler`). Knows shapes and kernels; knows no timing. Nothing is downloaded. Hidden states are
(tokens, hidden); the KV cache of a layer is (batch, tokens, heads, head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from flowsim.profiler.kernels import AttentionKernel, Elementwise, Experts, Run
from flowsim.profiler.models import Rank

__all__ = ["Kernels", "Layer", "Model", "Work"]

ROPE_THETA = 500_000.0


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels that a model runs on; `name` goes into the trace's `software`."""

    attention: AttentionKernel
    elementwise: Elementwise
    experts: Experts | None = None

    @property
    def name(self) -> str:
        experts = f"; experts {self.experts.name}" if self.experts else ""
        return f"attention {self.attention.name}; element-wise {self.elementwise.name}{experts}"


@dataclass(kw_only=True)
class Work:
    """One pass under way: what the operators read and leave for the next."""

    x: torch.Tensor
    residual: torch.Tensor
    positions: torch.Tensor
    attend: Run
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    shape: tuple[int, int, int]  # batch, new, cached
    heads: tuple[torch.Tensor, ...] = field(default=())
    inner: tuple[torch.Tensor, ...] = field(default=())


class Weights:
    """Draws random weights and inputs on a device, from a seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of standard deviation `scale`."""
        drawn = torch.empty(*shape, device=self.device, dtype=self.dtype)
        return drawn.normal_(0.0, scale, generator=self.generator)

    def matrix(self, n: int, k: int, *stack: int) -> torch.Tensor:
        """A (*stack, n, k) matrix that keeps the size of what it multiplies."""
        return self.normal(*stack, n, k, scale=1.0 / math.sqrt(k))

    def below(self, bound: int, *shape: int) -> torch.Tensor:
        """Whole numbers from 0 to `bound` - 1."""
        return torch.randint(bound, shape, device=self.device, generator=self.generator)


class Layer:
    """One layer's shard: weights, and the five operators at whose ends a prefill may be stopped."""

    def __init__(
        self,
        rank: Rank,
        kernels: Kernels,
        draw: Weights,
        all_reduce: Callable[[torch.Tensor], None],
        rope_table: torch.Tensor,
    ) -> None:
        shapes, hidden = rank.shapes, rank.shapes.hidden_size
        self.rank, self.shapes, self.kernels, self.all_reduce = rank, shapes, kernels, all_reduce
        gemms = rank.gemms
        self.qkv = draw.matrix(*gemms["qkv_gemm"])
        self.qkv_bias = draw.normal(self.qkv.shape[0], scale=0.1) if shapes.qkv_bias else None
        self.o = draw.matrix(*gemms["o_proj_gemm"])
        self.input_norm, self.post_norm = (1.0 + draw.normal(hidden, scale=0.1) for _ in range(2))
        self.q_norm, self.k_norm = (1.0 + draw.normal(shapes.head_dim, scale=0.1) for _ in range(2))
        self.rope_table = rope_table
        if shapes.experts:
            columns = shapes.expert_intermediate_size // rank.tp
            self.router = draw.matrix(*gemms["router_gemm"])
            self.gate_up = draw.matrix(hidden, 2 * columns, shapes.experts).mul_(math.sqrt(2 * columns / hidden))
            self.down = draw.matrix(columns, hidden, shapes.experts).mul_(math.sqrt(hidden / columns))
        else:
            self.gate_up = draw.matrix(*gemms["gate_up_gemm"])
            self.down = draw.matrix(*gemms["down_gemm"])

    @property
    def steps(self) -> tuple[tuple[str, Callable[[Work, int], None]], ...]:
        """The operators in order; each takes the work and the number of the layer whose KV cache to use."""
        return (
            ("qkv_proj", self.qkv_proj),
            ("attention", self.attention),
            ("o_proj", self.o_proj),
            ("gate_up_proj", self.gate_up_proj),
            ("down_proj", self.down_proj),
        )

    def qkv_proj(self, work: Work, number: int) -> None:
        """Residual, input norm, the fused qkv product, qk-norm where the model has it, rope."""
        kernel = self.kernels.elementwise
        work.residual = kernel.add(work.x, work.residual)
        q, k, v = self.split(F.linear(kernel.norm(work.residual, self.input_norm), self.qkv, self.qkv_bias))
        if self.shapes.qk_norm:
            q, k = kernel.norm(q, self.q_norm), kernel.norm(k, self.k_norm)
        q, k = (kernel.rope(one, self.rope_table, work.positions) for one in (q, k))
        work.heads = (q, k, v)

    def attention(self, work: Work, number: int) -> None:
        """Writes the new keys and values to the cache, and attends to all of it."""
        batch, new, cached = work.shape
        q, k, v = (one.view(batch, new, *one.shape[1:]) for one in work.heads)
        keys, values = work.caches[number]
        keys[:, cached:] = k
        values[:, cached:] = v
        work.heads = (work.attend(q, keys, values).reshape(batch * new, -1),)

    def o_proj(self, work: Work, number: int) -> None:
        """The output product, and the ranks' sum."""
        work.x = F.linear(work.heads[0], self.o)
        self.all_reduce(work.x)

    def gate_up_proj(self, work: Work, number: int) -> None:
        """Residual, post norm, and the gate and up product; of a MoE the router."""
        kernel = self.kernels.elementwise
        work.residual = kernel.add(work.x, work.residual)
        x = kernel.norm(work.residual, self.post_norm)
        work.inner = (x, *self.route(x)) if self.shapes.experts else (F.linear(x, self.gate_up),)

    def down_proj(self, work: Work, number: int) -> None:
        """The activation and the down product, or the experts; and the ranks' sum."""
        if self.shapes.experts:
            work.x = self.mix(*work.inner)
        else:
            work.x = F.linear(self.kernels.elementwise.act(work.inner[0]), self.down)
        self.all_reduce(work.x)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values as (tokens, heads, head_dim)."""
        heads = (self.rank.q_heads, self.rank.kv_heads, self.rank.kv_heads)
        parts = qkv.split([count * self.shapes.head_dim for count in heads], dim=-1)
        return tuple(part.unflatten(-1, (-1, self.shapes.head_dim)) for part in parts)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts: weights that sum to 1, and numbers."""
        scores = F.linear(x, self.router).float().softmax(-1)
        best, chosen = scores.topk(self.shapes.experts_per_token, dim=-1)
        return (best / best.sum(-1, keepdim=True)).to(x.dtype), chosen

    def mix(self, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The experts' weighted sum."""
        assert self.kernels.experts is not None, f"{self.shapes.name} has experts, its kernels have none"
        return self.kernels.experts.run(x, scores, chosen, self.gate_up, self.down, self.kernels.elementwise.act)


class Model:
    """A rank's whole prefill: embedding, layers, final norm, lm_head, greedy sampler.

    Args:
        rank: the shard.
        kernels: what to run on.
        draw: the weights' source.
        all_reduce: sums over the ranks in place.
        distinct: layers in memory; the prefill runs through them in turn, `shapes.layers` in all. From two on
            that takes the same time, where a layer's weights exceed the last cache.
    """

    def __init__(
        self,
        rank: Rank,
        kernels: Kernels,
        draw: Weights,
        all_reduce: Callable[[torch.Tensor], None],
        distinct: int,
    ) -> None:
        shapes = rank.shapes
        self.rank, self.shapes, self.kernels, self.draw = rank, shapes, kernels, draw
        vocab = shapes.vocab_size // rank.tp
        self.embedding = draw.normal(vocab, shapes.hidden_size)
        self.lm_head = self.embedding if shapes.tied_embeddings else draw.matrix(vocab, shapes.hidden_size)
        self.final_norm = 1.0 + draw.normal(shapes.hidden_size, scale=0.1)
        table = rope_table(shapes.head_dim, shapes.max_context_tokens, draw)
        self.layers = [Layer(rank, kernels, draw, all_reduce, table) for _ in range(min(distinct, shapes.layers))]

    def use(self, kernels: Kernels) -> None:
        """Runs on other kernels from now on."""
        self.kernels = kernels
        for layer in self.layers:
            layer.kernels = kernels

    def start(self, tokens: torch.Tensor, *, cached: int = 0, layers: int | None = None) -> Work:
        """A pass over (batch, new) token numbers, embedded, with random caches for so many layers (default: all)."""
        batch, new = tokens.shape
        kv = (batch, cached + new, self.rank.kv_heads, self.shapes.head_dim)
        x = self.embed(tokens)
        return Work(
            x=x,
            residual=torch.zeros_like(x),
            positions=torch.arange(cached, cached + new, device=x.device).repeat(batch),
            attend=self.kernels.attention.prepare(batch, new, cached),
            caches=[
                (self.draw.normal(*kv), self.draw.normal(*kv))
                for _ in range(self.shapes.layers if layers is None else layers)
            ],
            shape=(batch, new, cached),
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden states that enter layer 0."""
        return F.embedding(tokens.flatten(), self.embedding)

    def prefill(self, work: Work, tokens: torch.Tensor, at_end: Callable[[str], None] | None = None) -> torch.Tensor:
        """A whole pass, from the embedding; `at_end` is told each operator that has been issued. The next tokens."""
        work.x = self.embed(tokens)
        work.residual = torch.zeros_like(work.x)
        for number in range(len(work.caches)):
            for name, step in self.layers[number % len(self.layers)].steps:
                step(work, number)
                if at_end is not None:
                    at_end(name)
        return self.finish(work)

    def finish(self, work: Work) -> torch.Tensor:
        """Final norm and lm_head of each sequence's last token, and the likeliest token of each."""
        batch, new, _ = work.shape
        kernel = self.kernels.elementwise
        normed = kernel.norm(kernel.add(work.x, work.residual), self.final_norm)
        return F.linear(normed.view(batch, new, -1)[:, -1], self.lm_head).float().argmax(-1)


def rope_table(head_dim: int, positions: int, draw: Weights) -> torch.Tensor:
    """(positions, head_dim): cosines, then sines."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=draw.device) / head_dim
    angles = torch.arange(positions, dtype=torch.float64, device=draw.device)[:, None] * ROPE_THETA**-half
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(draw.dtype)
