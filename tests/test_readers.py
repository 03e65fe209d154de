"""Trace formats: each is recognised by content and read exactly, or refused by file and row; the facts are of
`docs/workloads.md`."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import logging
import math
import re
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowsim.workload import load_trace, read_trace, trace, uniform
from flowsim.workload.readers import READERS, Format
from flowsim.workload.rows import Rows

START = datetime.datetime(2023, 11, 16, 18, 0)


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="t"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


# ---------------------------------------------------------------- (arrival, prompt, output) as each format has it


def table(header, rows):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def lines(objects):
    return "".join(json.dumps(o) + "\n" for o in objects)


def plain_csv(rows):
    return table(["arrival_s", "prompt_tokens", "output_tokens"], [(a, p, o) for a, p, o in rows])


def azure(rows):
    return table(["TIMESTAMP", "ContextTokens", "GeneratedTokens"], [(stamp(a), p, o) for a, p, o in rows])


def stamp(arrival):
    """Seconds as a date with a fraction of 7 digits; what is no number is left as it is."""
    if not isinstance(arrival, int | float) or not 0 <= arrival < math.inf:
        return arrival
    whole, fraction = divmod(round(Decimal(repr(arrival)) * 10**7), 10**7)
    return f"{START + datetime.timedelta(seconds=int(whole))}.{fraction:07d}"


def burstgpt(rows):
    header = ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"]
    return table(header, [(a, "GPT-4", p, o, 7, "API log") for a, p, o in rows])


def milliseconds(arrival):
    is_time = isinstance(arrival, int | float) and math.isfinite(arrival)
    return float(Decimal(repr(arrival)) * 1000) if is_time else arrival


def mooncake(rows):
    return lines(
        {"timestamp": milliseconds(a), "input_length": p, "output_length": o, "hash_ids": [i, 2**40 + i]}
        for i, (a, p, o) in enumerate(rows)
    )


def qwen(rows):
    return lines(turn(i, a, p, output_length=o) for i, (a, p, o) in enumerate(rows))


def turn(chat_id, timestamp, input_length, parent=-1, hash_ids=(), kind="text", output_length=9):
    return {
        "chat_id": chat_id,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "type": kind,
        "turn": 1,
        "hash_ids": list(hash_ids),
    }


def plain_jsonl(rows):
    return lines({"arrival_s": a, "prompt_tokens": p, "output_tokens": o} for a, p, o in rows)


def vllm(rows):
    return json.dumps([{"prompt_len": p, "output_len": o, "arrival_time": a} for a, p, o in rows], indent=1)


def vllm_result(rows):
    arrivals, prompts, outputs = map(list, zip(*rows, strict=True))
    lists = {"input_lens": prompts, "output_lens": outputs, "start_times": arrivals, "ttfts": [0.1] * len(rows)}
    return json.dumps({"duration": 3.5, **lists})


WRITERS = {
    "csv": plain_csv,
    "jsonl": plain_jsonl,
    "azure": azure,
    "burstgpt": burstgpt,
    "mooncake": mooncake,
    "qwen": qwen,
    "vllm": vllm,
    "vllm result": vllm_result,
}
JSON = ["jsonl", "mooncake", "qwen", "vllm", "vllm result"]


def place(kind, row):
    """How an error names the row, the first being 0."""
    if kind == "vllm result":
        return f"value [{row}]"
    if kind == "vllm":
        return f"item [{row}]"
    return f"line {row + 1 if kind in JSON else row + 2}"


every_format = pytest.mark.parametrize("kind", WRITERS)


# ---------------------------------------------------------------- what is right is read exactly


@every_format
def test_arrivals_are_kept_exactly_in_every_format(write, kind):
    rows, summary = read_trace(write(WRITERS[kind]([(0.0, 5, 2), (0.4, 6, 3), (0.9, 7, 4)])))
    assert summary.format == kind.split()[0]
    assert rows.arrival_s.tolist() == [0.0, 0.4, 0.9]
    assert (rows.prompt_tokens.tolist(), rows.output_tokens.tolist()) == ([5, 6, 7], [2, 3, 4])
    assert not summary.has_slos


rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 2 * 10**10).map(lambda tick: tick / 10**4), st.integers(1, 2**31 - 1), st.integers(1, 10**5)
    ),
    min_size=1,
    max_size=12,
)
dress = st.fixed_dictionaries(
    {
        "line_end": st.sampled_from(["\n", "\r\n", "\r"]),
        "mark": st.booleans(),
        "cut": st.booleans(),
        "zip": st.booleans(),
    }
)


@every_format
@settings(max_examples=25, deadline=None)
@given(rows=rows_strategy, how=dress)
def test_any_valid_trace_is_read_exactly_however_it_is_stored(tmp_path_factory, kind, rows, how):
    text = WRITERS[kind](rows).replace("\n", how["line_end"])
    data = ("\ufeff" * how["mark"] + (text.rstrip("\r\n") if how["cut"] else text)).encode()
    path = tmp_path_factory.getbasetemp() / "t"  # gzip is known by content, not by name
    path.write_bytes(gzip.compress(data) if how["zip"] else data)
    read, summary = read_trace(path)
    order = sorted(range(len(rows)), key=lambda row: rows[row][0])
    first_s = rows[order[0]][0]
    assert read.prompt_tokens.tolist() == [rows[row][1] for row in order]
    assert read.output_tokens.tolist() == [rows[row][2] for row in order]
    assert read.arrival_s.tolist() == pytest.approx([rows[row][0] - first_s for row in order], abs=1e-9, rel=1e-15)
    assert summary.rows == len(rows)
    assert not summary.dropped_by_reason


# ---------------------------------------------------------------- what is mangled is refused, or means what it says


def meaning(kind, text):
    """What a text says in a format, read by another way: (arrival, prompt, output) with arrivals in seconds."""
    if kind in JSON:
        return [row for row in meant_by_json(kind, text) if kind != "vllm result" or row[2]]
    header, *rows = csv.reader(io.StringIO(text.rstrip("\n"), newline=""), strict=True)
    header = [name.strip() for name in header]
    names = {"csv": FIELDS, "azure": AZURE, "burstgpt": BURST}[kind]
    rows = [dict(zip(header, row, strict=True)) for row in rows]
    date = meant_by_date if kind == "azure" else Decimal
    meant = [(date(row[names[0]].strip()), *(int(Decimal(row.get(name, "1"))) for name in names[1:])) for row in rows]
    return [row for row in meant if kind != "burstgpt" or row[2]]


FIELDS = ("arrival_s", "prompt_tokens", "output_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST = ("Timestamp", "Request tokens", "Response tokens")


def meant_by_date(text):
    zone = re.search(r"[+-]\d\d:?\d\d$", text[19:])
    date, _, fraction = (text[: zone.start() + 19] if zone else text.rstrip("Z ")).strip().partition(".")
    whole = datetime.datetime.fromisoformat(date) - START
    offset_s = 0
    if zone:
        hours, minutes = zone.group()[:3], zone.group()[0] + zone.group()[-2:]
        offset_s = int(hours) * 3600 + int(minutes) * 60
    return Decimal(whole.days * 86400 + whole.seconds - offset_s) + Decimal(f"0.{fraction or 0}")


def meant_by_json(kind, text):
    numbers = {"parse_float": Decimal, "parse_int": Decimal}
    if kind == "vllm result":
        result = json.loads(text, **numbers)
        outputs = result.get("output_lens", [1] * len(result["input_lens"]))
        return list(zip(result["start_times"], map(int, result["input_lens"]), map(int, outputs), strict=True))
    is_list = text.lstrip().startswith("[")
    items = json.loads(text, **numbers) if is_list else [json.loads(x, **numbers) for x in text.rstrip().split("\n")]
    unit = 1000 if kind == "mooncake" else 1

    def first(item, *names):
        return next(Decimal(item[name]) for name in names if name in item)

    return [
        (
            first(item, "arrival_s", "arrival_time", "timestamp") / unit,
            int(first(item, "prompt_tokens", "prompt_len", "input_length", "input_len")),
            int(first({"none": 1, **item}, "output_tokens", "output_len", "output_length", "none")),
        )
        for item in items
    ]


def mangled(data, text):
    """The text with a byte, a cell or a line deleted, doubled or altered."""
    how = data.draw(st.sampled_from(["characters", "cell", "line"]))
    if how == "characters":
        where = data.draw(st.integers(0, len(text) - 1))
        put = data.draw(st.text('0159.,-+eEnaiNfy \n\r"_;:{}[]x\u0661\0\u2028', max_size=3))
        return text[:where] + put + text[where + data.draw(st.integers(0, 3)) :]
    between = "\n" if how == "line" else ","
    parts = text.split(between)
    part = data.draw(st.integers(0, len(parts) - 1))
    times = data.draw(st.sampled_from([0, 2]))
    swapped = data.draw(st.integers(0, len(parts) - 1))
    if data.draw(st.booleans()):
        parts[part], parts[swapped] = parts[swapped], parts[part]
    else:
        parts[part : part + 1] = [parts[part]] * times
    return between.join(parts)


@every_format
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_mangled_trace_is_refused_by_file_and_place_or_means_what_it_says(tmp_path_factory, kind, data):
    text = WRITERS[kind]([(0.25, 300, 20), (0.5, 41, 7), (8.125, 1000, 1), (8.125, 6, 3)])
    text = mangled(data, text)
    path = tmp_path_factory.getbasetemp() / "t"
    path.write_bytes(text.encode())
    try:
        rows, summary = read_trace(path, format=kind.split()[0])
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert refusal.startswith(f"{path}: ")
        assert re.search(r"line \d|\[\d+\]|the file|the list|key|column|span|header", refusal)
        return
    meant = sorted(meaning(kind, text.replace("\r\n", "\n").replace("\r", "\n")), key=lambda row: row[0])
    assert summary.dropped == ()
    assert rows.prompt_tokens.tolist() == [prompt for _, prompt, _ in meant]
    assert rows.output_tokens.tolist() == [output for _, _, output in meant]
    arrivals = [float(arrival - meant[0][0]) for arrival, _, _ in meant]
    assert rows.arrival_s.tolist() == pytest.approx(arrivals, abs=1e-9, rel=1e-12)


@every_format
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_mangled_bytes_and_archives_are_never_another_error(tmp_path_factory, kind, data):
    text = WRITERS[kind]([(0.25, 300, 20), (8.125, 1000, 1)]).encode()
    stored = gzip.compress(text, mtime=0) if data.draw(st.booleans()) else text
    where = data.draw(st.integers(0, len(stored) - 1))
    stored = stored[:where] + data.draw(st.binary(max_size=2)) + stored[where + data.draw(st.integers(0, 9)) :]
    path = tmp_path_factory.getbasetemp() / "t"
    path.write_bytes(stored)
    refusal = f"{path}: "
    try:
        read_trace(path, on_bad_row=data.draw(st.sampled_from(["error", "drop"])))
    except ValueError as error:
        refusal = str(error)
    assert refusal.startswith(f"{path}: ")


# ---------------------------------------------------------------- bad rows, in every format


@every_format
@pytest.mark.parametrize("bad", [-0.2, math.nan, math.inf, "noon"])
def test_an_arrival_that_is_no_time_is_named_by_row_or_dropped_and_counted(write, kind, bad):
    path = write(WRITERS[kind]([(0.1, 5, 1), (bad, 5, 1), (0.3, 7, 1)]))
    with pytest.raises(ValueError, match=re.escape(f"t: 1 bad row: {place(kind, 1)}: ")):
        read_trace(path)
    rows, summary = read_trace(path, on_bad_row="drop")
    assert rows.prompt_tokens.tolist() == [5, 7]
    assert (sum(summary.dropped_by_reason.values()), len(summary.dropped)) == (1, 1)
    assert summary.dropped[0].startswith(f"{place(kind, 1)}: ")


@every_format
@pytest.mark.parametrize("bad", [0, -3, 12.5, 2**31, "many"])
def test_a_prompt_that_is_no_count_of_tokens_is_named_by_row_or_dropped(write, kind, bad):
    path = write(WRITERS[kind]([(0.1, 5, 1)] * 4 + [(0.2, bad, 1)] + [(0.3, 5, 1)] * 5))
    with pytest.raises(ValueError, match=re.escape(f"t: 1 bad row: {place(kind, 4)}: ")):
        read_trace(path)
    rows, summary = read_trace(path, on_bad_row="drop")
    assert (len(rows), summary.rows, len(summary.dropped)) == (9, 9, 1)


def without_arrival(kind, text):
    """The second of three rows without its arrival, where a row can lack one."""
    if kind in ("vllm", "vllm result"):
        return text.replace("0.4", "null")
    if kind in JSON:
        return re.sub(r'"(timestamp|arrival_s)": (0\.4|400\.0), ', "", text)
    return re.sub(r"^(0\.4|\S+ \S+\.4000000),", ",", text, flags=re.MULTILINE)


@every_format
def test_a_missing_arrival_is_never_zero(write, kind):
    path = write(without_arrival(kind, WRITERS[kind]([(0.0, 5, 2), (0.4, 6, 3), (0.9, 7, 4)])))
    with pytest.raises(ValueError, match=re.escape(f"t: 1 bad row: {place(kind, 1)}: ") + ".*synthesize=poisson"):
        read_trace(path)
    rows, summary = read_trace(path, synthesize="poisson", rate_rps=2.0, seed=4)
    assert rows.prompt_tokens.tolist() == [5, 6, 7]
    drawn = uniform(num_requests=3, rate_rps=2.0, seed=4, min_tokens=1, max_tokens=9, ttft_slo_s=1.0)
    assert rows.arrival_s.tolist() == [r.arrival_s for r in drawn]
    assert "2 arrivals of the file replaced" in summary.warnings[0]


@every_format
def test_equal_arrivals_keep_the_files_order_and_unsorted_ones_are_sorted(write, kind):
    rows, summary = read_trace(write(WRITERS[kind]([(0.0, n, 1) for n in (5, 4, 3, 2, 1)])))
    assert rows.prompt_tokens.tolist() == [5, 4, 3, 2, 1]
    assert (summary.rows_out_of_order, summary.rate_rps, summary.span_s) == (0, None, 0.0)
    rows, summary = read_trace(write(WRITERS[kind]([(2.0, 1, 1), (0.5, 2, 1), (1.0, 3, 1)])))
    assert (rows.arrival_s.tolist(), rows.prompt_tokens.tolist()) == ([0.0, 0.5, 1.5], [2, 3, 1])
    assert summary.warnings == ("2 rows out of order; sorted by arrival",)


# ---------------------------------------------------------------- files that hold nothing, or nothing known

EMPTY = {
    "empty": b"",
    "blank": b" \n\n",
    "list": b"[]",
    "spaced list": b"\n [ ]\n",
    "header": b"arrival_s,prompt_tokens\n",
    "azure header": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n",
    "burstgpt header": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "result of none": b'{"input_lens": [], "output_lens": [], "start_times": []}',
}


@pytest.mark.parametrize("content", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_without_a_request_is_refused_by_name(write, content, zipped):
    path = write(gzip.compress(content) if zipped else content, "t.gz" if zipped else "t")
    with pytest.raises(ValueError, match=f"^{path}: .*(is empty|no row)"):
        read_trace(path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"arrived_at,tokens\n0,5\n", b"7", b"[7]"])
def test_a_named_format_that_is_not_the_files_is_refused_by_name(write, name, content):
    path = write(content)
    with pytest.raises(ValueError, match=f"^{path}: "):
        read_trace(path, format=name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "arrived_at,num_prefill_tokens\n0,5\n",
            "line 1: no trace format has these columns: arrived_at, num_prefill_tokens",
        ),
        ('{"arrival": 0, "tokens": 5}\n', "line 1: no trace format has these keys: arrival, tokens"),
        ('[{"a": 1}]', r"item \[0\]: no trace format has these keys: a"),
        ("arrival_time,prompt_tokens\n0,5\n", "line 1: no column arrival_s; found arrival_time, prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens"\n', r"line 1: no trace format .*line 1: it is .*no JSON: Expecting"),
        ("{}", "no trace format has these keys: none"),
        ("[1, 2]", r"item \[0\]: it is 1; it must be a JSON object"),
        ("[" * 5000, "the file is no JSON"),
        ('[{"prompt_len": 3}, ', "the file is no JSON"),
        ('{"prompt_len": 3, "prompt_len": 4, "arrival_s": 0}', "the key 'prompt_len' is there twice"),
        ('{"prompt_len": 3, "input_len": 4, "arrival_s": 0}', "prompt_len and input_len say the same thing"),
        ('{"input_lens": [1, 2], "start_times": [0]}', "the key start_times must be a list"),
        ('{"input_lens": 3}', "the key input_lens must be a list"),
        ('{"input_lens": [1]}\n{"input_lens": [2]}', "line 1"),
    ],
)
def test_what_is_not_recognised_is_refused_with_what_was_found(write, content, message):
    with pytest.raises(ValueError, match=rf"/t: .*{message}"):
        read_trace(write(content))


def test_what_was_looked_for_is_said(write):
    with pytest.raises(ValueError, match=r"Looked for csv: arrival_s or prompt_tokens; azure: .*burstgpt: "):
        read_trace(write("when,what\n0,5\n"))
    with pytest.raises(ValueError, match=r"Looked for jsonl: .*qwen: .*mooncake: .*vllm: "):
        read_trace(write('{"when": 0}'))


def test_a_first_line_that_is_broken_is_named_and_can_be_dropped(write):
    path = write("{broken\n" + mooncake([(0.0, 5, 1), (1.0, 6, 1)]))
    with pytest.raises(ValueError, match=r"1 bad row: line 1: it is '\{broken', no JSON"):
        read_trace(path)
    rows, summary = read_trace(path, on_bad_row="drop")
    assert (rows.prompt_tokens.tolist(), summary.dropped_by_reason) == ([5, 6], {"no JSON object": 1})


def test_a_key_that_one_object_lacks_or_mistypes_is_named(write):
    text = plain_jsonl([(0.0, 5, 2), (1.0, 6, 3)]).replace('"output_tokens": 3', '"outputs": 3')
    with pytest.raises(ValueError, match="line 2: output_tokens is missing; every request of the file must have it"):
        read_trace(write(text))


def test_a_format_is_added_by_a_function_and_an_entry(write, monkeypatch):
    def read_pairs(file):
        arrival_s, tokens = np.loadtxt(io.StringIO(file.text), delimiter=",", skiprows=1, unpack=True)
        read = READERS["csv"].read(file)
        read.rows = Rows.of(arrival_s, tokens.astype(np.int64))
        return read

    pairs = Format(
        read=lambda file: read_pairs(type(file)(file.path, file.text.replace("at,n", "arrival_s,prompt_tokens"))),
        layout="csv",
        recognised_by=(("at", "n"),),
    )
    monkeypatch.setitem(READERS, "pairs", pairs)
    rows, summary = read_trace(write("at,n\n1,5\n2,6\n"))
    assert (rows.arrival_s.tolist(), rows.prompt_tokens.tolist(), summary.format) == ([0.0, 1.0], [5, 6], "pairs")


# ---------------------------------------------------------------- time units


def test_seven_digits_of_a_second_are_kept_whatever_the_line_ends(write):
    stamps = ["00.0010000", "00.0020000", "00.0090000", "00.0110001"]
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:00:{s},5,1\n" for s in stamps)
    for variant in (text, text.replace("\n", "\r\n"), text.replace("\n", "\r\n")[:-2], text[:-1]):
        assert read_trace(write(variant))[0].arrival_s.tolist() == [0.0, 0.001, 0.008, 0.0100001]


def test_azure_time_zones_are_offsets_and_all_rows_have_one_or_none(write):
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = ["2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00", "2024-05-10 02:00:02.5+02:00"]
    text = head + "".join(f"{row},5,1\n" for row in rows)
    rows, summary = read_trace(write(text))
    assert rows.arrival_s.tolist() == [0.0, 0.99007, 2.49007]
    assert (summary.format, summary.time_unit) == ("azure", "date")
    with pytest.raises(ValueError, match="line 3: TIMESTAMP is '2024-05-10 00:00:01'; it must have a time zone"):
        read_trace(write(text.replace("01+00:00", "01")))
    with pytest.raises(ValueError, match="TIMESTAMP is a date, which has no unit; leave time_unit=ms out"):
        read_trace(write(text), time_unit="ms")


@pytest.mark.parametrize(
    "date", ["2023-02-30 00:00:00", "2023-01-01 24:00:00", "2023-01-01", "1", "0001-01-01 00:00:00"]
)
def test_a_date_that_there_is_not_is_named(write, date):
    with pytest.raises(ValueError, match=f"line 2: TIMESTAMP is '{date}'; "):
        read_trace(write(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{date},5,1\n"))


def test_mooncake_is_in_milliseconds_unless_told_otherwise_and_the_rate_shows_a_slip(write):
    path = write(mooncake([(0, 5, 1), (3.0, 5, 1), (3.5, 5, 1)]))
    rows, summary = read_trace(path)
    assert (rows.arrival_s.tolist(), summary.time_unit, summary.block_tokens) == ([0.0, 3.0, 3.5], "ms", 512)
    assert "time unit ms: 3 requests over 3.5 s, 0.5714 requests/s\n" in summary.describe()
    rows, summary = read_trace(path, time_unit="s")
    assert rows.arrival_s.tolist() == [0.0, 3000.0, 3500.0]
    assert "time unit s: 3 requests over 3500 s, 0.0005714 requests/s\n" in summary.describe()


def test_a_wrong_unit_shows_by_the_span_and_the_origin_is_the_first_arrival(write):
    path = write(plain_jsonl([(1.79e15 + 1e6 * n, 5, 1) for n in range(5)]))
    with pytest.raises(ValueError, match=r"/t: arrivals span 4e\+06 s, which is 46\.2963 days; at most 30 .*unit"):
        read_trace(path)
    assert read_trace(path, time_unit="us")[0].arrival_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("quote", ["{}", '"{}"'])
def test_nanoseconds_since_1970_lose_nothing(write, quote):
    base = 1_700_000_000_000_000_000
    text = "".join(f'{{"input_toks": 5, "arrival_time_ns": {base + gap}}}\n' for gap in (0, 1, 300))
    assert read_trace(write(text))[0].arrival_s.tolist() == [0.0, 1e-9, 3e-7]
    table_text = "arrival_s,prompt_tokens\n" + "".join(f"{quote.format(base + gap)},5\n" for gap in (0, 1, 300))
    assert read_trace(write(table_text), time_unit="ns")[0].arrival_s.tolist() == [0.0, 1e-9, 3e-7]


# ---------------------------------------------------------------- files without arrivals


@pytest.mark.parametrize("text", ["prompt_tokens,output_tokens\n5,2\n6,3\n", '[{"input_len": 5}, {"input_len": 6}]'])
def test_arrivals_that_a_file_does_not_have_are_drawn_when_asked_for(write, text):
    path = write(text)
    with pytest.raises(ValueError, match="synthesize=poisson"):
        read_trace(path)
    rows, _ = read_trace(path, synthesize="poisson", rate_rps=2.0)
    assert rows.prompt_tokens.tolist() == [5, 6]
    again, _ = read_trace(path, synthesize="poisson", rate_rps=4.0)
    assert again.arrival_s[1] == rows.arrival_s[1] / 2 > 0.0
    assert read_trace(path, synthesize="poisson", rate_rps=2.0, seed=1)[0].arrival_s[1] != rows.arrival_s[1]


def test_arrivals_that_a_file_has_are_not_drawn(write):
    path = write(plain_csv([(0.0, 5, 1), (1.0, 5, 1)]))
    with pytest.raises(ValueError, match="every row has an arrival; leave synthesize=poisson out"):
        read_trace(path, synthesize="poisson", rate_rps=2.0)
    with pytest.raises(ValueError, match="needs rate_rps"):
        read_trace(path, synthesize="poisson")


# ---------------------------------------------------------------- hash ids


@pytest.mark.parametrize("kind", ["mooncake", "csv", "jsonl"])
def test_hash_ids_of_64_bits_are_kept_apart(write, kind):
    ids = [(1, 7), (4294967297, 7), (2**64 - 1, -(2**63)), ()]
    if kind == "csv":
        text = table(["arrival_s", "prompt_tokens", "prefix_hashes"], [(0, 5, " ".join(map(str, row))) for row in ids])
    elif kind == "jsonl":
        text = lines({"arrival_s": 0, "prompt_tokens": 5, "prefix_hashes": row} for row in ids)
    else:
        text = lines({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": row} for row in ids)
    rows, summary = read_trace(write(text))
    assert (rows.prefix_hashes, summary.format) == (ids, kind)


def test_equal_leading_hash_ids_survive_being_written_and_read(write):
    text = lines(
        {"timestamp": 1000 * n, "input_length": 2000, "output_length": 1, "hash_ids": [46, 47, 2**63, last]}
        for n, last in enumerate((1, 2))
    )
    requests = load_trace(write(text))
    fields = ["arrival_s", "prompt_tokens", "output_tokens", "prefix_hashes"]

    def written(requests):
        hashes = [" ".join(map(str, r.prefix_hashes)) for r in requests]
        return table(
            fields, [(r.arrival_s, r.prompt_tokens, r.output_tokens, h) for r, h in zip(requests, hashes, strict=True)]
        )

    again = load_trace(write(written(requests)))
    assert again == requests
    assert written(again) == written(requests)
    assert again[0].prefix_hashes[:3] == again[1].prefix_hashes[:3] == (46, 47, 2**63)


@pytest.mark.parametrize("bad", ["[1, 2.5]", "[true]", '"x"', "[18446744073709551616]", "{}", "7", "[[1]]"])
def test_hash_ids_that_are_no_whole_numbers_are_named(write, bad):
    text = mooncake([(0, 5, 1), (1, 5, 1)]).replace("[1, 1099511627777]", bad)
    with pytest.raises(ValueError, match=r"line 2: hash_ids is .*it must be a list of whole numbers"):
        read_trace(write(text))


# ---------------------------------------------------------------- Qwen-Bailian: turns and classes


def test_a_follow_up_turn_is_reduced_to_its_new_blocks(write):
    chat = [
        turn(159, 0.0, 75, hash_ids=[1, 2, 3, 4, 5]),
        turn(160, 1.0, 125, parent=159, hash_ids=[1, 2, 3, 4, 9, 6, 7, 8], kind="search"),
        turn(161, 2.0, 20, parent=160, hash_ids=[1, 2], kind="image"),
        turn(162, 3.0, 80, parent=161, hash_ids=[1, 2, 3, 4, 5], kind="audio "),
    ]
    rows, summary = read_trace(write(lines(chat)))
    assert rows.prompt_tokens.tolist() == [75, 48, 4, 48]
    assert rows.prefix_hashes == [(1, 2, 3, 4, 5), (6, 7, 8), (2,), (3, 4, 5)]
    assert rows.slo_class == ["text", "search", "image", "audio"]
    assert (summary.format, summary.block_tokens, summary.clamped_turns) == ("qwen", 16, 1)


@pytest.mark.parametrize(("blocks", "length"), [(5, 80), (4, 64), (4, 49)])
def test_a_turn_without_a_new_block_is_its_last_block_and_counted(write, blocks, length):
    chat = [turn(7, 0.0, 80, hash_ids=range(5)), turn(8, 1.0, length, parent=7, hash_ids=range(blocks))]
    rows, summary = read_trace(write(lines(chat)))
    assert rows.prompt_tokens[1] == (1 if length == 49 else 16)
    assert rows.prefix_hashes[1] == (blocks - 1,)
    assert (summary.clamped_turns, "1 turn without a new block" in summary.describe()) == (1, True)


def test_a_turn_whose_parent_is_not_in_the_file_is_whole_with_a_warning(write, caplog):
    chat = [turn(n, n, 75, parent=7, hash_ids=[1, 2, 3, 4, 5]) for n in (0, 1, 2)]
    with caplog.at_level(logging.INFO, logger="flowsim"):
        requests = trace(path=write(lines(chat)))
    assert [r.prompt_tokens for r in requests] == [75] * 3
    assert "3 follow-up turns whose parent_chat_id is not in the file" in caplog.text


def test_a_parent_may_come_later_in_the_file_and_a_repeated_chat_is_told(write):
    chat = [turn(8, 1.0, 160, parent=7, hash_ids=range(10)), turn(7, 0.0, 80, hash_ids=range(5)), turn(7, 2.0, 16)]
    rows, summary = read_trace(write(lines(chat)))
    assert rows.prompt_tokens.tolist() == [80, 80, 16]
    assert any("1 rows repeat a chat_id" in warning for warning in summary.warnings)


# ---------------------------------------------------------------- BurstGPT, vLLM, ShareGPT


def test_failed_requests_of_burstgpt_are_left_out_and_counted(write):
    path = write(burstgpt([(5, 472, 18), (45, 0, 0), (118, 417, 0), (120, 30, 7)]))
    rows, summary = read_trace(path)
    assert (rows.arrival_s.tolist(), rows.prompt_tokens.tolist()) == ([0.0, 115.0], [472, 30])
    assert summary.dropped_by_reason == {"failed (an output of 0 tokens)": 2}
    assert summary.dropped == ()
    assert summary.columns_ignored == ("Model", "Total tokens", "Log Type")


def test_the_second_release_of_burstgpt_is_read_and_may_span_months(write):
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    text = head + "19440110.0,1722-a,43,GPT-4,906,446,1352,Conversation log\n28944110.5,,2,ChatGPT,36,29,65,API log\n"
    rows, summary = read_trace(write(text))
    assert rows.arrival_s.tolist() == [0.0, 9504000.5]
    assert "Session ID" in summary.columns_ignored
    assert "Elapsed time" in summary.columns_ignored
    with pytest.raises(ValueError, match="at most 366 are allowed; is the unit wrong"):
        read_trace(write(text.replace("28944110.5", "28944110500")))


@pytest.mark.parametrize("prompt", ["prompt_len", "input_len", "input_length", "prompt_tokens", "input_toks"])
@pytest.mark.parametrize("output", ["output_len", "output_length", "output_tokens", "output_toks"])
@pytest.mark.parametrize("arrival", ["arrival_time", "arrival_s", "arrival_time_ns"])
@pytest.mark.parametrize("as_lines", [False, True])
def test_lengths_are_read_under_the_names_that_tools_give_them(write, prompt, output, arrival, as_lines):
    unit = 10**9 if arrival == "arrival_time_ns" else 1
    items = [
        {prompt: 5, output: 2, arrival: 1 * unit, "prompt": "x"},
        {prompt: 6, output: 3, arrival: 3 * unit, "prompt": ""},
    ]
    rows, _ = read_trace(write(lines(items) if as_lines else json.dumps(items)))
    assert (rows.arrival_s.tolist(), rows.prompt_tokens.tolist(), rows.output_tokens.tolist()) == (
        [0, 2],
        [5, 6],
        [2, 3],
    )


@pytest.mark.parametrize("indent", [None, 2])
def test_failed_requests_of_a_benchmark_are_left_out_and_counted(write, indent):
    result = {
        "input_lens": [10, 20, 30],
        "output_lens": [3, 0, 2],
        "start_times": [10.0, 11.0, 11.5],
        "errors": ["", "x", ""],
    }
    rows, summary = read_trace(write(json.dumps(result, indent=indent)))
    assert (rows.arrival_s.tolist(), rows.prompt_tokens.tolist()) == ([0.0, 1.5], [10, 30])
    assert summary.dropped_by_reason == {"failed (an output of 0 tokens)": 1}
    assert summary.columns_ignored == ("errors",)


def test_conversations_without_lengths_are_refused_with_what_is_needed(write):
    talk = [{"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]
    with pytest.raises(ValueError, match=r"item \[0\]: .*lengths in tokens are needed.*prompt_len"):
        read_trace(write(json.dumps(talk)))
    talk[0] |= {"prompt_len": 5, "output_len": 2}
    rows, _ = read_trace(write(json.dumps(talk)), synthesize="poisson", rate_rps=1.0)
    assert rows.prompt_tokens.tolist() == [5]


# ---------------------------------------------------------------- the summary


def test_the_summary_says_lengths_slos_and_what_was_left_out(write):
    text = (
        "arrival_s,prompt_tokens,ttft_slo_s,user\n"
        + "".join(f"{n},{n + 1},,x\n" for n in range(101))
        + "5,0,,x\nx,1,,x\n"
    )
    _, summary = read_trace(write(text), on_bad_row="drop")
    assert summary.prompt_tokens == (51.0, 91.0, 100.0)
    assert summary.output_tokens == (1.0, 1.0, 1.0)
    assert summary.has_slos
    assert summary.dropped_by_reason == {"prompt_tokens": 1, "arrival_s": 1}
    assert summary.describe().count("\n") == 1
    assert "1 for prompt_tokens, 1 for arrival_s; columns ignored: user" in summary.describe()


def test_slos_and_classes_of_a_jsonl_are_read_and_null_is_none(write):
    items = [
        {
            "arrival_s": 0,
            "prompt_tokens": 5,
            "slo_class": "a",
            "ttft_slo_s": 0.25,
            "tbt_slo_s": None,
            "abandon_s": math.inf,
        },
        {"arrival_s": 1, "prompt_tokens": 6, "slo_class": None, "ttft_slo_s": math.inf, "tbt_slo_s": 1, "abandon_s": 9},
    ]
    first, second = load_trace(write(lines(items)), slo_scale=2.0)
    assert (first.slo_class, first.ttft_slo_s, first.tbt_slo_s, first.abandon_s) == ("a", 0.5, math.inf, math.inf)
    assert (second.slo_class, second.ttft_slo_s, second.tbt_slo_s, second.abandon_s) == ("default", math.inf, 2.0, 9.0)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("trace_azure2023_code", 8819),
        ("trace_azure2023_conv", 19366),
        ("trace_mooncake_conversation", 12031),
        ("trace_mooncake_synthetic", 3993),
    ],
)
def test_the_measured_traces_load(data_dir, name, count):
    rows, summary = read_trace(data_dir / f"{name}.csv.gz")
    assert (len(rows), summary.format, summary.dropped) == (count, "csv", ())
    assert 0.9 < summary.rate_rps < 10.0


def test_measured_lengths_without_arrivals_load_with_drawn_ones(data_dir):
    path = data_dir / "lengths_vidur_arxiv_summarization.csv.gz"
    rows, summary = read_trace(path, synthesize="poisson", rate_rps=6.0)
    assert len(rows) == 28257
    assert summary.rate_rps == pytest.approx(6.0, rel=0.02)
