"""Routers and pools: who gets a request, what a router may see, and many servers behind one router."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import toy_latency, workload

from flowsim import (
    Alone,
    Cluster,
    ComposedPolicy,
    LatencyModel,
    Pool,
    Request,
    Result,
    SLOAware,
    TokenBudget,
    load_profile,
    simulate,
)
from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.router import (
    FewestRequests,
    LeastWork,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
    SlackAware,
    TwoTrack,
)
from flowsim.testing import make_view
from flowsim.workload import mixed, sessions

ROUTERS = {
    "round_robin": RoundRobin,
    "fewest_requests": FewestRequests,
    "least_work": LeastWork,
    "power_of_two": PowerOfTwo,
    "slack_aware": SlackAware,
    "prefix_affinity": PrefixAffinity,
    "two_track": TwoTrack,
}


def fcfs() -> ComposedPolicy:
    return ComposedPolicy("arrival", Alone(), "request")


def two_pools(short: int = 1, long: int = 1) -> Cluster:
    return Cluster(pools={"realtime": Pool(instances=short), "batch": Pool(instances=long, policy=chunked())})


def chunked() -> ComposedPolicy:
    return ComposedPolicy("arrival", TokenBudget(200), "pass")


def routed(
    requests: list[Request], router: object, cluster: Cluster | Pool, latency: LatencyModel | None = None
) -> Result:
    """`simulate` under first come first served with the laws of a run checked."""
    latency = latency or toy_latency()
    result = simulate(requests, policy=fcfs(), latency=latency, cluster=cluster, router=router)
    check_result(result, Cluster.of(cluster).hardware(latency))
    return result


def instances_of(result: Result) -> list[int]:
    return result.requests.prefill_instance.tolist()


# ---------------------------------------------------------------- what each router chooses


@dataclass
class Seen:
    """An instance as a router may know it, and nothing else."""

    index: int
    busy_s: float = 0.0
    token_s: float = 1.0
    requests: int = 0
    pool: str = "prefill"
    view: object = None

    def outstanding_s(self) -> float:
        return self.busy_s

    def predicted_s(self, prompt_tokens: int) -> float:
        return self.token_s * prompt_tokens


class Secretive(Request):
    """A request whose output length nobody may ask for before it has been decoded."""

    @property
    def output_tokens(self):
        raise AssertionError("a router asked for the output length")


def asked(prompt_tokens: int = 10, **fields: object) -> Request:
    """A request that has no output length to see."""
    request = object.__new__(Secretive)
    whole = Request(id=0, arrival_s=0.0, prompt_tokens=prompt_tokens, **fields)
    for name in Request.__slots__:
        if name != "output_tokens":
            object.__setattr__(request, name, getattr(whole, name))
    return request


def test_round_robin_takes_each_in_turn():
    router, servers = RoundRobin(), [Seen(0), Seen(1), Seen(2)]
    assert [router.route(asked(), servers).index for _ in range(5)] == [0, 1, 2, 0, 1]


def test_fewest_requests_and_least_work_break_ties_by_index():
    servers = [Seen(0, 5.0, requests=1), Seen(1, 2.0, requests=3), Seen(2, 2.0, requests=1)]
    assert FewestRequests().route(asked(), servers).index == 0
    assert LeastWork().route(asked(), servers).index == 1


def test_least_work_counts_the_requests_own_time_on_unequal_gpus():
    assert LeastWork().route(asked(100), [Seen(0, 0.0, token_s=1.0), Seen(1, 20.0, token_s=0.5)]).index == 1


def test_power_of_two_never_takes_the_worst_of_three_and_reaches_the_others():
    servers = [Seen(0, 1.0), Seen(1, 2.0), Seen(2, 3.0)]
    chosen = {PowerOfTwo(seed).route(asked(), servers).index for seed in range(200)}
    assert chosen == {0, 1}


def test_power_of_two_is_fair_among_equals_and_repeats_with_its_seed():
    servers = [Seen(number, float(number)) for number in range(5)]

    def counts(seed: int) -> list[int]:
        router = PowerOfTwo(seed)
        return np.bincount([router.route(asked(), servers).index for _ in range(4000)], minlength=5).tolist()

    # the lower of two distinct ones of five: k is it with probability (4 - k) / 10
    assert counts(1) == counts(1) != counts(2)
    assert np.array(counts(1)) / 4000 == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0], abs=0.03)


@pytest.mark.parametrize(
    ("slo_s", "margin", "chosen"),
    [(100.0, 0.0, 2), (25.0, 0.0, 1), (30.0, 0.3, 1), (5.0, 0.0, 0), (math.inf, 0.0, 0)],
)
def test_slack_aware_takes_the_busiest_queue_that_still_meets_the_deadline_else_the_least_busy(slo_s, margin, chosen):
    servers = [Seen(0, 0.0), Seen(1, 10.0), Seen(2, 20.0)]
    assert SlackAware(margin).route(asked(10, ttft_slo_s=slo_s), servers).index == chosen


def test_two_track_goes_by_class_then_by_length_and_to_the_other_track_where_one_is_down():
    servers = [Seen(0, 1.0, pool="realtime"), Seen(1, 0.0, pool="realtime"), Seen(2, 9.0, pool="batch")]
    router = TwoTrack(threshold_tokens=100, classes={"report": "batch"})
    assert router.route(asked(100), servers).index == 1
    assert router.route(asked(101), servers).index == 2
    assert router.route(asked(5, slo_class="report"), servers).index == 2
    assert router.route(asked(101), servers[:2]).index == 1


def test_prefix_affinity_goes_where_the_prefix_is_until_the_queue_there_costs_more_than_it_saves():
    router = PrefixAffinity(block_tokens=10)
    servers = [Seen(0), Seen(1)]
    talk = asked(45, prefix_hashes=(1, 2, 3, 4))
    assert router.route(talk, [Seen(0, 1.0), Seen(1)]).index == 1
    assert router.route(talk, servers).index == 1  # 40 of 45 tokens are there
    assert router.route(talk, [Seen(0), Seen(1, 39.0)]).index == 1
    assert router.route(talk, [Seen(0), Seen(1, 41.0)]).index == 0
    assert router.route(asked(45, prefix_hashes=(8, 9)), servers).index == 0


def test_prefix_affinity_forgets_what_was_sent_long_ago():
    router = PrefixAffinity(memory_blocks=4, block_tokens=10)
    router.route(asked(45, prefix_hashes=(1, 2, 3, 4)), [Seen(1)])
    router.route(asked(25, prefix_hashes=(8, 9)), [Seen(1)])  # displaces 3 and 4
    known = asked(45, prefix_hashes=(1, 2, 3, 4))
    assert router.route(known, [Seen(0), Seen(1, 19.0)]).index == 1
    assert router.route(known, [Seen(0), Seen(1, 19.0)]).index == 1
    assert router.route(asked(45, prefix_hashes=(1, 2, 3, 5)), [Seen(0, 0.0), Seen(2, 0.0)]).index == 0


@pytest.mark.parametrize("name", ROUTERS)
def test_every_shipped_router_needs_no_more_than_the_protocol_and_no_output_length(name):
    servers = [Seen(0, 2.0, pool="realtime"), Seen(1, 1.0, pool="batch"), Seen(2, 0.0, pool="batch")]
    for server in servers:
        server.view = make_view()
    router = build(compose([f"router={name}"])).router
    assert type(router) is ROUTERS[name]
    for tokens in (1, 5000):
        request = asked(tokens, ttft_slo_s=3.0, prefix_hashes=(1, 2))
        assert router.route(request, servers) in servers


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: SlackAware(1.5), "router.margin is 1.5; it must be within 0..1"),
        (lambda: TwoTrack(threshold_tokens=0), "router.threshold_tokens is 0; it must be a whole number"),
        (lambda: PrefixAffinity(memory_blocks=0), "router.memory_blocks is 0; it must be a whole number"),
    ],
)
def test_a_router_says_which_value_is_out_of_range(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


def test_a_router_that_names_a_pool_which_is_not_there_says_so_before_the_run():
    with pytest.raises(ValueError, match="of router=two_track"):
        routed(workload((0.0, 5)), TwoTrack(), Pool())


def test_pools_that_are_tracks_want_a_router_that_tells_them_apart_unless_told_otherwise():
    small = ["workload.num_requests=20", "workload.rate_rps=12"]
    with pytest.raises(ValueError, match="use router=two_track, or cluster"):
        build(compose(["cluster=two_track", *small])).run()
    for more in ("router=two_track", "cluster.tracks=false"):
        assert build(compose(["cluster=two_track", more, *small])).run().summary()["unfinished"] == 0


def test_a_router_must_answer_one_of_the_servers():
    class Lost:
        def route(self, request, servers):
            return servers

    with pytest.raises(ValueError, match=r"Lost.route answered \[instance 0 of prefill\]; it must be one of"):
        routed(workload((0.0, 5)), Lost(), Pool())


# ---------------------------------------------------------------- in a run


def test_what_is_outstanding_is_the_prompts_without_a_first_token_less_what_has_run():
    seen = []

    class Watching:
        def route(self, request, servers):
            seen.append([server.outstanding_s() for server in servers])
            return servers[0]

    requests = workload((0.0, 10), (1.0, 20), (6.0, 5), (15.0, 1), (40.0, 1))
    routed(requests, Watching(), Pool(instances=2))
    assert seen == [[0.0, 0.0], [9.0, 0.0], [24.0, 0.0], [20.0, 0.0], [0.0, 0.0]]


def test_what_a_paused_prefill_has_had_is_not_outstanding():
    seen = []

    class Watching:
        def route(self, request, servers):
            seen.append(servers[0].outstanding_s())
            return servers[0]

    requests = workload((0.0, 100), (31.0, 10, 15.0), (36.0, 1))
    policy = ComposedPolicy("deadline", Alone(), "operator")
    latency = toy_latency()
    result = simulate(requests, policy=policy, latency=latency, router=Watching())
    check_result(result, latency)
    stopped_s = result.preemptions.stopped_s[0]
    assert seen == pytest.approx([0.0, 69.0, 100.0 - stopped_s + 10.0 - (36.0 - stopped_s)])


@pytest.mark.parametrize("name", sorted(ROUTERS.keys() - {"two_track"}))
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 9), st.integers(1, 900), st.sampled_from([30.0, math.inf])), max_size=30),
    instances=st.integers(1, 4),
    policy=st.sampled_from(["fcfs", "chunked", "preemptive"]),
)
def test_any_router_before_any_pool_keeps_the_laws_and_repeats(name, rows, instances, policy):
    arrivals = np.cumsum([row[0] for row in rows])
    requests = workload(*[(float(at), row[1], row[2]) for at, row in zip(arrivals, rows, strict=True)])
    policies = {"fcfs": fcfs(), "chunked": chunked(), "preemptive": ComposedPolicy("slack_edf", SLOAware(), "layer")}
    latency, cluster, router = toy_latency(0.1), Pool(instances=instances), ROUTERS[name]()
    results = [
        simulate(requests, policy=policies[policy], latency=latency, cluster=cluster, router=router) for _ in range(2)
    ]
    for result in results:
        check_result(result, latency)
    assert results[0].requests.equals(results[1].requests)
    assert set(instances_of(results[0])) <= set(range(instances))


@pytest.mark.parametrize("name", sorted(ROUTERS.keys() - {"two_track"}))
def test_output_lengths_never_change_where_a_prefill_goes(name):
    requests = mixed(rate_rps=20.0, num_requests=150, seed=3)
    longer = [replace(request, output_tokens=1 + 7 * request.id % 300) for request in requests]
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    sent = [instances_of(routed(given_, ROUTERS[name](), Pool(instances=3), latency)) for given_ in (requests, longer)]
    assert sent[0] == sent[1]


def test_two_track_pools_have_their_own_policy_gpu_and_tp_and_keep_their_kinds_apart():
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    cluster = Cluster(
        pools={
            "realtime": Pool(instances=2, policy=ComposedPolicy("slack_edf", SLOAware(), "operator")),
            "batch": Pool(gpu="h100", tp=2, policy=ComposedPolicy("arrival", TokenBudget(512), "pass")),
        }
    )
    requests = mixed(rate_rps=15.0, num_requests=300, seed=5)
    result = simulate(requests, policy=fcfs(), latency=latency, cluster=cluster, router=TwoTrack(threshold_tokens=4096))
    check_result(result, cluster.hardware(latency))
    table = result.requests
    assert ((table.prefill_instance == 2) == (table.prompt_tokens > 4096)).all()
    assert set(table.prefill_instance) == {0, 1, 2}
    assert [pool["gpu"] for pool in result.run["pools"].values()] == ["a100", "h100"]
    pools = result.summary()["pools"]
    assert (pools["realtime"]["gpus"], pools["batch"]["gpus"]) == (2, 2)
    assert result.summary()["gpus"] == 4
    assert pools["realtime"]["requests"] + pools["batch"]["requests"] == 300
    assert (result.segments[result.segments.instance == 2].tokens <= 512).all()
    for name, pool in cluster.pools.items():
        hardware = pool.hardware(latency).bound(pass_tokens=8192, stops=pool.policy.stops)
        first, last = result.run["pools"][name]["instances"]
        mine = table[table.prefill_instance.between(first, last)]
        assert mine.isolated_s.tolist() == [hardware.isolated_s(tokens) for tokens in mine.prompt_tokens]


def test_one_pool_on_its_own_is_a_cluster_of_one():
    requests = mixed(rate_rps=12.0, num_requests=200, seed=5)
    latency = LatencyModel(load_profile("llama3-8b", "a100"))
    alone, named = (
        routed(requests, RoundRobin(), cluster, latency)
        for cluster in (Pool(instances=2), Cluster(pools={"prefill": Pool(instances=2)}))
    )
    for name, columns in alone.tables.items():
        for column, cells in columns.items():
            np.testing.assert_array_equal(cells, named.tables[name][column], err_msg=f"{name}.{column}")


def test_prefix_affinity_keeps_a_session_together_where_round_robin_scatters_it():
    requests = sessions(num_sessions=40, rate_rps=0.5, system_prompts=1, system_tokens=0, seed=2)
    latency = LatencyModel(load_profile("llama3-8b", "a100"))

    def scattered(router: object) -> float:
        """The mean number of instances that the turns of a session, told by its first block, were sent to."""
        result = routed(requests, router, Pool(instances=4), latency)
        where: dict[int, set[int]] = {}
        for request, instance in zip(requests, instances_of(result), strict=True):
            if request.prefix_hashes:
                where.setdefault(request.prefix_hashes[0], set()).add(instance)
        return float(np.mean([len(instances) for instances in where.values()]))

    assert scattered(PrefixAffinity()) < 1.2 < 1.8 < scattered(RoundRobin())


# ---------------------------------------------------------------- theory: M/M/c behind a router


def erlang_c_wait_s(rate_rps: float, mean_s: float, servers: int) -> float:
    """Mean wait of M/M/c: C(c, a) / (c mu - lambda), with the Erlang C probability of waiting."""
    a = rate_rps * mean_s
    top = a**servers / math.factorial(servers) * servers / (servers - a)
    waiting = top / (sum(a**k / math.factorial(k) for k in range(servers)) + top)
    return waiting / (servers / mean_s - rate_rps)


def waits_s(router: object, servers: int, load: float, n: int, seed: int) -> tuple[float, float]:
    """Mean wait and the half width of its 99.95 % confidence interval, over 20 stretches of one run."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1.0 / (servers * load), n))
    sizes = rng.geometric(1e-3, n)  # exponential with mean 1 s, in ms
    requests = workload(*zip(arrivals_s.tolist(), sizes.tolist(), strict=True))
    result = simulate(
        requests,
        policy=fcfs(),
        latency=toy_latency(0.001),
        cluster=Pool(instances=servers, kv_blocks=10**9, pass_tokens=10**9),
        router=router,
    )
    check_result(result, toy_latency(0.001))
    means_s = np.array([part.mean() for part in np.array_split(result.requests.queued_s.to_numpy(), 20)])
    return float(means_s.mean()), 4.0 * float(means_s.std(ddof=1)) / math.sqrt(20)


@pytest.mark.parametrize(("servers", "load"), [(2, 0.6), (4, 0.7)])
def test_the_instance_with_least_work_makes_an_mmc_queue(servers, load):
    """First come first served at c servers with one queue is the same as sending each job to the server that will be
    free first (Kiefer and Wolfowitz, 1955), which LeastWork does as it knows the work exactly."""
    got_s, half_width_s = waits_s(LeastWork(), servers, load, 30_000, seed=11)
    expected_s = erlang_c_wait_s(servers * load, 1.0, servers)
    assert half_width_s < 0.35 * expected_s
    assert abs(got_s - expected_s) < half_width_s, (got_s, expected_s)


def test_blind_and_half_blind_routers_wait_longer_than_mmc_in_the_known_order():
    load, servers = 0.8, 4
    waits = {
        name: waits_s(ROUTERS[name](), servers, load, 12_000, seed=5)[0]
        for name in ("least_work", "power_of_two", "round_robin")
    }
    random_split_s = load / (1.0 - load)  # c queues M/M/1
    assert waits["least_work"] < waits["power_of_two"] < waits["round_robin"] < random_split_s
