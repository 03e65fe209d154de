"""The page of the study of policies is written from tables alone, every number in it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pandas as pd
import pytest

from experiments import beyond, suspension
from experiments import beyond_layered as layered
from experiments import beyond_stops as stops
from experiments.beyond_report import write

CLASSES = {"text": 0.97, "image": 1.0, "search": 0.65, "file": 0.6}


def rows(cells, **columns):
    return [
        {"policy": name, "goodput_rps": 12.0 + place, "attained": 0.9, "decision_us": 20.0 + place} | CLASSES | columns
        for place, name in enumerate(cells)
    ]


def layered_tables():
    """Those on layered prefill: all alike, but where no rate holds and where an engine does not keep up."""
    times = {"ttft_s.mean": 0.4, "ttft_s.p50": 0.3, "ttft_s.p99": 1.2, "tbt_mean_s": 0.01, "tbt_p50_s": 0.009}
    times |= {"tbt_p99_s": 0.03, "decode.mean_sequences": 5.0}
    goodput = {"goodput_mean_rps": 2.0, "goodput_p99_rps": 1.0}
    cells = list(itertools.product(layered.MODELS, layered.WORKLOADS, layered.POLICIES))
    made = {
        "layered": [{"model": m, "workload": w, "policy": p} | times | goodput for m, w, p in cells],
        "layered_frontier": [
            {"model": model, "kind": kind, "tokens": tokens} | times | {"tbt_p99_s": tokens / 1e4}
            for model in layered.MODELS
            for kind in layered.KINDS
            for tokens in layered.SIZES
        ],
        "layered_published": [
            {"rate_rps": rate_rps, "policy": policy} | times
            for rate_rps in layered.RATES_RPS
            for policy in ("chunks of 512", "layered, groups of 512")
        ],
        "layered_experts": layered.layered_experts(Path()).to_dict("records"),
    }
    made["layered_frontier"][0]["ttft_s.p50"] = 100.0
    made["layered"][0]["goodput_p99_rps"] = math.nan
    return made


def suspension_tables():
    """Made-up tables of the studies of suspension: a mean TTFT of 0.3 s, and of 0.9 s without a bound."""
    figures = {"ttft_s.mean": 0.3, "ttft_s.p50": 0.3, "ttft_s.p99": 2.6, "suspended_s.max": 1.1, "attainment": 0.9}
    figures |= {"suspended_share": 0.5, "tbt_mean_s.mean": 0.02, "tbt_max_s.mean": 0.15}
    figures |= {f"attainment_by_class.{name}": 0.98 for name in suspension.CLASSES}

    def table(limits, **columns):
        return [
            {**columns, **figures, **limit, "seed": seed, "ttft_s.mean": (0.3, 0.9)[slow] + 0.001 * seed}
            for limit, slow in limits
            for seed in (0, 1)
        ]

    none = math.inf
    named = [({"policy": "none"}, False)]
    named += [({"policy": f"{one} {at:g}"}, at == none) for one in suspension.THRESHOLDS for at in suspension.LIMITS_S]
    bounded = [({"policy.max_suspend_s": at}, at == none) for at in suspension.LIMITS_S]
    drawn = [({"policy.max_suspend_s": at}, at == none) for at in suspension.DRAWN_LIMITS_S]
    newest = [({"policy": at}, at == none) for at in suspension.LIMITS_S]
    return {
        "suspension_held": table(named),
        "suspension_newest": [row for load in suspension.LOADS for row in table(newest, load=load)],
        "suspension_orders": [row for name in suspension.CONDITIONS for row in table(bounded, condition=name)],
        "suspension_drawn": [row for number in range(3) for row in table(drawn, condition=number) if not row["seed"]],
    }


def stops_tables():
    """Made-up tables of adaptive stops, a hundredth ahead of layers where checks are dear."""
    cells = [(name, check) for check in stops.CHECKS for name in stops.POLICIES] + [
        (name, "free") for name in stops.FREE
    ]
    ahead = {(stops.ADAPTIVE, "200 µs"), (stops.FEASIBLE_ADAPTIVE, "200 µs")}
    return {
        "adaptive": [
            {"scenario": scenario, "seed": seed, "policy": name, "check": check,
             "goodput_rps": (12.0 + seed) * (1.01 if (name, check) in ahead else 1.0)}
            for scenario in stops.SCENARIOS for seed in stops.SEEDS for name, check in cells
        ],
        "adaptive_chosen": [
            {"check": check, "prompt": prompt, "stops": one, "batches": 20}
            for check in stops.CHECKS for prompt in stops.SIZES for one in ("pass", "layer")
        ],
    }  # fmt: skip


@pytest.fixture
def tables(tmp_path):
    """A folder of made-up tables, of the form that the studies have."""
    bounded = [*beyond.SCENARIOS, *(f"SLO x {scale:g}" for scale in beyond.SCALES), "4 instances"]
    made = (
        {
            "headline": [
                r for s in ("Poisson", "CV 2") for n in range(3) for r in rows(beyond.HEADLINE, scenario=s, seed=n)
            ],
            "scenarios": [row for name in beyond.SCENARIOS for row in rows(beyond.POLICIES, scenario=name)],
            "bounds": [
                {"scenario": name, "batching": batching, "goodput_rps": 20.0}
                for name in bounded
                for batching in ("alone", "perfect")
            ],
            "replays": [row for name in beyond.REPLAYS for row in rows(beyond.POLICIES, scenario=name, bound_rps=20.0)],
            "misses": [{"policy": name, "cause": "behind_earlier", "misses": 7} for name in beyond.MISSES],
            "instances": rows([f"{name}, {router}" for name in beyond.TWO for router in beyond.ROUTERS]),
            "fairness": rows(beyond.FAIR, per_class_rps=9.5),
            "errors": [row for sigma in beyond.SIGMAS for row in rows(beyond.CAUTIOUS, sigma=sigma)],
            "scales": [row for scale in beyond.SCALES for row in rows(beyond.TWO, slo_scale=scale)],
        }
        | layered_tables()
        | suspension_tables()
        | stops_tables()
    )
    assert made.keys() == beyond.STUDIES.keys()
    for name, table in made.items():
        pd.DataFrame(table).to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "points.jsonl").write_text(json.dumps({"figures": {"simulation_wall_s": 90.0}}) + "\n")
    return tmp_path


def test_the_page_has_every_section_and_no_number_is_missing(tables, tmp_path):
    write(tables, tmp_path / "docs")
    page = (tmp_path / "docs" / "beyond.md").read_text()
    assert page.count("\n## ") == 14
    assert "nan" not in page.split()
    assert "| Poisson | 20.0 | 20.0 | 75% | 85% |" in page  # 15 and 17 of 20
    assert f"chunks of 256 on {layered.MOE} do not keep up (median 100 s)" in " ".join(page.split())
    assert "| 2.00 | none |" in page
    text = " ".join(page.split())
    assert "change FlowPrefill's goodput by +0.0 ± 0.0 % and +0.0 ± 0.0 % (Poisson and CV 2)" in text
    assert "with checks of 200 µs by +1.0 ± 0.0 % and +1.0 ± 0.0 % and +1.0 ± 0.0 % and +1.0 ± 0.0 %." in text
    assert "| 3.00 ± 0.04 |" in page  # 0.9 of 0.3 s and 0.901 of 0.301 s
    for figure in ("beyond_share.png", "beyond_causes.png", "beyond_layered.png", "beyond_suspension.png"):
        assert f"img/{figure}" in page
        assert (tmp_path / "docs" / "img" / figure).stat().st_size > 0


def test_the_page_says_so_where_there_were_no_recorded_traces(tables, tmp_path):
    (tables / "replays.csv").unlink()
    write(tables, tmp_path / "docs")
    assert "Left out: the recorded traces were not there" in (tmp_path / "docs" / "beyond.md").read_text()


def test_replays_without_the_traces_are_left_out_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(beyond, "DATA", tmp_path / "nowhere")
    monkeypatch.setattr(beyond, "STUDIES", {"replays": beyond.replays})
    beyond.run_all(tmp_path)
    assert not (tmp_path / "replays.csv").exists()
    assert "set FLOWSIM_DATA" in capsys.readouterr().err


def test_a_missing_table_is_named(tables, tmp_path):
    (tables / "bounds.csv").unlink()
    with pytest.raises(ValueError, match="lacks bounds"):
        write(tables, tmp_path / "docs")
