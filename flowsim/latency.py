"""How long things take: operator curves of a profile composed into timelines, and predictors of them.

Reads profiles; knows no scheduling and no simulator. The instance runs a LatencyModel; a policy sees a
Predictor. The two are separate objects, so that prediction error can be studied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from flowsim.profile import BOUNDARIES, REDUCED, Dense, Profile
from flowsim.timeline import Pass, Stops, Timeline

__all__ = ["Exact", "LatencyModel", "Predictor", "Tokens"]

Tokens = Sequence[tuple[int, int]]
"""What a batch computes: (new tokens c, cached tokens p) of each part."""


class Predictor(Protocol):
    """What a scheduler believes about prefill times; seconds from the start to the first token, run alone."""

    def alone_s(self, prompt_tokens: int) -> float:
        """A whole prompt on an idle instance."""
        ...

    def batch_s(self, tokens: Tokens) -> float:
        """A batch on an idle instance."""
        ...


class LatencyModel:
    """The simulated hardware: turns a batch into its timeline.

    Args:
        profile: the model's and GPU's curves.
        tp: GPUs of one instance; the profile must have data for it.
        pass_tokens: a longer batch runs as several passes back to back.
        stops: the legal stops; each costs the profile's `check_s` (except REQUEST and PASS, which have none).

    Raises:
        ValueError: a TP degree without data (those available are listed), or `pass_tokens` below 1.
    """

    def __init__(self, profile: Profile, tp: int = 1, *, pass_tokens: int = 8192, stops: Stops = Stops.REQUEST) -> None:
        if tp not in profile.dense:
            degrees = ", ".join(map(str, profile.tp_degrees))
            raise ValueError(
                f"tp={tp}: {profile.path} has data for tp {degrees} only; "
                "profile this degree and add it to the file's `tp` section"
            )
        if pass_tokens < 1:
            raise ValueError(f"pass_tokens is {pass_tokens}; it must be at least 1")
        self.profile = profile
        self.tp = tp
        self.pass_tokens = pass_tokens
        self.stops = stops
        self._attention = profile.attention[tp]
        experts = profile.experts.get(tp, ())
        self._experts = [
            (one.expert_s * one.experts, 1.0 - one.experts_per_token / one.experts) for one in experts if one.expert_s
        ]
        curves = [*profile.dense[tp], *(one.curve for one in experts)]
        self._knots, self._lines = _merge(curves, profile.all_reduce[tp])
        self._measured = [(one.name, one.measured_tokens) for one in curves]
        self._per_sequence = profile.per_sequence.get(tp, ())
        self._sequences_s: dict[int, float] = {0: 0.0}
        check_s = profile.check_s
        self._checks_s = tuple(check_s * (operator in stops.operators) for operator in range(5))
        self._whole: dict[int, Timeline] = {}

    @property
    def barrier_s(self) -> float:
        """What a meeting of all ranks costs: an all-reduce of nothing; 0 for a single GPU."""
        return max((one.constant_s for one in self.profile.all_reduce[self.tp]), default=0.0)

    def bound(self, *, pass_tokens: int, stops: Stops) -> LatencyModel:
        """The same hardware under an engine's pass size and a policy's stops."""
        return LatencyModel(self.profile, self.tp, pass_tokens=pass_tokens, stops=stops)

    def timeline(self, tokens: Tokens, slowest: float = 1.0) -> Timeline:
        """The timeline of a batch, split in order into passes of at most `pass_tokens` new tokens.

        `slowest` multiplies the operators' times: by how much the slowest rank of this batch is off. Ranks wait
        for one another at each all-reduce, so the group takes what its slowest rank takes, plus the all-reduces.
        """
        if len(tokens) == 1 and tokens[0][1] == 0 and slowest == 1.0:
            return self.whole(tokens[0][0])
        return Timeline([self._pass(part, slowest) for part in _passes(tokens, self.pass_tokens)])

    def whole(self, prompt_tokens: int) -> Timeline:
        """The timeline of one whole prompt alone; computed once per length."""
        timeline = self._whole.get(prompt_tokens)
        if timeline is None:
            passes = _passes(((prompt_tokens, 0),), self.pass_tokens)
            timeline = self._whole[prompt_tokens] = Timeline([self._pass(part, 1.0) for part in passes])
        return timeline

    def isolated_s(self, prompt_tokens: int) -> float:
        """TTFT in seconds of one prompt on an idle instance, all overheads included."""
        return self.whole(prompt_tokens).total_s + self.profile.request_s

    def extrapolated(self, prompt_tokens: int) -> list[str]:
        """The operators that a prompt of this length drives beyond the range they were measured in."""
        return [name for name, _ in self.beyond(prompt_tokens)]

    def beyond(self, prompt_tokens: int) -> list[tuple[str, tuple[int, int]]]:
        """Those operators, and the (smallest, largest) tokens that each was measured with."""
        new, a = min(prompt_tokens, self.pass_tokens), self._attention
        found = [(name, measured) for name, measured in self._measured if new > measured[1]]
        return found + [(a.name, a.measured_tokens)] * (prompt_tokens > a.measured_tokens[1])

    def _pass(self, tokens: Tokens, slowest: float) -> Pass:
        """One pass: dense operators in its tokens, experts touched, attention in `1, c, c*c, c*p, p` over the parts."""
        a = self._attention
        floor = a.floor_tokens
        total = square = cross = cached = wide = 0
        for c, p in tokens:
            total += c
            square += c * c
            at_least = c if c > floor else floor
            wide += at_least
            cross += at_least * p
            cached += p
        lines = self._lines[bisect_left(self._knots, total)]
        head_s, qkv_s, other_s, o_s, gate_s, down_s, tail_s, o_meet_s, down_meet_s = [
            start + slope * total for start, slope in lines
        ]
        for all_s, missed in self._experts:
            down_s += all_s * (1.0 - missed**total)
        if self._per_sequence:
            tail_s += self._of_sequences(len(tokens))
        attention_s = other_s + a.one_s + a.c_s * total + a.cc_s * square + a.cp_s * cross + a.p_s * cached
        attention_s += a.floor_s * wide
        check = self._checks_s
        e0 = slowest * qkv_s + check[0]
        e1 = e0 + slowest * attention_s + check[1]
        e2 = e1 + slowest * o_s + o_meet_s + check[2]
        e3 = e2 + slowest * gate_s + check[3]
        e4 = e3 + slowest * down_s + down_meet_s + check[4]
        profile = self.profile
        head_s = profile.pass_s + slowest * head_s
        return Pass(total, head_s, (e0, e1, e2, e3, e4), profile.layers, slowest * tail_s)

    def _of_sequences(self, sequences: int) -> float:
        """lm_head and sampler of a pass that ends so many sequences; computed once per count."""
        seconds = self._sequences_s.get(sequences)
        if seconds is None:
            seconds = 0.0
            for one in self._per_sequence:
                start_s, slope_s = _line(one, sequences - 1)
                seconds += start_s + slope_s * sequences
            self._sequences_s[sequences] = seconds
        return seconds


class Exact:
    """Predicts what the hardware will take: no prediction error."""

    def __init__(self, latency: LatencyModel) -> None:
        self.latency = latency
        self._request_s = latency.profile.request_s
        self._alone_s: dict[int, float] = {}

    def alone_s(self, prompt_tokens: int) -> float:
        """The prompt's isolated TTFT; computed once per length."""
        alone_s = self._alone_s.get(prompt_tokens)
        if alone_s is None:
            alone_s = self._alone_s[prompt_tokens] = self.latency.isolated_s(prompt_tokens)
        return alone_s

    def batch_s(self, tokens: Tokens) -> float:
        """The batch's timeline, plus `request_s`."""
        return self.latency.timeline(tokens).total_s + self._request_s


def _passes(tokens: Tokens, pass_tokens: int) -> list[list[tuple[int, int]]]:
    """The parts cut, in order, into passes of at most `pass_tokens` new tokens; a cut part's rest sees its
    earlier tokens as cached."""
    passes: list[list[tuple[int, int]]] = [[]]
    room = pass_tokens
    for new, cached in tokens:
        while new:
            if not room:
                passes.append([])
                room = pass_tokens
            taken = min(new, room)
            passes[-1].append((taken, cached))
            new, cached, room = new - taken, cached + taken, room - taken
    return passes


def _merge(dense: Sequence[Dense], all_reduce: Sequence[Dense]) -> tuple[list[int], list[list[tuple[float, float]]]]:
    """All curves summed per boundary, and the all-reduces per boundary that has one, on one common set of knots.

    Returns the knots, and for each of the `len(knots) + 1` segments the (start, slope) line of every sum:
    `bisect_left(knots, n)` names the segment of n tokens (a knot belongs to the segment below it).
    """
    curves = [(BOUNDARIES.index(one.boundary), one) for one in dense]
    curves += [(len(BOUNDARIES) + REDUCED.index(one.boundary), one) for one in all_reduce]
    knots = sorted({knot for _, one in curves for knot in one.knots_tokens})
    segments = []
    for low in [0, *knots]:
        lines = [(0.0, 0.0)] * (len(BOUNDARIES) + len(REDUCED))
        for place, one in curves:
            start_s, slope_s = _line(one, low)
            lines[place] = (lines[place][0] + start_s, lines[place][1] + slope_s)
        segments.append(lines)
    return knots, segments


def _line(one: Dense, above_tokens: int) -> tuple[float, float]:
    """The line (start, slope) that a dense curve follows just above a number of tokens."""
    edges = [0, *one.knots_tokens]
    segment = sum(knot <= above_tokens for knot in one.knots_tokens)
    widths = [high - low for low, high in pairwise(edges)]
    steps_s = [slope * width for slope, width in zip(one.slopes_s_per_token, widths, strict=False)]
    reached_s = list(accumulate(steps_s, initial=one.constant_s))[segment]
    slope_s = one.slopes_s_per_token[segment]
    return reached_s - slope_s * edges[segment], slope_s
