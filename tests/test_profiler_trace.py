"""The operator trace: what it holds survives a round trip, and a row that breaks a rule is named."""

from __future__ import annotations

import pandas as pd
import pytest

from flowsim.profiler.trace import COLUMNS, OPTIONAL, read_trace, validate, write_trace


def trace(**changes):
    """Two good rows; `changes` replace values of the second."""
    row = {
        "model": "m",
        "gpu": "g",
        "tp": 1,
        "operator": "qkv_gemm",
        "new_tokens": 4,
        "cached_tokens": 0,
        "batch": 1,
        "latency_s": 1e-5,
        "statistic": "median",
        "repetitions": 3,
        "software": "x 1.0",
        "source": "here",
    }
    return pd.DataFrame([row, row | changes])


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_a_trace_reads_back_as_it_was_written(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    written = trace(operator="attention", new_tokens=0, decodes=3, decode_kv_tokens=77, latency_s=1.23456789e-5)
    write_trace(written, tmp_path / name)
    read = read_trace(tmp_path / name)
    assert list(read.columns) == [*COLUMNS, *OPTIONAL]
    pd.testing.assert_frame_equal(read, validate(written, "written"))


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("latency_s", 0.0, "line 3: latency_s is 0.0; allowed: finite seconds above 0"),
        ("latency_s", -1e-6, "line 3: latency_s is -1e-06"),
        ("latency_s", float("nan"), "line 3: latency_s is nan"),
        ("latency_s", "fast", "line 3: latency_s is 'fast'"),
        ("tp", 0, "line 3: tp is 0; allowed: a whole number, 1 or more"),
        ("new_tokens", 2.5, "line 3: new_tokens is 2.5; allowed: a whole number, 0 or more"),
        ("new_tokens", 0, "line 3: new_tokens is 0; allowed: 1 or more, unless decodes or sequences is"),
        ("cached_tokens", -1, "line 3: cached_tokens is -1"),
        ("operator", "qkv_gem", "line 3: operator is 'qkv_gem'; allowed: did you mean qkv_gemm"),
        ("gpu", "  ", "line 3: gpu is ''; allowed: a text"),
    ],
)
def test_a_row_that_breaks_a_rule_is_named_with_its_line_and_column(column, value, complaint):
    frame = trace().astype({column: object})
    frame.loc[1, column] = value
    with pytest.raises(ValueError, match=r"^f\.csv: ") as error:
        validate(frame, "f.csv")
    assert complaint in str(error.value)


def test_checks_and_whole_totals_are_operators_too():
    assert validate(trace(operator="whole_prefill"), "f")["operator"].iloc[1] == "whole_prefill"
    assert validate(trace(operator="check_layer"), "f")["operator"].iloc[1] == "check_layer"


def test_a_missing_column_is_named_beside_those_found(tmp_path):
    trace().drop(columns="tp").to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(ValueError, match="no column tp; found: model, gpu, operator"):
        read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("none.csv", None, "cannot read"),
        ("empty.csv", "", "cannot read"),
        ("header.csv", ",".join(COLUMNS) + "\n", "has no rows"),
        ("t.xlsx", "", "a .csv, .csv.gz or .parquet file"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, name, text, complaint):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=complaint) as error:
        read_trace(tmp_path / name)
    assert name in str(error.value)
