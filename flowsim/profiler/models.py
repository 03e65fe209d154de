"""Shapes of transformers, and what one tensor-parallel rank of them computes and moves.

Knows the shipped tables of models and GPUs and Hugging Face's `config.json`; knows nothing of measured times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowsim.names import unknown

__all__ = ["Gpu", "Rank", "Shapes", "load_gpu", "load_shapes", "model_names"]

ELEMENT_BYTES = 2
"""Of a bf16 weight or activation."""

_TABLES = Path(__file__).parent / "tables"
_HF_NAMES = {
    "layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "q_heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "intermediate_size": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
    "max_context_tokens": ("max_position_embeddings",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A decoder-only transformer with grouped-query attention and a gated MLP or a mixture of experts, in bf16."""

    name: str
    layers: int
    hidden_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int
    qk_norm: bool = False
    qkv_bias: bool = False
    tied_embeddings: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0

    @property
    def parameters(self) -> int:
        """Weights of the whole model: embeddings, matrices, norms, biases and router."""
        hidden, heads_size = self.hidden_size, (self.q_heads + 2 * self.kv_heads) * self.head_dim
        attention = hidden * heads_size + self.q_heads * self.head_dim * hidden + heads_size * self.qkv_bias
        mlp = 3 * hidden * self.intermediate_size
        if self.experts:
            mlp = self.experts * (3 * hidden * self.expert_intermediate_size + hidden)
        norms = 2 * hidden + 2 * self.head_dim * self.qk_norm
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * hidden
        return tables + self.layers * (attention + mlp + norms) + hidden

    @property
    def weights_bytes(self) -> int:
        """Of the whole model, over all its GPUs."""
        return ELEMENT_BYTES * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token, all layers, over all GPUs."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ELEMENT_BYTES

    def rank(self, tp: int) -> Rank:
        """One of `tp` ranks.

        Raises:
            ValueError: the query heads, KV heads or MLP columns do not divide among the ranks.
        """
        columns = self.expert_intermediate_size or self.intermediate_size
        for what, count in (("query heads", self.q_heads), ("MLP columns", columns)):
            if tp < 1 or count % tp:
                raise ValueError(f"tp={tp}: {self.name} has {count} {what}, which do not divide among {tp} ranks")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(f"tp={tp}: {self.name} has {self.kv_heads} KV heads, neither divided nor repeated evenly")
        return Rank(self, tp)


@dataclass(frozen=True, slots=True)
class Rank:
    """What one tensor-parallel rank computes: heads, matrices [m, k] x [k, n], and bytes of the other operators.

    Where there are fewer KV heads than ranks, each rank holds a copy of one.
    """

    shapes: Shapes
    tp: int

    @property
    def q_heads(self) -> int:
        return self.shapes.q_heads // self.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.shapes.kv_heads // self.tp)

    @property
    def gemms(self) -> dict[str, tuple[int, int]]:
        """(n, k) of each matrix product of a layer, by operator."""
        shapes, head_dim = self.shapes, self.shapes.head_dim
        found = {
            "qkv_gemm": ((self.q_heads + 2 * self.kv_heads) * head_dim, shapes.hidden_size),
            "o_proj_gemm": (shapes.hidden_size, self.q_heads * head_dim),
        }
        if shapes.experts:
            return found | {"router_gemm": (shapes.experts, shapes.hidden_size)}
        columns = shapes.intermediate_size // self.tp
        return found | {
            "gate_up_gemm": (2 * columns, shapes.hidden_size),
            "down_gemm": (shapes.hidden_size, columns),
        }

    @property
    def moved_bytes_per_token(self) -> dict[str, int]:
        """Bytes read and written for a token by each operator that computes next to nothing."""
        shapes = self.shapes
        hidden = shapes.hidden_size * ELEMENT_BYTES
        heads = (self.q_heads + self.kv_heads) * shapes.head_dim * ELEMENT_BYTES
        found = {
            "embedding": 2 * hidden,
            "residual_add": 3 * hidden,
            "input_norm": 2 * hidden,
            "rope": 2 * heads,
            "post_attention_residual_add": 3 * hidden,
            "post_attention_norm": 2 * hidden,
            "final_norm": 2 * hidden,
        }
        if shapes.qk_norm:
            found["qk_norm"] = 2 * heads
        if not shapes.experts:
            found["act"] = 3 * shapes.intermediate_size // self.tp * ELEMENT_BYTES
        return found

    @property
    def message_bytes_per_token(self) -> int:
        """Of an all-reduce: the hidden state of one token."""
        return self.shapes.hidden_size * ELEMENT_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one layer on this rank: what decode attention reads for each token of context."""
        return 2 * self.kv_heads * self.shapes.head_dim * ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU's memory and its bandwidth; `system` is its name in aiconfigurator, empty where it has none."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    system: str = ""


def model_names() -> list[str]:
    """The models whose shapes are shipped."""
    return sorted(_table("models"))


def load_shapes(model: str) -> Shapes:
    """The shapes of a shipped model by name, or of any from the path of its Hugging Face `config.json`.

    Raises:
        ValueError: an unknown name (near names are given), or a config without a key that is needed.
    """
    if model.endswith(".json"):
        return _from_config(Path(model))
    models = _table("models")
    if model not in models:
        raise ValueError(unknown("model", model, models) + "; or give the path of a Hugging Face config.json")
    return Shapes(name=model, **models[model])


def load_gpu(gpu: str) -> Gpu:
    """A GPU of the shipped table by its name or its aiconfigurator system.

    Raises:
        ValueError: an unknown name; near names are given.
    """
    gpus = _table("gpus")
    named = {entry.get("system"): name for name, entry in gpus.items()} | {name: name for name in gpus}
    if gpu not in named:
        raise ValueError(unknown("gpu", gpu, gpus))
    return Gpu(name=named[gpu], **gpus[named[gpu]])


def _from_config(path: Path) -> Shapes:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot read the model's config: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a mapping; give the config.json of a Hugging Face model")
    found: dict[str, Any] = {ours: _first(config, theirs, path) for ours, theirs in _HF_NAMES.items()}
    family = str(config.get("model_type", ""))
    found["head_dim"] = int(config.get("head_dim") or found["hidden_size"] // found["q_heads"])
    found["qk_norm"] = family.startswith("qwen3")
    found["qkv_bias"] = bool(config.get("attention_bias", family.startswith("qwen2")))
    found["tied_embeddings"] = bool(config.get("tie_word_embeddings", False))
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    if experts:
        found["experts"] = int(experts)
        found["experts_per_token"] = _first(config, ("num_experts_per_tok",), path)
        found["expert_intermediate_size"] = _first(config, ("moe_intermediate_size", "intermediate_size"), path)
    name = str(config.get("_name_or_path") or path.resolve().parent.name).rsplit("/", 1)[-1].lower()
    return Shapes(name=name, **found)


def _first(config: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError(f"{path}: no whole number above 0 under {' or '.join(names)}; a transformer's config needs it")


def _table(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((_TABLES / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded
