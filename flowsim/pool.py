"""What a cluster is made of, as data: pools of equal instances.

Knows no simulator. `flowsim.cluster` builds what is described here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowsim.latency import LatencyModel
from flowsim.policy import Policy
from flowsim.profile import load_profile

__all__ = ["Cluster", "Pool", "PrefillOnly"]

MOST_INSTANCES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal instances; on its own a whole cluster, in which a request ends with its first token.

    `kv_blocks` per instance (None: what GPU memory leaves beside the weights at `gpu_memory_fraction`) of
    `block_tokens` tokens; at most `max_batches` batches running and suspended on an instance; a batch longer
    than `pass_tokens` runs as several passes. `jitter_sigma` spreads the speed of each rank, drawn anew for each
    batch as exp(sigma z) with z standard normal; a group takes what its slowest rank takes. `gpu` (as in
    `load_profile`), `tp` and `policy` are the run's unless given.

    Raises:
        ValueError: a value out of its range.
    """

    instances: int = 1
    kv_blocks: int | None = None
    block_tokens: int = 16
    gpu_memory_fraction: float = 0.9
    max_batches: int = 128
    pass_tokens: int = 8192
    jitter_sigma: float = 0.0
    gpu: str | None = None
    tp: int | None = None
    policy: Policy | None = None

    def __post_init__(self) -> None:
        for name in ("instances", "kv_blocks", "block_tokens", "max_batches", "pass_tokens", "tp"):
            value = getattr(self, name)
            if (value is not None or name not in ("kv_blocks", "tp")) and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"cluster.{name} is {value!r}; it must be a whole number, at least 1")
        if self.instances > MOST_INSTANCES:
            raise ValueError(f"cluster.instances is {self.instances}; at most {MOST_INSTANCES} are simulated at once")
        if not 0.0 < self.gpu_memory_fraction <= 1.0:
            raise ValueError(f"cluster.gpu_memory_fraction is {self.gpu_memory_fraction}; it must be within 0..1")
        if not 0.0 <= self.jitter_sigma <= 1.0:
            raise ValueError(f"cluster.jitter_sigma is {self.jitter_sigma}; it must be within 0..1")

    def hardware(self, latency: LatencyModel) -> LatencyModel:
        """The pool's GPUs, given those of the run."""
        profile = latency.profile if self.gpu is None else load_profile(latency.profile.model, self.gpu)
        if profile is latency.profile and self.tp in (None, latency.tp):
            return latency
        return LatencyModel(profile, self.tp or latency.tp)


PrefillOnly = Pool
"""`cluster=prefill_only`: one pool, whose requests end with their first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Pools by name; the router sends a request to an instance of any of them.

    Raises:
        ValueError: no pool, or more instances than are simulated at once.
    """

    pools: Mapping[str, Pool] = field(default_factory=lambda: {"prefill": Pool()})

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError("cluster.pools is empty; a cluster needs at least one pool")
        for name, pool in self.pools.items():
            if not isinstance(pool, Pool):
                raise ValueError(f"cluster.pools.{name} is {pool!r:.60}; it must be a flowsim.pool.Pool")
        count = sum(pool.instances for pool in self.pools.values())
        if count > MOST_INSTANCES:
            raise ValueError(f"the pools have {count} instances; at most {MOST_INSTANCES} are simulated at once")

    @staticmethod
    def of(cluster: Cluster | Pool) -> Cluster:
        """A pool on its own is a cluster of one."""
        return Cluster(pools={"prefill": cluster}) if isinstance(cluster, Pool) else cluster

    def hardware(self, latency: LatencyModel) -> dict[str, LatencyModel]:
        """The GPUs of each pool, given those of the run."""
        return {name: pool.hardware(latency) for name, pool in self.pools.items()}
