"""Traces: what is written is read exactly, and what is broken is named by file and line."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import math
import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowsim.check import check_result
from flowsim.config import build, compose
from flowsim.core import Request
from flowsim.pool import Cluster
from flowsim.workload import load_trace, mixed, read_trace, trace

DATA = Path(os.environ.get("FLOWSIM_DATA", Path(__file__).resolve().parents[1] / ".." / "shared" / "data"))
FIELDS = ["arrival_s", "prompt_tokens", "output_tokens", "slo_class", "ttft_slo_s", "tbt_slo_s"]


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="t.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def test_the_requests_of_a_run_that_decodes_and_evicts_replay_without_a_warning(tmp_path, caplog):
    scarce = ["cluster=colocated", "policy=layered_prefill", "cluster.kv_blocks=900", "workload.rate_rps=8"]
    setup = build(compose([*scarce, "workload=azure_conv", "workload.num_requests=60"]))
    result = setup.run()
    check_result(result, Cluster.of(setup.cluster).hardware(setup.latency))
    assert result.tables["requests"]["recomputed_tokens"].sum() > 0
    result.save(tmp_path)
    with caplog.at_level(logging.WARNING, "flowsim"):
        replayed = load_trace(tmp_path / "requests.csv")
    assert [one.prompt_tokens for one in replayed] == result.tables["requests"]["prompt_tokens"].tolist()
    assert caplog.messages == []


def as_csv(requests, line_end="\n"):
    """The requests as a run writes them: floats by repr, columns that a trace does not read between."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=line_end)
    writer.writerow(["id", *FIELDS, "ttft_s", "outcome"])
    for r in requests:
        writer.writerow([r.id, *(getattr(r, name) for name in FIELDS), repr(r.arrival_s * 1.3), "finished"])
    return text.getvalue()


# ---------------------------------------------------------------- what is right is read exactly


def test_the_smallest_trace_is_read_with_the_defaults_of_a_request(write):
    requests = load_trace(write("arrival_s,prompt_tokens\n0.0,100\n0.4,200\n0.9,300\n"))
    assert requests == [
        Request(id=0, arrival_s=0.0, prompt_tokens=100),
        Request(id=1, arrival_s=0.4, prompt_tokens=200),
        Request(id=2, arrival_s=0.9, prompt_tokens=300),
    ]


def test_requests_are_written_as_a_run_writes_them_and_read_back_exactly(write):
    requests = mixed(num_requests=2000, seed=5)
    rows, summary = read_trace(write(as_csv(requests)))
    assert rows.requests() == requests
    assert summary.columns_ignored == ("id", "ttft_s", "outcome")
    assert summary.rows == 2000
    assert summary.rate_rps == pytest.approx(1999 / requests[-1].arrival_s)


def test_a_read_request_is_like_one_that_was_constructed(write):
    read = load_trace(write("arrival_s,prompt_tokens\n0,1\n"))[0]
    made = Request(id=0, arrival_s=0.0, prompt_tokens=1)
    assert (read, hash(read), repr(read)) == (made, hash(made), repr(made))
    kinds = [type(getattr(read, name)) for name in ["id", *FIELDS, "prefix_hashes"]]
    assert kinds == [int, float, int, int, str, float, float, tuple]


slos_s = st.one_of(st.just(math.inf), st.floats(1e-6, 1e6))
requests_strategy = st.lists(
    st.tuples(
        st.floats(0.0, 2e6),
        st.integers(1, 2**31 - 1),
        st.integers(1, 10**5),
        st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=6),
        slos_s,
        slos_s,
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=80, deadline=None)
@given(rows=requests_strategy, line_end=st.sampled_from(["\n", "\r\n"]), zipped=st.booleans())
def test_any_valid_trace_is_read_exactly(tmp_path_factory, rows, line_end, zipped):
    rows.sort(key=lambda row: row[0])
    first_s = rows[0][0]
    written = [
        Request(id=i, **dict(zip(FIELDS, (row[0] - first_s, *row[1:]), strict=True))) for i, row in enumerate(rows)
    ]
    path = tmp_path_factory.getbasetemp() / ("t.csv.gz" if zipped else "t.csv")
    data = as_csv(written, line_end).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert load_trace(path) == written


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mangled_trace_is_read_exactly_or_refused_with_its_file_and_never_otherwise(tmp_path_factory, data):
    requests = mixed(num_requests=5, seed=1)
    text = as_csv(requests)
    where = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 3))
    mangled = text[:where] + data.draw(st.text('0159.,-+eEnaif \n\r"_;x\u0661\0', max_size=3)) + text[where + cut :]
    path = tmp_path_factory.getbasetemp() / "t.csv"
    path.write_bytes(mangled.encode())
    refusal = ""
    try:
        rows, summary = read_trace(path)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(f"{path}: ")
    else:
        assert summary.dropped == ()
        assert len(rows) in range(4, 7)  # a line end may be cut or added where that leaves whole rows
        cell_by_cell = path.with_name("quoted.csv")  # quoting one cell sends every cell the careful way
        cell_by_cell.write_bytes(re.sub(rb"(?<=,)finished(?=[\r\n,]|$)", b'"finished"', mangled.encode()))
        assert read_trace(cell_by_cell)[0].requests() == rows.requests()


def test_both_readers_mean_the_same(write):
    requests = mixed(num_requests=300, seed=8)
    plain = as_csv(requests)
    assert '"' not in plain
    assert load_trace(write(plain.replace("finished", '"finished"'))) == load_trace(write(plain)) == requests


def test_carriage_returns_and_a_missing_last_line_end_read_the_same(write):
    text = "arrival_s,prompt_tokens,slo_class\n0,5,a\n1.5,6,b\n"
    expected = load_trace(write(text))
    for variant in (text[:-1], text.replace("\n", "\r\n"), text.replace("\n", "\r\n")[:-2], text + "\n\n"):
        assert load_trace(write(variant)) == expected


def test_a_byte_order_mark_and_blanks_around_cells_are_no_part_of_them(write):
    text = "\ufeffarrival_s, prompt_tokens, slo_class\n0, 5, text \n1, 6, text\n"
    assert [(r.prompt_tokens, r.slo_class) for r in load_trace(write(text))] == [(5, "text"), (6, "text")]


def test_an_empty_or_infinite_slo_means_none_and_an_empty_class_the_default(write):
    text = "arrival_s,prompt_tokens,slo_class,ttft_slo_s,tbt_slo_s\n0,5,,,inf\n1,6,a,0.25,\n"
    first, second = load_trace(write(text), slo_scale=2.0)
    assert (first.slo_class, first.ttft_slo_s, first.tbt_slo_s) == ("default", math.inf, math.inf)
    assert (second.slo_class, second.ttft_slo_s, second.tbt_slo_s) == ("a", 0.5, math.inf)


def test_quoted_cells_are_read_and_rows_after_them_keep_their_line_numbers(write):
    text = 'arrival_s,prompt_tokens,slo_class,note\n0,5,"a, b","two\nlines"\n1,x,c,d\n'
    with pytest.raises(ValueError, match="line 4: prompt_tokens is 'x'"):
        load_trace(write(text))
    assert load_trace(write(text.replace("1,x", "1,7")))[0].slo_class == "a, b"


def test_whole_numbers_may_be_written_with_a_point_or_an_exponent(write):
    text = "arrival_s,prompt_tokens\n0,12.0\n1e0,1e3\n"
    assert [r.prompt_tokens for r in load_trace(write(text))] == [12, 1000]


# ---------------------------------------------------------------- order and origin


def test_arrivals_are_counted_from_the_first_however_large_the_origin(write):
    text = "arrival_s,prompt_tokens\n1700000000.0,5\n1700000000.5,6\n"
    assert [r.arrival_s for r in load_trace(write(text))] == [0.0, 0.5]


def test_equal_arrivals_keep_the_order_of_the_file(write):
    text = "arrival_s,prompt_tokens,slo_class\n" + "".join(f"0,5,{name}\n" for name in "edcba")
    rows, summary = read_trace(write(text))
    assert rows.slo_class == list("edcba")
    assert (summary.rows_out_of_order, summary.span_s, summary.rate_rps) == (0, 0.0, None)


def test_an_unsorted_trace_is_sorted_with_a_warning_and_starts_at_zero(write, caplog):
    path = write("arrival_s,prompt_tokens,slo_class\n2.0,1,a\n0.5,2,b\n1.0,3,c\n")
    with caplog.at_level(logging.INFO, logger="flowsim"):
        requests = trace(path=path)
    assert [(r.id, r.arrival_s, r.prompt_tokens, r.slo_class) for r in requests] == [
        (0, 0.0, 2, "b"),
        (1, 0.5, 3, "c"),
        (2, 1.5, 1, "a"),
    ]
    assert "2 rows out of order" in caplog.text


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_any_order_of_rows_is_sorted_stably(tmp_path_factory, arrivals):
    path = tmp_path_factory.getbasetemp() / "t.csv"
    rows = "".join(f"{arrival},{row + 1}\n" for row, arrival in enumerate(arrivals))
    path.write_text("arrival_s,prompt_tokens\n" + rows)
    order = sorted(range(len(arrivals)), key=lambda row: arrivals[row])
    assert [r.prompt_tokens for r in load_trace(path)] == [row + 1 for row in order]


def test_a_span_over_thirty_days_asks_for_the_unit(write):
    path = write("arrival_s,prompt_tokens\n1.79e15,5\n0.4,6\n")
    with pytest.raises(ValueError, match=r"t\.csv: arrivals span 1\.79e\+15 s.*unit"):
        load_trace(path)


# ---------------------------------------------------------------- bad rows


def test_times_that_are_negative_or_not_finite_are_refused_by_line_or_dropped_and_counted(write, caplog):
    path = write("arrival_s,prompt_tokens\n-0.2,5\nNaN,5\ninf,5\n0.1,7\n")
    with pytest.raises(ValueError, match=r"3 bad rows: line 2: .*'-0\.2'.*line 3: .*'NaN'.*line 4: .*'inf'"):
        load_trace(path)
    rows, summary = read_trace(path, on_bad_row="drop")
    assert [(r.id, r.arrival_s, r.prompt_tokens) for r in rows.requests()] == [(0, 0.0, 7)]
    assert len(summary.dropped) == 3
    assert summary.dropped_by_reason == {"arrival_s": 3}
    trace(path=path, on_bad_row="drop")
    assert "dropped 3 bad rows: line 2: arrival_s is '-0.2'" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (",5,1,a,1,1", "arrival_s is empty; it must be a finite number >= 0"),
        ("noon,5,1,a,1,1", "arrival_s is 'noon'"),
        ("1_0,5,1,a,1,1", "arrival_s is '1_0'"),
        ("0x10,5,1,a,1,1", "arrival_s is '0x10'"),
        ("1e999,5,1,a,1,1", "arrival_s is '1e999'"),
        ("0,0,1,a,1,1", r"prompt_tokens is '0'; it must be a whole number of tokens within 1\.\.2147483647"),
        ("0,-3,1,a,1,1", "prompt_tokens is '-3'"),
        ("0,12.5,1,a,1,1", r"prompt_tokens is '12\.5'"),
        ("0,,1,a,1,1", "prompt_tokens is empty"),
        ("0,many,1,a,1,1", "prompt_tokens is 'many'"),
        ("0,True,1,a,1,1", "prompt_tokens is 'True'"),
        ("0,2147483648,1,a,1,1", "prompt_tokens is '2147483648'"),
        ("0,9223372036854775808,1,a,1,1", "prompt_tokens is '9223372036854775808'"),
        ("0," + "9" * 400 + ",1,a,1,1", "prompt_tokens is '9{40}'"),
        ("0,\u0661,1,a,1,1", "prompt_tokens is"),
        ("0,5,0,a,1,1", "output_tokens is '0'"),
        ("0,5,,a,1,1", "output_tokens is empty"),
        ("0,5,1,a,0,1", "ttft_slo_s is '0'; it must be a number of seconds > 0"),
        ("0,5,1,a,nan,1", "ttft_slo_s is 'nan'"),
        ("0,5,1,a,1,-inf", "tbt_slo_s is '-inf'"),
        ("0,5,1,a,1", "it has 5 fields; the header has 6"),
        ("0,5,1,a,1,1,9", "it has 7 fields; the header has 6"),
        ("", "the line is blank"),
    ],
)
def test_a_bad_row_among_good_ones_is_named_or_dropped(write, row, message):
    good = "0,5,1,a,1,1\n"
    path = write(",".join(FIELDS) + "\n" + good * 4 + row + "\n" + good * 5)
    with pytest.raises(ValueError, match=rf"t\.csv: 1 bad row: line 6: {message}"):
        load_trace(path)
    rows, summary = read_trace(path, on_bad_row="drop")
    assert (len(rows), summary.rows, len(summary.dropped)) == (9, 9, 1)


def test_of_many_bad_rows_the_first_five_are_shown_and_the_rest_counted(write):
    with pytest.raises(ValueError, match=r"12 bad rows: line 2: .*line 6: .*; and 7 more") as caught:
        load_trace(write("arrival_s,prompt_tokens\n" + "0,0\n" * 12))
    assert "line 7" not in str(caught.value)


def test_a_trace_without_a_good_row_is_refused_even_when_bad_rows_are_dropped(write):
    with pytest.raises(ValueError, match="no good row is left: line 2"):
        load_trace(write("arrival_s,prompt_tokens\n0,0\n"), on_bad_row="drop")


# ---------------------------------------------------------------- bad files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ("\ufeff", "the file is empty"),
        ("arrival_s,prompt_tokens", "a header but no row"),
        ("arrival_s,prompt_tokens\r\n\r\n", "a header but no row"),
        ("arrived_at,prompt_tokens\n0,5\n", "line 1: no column arrival_s; found arrived_at, prompt_tokens"),
        ("arrival_s;prompt_tokens\n0;5\n", "line 1: no trace format has these columns: arrival_s;prompt_tokens"),
        ("arrival_s,prompt_tokens,arrival_s\n0,5,1\n", "line 1: the column 'arrival_s' is there twice"),
        ("arrival_s,prompt_tokens,x,x\n0,5,1,2\n", "line 1: the column 'x' is there twice"),
        ('"arrival_s,prompt_tokens\n0,5\n', "line 1, the header, cannot be read"),
        ('arrival_s,prompt_tokens\n0,5\n1,"6\n', "line 3: the quoting is broken"),
        (b"arrival_s,prompt_tokens\n0,5\n1,\xff\n", "line 3 is not UTF-8"),
        ("arrival_s,prompt_tokens\n0,5\n".encode("utf-16"), "line 1 is not UTF-8"),
    ],
)
def test_a_broken_file_is_refused_by_name(write, content, message):
    with pytest.raises(ValueError, match=rf"t\.csv: .*{message}"):
        load_trace(write(content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (gzip.compress(b""), "the file is empty"),
        (gzip.compress(b"arrival_s,prompt_tokens\n"), "a header but no row"),
        (gzip.compress(b"arrival_s,prompt_tokens\n0,5\n" * 50)[:-12], "no complete gzip file"),
        (b"arrival_s,prompt_tokens\n0,5\n", "no complete gzip file"),
        (b"\x1f\x8b\x08\x00" + bytes(range(200)), "no complete gzip file"),
    ],
)
def test_a_broken_gzip_is_refused_by_name(write, content, message):
    with pytest.raises(ValueError, match=rf"t\.csv\.gz: .*{message}"):
        load_trace(write(content, "t.csv.gz"))


def test_a_missing_file_or_a_folder_is_refused_by_name(tmp_path):
    for path in (tmp_path / "nowhere.csv", tmp_path):
        with pytest.raises(ValueError, match=f"{path.name}: cannot be read: "):
            load_trace(path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"slo_scale": 0.0},
        {"slo_scale": math.inf},
        {"on_bad_row": "skip"},
        {"abandon_s": 0.0},
        {"format": "parquet"},
        {"time_unit": "min"},
        {"rate_scale": 0.0},
        {"synthesize": "uniform", "rate_rps": 3.0},
    ],
)
def test_an_argument_out_of_range_is_refused(write, arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} is"):
        load_trace(write("arrival_s,prompt_tokens\n0,5\n"), **arguments)


# ---------------------------------------------------------------- reports


def test_what_was_read_is_logged_and_nothing_is_printed(write, caplog, capsys):
    with caplog.at_level(logging.INFO, logger="flowsim"):
        trace(path=write("user,arrival_s,prompt_tokens\nx,0,5\ny,0.5,5\n"))
    assert "format csv, time unit s: 2 requests over 0.5 s, 2 requests/s" in caplog.text
    assert "prompt tokens p50 5, p90 5, p99 5; output tokens p50 1" in caplog.text
    assert "rows left out: none; columns ignored: user" in caplog.text
    assert capsys.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


# ---------------------------------------------------------------- measured data


@pytest.mark.parametrize("draw", [0, 19])
def test_the_measured_requests_replay_at_a_reconstructed_arrival_draw(write, draw):
    import pandas as pd

    measured_path = DATA / "flowprefill_a800_llama31_8b_requests.csv"
    if not measured_path.is_file():
        pytest.skip(f"no measured data in {DATA}; FLOWSIM_DATA names its folder")
    measured = pd.read_csv(measured_path)
    arrivals = pd.read_csv(DATA / "flowprefill_a800_llama31_8b_arrivals_posterior.csv.gz")
    table = measured.merge(arrivals, on="trace_index", validate="one_to_one")
    table = table.rename(columns={f"draw_{draw}_s": "arrival_s", "request_class": "slo_class"})
    shuffled = list(range(len(table)))
    random.Random(0).shuffle(shuffled)
    rows, summary = read_trace(write(table.iloc[shuffled].to_csv(index=False)))
    assert (summary.rows, summary.dropped) == (323, ())
    table = table.sort_values("arrival_s", kind="stable")
    assert rows.prompt_tokens.tolist() == table.prompt_tokens.tolist()
    assert rows.slo_class == table.slo_class.tolist()
    assert summary.span_s == pytest.approx(59.54, abs=0.05)
    assert set(rows.ttft_slo_s.tolist()) == {0.25, 0.5, 4.0, 6.0}
