"""What a person sees on a terminal, and in Jupyter."""

from __future__ import annotations

import io
import math
import signal
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console
from toys import checked, toy_latency, workload

from flowsim import Alone, ComposedPolicy, LatencyModel, PrefillOnly, load_profile, simulate
from flowsim.__main__ import gpus_of
from flowsim.config import build, compose
from flowsim.core import Request
from flowsim.load import offered_load
from flowsim.pool import Cluster
from flowsim.report.terminal import RunProgress, class_table, header, interruptible
from flowsim.task import capacity_words, notes
from flowsim.workload import mixed


def shown(what: object) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    console.print(what)
    return console.file.getvalue()


def run():
    requests = workload((0.0, 5000, 9.0), (0.1, 100, 0.2), (0.2, 100, 0.2), (0.3, 200))
    return checked(requests, ComposedPolicy("arrival", Alone(), "request"), toy_latency(1e-4))


def test_the_load_before_a_run_is_the_one_that_its_summary_reports():
    two_track = ["cluster=two_track", "router=two_track", "cluster.pools.batch.gpu=h100"]
    for overrides in (["seed=1"], ["cluster.instances=3", "policy=layer_sedf"], ["cluster=pd"], two_track):
        setup = build(compose(["workload.num_requests=200", *overrides]))
        assert setup.offered_load() == pytest.approx(setup.run().summary()["offered_load"])


def test_the_load_of_different_gpus_is_a_share_of_what_they_can_do_together():
    requests = mixed(rate_rps=5.0, num_requests=300, seed=1)
    fast, slow = toy_latency(1e-5), toy_latency(3e-5)
    alone = offered_load(requests, [(1, fast)])
    assert offered_load(requests, [(1, fast), (3, slow)]) == pytest.approx(alone / 2)
    assert offered_load(requests, [(2, fast)]) == pytest.approx(alone / 2)


def test_there_is_no_load_without_a_rate():
    assert offered_load([], [(1, toy_latency())]) is None
    assert offered_load([Request(id=0, arrival_s=1.0, prompt_tokens=1)], [(1, toy_latency())]) is None
    assert build(compose(["workload=closed_loop"])).offered_load() is None


def test_a_run_that_offers_more_than_the_gpus_can_do_is_warned_about():
    assert "warning" in header("a title", 100, 1.01).plain
    assert "warning" not in header("a title", 100, 1.0).plain
    assert header("a title", 100, None).plain == "a title\n100 requests"


def test_the_load_is_said_to_be_of_the_instances_that_prefill():
    for cluster, words in (
        ("prefill_only", "capacity"),
        ("two_track", "capacity"),
        ("pd", "the capacity of prefill"),
        ("colocated", "capacity without decoding"),
    ):
        needs = {"colocated": ["policy=vllm"], "two_track": ["router=two_track"]}.get(cluster, [])
        setup = build(compose([f"cluster={cluster}", "workload.num_requests=50", *needs]))
        words_of_it = capacity_words(Cluster.of(setup.cluster))
        assert words_of_it == words
        assert header("t", 50, 0.5, words_of_it).plain.endswith(f"offered load 0.50 of {words}")
        assert any(f"of {words}, utilisation" in line for line in notes(setup.run().summary(), words_of_it))


def test_a_title_counts_every_gpu_of_a_run():
    for overrides, words in (
        ([], "1 x a100"),
        (["cluster.instances=3", "tp=2"], "6 x a100"),
        (["cluster=pd"], "2 x a100"),
        (["cluster=pd", "cluster.pools.decode.gpu=h100", "cluster.pools.decode.instances=4"], "1 x a100 and 4 x h100"),
    ):
        config = compose([*overrides, "workload.num_requests=2"])
        assert gpus_of(config) == words
        assert repr(build(config).run()).endswith(f" on {words})")


def test_where_tokens_are_decoded_the_table_has_their_tbt_and_joint_attainment():
    given = ["cluster=pd", "workload=azure_conv", "workload.rate_rps=4", "workload.num_requests=60"]
    result = build(compose(given)).run()
    assert not {"TBT p50", "joint"} & set(shown(class_table(run(), "a title")).split("\n")[2].split("  "))
    text = shown(class_table(result, "a title"))
    figures = result.summary()
    assert "TBT p50" in text
    for cell in (figures["tbt_mean_s"]["p50"], figures["tbt_mean_s"]["p99"], figures["ttft_s"]["p99"]):
        assert f" {cell:.3f} " in text
    assert text.count(f" {figures['joint_attainment']:.2%} ") >= 2  # of the only class, and of all
    assert "<th>joint</th>" in result._repr_html_()


def test_a_narrow_terminal_folds_class_names_and_loses_no_column():
    result = build(compose(["cluster=pd", "workload=azure_conv", "workload.num_requests=60"])).run()
    console = Console(file=io.StringIO(), width=80)
    console.print(class_table(result, "a title"))
    lines = console.file.getvalue().splitlines()
    assert "paused" in "".join(lines)
    assert max(map(len, lines)) <= 80
    assert "conversation" in "".join(line[:9].strip() for line in lines)


def test_attainment_is_coloured_by_how_good_it_is():
    lines = shown(class_table(run(), "a title")).splitlines()
    (row,) = [line for line in lines if "default" in line]
    assert "\x1b[31m33.33%" in row  # red: one of the three with an SLO met it


def test_progress_shows_the_simulated_time_once_a_run_takes_long(monkeypatch, capsys):
    monkeypatch.setattr("flowsim.report.terminal.PATIENCE_S", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    with RunProgress(1000) as progress:
        progress(500, 123.4)
    err = capsys.readouterr().err
    assert "t = 123.4 s" in err
    assert "500/1000" in err


def test_ctrl_c_asks_first_and_interrupts_the_second_time():
    with interruptible() as pressed:
        assert not pressed()
        signal.raise_signal(signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_jupyter_shows_results_policies_and_profiles_as_tables():
    profile = load_profile("llama3-8b", "a100")
    odd = mixed(rate_rps=5.0, num_requests=50, seed=1)
    odd = [Request(**{**vars_of(one), "slo_class": "<b>&"}) for one in odd]
    result = simulate(odd, policy=run_policy(), latency=LatencyModel(profile), cluster=PrefillOnly())
    for thing, words in (
        (result, ["<b>&", "50", "attained"]),
        (run_policy(), ["slack_edf", "operator", "inf"]),
        (profile, ["llama3-8b", "a100", "1, 2, 4"]),
    ):
        tree = ET.fromstring(thing._repr_html_())
        cells = [cell.text for cell in tree.iter() if cell.text]
        for word in words:
            assert any(word in cell for cell in cells), word


def run_policy() -> ComposedPolicy:
    return ComposedPolicy("slack_edf", Alone(), "operator", max_suspend_s=math.inf)


def vars_of(request: Request) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}
