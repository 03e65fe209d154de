"""The section of `docs/beyond.md` on layered prefill, and its figure, from the tables of `beyond_layered`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from experiments import beyond_layered as studies
from experiments.beyond_markdown import table_of, words
from flowsim.report.style import PAGE_IN, drawn, figure_of, legend_above, looks

__all__ = ["frontier_figure", "section"]

SMALL, LARGE, LAYERED = "chunks of 512", "chunks of 2048", "layered, groups of 512"


SHOWN_S = 5.0  # medians of engines that cannot keep up grow with the run, and are left out of the figure


@drawn
def frontier_figure(table: pd.DataFrame) -> Figure:
    """Median TTFT against the 99th percentile of times between tokens: a panel a model, a point a size."""
    figure = figure_of(PAGE_IN, 0.38)
    panels = figure.subplots(1, len(studies.MODELS), sharey=True)
    names = {"chunks": "chunks of n tokens", "layered": "layered prefill, groups of n tokens"}
    look = looks(names)
    table = table[table["ttft_s.p50"] < SHOWN_S]
    for axes, model in zip(panels, studies.MODELS, strict=True):
        shown = table[table.model == model]
        ahead = shown.loc[shown[shown.tokens == shown.tokens.min()]["tbt_p99_s"].idxmin(), "kind"]
        for kind, name in names.items():
            own = shown[shown.kind == kind].sort_values("tokens")
            points = list(zip(own["ttft_s.p50"], 1e3 * own["tbt_p99_s"], strict=True))
            one = look[kind]
            axes.plot(*zip(*points, strict=True), color=one.colour, linestyle=one.line, marker=one.marker, label=name)
            shift, side = ((-5, -8), "right") if kind == ahead else ((5, 3), "left")
            for point, tokens in zip(points, own["tokens"], strict=True):
                axes.annotate(f"{tokens}", point, shift, textcoords="offset points", fontsize=6, ha=side)
        axes.set(title=model, xlabel="TTFT, median [s]", xlim=(0.0, 1.1 * shown["ttft_s.p50"].max()))
        axes.grid(alpha=0.4)
    panels[0].set(ylabel="time between tokens, p99 [ms]", ylim=(0.0, 1.1e3 * table["tbt_p99_s"].max()))
    legend_above(figure)
    return figure


def section(tables: Mapping[str, pd.DataFrame]) -> str:
    """The section, every number of it from the tables."""
    table = tables["layered"]
    rows = [
        [
            *row[["model", "workload", "policy"]],
            f"{row['ttft_s.p50']:.3f}",
            f"{row['ttft_s.p99']:.2f}",
            f"{1e3 * row['tbt_p99_s']:.1f}",
            _rate(row["goodput_mean_rps"]),
            _rate(row["goodput_p99_rps"]),
        ]
        for _, row in table.iterrows()
    ]
    heads = ["model", "prompts", "policy", "TTFT p50 [s]", "TTFT p99 [s]", "TBT p99 [ms]", "goodput", "goodput, p99"]
    rates = words(f"{rate_rps:g} ({name})" for name, (_, rate_rps) in studies.WORKLOADS.items())
    return f"""
## Layered prefill

`policy=layered_prefill` (arXiv 2510.08055; its rules and their sources are in [policies.md](policies.md)) takes
whole prompts through the model a group of layers a step, beside decodes that go through all layers; chunked prefill
takes a chunk of tokens through all layers. Here both share one H100 with the decodes (`cluster=colocated`),
{studies.NUM_REQUESTS} requests, seeds {words(studies.SEEDS)}. *Chats* are `azure_conv`; *documents* are prompts of
{studies.MEAN_TOKENS} tokens on average, as the arXiv prompts of the paper's evaluation (lognormal with CV 0.5:
assumed), with 200 tokens of output. Times are those at {rates} req/s; TBT p99 is over all tokens. *Goodput* is the
highest rate at which 90 % keep a TTFT of 5 times the idle one (at least 0.25 s) and {1e3 * studies.TBT_SLO_S:g} ms
between tokens on average; *p99*: {1e3 * studies.TBT_SLO_S:g} ms for 99 % of their own tokens
({studies.GOODPUT_REQUESTS} requests, to 10 %).

{table_of(heads, rows)}

{_verdict(table)}

![TTFT against time between tokens, by size of chunk and group](img/beyond_layered.png)

Documents at {studies.WORKLOADS["documents"][1]:g} req/s. {_frontier(tables["layered_frontier"])}

{_experts(tables["layered_experts"])}

{_published(tables["layered_published"], tables["layered_frontier"])}
"""


def _rate(goodput_rps: float) -> str:
    return "none" if math.isnan(goodput_rps) else f"{goodput_rps:.2f}"


def _verdict(table: pd.DataFrame) -> str:
    """Groups against chunks of the same size, and the best size of each."""
    figures = table.set_index(["model", "workload", "policy"])

    def changed(model: str, column: str) -> str:
        changes = [
            figures.loc[(model, workload, LAYERED), column] / figures.loc[(model, workload, SMALL), column] - 1.0
            for workload in studies.WORKLOADS
        ]
        return words(_percent(change) for change in changes)

    rows = []
    for (model, workload), part in table.groupby(["model", "workload"], sort=False):
        named = part.set_index("policy")
        for column, kept in (("goodput_mean_rps", "mean"), ("goodput_p99_rps", "p99")):
            chunked, layered = (_best(named[column].filter(like=kind)) for kind in ("chunks", "layered"))
            ratio = f"{layered[1] / chunked[1]:.2f}"
            rows.append([model, workload, kept, *(f"{rate:.2f} ({size})" for size, rate in (chunked, layered)), ratio])
    heads = ["model", "prompts", "TBT that is kept", "best chunks", "best groups", "ratio"]
    return f"""
Against chunks of 512, groups of 512 change the median TTFT of the mixture of experts by
{changed(studies.MOE, "ttft_s.p50")} (chats and documents) and its TBT p99 by {changed(studies.MOE, "tbt_p99_s")}; those
of the dense model by {changed(studies.DENSE, "ttft_s.p50")} and {changed(studies.DENSE, "tbt_p99_s")}. Goodput with the
best size of each (of 512, 1024 and 2048 tokens, in brackets):

{table_of(heads, rows)}

Layered prefill pays on a mixture of experts, where few sequences decode beside a prompt (documents:
{figures.loc[(studies.MOE, "documents", LAYERED), "decode.mean_sequences"]:.0f} on average, chats
{figures.loc[(studies.MOE, "chats", LAYERED), "decode.mean_sequences"]:.0f}) and the slowest tokens count. Where they
do not, the largest chunks serve as much; the dense model is better off with chunks throughout.
""".strip()


def _best(goodput_rps: pd.Series) -> tuple[str, float]:
    """The size with the highest goodput, and that."""
    if goodput_rps.isna().all():
        return "none", math.nan
    name = str(goodput_rps.idxmax())
    return name.rpartition(" ")[2], float(goodput_rps[name])


def _frontier(table: pd.DataFrame) -> str:
    """Which sizes of chunk a size of group beats in both, by model."""
    texts = []
    for model in studies.MODELS:
        own = table[table.model == model]
        chunked, layered = own[own.kind == "chunks"], own[own.kind == "layered"]
        beaten = [
            int(one.tokens)
            for _, one in chunked.iterrows()
            if ((layered["ttft_s.p50"] <= one["ttft_s.p50"]) & (layered["tbt_p99_s"] <= one["tbt_p99_s"])).any()
        ]
        texts.append(f"{words(beaten or ['none'])} ({model})")
    return f"""
Sizes of chunk that some size of group beats in both figures: {"; ".join(texts)}. {_unshown(table)}
""".strip()


def _unshown(table: pd.DataFrame) -> str:
    left_out = table[table["ttft_s.p50"] >= SHOWN_S]
    told = [
        f"{one.kind} of {one.tokens} on {one.model} do not keep up (median {one['ttft_s.p50']:.0f} s)"
        for _, one in left_out.iterrows()
    ]
    return f"Outside the figure: {words(told)}." if told else ""


def _experts(table: pd.DataFrame) -> str:
    rows = []
    for number, part in table.groupby("decodes", sort=False):
        named = part.set_index("policy")
        cells = [f"{named.loc[name, 'experts_s']:.3f}" for name in (SMALL, LARGE, LAYERED)]
        cells += [f"{named.loc[name, 'all_s']:.3f}" for name in (SMALL, LARGE, LAYERED)]
        rows.append([str(number), *cells])
    heads = ["decodes beside it"]
    heads += [f"{what}: {name}" for what in ("experts [s]", "all steps [s]") for name in ("512", "2048", "layered")]
    return f"""
Seconds that the experts take, and the steps in all, while a prompt of 8192 tokens is prefilled beside decodes of
{studies.MEAN_TOKENS} tokens of context:

{table_of(heads, rows)}

Each layer sees the prompt once, and so loads its experts once for it. But in every other step its decodes load what
they need all the same: with few of them that is little, with 128 it is as much as a chunk of 512 loads. And decodes
do not ride along any more: in all layers but the group's they read the weights for themselves. A dense model has only
that second part, which is why chunks are better for it at every size; so they are for the paper's dense model, below.
The profiles take routing as uniform, so that 16, 64 and 128 tokens reach {_coverage(16)}, {_coverage(64)} and
{_coverage(128)} of the experts; in the paper's table 1 (as notes on it quote it) they reach less than 50 %, less
than 70 % and 86 %. Decodes are thus dearer here than there, and layered prefill gains less.
""".strip()


def _coverage(tokens: int) -> str:
    return f"{1.0 - (1.0 - 8 / 128) ** tokens:.0%}"


def _published(table: pd.DataFrame, documents: pd.DataFrame) -> str:
    figures = table.set_index(["rate_rps", "policy"])
    rows = []
    for name, (column, readme, paper) in studies.PUBLISHED.items():
        ours = [
            f"{figures.loc[(rate, LAYERED), column] / figures.loc[(rate, SMALL), column] - 1.0:+.0%}"
            for rate in studies.RATES_RPS
        ]
        rows.append([name, _percent(readme), ours[1], _percent(paper), ours[0], ours[2]])
    heads = ["", "vLLM, 1.5 req/s", "here", "authors' engine, 1.3 req/s", "here", "here, 2 req/s"]
    return f"""
What its authors measured with Qwen3-30B-A3B on two H100s and arXiv prompts: layered prefill against chunks of 512, in
vLLM 0.10.2 (README of their code, 100 requests) and in their own engine (the paper's table 6, as notes on it quote it).
Here the same model and GPUs as one group (`tp=2`), at the same rates; only the mean of the lengths is known, and
nothing was fitted to these figures:

{table_of(heads, rows)}

All signs agree, and times between tokens agree in size. TTFT turns on how near the chunked engine is to what it can
serve: their step with a chunk has a p99 of 48 ms where the profile's has
{1e3 * figures.loc[(studies.RATES_RPS[0], SMALL), "tbt_p99_s"]:.0f} ms, so that 1.3 req/s is more for it. For their
dense model (Qwen3-8B) they report a mean TTFT of 1.45 s against 0.955 s, +52 %; Llama-3-8B on one H100 has
{_dense(documents)} here (documents at {studies.WORKLOADS["documents"][1]:g} req/s).
""".strip()


def _dense(documents: pd.DataFrame) -> str:
    own = documents[(documents.model == studies.DENSE) & (documents.tokens == 512)].set_index("kind")["ttft_s.mean"]
    return f"{own['layered'] / own['chunks'] - 1.0:+.0%}"


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{share:+.0%}".replace("-0%", "0%").replace("+0%", "0%")
