"""A fitted latency profile: one model on one GPU, read from `profiles/<model>/<gpu>.yaml` and validated.

Knows the file's schema and where the shipped files are. Knows nothing of batches or scheduling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from flowsim.markup import table
from flowsim.names import shipped, unknown

__all__ = [
    "MODEL_ALIASES",
    "Attention",
    "Dense",
    "Experts",
    "Profile",
    "Terms",
    "available_profiles",
    "load_profile",
    "read_profile",
]

PROFILE_VERSION = 1
BOUNDARIES = ("head", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "tail")
REDUCED = ("o_proj", "down_proj")  # the operators that end with an all-reduce where tp > 1
REGIMES = {  # attention of batches with decodes, and the terms of each
    "decode_attention": ("1", "n", "sum_kv", "mean_kv"),
    "mixed_attention": ("1", "q", "work", "kp", "n", "sum_kv", "mean_kv", "nq"),
}
OPTIONAL_TERMS: dict[str, Any] = {"nq": 0.0}  # that files may leave out
LARGEST = 1e30  # of any number in a profile; far beyond all that is measured
KINDS = ("dense", "attention", "experts", "all_reduce", "per_sequence", *REGIMES)
MODEL_ALIASES = {"llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b"}
"""Models that share another's shapes, and so its profiles."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Seconds of a token-wise operator: `constant_s` plus each segment's slope times the tokens inside it.

    `knots_tokens` cut the axis of batch tokens into `len(slopes_s_per_token)` segments; the curve is continuous
    and, with slopes above zero, strictly increasing. An operator of kind `per_sequence` (lm_head, sampler) is the
    same in sequences: then all counts are sequences.
    """

    name: str
    boundary: str
    constant_s: float
    knots_tokens: tuple[int, ...]
    slopes_s_per_token: tuple[float, ...]
    measured_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Attention:
    """Seconds of one layer's attention in c new and p cached tokens, summed over the parts of a batch.

    Below `floor_tokens` new tokens fewer are no cheaper to the kernel: `cp_s` counts max(c, floor) times p, and
    `floor_s` max(c, floor).
    """

    name: str
    one_s: float
    c_s: float
    cc_s: float
    cp_s: float
    p_s: float
    measured_tokens: tuple[int, int]
    floor_s: float = 0.0
    floor_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Experts:
    """Seconds of a layer's experts: a curve in tokens, plus `expert_s` for each distinct expert that is touched.

    `n` tokens, each with `experts_per_token` of `experts`, touch `experts * (1 - (1 - share)**n)` of them if
    routing is uniform, `share` being `experts_per_token / experts`.
    """

    curve: Dense
    expert_s: float
    experts: int
    experts_per_token: int

    def touched(self, tokens: int) -> float:
        """Expected distinct experts that a batch of `tokens` tokens reaches."""
        return self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Terms:
    """Attention of batches with decodes: seconds per unit of each term; `measured_tokens` are of one decode's KV.

    n decodes with sum_kv tokens of context together and mean_kv on average; in a mixed batch q new tokens on kp
    cached ones, work = q*kp + q*q/2, nq = n*q.
    """

    name: str
    coefficients: Mapping[str, float]
    measured_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients by TP degree, model shapes and overheads; see `docs/profiles.md` for the file's schema.

    `dense`, `experts`, `attention` and `per_sequence` are those of one rank; `all_reduce` is what the ranks spend
    on meeting. `decode_attention` and `mixed_attention` are there where they were measured, for engines that run
    decodes; prefill timelines do not use them.
    """

    path: str
    model: str
    gpu: str
    gpu_memory_bytes: float
    weights_bytes: float
    kv_bytes_per_token: float
    max_context_tokens: int
    layers: int
    hidden_size: int
    pass_s: float
    request_s: float
    check_s: float
    switch_s: float
    dense: Mapping[int, tuple[Dense, ...]]
    attention: Mapping[int, Attention]
    all_reduce: Mapping[int, tuple[Dense, ...]]
    experts: Mapping[int, tuple[Experts, ...]] = field(default_factory=dict)
    per_sequence: Mapping[int, tuple[Dense, ...]] = field(default_factory=dict)
    decode_attention: Mapping[int, Terms] = field(default_factory=dict)
    mixed_attention: Mapping[int, Terms] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Profile({self.model} on {self.gpu}, tp {', '.join(map(str, self.tp_degrees))})"

    def _repr_html_(self) -> str:
        return table(
            f"{self.model} on {self.gpu}",
            [
                ("TP degrees", ", ".join(map(str, self.tp_degrees))),
                ("layers", self.layers),
                ("GPU memory [GB]", f"{self.gpu_memory_bytes / 1e9:.1f}"),
                ("weights [GB]", f"{self.weights_bytes / 1e9:.1f}"),
                ("KV [kB a token]", f"{self.kv_bytes_per_token / 1e3:.1f}"),
                ("longest context [tokens]", self.max_context_tokens),
                ("a pass, a request [ms]", f"{self.pass_s * 1e3:g}, {self.request_s * 1e3:g}"),
                ("a check, a switch [us]", f"{self.check_s * 1e6:g}, {self.switch_s * 1e6:g}"),
            ],
        )

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that the profile has data for."""
        return tuple(sorted(self.dense))

    def linked(self, latency_s: float, bytes_per_s: float) -> Profile:
        """The same GPUs over another link: an all-reduce is its latency, and 2 bytes of each token's hidden state."""
        token_s = max(2.0 * self.hidden_size / bytes_per_s, 1e-15)
        ends = tuple(Dense(f"all_reduce_{name}", name, latency_s, (), (token_s,), (1, 10**9)) for name in REDUCED)
        return replace(self, all_reduce={tp: ends if tp > 1 else () for tp in self.dense})


def available_profiles() -> dict[str, list[str]]:
    """The shipped profiles: model name to the GPUs it has a profile for, both sorted."""
    found: dict[str, list[str]] = {}
    for path in sorted(shipped("profiles").glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return found


def load_profile(model: str, gpu: str) -> Profile:
    """The shipped profile of `model` on `gpu`, or the profile file that `gpu` names as a path ending in .yaml.

    Raises:
        ValueError: no such model or GPU (near names and all choices are given), or a malformed file.
    """
    name = MODEL_ALIASES.get(model, model)
    if gpu.endswith((".yaml", ".yml")):
        profile = read_profile(Path(gpu).expanduser())
        if name != MODEL_ALIASES.get(profile.model, profile.model):
            raise ValueError(f"{gpu} is a profile of {profile.model}, not of {model}; give model={profile.model}")
        return profile
    profiles = available_profiles()
    if name not in profiles:
        raise ValueError(unknown("model", model, [*profiles, *MODEL_ALIASES]))
    if gpu not in profiles[name]:
        raise ValueError(
            unknown("gpu", gpu, profiles[name], where=f"for model={model}")
            + "; or give the path of a profile file, gpu=my_gpu.yaml"
        )
    return read_profile(shipped("profiles") / name / f"{gpu}.yaml")


def read_profile(path: Path) -> Profile:
    """Reads and validates one profile file.

    Raises:
        ValueError: unreadable or malformed, with the file, the key, what was found and what is allowed.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot read the profile: {error}") from error
    return _Reader(str(path)).profile(raw)


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Reader:
    """Turns a parsed file into a Profile; every complaint names the file and the key."""

    def __init__(self, path: str) -> None:
        self.path = path

    def profile(self, raw: object) -> Profile:
        top = self.mapping(raw, "the file")
        if top.get("version") != PROFILE_VERSION or top.get("version") is True:
            allowed = (
                f"{PROFILE_VERSION}: this release reads no other; write the file again with this release's profiler"
            )
            self.fail("version", top.get("version"), allowed)
        shapes = self.mapping(top.get("shapes"), "shapes")
        overheads = self.mapping(top.get("overheads"), "overheads")
        degrees = self.mapping(top.get("tp"), "tp")
        read: dict[int, dict[str, list[Any]]] = {}
        for tp, entry in degrees.items():
            if not isinstance(tp, int) or tp < 1:
                self.fail("tp", tp, "a whole number of GPUs, 1 or more")
            read[tp] = self.degree(entry, f"tp.{tp}")
        if not read:
            self.fail("tp", {}, "at least one TP degree")

        def several(kind: str) -> dict[int, tuple[Any, ...]]:
            return {tp: tuple(kinds[kind]) for tp, kinds in read.items()}

        def single(kind: str) -> dict[int, Any]:
            return {tp: kinds[kind][0] for tp, kinds in read.items() if kinds[kind]}

        return Profile(
            path=self.path,
            model=self.text(top, "model"),
            gpu=self.text(top, "gpu"),
            gpu_memory_bytes=self.number(top, "gpu_memory_bytes", above=0.0),
            weights_bytes=self.number(top, "weights_bytes", above=0.0),
            kv_bytes_per_token=self.number(top, "kv_bytes_per_token", above=0.0),
            max_context_tokens=self.whole(top, "max_context_tokens"),
            layers=self.whole(shapes, "layers", "shapes."),
            hidden_size=self.whole({"hidden_size": 1, **shapes}, "hidden_size", "shapes."),
            dense=several("dense"),
            attention=single("attention"),
            all_reduce=several("all_reduce"),
            experts=several("experts"),
            per_sequence=several("per_sequence"),
            decode_attention=single("decode_attention"),
            mixed_attention=single("mixed_attention"),
            pass_s=self.number(overheads, "pass_s", "overheads."),
            request_s=self.number(overheads, "request_s", "overheads."),
            check_s=self.number(overheads, "check_s", "overheads."),
            switch_s=self.number(overheads, "switch_s", "overheads."),
        )

    def degree(self, entry: object, where: str) -> dict[str, list[Any]]:
        """The operators at one TP degree, by kind."""
        operators = self.mapping(entry, where).get("operators")
        if not isinstance(operators, list):
            self.fail(f"{where}.operators", operators, "a list of operators")
        found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        for index, item in enumerate(operators):
            here = f"{where}.operators[{index}]"
            operator = self.mapping(item, here)
            kind = operator.get("kind")
            if kind not in KINDS:
                self.fail(f"{here}.kind", kind, f"one of {', '.join(KINDS)}")
            found[kind].append(self.operator(operator, kind, here))
        for kind in ("attention", *REGIMES):
            if len(found[kind]) > 1 or (kind == "attention" and not found[kind]):
                allowed = "exactly one" if kind == "attention" else "at most one"
                self.fail(f"{where}.operators", f"{len(found[kind])} of kind {kind}", allowed)
        there = {one.boundary for one in found["dense"]} | {one.curve.boundary for one in found["experts"]}
        missing = [b for b in BOUNDARIES[1:-1] if b != "attention" and b not in there]
        if missing:
            self.fail(f"{where}.operators", f"none with boundary {', '.join(missing)}", "every boundary of a layer")
        return found

    def operator(self, raw: Mapping[str, Any], kind: str, where: str) -> Dense | Attention | Experts | Terms:
        if kind == "attention":
            return self.attention(raw, where)
        if kind == "experts":
            return self.experts(raw, where)
        if kind in REGIMES:
            terms = self.mapping(raw.get("coefficients"), f"{where}.coefficients")
            terms = {**OPTIONAL_TERMS, **terms}
            values = {name: self.number(terms, name, f"{where}.coefficients.") for name in REGIMES[kind]}
            return Terms(self.text(raw, "name", f"{where}."), values, self.measured(raw, where))
        if kind == "per_sequence":
            return self.dense(raw, where, ("tail",), "sequences")
        return self.dense(raw, where, REDUCED if kind == "all_reduce" else BOUNDARIES)

    def experts(self, raw: Mapping[str, Any], where: str) -> Experts:
        experts, per_token = (self.whole(raw, key, f"{where}.") for key in ("experts", "experts_per_token"))
        if per_token > experts:
            self.fail(f"{where}.experts_per_token", per_token, f"at most experts, {experts}")
        curve = self.dense(raw, where, ("down_proj",))
        return Experts(curve, self.number(raw, "expert_s", f"{where}."), experts, per_token)

    def dense(self, raw: Mapping[str, Any], where: str, boundaries: Sequence[str], unit: str = "tokens") -> Dense:
        boundary = self.text(raw, "boundary", f"{where}.")
        if boundary not in boundaries:
            self.fail(f"{where}.boundary", boundary, f"one of {', '.join(boundaries)}")
        cuts, rises = f"knots_{unit}", f"slopes_s_per_{unit[:-1]}"
        cut_at = self.numbers(raw, cuts, where)
        if any(not knot.is_integer() or knot < 1.0 for knot in cut_at):
            self.fail(f"{where}.{cuts}", list(cut_at), f"whole {unit}, 1 or more")
        knots = tuple(map(int, cut_at))
        slopes = self.numbers(raw, rises, where)
        if len(slopes) != len(knots) + 1:
            self.fail(f"{where}.{rises}", f"{len(slopes)} values", f"{len(knots) + 1}, one more than knots")
        if list(knots) != sorted(set(knots)):
            self.fail(f"{where}.{cuts}", list(knots), "increasing counts")
        if min(slopes) <= 0.0:
            self.fail(f"{where}.{rises}", min(slopes), f"> 0: more {unit} must cost more")
        constant_s = self.number(raw, "constant_s", f"{where}.")
        measured = self.measured(raw, where, unit)
        return Dense(self.text(raw, "name", f"{where}."), boundary, constant_s, knots, slopes, measured)

    def attention(self, raw: Mapping[str, Any], where: str) -> Attention:
        terms = self.mapping(raw.get("coefficients"), f"{where}.coefficients")
        values = [self.number(terms, key, f"{where}.coefficients.") for key in ("1", "c", "c*c", "c*p", "p")]
        if values[1] + values[2] <= 0.0:
            self.fail(f"{where}.coefficients", terms, "c or c*c > 0: more tokens must cost more")
        one_s, c_s, cc_s, cp_s, p_s = values
        floor_tokens = int(self.number({"floor_tokens": 0, **raw}, "floor_tokens", f"{where}."))
        floor_s = self.number({"f": 0.0, **terms}, "f", f"{where}.coefficients.") if floor_tokens else 0.0
        measured = self.measured(raw, where)
        return Attention(
            self.text(raw, "name", f"{where}."), one_s, c_s, cc_s, cp_s, p_s, measured, floor_s, floor_tokens
        )

    def measured(self, raw: Mapping[str, Any], where: str, unit: str = "tokens") -> tuple[int, int]:
        values = self.numbers(raw, f"measured_{unit}", where)
        if len(values) != 2 or not 1 <= values[0] <= values[1]:
            self.fail(f"{where}.measured_{unit}", list(values), "[smallest, largest]")
        return int(values[0]), int(values[1])

    def numbers(self, raw: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
        values = raw.get(key)
        if not isinstance(values, list):
            self.fail(f"{where}.{key}", values, "a list of numbers")
        return tuple(self.number({key: value}, key, f"{where}.") for value in values)

    def number(self, raw: Mapping[str, Any], key: str, where: str = "", above: float | None = None) -> float:
        value = raw.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            enough = value >= 0.0 if above is None else value > above
            if enough and value <= LARGEST:
                return float(value)
        least = ">= 0" if above is None else f"> {above:g}"
        notation = " (written with a point and a signed exponent, 1.6e+10)" if isinstance(value, str) else ""
        return self.fail(where + key, value, f"a number {least} and at most {LARGEST:g}{notation}")

    def whole(self, raw: Mapping[str, Any], key: str, where: str = "") -> int:
        value = self.number(raw, key, where, above=0.0)
        if not value.is_integer():
            self.fail(where + key, raw.get(key), "a whole number, 1 or more")
        return int(value)

    def text(self, raw: Mapping[str, Any], key: str, where: str = "") -> str:
        value = raw.get(key)
        if not isinstance(value, str) or not value:
            self.fail(where + key, value, "a name")
        return value

    def mapping(self, raw: object, where: str) -> Mapping[Any, Any]:
        if not isinstance(raw, dict):
            self.fail(where, raw, "a mapping")
        return raw

    def fail(self, key: str, found: object, allowed: object) -> NoReturn:
        raise ValueError(f"{self.path}: {key} is {found!r}; allowed: {allowed}")


def profile_table() -> Iterable[tuple[str, str, tuple[int, ...]]]:
    """(model, gpu, TP degrees) of every shipped profile; its degrees are looked up in the text, which is fast."""
    for model, gpus in available_profiles().items():
        for gpu in gpus:
            text = (shipped("profiles") / model / f"{gpu}.yaml").read_text(encoding="utf-8")
            degrees = re.findall(r"^  (\d+):$", text.partition("\ntp:\n")[2], flags=re.MULTILINE)
            yield model, gpu, tuple(sorted(map(int, degrees))) or load_profile(model, gpu).tp_degrees
