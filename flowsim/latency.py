"""How long things take: operator curves of a profile composed into timelines, and predictors of them.

Reads profiles; knows no scheduling and no simulator. The instance runs a LatencyModel; a policy sees a
Predictor. The two are separate objects, so that prediction error can be studied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from flowsim.curves import line, merge, shared
from flowsim.profile import Profile
from flowsim.timeline import Iterations, Pass, Stops, Timeline

__all__ = ["Decodes", "Exact", "LatencyModel", "Predictor", "Tokens"]

Tokens = Sequence[tuple[int, int]]
"""What a batch computes: (new tokens c, cached tokens p) of each part."""


class Decodes(NamedTuple):
    """What the decodes of a step compute: how many, and the tokens of context (their own new one included) that they
    attend to, together and the longest."""

    sequences: int
    sum_tokens: int
    max_tokens: int


NO_DECODES = Decodes(0, 0, 0)
DECODE_SKEW = 0.06
"""Of the context that the longest decode of a batch has beyond the mean, the share that each decode pays for.

Kernels split work evenly over decodes of unequal length only in part: published sweeps pool to 0.054 - 0.075. This
value is not fitted to any run."""


class Predictor(Protocol):
    """What a scheduler believes about prefill times; seconds from the start to the first token, run alone."""

    def alone_s(self, prompt_tokens: int) -> float:
        """A whole prompt on an idle instance."""
        ...

    def batch_s(self, tokens: Tokens, decodes: Decodes = NO_DECODES) -> float:
        """A batch on an idle instance; with decodes, those gain a token."""
        ...


class LatencyModel:
    """The simulated hardware: turns a batch into its timeline.

    Args:
        profile: the model's and GPU's curves.
        tp: GPUs of one instance; the profile must have data for it.
        pass_tokens: a longer batch runs as several passes back to back.
        stops: the legal stops; each costs the profile's `check_s` (except REQUEST and PASS, which have none).
        decode_skew: what decodes of unequal context cost beyond equal ones (see `DECODE_SKEW`), 0 to 1.
        ranks: instances that share a layer's experts evenly, each computing its share for the tokens of all.

    Raises:
        ValueError: a TP degree without data (those available are listed), or `pass_tokens` below 1.
    """

    def __init__(
        self,
        profile: Profile,
        tp: int = 1,
        *,
        pass_tokens: int = 8192,
        stops: Stops = Stops.REQUEST,
        decode_skew: float = DECODE_SKEW,
        ranks: int = 1,
    ) -> None:
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
        self.decode_skew = decode_skew
        self.ranks = ranks
        self._attention = profile.attention[tp]
        experts = [shared(one, ranks) for one in profile.experts.get(tp, ())]
        self._curves = [one.curve for one in experts]
        self._experts = [
            (one.expert_s * one.experts / ranks, 1.0 - one.experts_per_token / one.experts)
            for one in experts
            if one.expert_s
        ]
        curves = [*profile.dense[tp], *(one.curve for one in experts)]
        self._knots, self._lines = merge(curves, profile.all_reduce[tp])
        self._sums_s: dict[int, tuple[float, ...]] = {}  # by tokens of a pass: at each boundary, what the lines give
        self._measured = [(one.name, one.measured_tokens) for one in curves]
        self._per_sequence = profile.per_sequence.get(tp, ())
        self._sequences_s: dict[int, float] = {0: 0.0}
        check_s = profile.check_s
        self._checks_s = tuple(check_s * (operator in stops.operators) for operator in range(5))
        self._bound: dict[tuple[int, Stops], LatencyModel] = {}
        self._whole: dict[int, Timeline] = {}
        self._asked: tuple[Tokens, float, Decodes] | None = (
            None  # the last one: who predicts a batch often runs it next
        )
        self._answer = Timeline(())

    @property
    def barrier_s(self) -> float:
        """What a meeting of all ranks costs: an all-reduce of nothing; 0 for a single GPU."""
        return max((one.constant_s for one in self.profile.all_reduce[self.tp]), default=0.0)

    def bound(self, *, pass_tokens: int, stops: Stops) -> LatencyModel:
        """The same hardware under an engine's pass size and a policy's stops; one object for all runs that ask."""
        bound = self._bound.get((pass_tokens, stops))
        if bound is None:
            skew, ranks = self.decode_skew, self.ranks
            bound = self._bound[pass_tokens, stops] = LatencyModel(
                self.profile, self.tp, pass_tokens=pass_tokens, stops=stops, decode_skew=skew, ranks=ranks
            )
        return bound

    def stopping(self, stops: Stops) -> LatencyModel:
        """The same with the checks of other stops."""
        return self if stops is self.stops else self.bound(pass_tokens=self.pass_tokens, stops=stops)

    def checks_s(self, passes: int) -> float:
        """Seconds that the checks of so many passes take."""
        return passes * self.profile.layers * sum(self._checks_s)

    def exchange_s(self, own_tokens: int, tokens: int, link: tuple[float, float]) -> float:
        """What a step of a group of ranks takes beyond a rank's own timeline: the others' tokens in its share of the
        experts, and in each layer an all-gather of their hidden states and a reduce-scatter of the sums.

        `tokens` are those of all ranks; `link` is (latency in s, bytes per s), `inf` for one without limit.
        """
        latency_s, bytes_per_s = link
        moved_s = latency_s + 2.0 * self.profile.hidden_size * (tokens - own_tokens) / bytes_per_s
        experts_s = self._experts_s(tokens) - self._experts_s(own_tokens)
        return self.profile.layers * (experts_s + 2.0 * moved_s)

    def _experts_s(self, tokens: int) -> float:
        """One layer's experts on a rank, for the tokens of all ranks."""
        seconds = 0.0
        for one in self._curves:
            start_s, slope_s = line(one, tokens - 1)
            seconds += start_s + slope_s * tokens
        return seconds + sum(all_s * (1.0 - missed**tokens) for all_s, missed in self._experts)

    def timeline(self, tokens: Tokens, slowest: float = 1.0, decodes: Decodes = NO_DECODES) -> Timeline:
        """The timeline of a batch, split in order into passes of at most `pass_tokens` new tokens; decodes, if any,
        are in the first.

        `slowest` multiplies the operators' times: by how much the slowest rank of this batch is off. Ranks wait
        for one another at each all-reduce, so the group takes what its slowest rank takes, plus the all-reduces.
        """
        if len(tokens) == 1 and slowest == 1.0 and decodes is NO_DECODES:
            new, cached = tokens[0]
            if not cached:
                return self.whole(new)
        asked = (tokens, slowest, decodes)
        if asked != self._asked:
            self._asked, self._answer = asked, self._lay_out(tokens, slowest, decodes)
        return self._answer

    def _lay_out(self, tokens: Tokens, slowest: float, decodes: Decodes) -> Timeline:
        passes = _passes(tokens, self.pass_tokens)
        if decodes.sequences:
            rest = [self._pass(part, slowest) for part in passes[1:]]
            return Timeline([self._pass(passes[0], slowest, decodes), *rest])
        return Timeline([self._pass(part, slowest) for part in passes])

    def layered(self, tokens: Tokens, layers: range, slowest: float = 1.0, decodes: Decodes = NO_DECODES) -> Timeline:
        """The timeline of a batch whose prompts go through `layers` only, while its decodes go through all.

        Prompts are embedded where `layers` begin with the model's first, and come to lm_head where they end with its
        last; decodes do both each time. A pass's decodes and prompts share the operators of `layers`.
        """
        first, *rest = _passes(tokens, self.pass_tokens)
        passes = self._group(first, layers, slowest, decodes)
        for part in rest:
            passes += self._group(part, layers, slowest)
        return Timeline(passes)

    def _group(self, tokens: Tokens, layers: range, slowest: float, decodes: Decodes = NO_DECODES) -> list[Pass]:
        """One pass in which prompts go through `layers` only: its stretches of like layers."""
        count = self.profile.layers
        mixed = self._pass(tokens, slowest, decodes)
        alone = mixed._replace(head_s=self.profile.pass_s, tail_s=0.0)  # without decodes nothing is beside the prompts
        if decodes.sequences:
            alone = self._pass((), slowest, decodes)
        before, after = (layers.start, count - layers.stop) if decodes.sequences else (0, 0)
        stretches = ((alone, before), (mixed, len(layers)), (alone, after))
        passes = [one._replace(head_s=0.0, layers=many, tail_s=0.0) for one, many in stretches if many]
        passes[0] = passes[0]._replace(head_s=alone.head_s if layers.start else mixed.head_s)
        passes[-1] = passes[-1]._replace(tail_s=alone.tail_s if layers.stop < count else mixed.tail_s)
        return passes

    def iterations(self, decodes: Decodes, count: int, slowest: float = 1.0) -> Iterations:
        """`count` steps of the same decodes, back to back; `decodes` is as of the first.

        Raises:
            ValueError: the profile has no decode attention.
        """
        first_s = self._pass((), slowest, decodes).total_s
        _, _, sum_s, mean_s = self._decode_terms()
        growth_s = self.profile.layers * slowest * (sum_s * decodes.sequences + mean_s)
        return Iterations(first_s, growth_s, count, 5 * self.profile.layers)

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

    def _pass(self, tokens: Tokens, slowest: float, decodes: Decodes = NO_DECODES) -> Pass:
        """One pass: dense operators in its tokens, experts touched, attention in `1, c, c*c, c*p, p` over the parts,
        or in the terms of a decode or mixed batch."""
        total = square = cross = cached = 0
        for c, p in tokens:
            total += c
            square += c * c
            cross += c * p
            cached += p
        prefilled = total
        total += decodes.sequences
        sums_s = self._sums_s.get(total)
        if sums_s is None:
            lines = self._lines[bisect_left(self._knots, total)]
            sums_s = self._sums_s[total] = tuple([start + slope * total for start, slope in lines])
        head_s, qkv_s, other_s, o_s, gate_s, down_s, tail_s, o_meet_s, down_meet_s = sums_s
        for all_s, missed in self._experts:
            down_s += all_s * (1.0 - missed**total)
        if self._per_sequence:
            tail_s += self._of_sequences(len(tokens) + decodes.sequences)
        if decodes.sequences:
            attention_s = other_s + self._mixed_s(tokens, prefilled, cross + 0.5 * square, cached, decodes)
        else:
            a = self._attention
            attention_s = other_s + a.one_s + a.c_s * total + a.cc_s * square + a.cp_s * cross + a.p_s * cached
            if a.floor_tokens:
                attention_s += self._of_floor(tokens)
        check = self._checks_s
        e0 = slowest * qkv_s + check[0]
        e1 = e0 + slowest * attention_s + check[1]
        e2 = e1 + slowest * o_s + o_meet_s + check[2]
        e3 = e2 + slowest * gate_s + check[3]
        e4 = e3 + slowest * down_s + down_meet_s + check[4]
        profile = self.profile
        head_s = profile.pass_s + slowest * head_s
        return Pass(total, head_s, (e0, e1, e2, e3, e4), profile.layers, slowest * tail_s)

    def _mixed_s(self, tokens: Tokens, new: int, work: float, cached: int, decodes: Decodes) -> float:
        """Attention of a batch with decodes: of decodes alone, or mixed with prefills, each in its own measured terms.

        Where a source has measured no mixed batches they cost the sum of the two (assumed; on the GPUs where both are
        known that is a quarter to a third too little).
        """
        n, sum_tokens, max_tokens = decodes
        mean = sum_tokens / n
        skewed = sum_tokens + self.decode_skew * (n * max_tokens - sum_tokens)
        terms = self.profile.mixed_attention.get(self.tp) if tokens else None
        if terms is None:
            one_s, n_s, sum_s, mean_s = self._decode_terms()
            decode_s = one_s + n_s * n + sum_s * skewed + mean_s * mean
            return decode_s + self._parts_attention_s(tokens)
        k = terms.coefficients
        return (
            k["1"] + k["q"] * new + k["work"] * work + k["kp"] * cached
            + k["n"] * n + k["sum_kv"] * skewed + k["mean_kv"] * mean + k["nq"] * n * new
        )  # fmt: skip

    def _parts_attention_s(self, tokens: Tokens) -> float:
        """Attention of prefills, in `1, c, c*c, c*p, p` over the parts."""
        if not tokens:
            return 0.0
        a = self._attention
        seconds = a.one_s + self._of_floor(tokens)
        for c, p in tokens:
            seconds += a.c_s * c + a.cc_s * c * c + a.cp_s * c * p + a.p_s * p
        return seconds

    def _decode_terms(self) -> tuple[float, float, float, float]:
        """Decode attention's seconds for `1, n, sum_kv, mean_kv`."""
        terms = self.profile.decode_attention.get(self.tp)
        if terms is None:
            raise ValueError(
                f"{self.profile.path} has no decode_attention at tp {self.tp}; only cluster=prefill_only runs"
            )
        k = terms.coefficients
        return k["1"], k["n"], k["sum_kv"], k["mean_kv"]

    def _of_floor(self, tokens: Tokens) -> float:
        """What attention's floor of new tokens adds: its own term, and `c*p` of the parts that are below it."""
        a, seconds = self._attention, 0.0
        for c, p in tokens:
            below = max(0, a.floor_tokens - c)
            seconds += a.floor_s * (c + below) + a.cp_s * below * p
        return seconds

    def _of_sequences(self, sequences: int) -> float:
        """lm_head and sampler of a pass that ends so many sequences; computed once per count."""
        seconds = self._sequences_s.get(sequences)
        if seconds is None:
            seconds = 0.0
            for one in self._per_sequence:
                start_s, slope_s = line(one, sequences - 1)
                seconds += start_s + slope_s * sequences
            self._sequences_s[sequences] = seconds
        return seconds


class Exact:
    """Predicts what the hardware will take: no prediction error."""

    def __init__(self, latency: LatencyModel) -> None:
        self.latency = latency
        self._request_s = latency.profile.request_s

    def alone_s(self, prompt_tokens: int) -> float:
        """The prompt's isolated TTFT."""
        return self.latency.isolated_s(prompt_tokens)

    def batch_s(self, tokens: Tokens, decodes: Decodes = NO_DECODES) -> float:
        """The batch's timeline, plus `request_s`."""
        if not tokens:
            return self.latency.iterations(decodes, 1).total_s + self._request_s
        return self.latency.timeline(tokens, 1.0, decodes).total_s + self._request_s


def _passes(tokens: Tokens, pass_tokens: int) -> Sequence[Tokens]:
    """The parts cut, in order, into passes of at most `pass_tokens` new tokens; a cut part's rest sees its
    earlier tokens as cached."""
    if sum([new for new, _ in tokens]) <= pass_tokens:
        return [tokens]
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
