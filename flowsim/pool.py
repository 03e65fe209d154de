"""What a cluster is made of, as data: pools of equal instances, what follows a prefill there, and links.

Knows no simulator. `flowsim.cluster` builds what is described here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flowsim.latency import DECODE_SKEW, LatencyModel
from flowsim.names import unknown
from flowsim.policy import Policy
from flowsim.profile import load_profile
from flowsim.router import FewestRequests, Router

__all__ = ["HERE", "Cluster", "Failure", "Link", "Pool", "PrefillOnly"]

MOST_INSTANCES = 10_000
HERE = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """At `at_s` the pool's instance number `instance` stops, for `for_s` seconds, and loses what its GPUs hold.

    Raises:
        ValueError: a time that is negative or not finite, a stop of no length, an instance below 0.
    """

    at_s: float
    instance: int
    for_s: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.at_s < math.inf and 0.0 < self.for_s < math.inf):
            raise ValueError(f"{self}: at_s must be finite and at least 0, for_s finite and above 0")
        if not isinstance(self.instance, int) or self.instance < 0:
            raise ValueError(f"{self}: instance must be a whole number, from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What moves KV from instance to instance: each has one link out and one in, `bytes_per_s` either way.

    A transfer has both ends for itself while its bytes pass, and arrives `latency_s` after the last has left; others
    wait in the order in which they were asked for.

    Raises:
        ValueError: a latency that is negative or not finite, a bandwidth that is not above 0 (inf: only latency).
    """

    latency_s: float = 1e-4
    bytes_per_s: float = 25e9

    def __post_init__(self) -> None:
        if not 0.0 <= self.latency_s < math.inf:
            raise ValueError(f"cluster.link.latency_s is {self.latency_s}; it must be finite and at least 0")
        if not self.bytes_per_s > 0.0:
            raise ValueError(f"cluster.link.bytes_per_s is {self.bytes_per_s}; it must be above 0 (inf for no limit)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal instances; on its own a whole cluster, in which a request ends with its first token.

    `kv_blocks` per instance (None: what GPU memory leaves beside the weights at `gpu_memory_fraction`) of
    `block_tokens` tokens; at most `max_batches` batches running and suspended on an instance; a batch longer
    than `pass_tokens` runs as several passes. `jitter_sigma` spreads the speed of each rank, drawn anew for each
    batch as exp(sigma z) with z standard normal; a group takes what its slowest rank takes. `gpu` (as in
    `load_profile`), `tp` and `policy` are the run's unless given.

    `decode` says what follows a prefill: None, the request ends with its first token; `here`, it is decoded on the
    same instance, up to `max_sequences` at a time, by a policy whose batches have decodes; or the name of the
    cluster's pool that decodes it, to which its KV is moved. With `async_steps` 1 the next step is formed while one
    runs. `prefix_cache` remembers KV blocks by the ids that the workload gives them, and whatever a sequence has
    lost to the growth of others.

    Of the hardware: `step_s`, seconds at the start of each pass (None: the profile's `pass_s`); `decode_skew` as in
    `LatencyModel`; `collective`, the link between the GPUs of a group or the ranks of a pool (None: the profile's
    all-reduces). With `expert_parallel` the instances are ranks of one data-parallel group: they share the experts,
    and step together.

    `failures` are those of its instances, numbered from 0 within the pool; each may be a mapping with Failure's fields.

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
    decode: str | None = None
    max_sequences: int | None = None
    async_steps: int = 0
    prefix_cache: bool = False
    step_s: float | None = None
    decode_skew: float = DECODE_SKEW
    collective: Link | None = None
    expert_parallel: bool = False
    failures: Sequence[Failure | Mapping[str, float]] = ()

    def __post_init__(self) -> None:
        counts = ("instances", "kv_blocks", "block_tokens", "max_batches", "pass_tokens", "tp", "max_sequences")
        for name in counts:
            value = getattr(self, name)
            if (value is not None or name not in ("kv_blocks", "tp", "max_sequences")) and not (
                isinstance(value, int) and value >= 1
            ):
                raise ValueError(f"cluster.{name} is {value!r}; it must be a whole number, at least 1")
        if self.instances > MOST_INSTANCES:
            raise ValueError(f"cluster.instances is {self.instances}; at most {MOST_INSTANCES} are simulated at once")
        if not 0.0 < self.gpu_memory_fraction <= 1.0:
            raise ValueError(f"cluster.gpu_memory_fraction is {self.gpu_memory_fraction}; it must be within 0..1")
        if not 0.0 <= self.jitter_sigma <= 1.0:
            raise ValueError(f"cluster.jitter_sigma is {self.jitter_sigma}; it must be within 0..1")
        object.__setattr__(self, "failures", tuple(_failure(one) for one in self.failures))
        self._check_failures()
        if self.async_steps not in (0, 1):
            raise ValueError(f"cluster.async_steps is {self.async_steps!r}; it must be 0 or 1")
        if self.step_s is not None and not 0.0 <= self.step_s < math.inf:
            raise ValueError(f"cluster.step_s is {self.step_s}; it must be finite and at least 0 (null: the profile's)")
        if not 0.0 <= self.decode_skew <= 1.0:
            raise ValueError(f"cluster.decode_skew is {self.decode_skew}; it must be within 0..1")
        if self.expert_parallel and (self.collective is None or self.decode != HERE):
            raise ValueError(
                "cluster.expert_parallel needs cluster.collective, the link between ranks, and decode=here"
            )

    def _check_failures(self) -> None:
        if self.failures and self.expert_parallel:
            raise ValueError("cluster.failures are of instances that run on their own, not of ranks that share experts")
        until_s: dict[int, float] = {}
        for one in sorted(self.outages, key=lambda failure: failure.at_s):
            if one.instance >= self.instances:
                raise ValueError(f"{one}: the pool has instances 0 to {self.instances - 1}")
            if one.at_s <= until_s.get(one.instance, -1.0):
                raise ValueError(f"{one}: instance {one.instance} is down until {until_s[one.instance]:g} s already")
            until_s[one.instance] = one.at_s + one.for_s

    @property
    def outages(self) -> tuple[Failure, ...]:
        """The failures, as such."""
        return tuple(one for one in self.failures if isinstance(one, Failure))

    def hardware(self, latency: LatencyModel) -> LatencyModel:
        """The pool's GPUs, given those of the run."""
        profile = latency.profile if self.gpu is None else load_profile(latency.profile.model, self.gpu)
        if self.collective is not None:
            profile = profile.linked(self.collective.latency_s, self.collective.bytes_per_s)
        if self.step_s is not None:
            profile = replace(profile, pass_s=self.step_s)
        engine = (self.tp or latency.tp, self.decode_skew, self.instances if self.expert_parallel else 1)
        if profile is latency.profile and engine == (latency.tp, latency.decode_skew, latency.ranks):
            return latency
        tp, decode_skew, ranks = engine
        return LatencyModel(profile, tp, decode_skew=decode_skew, ranks=ranks)


PrefillOnly = Pool
"""`cluster=prefill_only`: one pool, whose requests end with their first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Pools by name; the router sends a request to an instance of any that only `decode` for no other.

    A request that a pool hands over for decoding goes to an instance of the other pool that `handover` chooses (least
    loaded, as DistServe does, unless given), over the `link`. Where the pools are `tracks`, for requests of different
    kinds, a router that knows no pools (has no `check_pools`) is refused.

    Raises:
        ValueError: no pool, a pool to decode in that is not there or hands over itself, or more instances than are
            simulated at once.
    """

    pools: Mapping[str, Pool] = field(default_factory=lambda: {"prefill": Pool()})
    link: Link = field(default_factory=Link)
    handover: Router = field(default_factory=FewestRequests)
    tracks: bool = False

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError("cluster.pools is empty; a cluster needs at least one pool")
        for name, pool in self.pools.items():
            if not isinstance(pool, Pool):
                raise ValueError(f"cluster.pools.{name} is {pool!r:.60}; it must be a flowsim.pool.Pool")
            self._check_decode(name, pool)
        count = sum(pool.instances for pool in self.pools.values())
        if count > MOST_INSTANCES:
            raise ValueError(f"the pools have {count} instances; at most {MOST_INSTANCES} are simulated at once")

    def _check_decode(self, name: str, pool: Pool) -> None:
        if pool.decode in (None, HERE):
            return
        if pool.decode not in self.pools or pool.decode == name:
            choices = [HERE, *(other for other in self.pools if other != name)]
            raise ValueError(unknown(f"cluster.pools.{name}.decode", str(pool.decode), choices) + "; or null for none")
        if self.pools[pool.decode].decode is not None:
            raise ValueError(
                f"cluster.pools.{pool.decode}.decode is {self.pools[pool.decode].decode}; a pool that {name} hands "
                "over to decodes what it is given: leave its own `decode` null"
            )

    @property
    def decoding(self) -> frozenset[str]:
        """The pools that others hand over to."""
        return frozenset(pool.decode for pool in self.pools.values() if pool.decode not in (None, HERE))

    @staticmethod
    def of(cluster: Cluster | Pool) -> Cluster:
        """A pool on its own is a cluster of one."""
        if isinstance(cluster, Cluster):
            return cluster
        return Cluster(pools={"engine" if cluster.decode else "prefill": cluster})

    def hardware(self, latency: LatencyModel) -> dict[str, LatencyModel]:
        """The GPUs of each pool, given those of the run."""
        return {name: pool.hardware(latency) for name, pool in self.pools.items()}


def _failure(given: Failure | Mapping[str, float]) -> Failure:
    if isinstance(given, Failure):
        return given
    names = ("at_s", "instance", "for_s")
    for key in given:
        if key not in names:
            raise ValueError(unknown("key of a failure", str(key), names))
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"a failure needs {', '.join(missing)} too; got {dict(given)}")
    instance = given["instance"]
    return Failure(at_s=given["at_s"], instance=instance, for_s=given["for_s"])  # type: ignore[arg-type]
