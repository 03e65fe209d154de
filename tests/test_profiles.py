"""Laws of every shipped profile, and the sums that its sources say."""

from __future__ import annotations

import copy
from importlib import util
from itertools import pairwise

import pytest
import yaml

from experiments import make_profiles
from flowsim import Alone, ComposedPolicy, LatencyModel, Request, Stops, load_profile, simulate
from flowsim.names import shipped
from flowsim.profile import available_profiles, profile_table, read_profile
from flowsim.profiler.entries import fit_rows
from flowsim.profiler.evaluate import PREFILL_KINDS, layer_seconds, operator_seconds, pass_seconds
from flowsim.profiler.importers.aiconfigurator import Choices, import_aiconfigurator
from flowsim.profiler.importers.perf_tables import PerfTables
from flowsim.profiler.models import load_gpu, load_shapes
from flowsim.profiler.trace import validate

needs_package = pytest.mark.skipif(
    not (util.find_spec("aiconfigurator_core") and util.find_spec("pyarrow")),
    reason="needs the packages aiconfigurator-core and pyarrow",
)
SHIPPED = [(model, gpu, tp) for model, gpu, degrees in profile_table() for tp in degrees]
COUNTS = (*range(1, 65), *range(65, 2049, 31), *range(2049, 40_000, 997))
GEMMS = ("qkv_gemm", "o_proj_gemm", "gate_up_gemm", "down_gemm")
_FILES: dict[tuple[str, str], dict] = {}


def file_of(model, gpu):
    """The parsed profile; parsed once."""
    if (model, gpu) not in _FILES:
        text = (shipped("profiles") / model / f"{gpu}.yaml").read_text(encoding="utf-8")
        _FILES[model, gpu] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return _FILES[model, gpu]


def operators(model, gpu, tp):
    return file_of(model, gpu)["tp"][tp]["operators"]


def is_compute(entry):
    return entry["kind"] != "all_reduce"


def is_gemm_or_attention(entry):
    return entry["kind"] == "attention" or entry["name"] in GEMMS


def test_the_models_and_gpus_of_the_field_are_there():
    table = {(model, gpu): set(degrees) for model, gpu, degrees in profile_table()}
    for gpu in ("a100", "h100", "h200"):
        assert table["llama3-8b", gpu] == {1, 2, 4}
        assert table["llama3-70b", gpu] == {4, 8}
        for model in ("qwen2.5-14b", "qwen3-32b", "qwen3-30b-a3b"):
            assert table[model, gpu] == {1, 2}
    assert table["llama3-8b", "rtxpro6000"] == table["qwen3-32b", "rtxpro6000"] == {1, 2}
    assert ("llama3-8b", "a800") in table
    assert ("llama3-8b", "rtx4090") in table
    assert ("qwen3-30b-a3b", "rtxpro6000") in table
    assert len(SHIPPED) >= 20


@pytest.mark.parametrize(("model", "gpu", "tp"), SHIPPED)
def test_more_tokens_cost_more_and_more_context_never_less(model, gpu, tp):
    for entry in operators(model, gpu, tp):
        if entry["kind"] not in PREFILL_KINDS:
            assert min(entry["coefficients"].values()) >= 0.0 < max(entry["coefficients"].values())
            continue
        is_sequences = entry["kind"] == "per_sequence"
        times_s = [operator_seconds(entry, n, sequences=n) for n in COUNTS]
        assert times_s[0] > 0.0
        assert all(earlier < later for earlier, later in pairwise(times_s)), entry["name"]
        for n in () if is_sequences else (1, 100, 5000):
            context_s = [operator_seconds(entry, n, p) for p in (0, 1, 64, 4096, 200_000)]
            assert context_s == sorted(context_s), entry["name"]


@pytest.mark.parametrize(("model", "gpu", "tp"), SHIPPED)
def test_the_chunks_of_a_prompt_never_cost_less_than_the_whole(model, gpu, tp):
    (entry,) = [entry for entry in operators(model, gpu, tp) if entry["kind"] == "attention"]
    whole_s, one_s = operator_seconds(entry, 65_536), entry["coefficients"]["1"]
    for chunk in (1024, 2048, 8192):
        chunks_s = [operator_seconds(entry, chunk, start) for start in range(0, 65_536, chunk)]
        assert sum(chunks_s) > whole_s
        if entry.get("assumed"):
            assert sum(chunks_s) - (len(chunks_s) - 1) * one_s == pytest.approx(whole_s, rel=1e-9)


@pytest.mark.parametrize(("model", "gpu"), sorted({(model, gpu) for model, gpu, _ in SHIPPED}))
def test_more_ranks_never_slow_what_a_layer_computes(model, gpu):
    profile = file_of(model, gpu)
    for few, many in pairwise(profile["tp"]):
        for tokens in (1, 16, 100, 256, 512, 1024, 2048, 4096, 8192, 16_384):
            few_s, many_s = (layer_seconds(profile, tp, tokens, 0, is_compute) for tp in (few, many))
            assert many_s <= few_s, f"TP {few} to {many}, {tokens} tokens"


@pytest.mark.parametrize(("model", "gpu", "tp"), SHIPPED)
def test_the_simulator_takes_what_the_file_says(model, gpu, tp):
    latency = LatencyModel(load_profile(model, gpu), tp, pass_tokens=100_000)
    for tokens in (1, 300, 2048, 20_000):
        said_s = pass_seconds(file_of(model, gpu), tp, tokens)
        assert latency.whole(tokens).total_s - latency.profile.pass_s == pytest.approx(said_s, rel=1e-9)
        said_s = pass_seconds(file_of(model, gpu), tp, tokens, 5000)
        assert latency.timeline([(tokens, 5000)]).total_s - latency.profile.pass_s == pytest.approx(said_s, rel=1e-9)


@pytest.mark.parametrize(("model", "gpu", "tp"), SHIPPED)
def test_every_operator_says_where_it_is_from_and_how_good_it_is(model, gpu, tp):
    profile = file_of(model, gpu)
    shapes = load_shapes(model)
    assert profile["weights_bytes"] == shapes.weights_bytes
    assert profile["kv_bytes_per_token"] == shapes.kv_bytes_per_token
    assert profile["overheads_source"]
    for entry in operators(model, gpu, tp):
        assert entry["source"].split()[0] in profile["sources"]
        assert entry.get("estimated") or entry["fit"]["points"] >= 8
        assert entry.get("estimated") or 0.0 < entry["fit"]["heldout_mape"] < 0.2
    names = [entry["name"] for entry in operators(model, gpu, tp)]
    assert ("all_reduce_mlp" in names) == ("all_reduce_attention" in names) == (tp > 1)


@pytest.mark.parametrize(
    ("gpu", "tokens", "ms"),
    [
        ("h100", 2048, 37.7),
        ("h100", 8192, 183.6),
        ("h100", 16384, 414.9),
        ("h200", 2048, 37.3),
        ("h200", 8192, 180.3),
        ("h200", 16384, 419.0),
    ],
)
def test_gemms_and_attention_on_hopper_meet_the_measured_sums(gpu, tokens, ms):
    assert 1e3 * pass_seconds(file_of("llama3-8b", gpu), 1, tokens, 0, is_gemm_or_attention) == pytest.approx(
        ms, rel=0.05
    )


@pytest.mark.parametrize(("tokens", "ms"), [(2048, 44.6), (8192, 214.0), (16384, 476.0)])
def test_all_operators_on_h100_meet_the_measured_sums(tokens, ms):
    assert 1e3 * pass_seconds(file_of("llama3-8b", "h100"), 1, tokens) == pytest.approx(ms, rel=0.10)


@pytest.mark.parametrize(("tokens", "seconds"), [(2048, 0.131), (8192, 0.588)])
def test_all_operators_on_a100_meet_the_measured_sums(tokens, seconds):
    assert pass_seconds(file_of("llama3-8b", "a100"), 1, tokens) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_llama3_8b_on_hopper_is_fitted_within_the_bars_from_256_tokens_on(gpu):
    errors = {
        entry["name"]: entry["fit"]["heldout_mape_core"] for entry in operators("llama3-8b", gpu, 1) if "fit" in entry
    }
    assert max(errors[name] for name in GEMMS) <= 0.05
    assert errors["attention"] <= 0.03


def test_llama3_8b_on_a100_is_fitted_within_8_percent_over_the_four_gemms():
    errors = {entry["name"]: entry["fit"]["heldout_mape"] for entry in operators("llama3-8b", "a100", 1)}
    assert sum(errors[name] for name in GEMMS) / 4 <= 0.08


def test_an_a800_is_an_a100_times_1_03_with_the_overheads_of_the_real_run():
    a100, a800 = file_of("llama3-8b", "a100"), file_of("llama3-8b", "a800")
    assert a800["overheads"] == {"pass_s": 0.0052, "request_s": 0.0045, "check_s": 20e-6, "switch_s": 0.0003}
    for tokens in (1, 512, 16_384):
        for tp in (1, 2, 4):
            ratio = pass_seconds(a800, tp, tokens, 0, is_compute) / pass_seconds(a100, tp, tokens, 0, is_compute)
            assert ratio == pytest.approx(1.03, rel=1e-5)


@pytest.mark.parametrize(("model", "gpu"), [("llama3-8b", "a100"), ("qwen3-30b-a3b", "h100"), ("llama3-8b", "rtx4090")])
def test_a_prompt_beyond_the_measured_range_runs_on_is_counted_and_refused_where_strict(model, gpu):
    latency = LatencyModel(load_profile(model, gpu), pass_tokens=100_000)
    kinds = ("dense", "attention", "experts")
    longest = max(entry["measured_tokens"][1] for entry in operators(model, gpu, 1) if entry["kind"] in kinds)
    assert latency.isolated_s(100_000) > 2.5 * latency.isolated_s(longest)
    requests, fcfs = (
        [Request(id=0, arrival_s=0.0, prompt_tokens=100_000)],
        ComposedPolicy("arrival", Alone(), "request"),
    )
    result = simulate(requests, policy=fcfs, latency=latency)
    assert result.requests.extrapolated.tolist() == [True]
    low, high = next(entry for entry in operators(model, gpu, 1) if entry["name"] == "qkv_gemm")["measured_tokens"]
    with pytest.raises(ValueError, match=rf"qkv_gemm \({low} to {high} tokens\)"):
        simulate(requests, policy=fcfs, latency=latency, strict=True)


def test_lm_head_and_sampler_are_paid_for_each_sequence_of_a_pass():
    latency = LatencyModel(load_profile("llama3-8b", "rtxpro6000"))
    once = [entry for entry in operators("llama3-8b", "rtxpro6000", 1) if entry["kind"] == "per_sequence"]
    assert [entry["name"] for entry in once] == ["lm_head", "sampler"]
    more_s = sum(operator_seconds(entry, 0, sequences=64) - operator_seconds(entry, 0, sequences=1) for entry in once)
    attention = latency.profile.attention[1]
    one, many = latency.timeline([(1024, 0)]), latency.timeline([(16, 0)] * 64)
    squares = 1024**2 - 64 * 16**2
    wide = 64 * max(16, attention.floor_tokens) - 1024
    saved_s = latency.profile.layers * (attention.cc_s * squares - attention.floor_s * wide)
    assert many.total_s - one.total_s == pytest.approx(more_s - saved_s, rel=1e-6)


def test_profiles_with_decodes_measured_have_their_regimes():
    mixed = load_profile("llama3-8b", "rtxpro6000")
    assert set(mixed.decode_attention) == set(mixed.mixed_attention) == {1, 2}
    package = load_profile("llama3-8b", "h100")
    assert set(package.decode_attention) == {1, 2, 4}
    assert package.mixed_attention == {}


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_a_file_of_another_version_is_refused_in_one_clear_line(tmp_path, version):
    changed = copy.deepcopy(file_of("llama3-8b", "rtx4090"))
    changed["version"] = version
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(changed))
    with pytest.raises(ValueError, match=r"p\.yaml: version is .*; allowed: 1: this release reads no other"):
        read_profile(path)


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        ("experts", {"expert_s": -1.0}, r"operators\[\d+\]\.expert_s is -1.0"),
        ("experts", {"experts_per_token": 129}, "experts_per_token is 129; allowed: at most experts, 128"),
        ("experts", {"boundary": "tail"}, "boundary is 'tail'; allowed: one of down_proj"),
        ("per_sequence", {"boundary": "head"}, "boundary is 'head'; allowed: one of tail"),
        ("per_sequence", {"slopes_s_per_sequence": []}, "slopes_s_per_sequence is '0 values'"),
        ("decode_attention", {"coefficients": {"1": 0.0}}, r"coefficients\.n is None"),
        ("dense", {"kind": "sparse"}, "kind is 'sparse'; allowed: one of dense, attention, experts"),
    ],
)
def test_a_malformed_operator_is_refused_by_its_key(tmp_path, kind, change, complaint):
    changed = copy.deepcopy(file_of("qwen3-30b-a3b", "rtxpro6000"))
    entry = next(entry for entry in changed["tp"][1]["operators"] if entry["kind"] == kind)
    entry.update(change)
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(changed))
    with pytest.raises(ValueError, match=complaint):
        read_profile(path)


def test_a_mixture_of_experts_stops_at_the_same_five_boundaries():
    latency = LatencyModel(load_profile("qwen3-30b-a3b", "h100"), stops=Stops.OPERATOR)
    ends = latency.whole(2000).passes[0].ends_s
    assert len(ends) == 5
    assert all(earlier < later for earlier, later in pairwise(ends))


def test_the_list_of_profiles_reads_the_degrees_that_the_files_have():
    assert {(model, gpu) for model, gpus in available_profiles().items() for gpu in gpus} == set(
        make_profiles.everything()
    )
    for model, gpu, degrees in profile_table():
        assert degrees == tuple(file_of(model, gpu)["tp"])


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu"), make_profiles.everything())
def test_refitting_the_measured_data_gives_exactly_the_committed_profile(model, gpu, data_dir):
    made = make_profiles.make(model, gpu, data_dir)
    assert made.text == (shipped("profiles") / model / f"{gpu}.yaml").read_text(encoding="utf-8")


@needs_package
def test_one_operator_refitted_from_the_package_is_exactly_the_committed_one():
    tables, rank = PerfTables("h200_sxm", "vllm"), load_shapes("llama3-8b").rank(1)
    trace = validate(import_aiconfigurator(tables, rank, load_gpu("h200"), Choices(), lambda _: None), "package")
    (fitted,) = fit_rows("down_gemm", trace[trace["operator"] == "down_gemm"], rank.shapes, lambda _: None)
    (committed,) = [entry for entry in operators("llama3-8b", "h200", 1) if entry["name"] == "down_gemm"]
    assert fitted.entry == committed
