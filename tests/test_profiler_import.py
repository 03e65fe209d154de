"""Importers: what they read comes out as it was measured, gaps are said, and what is not understood is named."""

from __future__ import annotations

import json
from importlib import util

import pandas as pd
import pytest

from flowsim.profiler.__main__ import main
from flowsim.profiler.models import load_gpu, load_shapes, model_names
from flowsim.profiler.trace import read_trace

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)
MLP = ("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm")
MLP += ("mlp_up_proj", "mlp_act", "mlp_down_proj", "add")
LAYERS = ("embedding", "layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
LAYERS += ("final_layernorm",)


needs_package = pytest.mark.skipif(
    not (util.find_spec("aiconfigurator_core") and util.find_spec("pyarrow")),
    reason="needs the packages aiconfigurator-core and pyarrow",
)


def mlp(tp=1):
    """A table in Vidur's own form: every operator takes (its place + tokens) milliseconds."""
    rows = [
        {"num_tokens": n, "num_tensor_parallel_workers": tp}
        | {f"time_stats.{name}.median": place + n for place, name in enumerate(MLP, start=1)}
        for n in TOKENS
    ]
    return pd.DataFrame(rows)


def serving_tables(folder):
    """LLMServingSim's dense, attention and per_sequence tables, in microseconds."""
    dense = [{"layer": layer, "tokens": n, "time_us": 10.0 + n} for layer in LAYERS for n in TOKENS]
    attention = [
        {"prefill_chunk": c, "kv_prefill": p, "n_decode": n, "kv_decode": kv, "time_us": 5.0 + c + p + n + kv}
        for c, p, n, kv in [(16, 0, 0, 0), (16, 32, 0, 0), (0, 0, 4, 128), (16, 32, 4, 128)]
    ]
    sequences = [{"layer": "lm_head", "sequences": n, "time_us": 100.0 + n} for n in TOKENS]
    for name, rows in (("dense", dense), ("attention", attention), ("per_sequence", sequences)):
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    return [f"--{name.replace('_', '-')}={folder / name}.csv" for name in ("dense", "attention", "per_sequence")]


def refusal(capsys, *arguments):
    assert main(["import", *map(str, arguments)]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    return out.err


def test_vidurs_operators_come_out_in_seconds_under_our_names(tmp_path):
    mlp().to_csv(tmp_path / "mlp.csv", index=False)
    options = ["--model=llama3-8b", "--gpu=a100", f"--mlp={tmp_path / 'mlp.csv'}", f"--out={tmp_path / 't.csv'}"]
    assert main(["import", "vidur", *options]) == 0
    trace = read_trace(tmp_path / "t.csv")
    gemm = trace[trace["operator"] == "qkv_gemm"].set_index("new_tokens")["latency_s"]
    assert gemm.to_dict() == pytest.approx({n: (3 + n) / 1e3 for n in TOKENS})
    assert set(trace["operator"]) >= {"residual_add", "post_attention_residual_add", "final_norm", "down_gemm"}
    assert (trace["model"] + trace["gpu"]).unique().tolist() == ["llama3-8ba100"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda table: table.drop(columns="time_stats.mlp_act.median"),
            "no column mlp_act_ms or time_stats.mlp_act.median",
        ),
        (lambda table: table.drop(columns="num_tokens"), "no column num_tokens"),
        (lambda table: table.assign(num_tensor_parallel_workers=8), "has no rows with 1; found: [8]"),
        (
            lambda table: table.assign(**{"time_stats.emb.median": [1.0, 1, 0, 1, 1, 1, 1, 1]}),
            "line 4: time_stats.emb.median is 0.0",
        ),
    ],
)
def test_vidurs_importer_names_the_column_and_the_row_that_it_refuses(tmp_path, capsys, change, complaint):
    change(mlp()).to_csv(tmp_path / "mlp.csv", index=False)
    options = ["--model=llama3-8b", "--gpu=a100", f"--mlp={tmp_path / 'mlp.csv'}", f"--out={tmp_path / 't.csv'}"]
    assert complaint in refusal(capsys, "vidur", *options)


def test_llmservingsims_tables_keep_every_regime_of_attention_and_estimate_the_all_reduce(tmp_path, capsys):
    options = [*serving_tables(tmp_path), "--model=llama3-8b", "--gpu=rtx4090", "--tp=2", f"--out={tmp_path / 't.csv'}"]
    assert main(["import", "llmservingsim", *options]) == 0
    assert "all-reduce: not in the tables; estimated" in capsys.readouterr().err
    trace = read_trace(tmp_path / "t.csv")
    attention = trace[trace["operator"] == "attention"]
    columns = ["new_tokens", "cached_tokens", "decodes", "decode_kv_tokens"]
    assert attention[columns].to_numpy().tolist() == [[16, 0, 0, 0], [16, 32, 0, 0], [0, 0, 4, 128], [16, 32, 4, 128]]
    assert attention["latency_s"].tolist() == pytest.approx([21e-6, 53e-6, 137e-6, 185e-6])
    assert trace[trace["operator"] == "lm_head"]["sequences"].tolist() == list(TOKENS)
    meet = trace[(trace["operator"] == "all_reduce_mlp") & (trace["new_tokens"] == 1024)]
    assert meet["latency_s"].item() == pytest.approx(40e-6 + 1024 * 8192 / 16e9)
    assert meet["source"].item().startswith("estimated")


def test_llmservingsims_importer_names_a_layer_that_it_does_not_know(tmp_path, capsys):
    options = [*serving_tables(tmp_path), "--model=llama3-8b", "--gpu=rtx4090", f"--out={tmp_path / 't.csv'}"]
    table = pd.read_csv(tmp_path / "dense.csv")
    table.loc[5, "layer"] = "mystery"
    table.to_csv(tmp_path / "dense.csv", index=False)
    assert "dense.csv: line 7: layer is 'mystery'; allowed: embedding" in refusal(capsys, "llmservingsim", *options)


@needs_package
def test_the_package_gives_the_measured_points_where_the_shape_is_on_its_grid(tmp_path):
    options = ["--system=h100_sxm", "--model=llama3-8b", "--tp", "1", "2", f"--out={tmp_path / 't.csv'}"]
    assert main(["import", "aiconfigurator", *options]) == 0
    trace = read_trace(tmp_path / "t.csv")
    one = trace[(trace["tp"] == 1) & (trace["new_tokens"] == 2048) & (trace["batch"] == 1)].set_index("operator")
    assert 1e3 * one.loc["qkv_gemm", "latency_s"] == pytest.approx(0.129, abs=5e-4)
    assert 1e3 * one.loc["o_proj_gemm", "latency_s"] == pytest.approx(0.087, abs=5e-4)
    assert 1e3 * one.loc["gate_up_gemm", "latency_s"] == pytest.approx(0.588, rel=0.01)
    assert 1e3 * one.loc["down_gemm", "latency_s"] == pytest.approx(0.284, rel=0.01)
    assert 1e3 * one.loc["attention", "latency_s"] == pytest.approx(0.089, abs=5e-4)
    assert "n = 28672 as 16384 + 12288" in one.loc["gate_up_gemm", "source"]
    assert "all_reduce_mlp" in set(trace[trace["tp"] == 2]["operator"])


@needs_package
def test_every_gap_of_the_package_is_said_on_stderr_and_in_the_source(tmp_path, capsys):
    options = ["--system=a100_sxm", "--model=qwen2.5-14b", "--tp=2", f"--out={tmp_path / 't.csv'}"]
    assert main(["import", "aiconfigurator", *options]) == 0
    said = capsys.readouterr().err
    for gap in (
        "attention: no cached-prefix axis",
        "query heads = 20 between 16 and 24 with 4 KV heads",
        "n = 13824 between 12288 and 16384",
        "k = 6912 between 6144 and 7168",
        "estimated from memory bandwidth",
    ):
        assert gap in said
    sources = read_trace(tmp_path / "t.csv").groupby("operator")["source"].first()
    assert "query heads = 20 between 16 and 24" in sources["attention"]
    assert sources["rope"].startswith("estimated")


@needs_package
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--system=h100"], "unknown system 'h100' of aiconfigurator-core; did you mean 'h100_"),
        (["--system=h100_sxm", "--backend=vlm"], "has no gemm_perf under h100_sxm/gemm/vlm"),
        (["--system=h100_sxm", "--tp=3"], "tp=3: llama3-8b has 32 query heads, which do not divide"),
    ],
)
def test_the_packages_importer_refuses_what_it_does_not_have(tmp_path, capsys, options, complaint):
    asked = ["aiconfigurator", "--model=llama3-8b", f"--out={tmp_path / 't.csv'}", *options]
    assert complaint in refusal(capsys, *asked)


def test_without_the_package_the_importer_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flowsim.profiler.importers.perf_tables.util.find_spec", lambda _: None)
    asked = ["aiconfigurator", "--system=h100_sxm", "--model=llama3-8b", f"--out={tmp_path / 't.csv'}"]
    assert "pip install 'flowsim-prefill[aiconfigurator]'" in refusal(capsys, *asked)


def test_csv_traces_are_joined(tmp_path):
    mlp().to_csv(tmp_path / "mlp.csv", index=False)
    for gpu in ("a", "b"):
        options = ["--model=llama3-8b", f"--gpu={gpu}", f"--mlp={tmp_path / 'mlp.csv'}", f"--out={tmp_path / gpu}.csv"]
        assert main(["import", "vidur", *options]) == 0
    assert main(["import", "csv", f"{tmp_path}/a.csv", f"{tmp_path}/b.csv", f"--out={tmp_path}/both.csv"]) == 0
    assert sorted(read_trace(tmp_path / "both.csv")["gpu"].unique()) == ["a", "b"]


def test_the_shapes_of_the_field_have_the_parameters_that_their_names_say():
    billions = {name: load_shapes(name).parameters / 1e9 for name in model_names()}
    said = {"llama3-8b": 8.03, "llama3-70b": 70.55, "qwen2.5-14b": 14.77, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53}
    assert billions == pytest.approx(said, rel=1e-3)


def test_a_hugging_face_config_gives_the_same_shapes_as_the_table(tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "_name_or_path": "Qwen/qwen3-30b-a3b",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert load_shapes(str(path)) == load_shapes("qwen3-30b-a3b")
    path.write_text(json.dumps({**config, "vocab_size": None}))
    with pytest.raises(ValueError, match="no whole number above 0 under vocab_size"):
        load_shapes(str(path))


def test_kv_heads_are_repeated_where_there_are_fewer_than_ranks():
    rank = load_shapes("qwen3-30b-a3b").rank(8)
    assert (rank.q_heads, rank.kv_heads) == (4, 1)
    assert rank.gemms["qkv_gemm"] == ((4 + 2) * 128, 2048)


def test_unknown_models_and_gpus_are_answered_with_near_names():
    with pytest.raises(ValueError, match="did you mean 'llama3-8b'"):
        load_shapes("llama3-8")
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        load_gpu("h10")
