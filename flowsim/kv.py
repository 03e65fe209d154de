"""KV blocks taken and given back, and prefixes remembered. Knows no scheduling, no requests, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

__all__ = ["Blocks", "KVPool", "PrefixPool", "pool_blocks"]

Named = Callable[[int], Hashable]
"""What a block of a sequence is called, from its place: equal for equal tokens after equal tokens."""


def pool_blocks(
    *,
    gpu_memory_bytes: float,
    weights_bytes: float,
    kv_bytes_per_token: float,
    block_tokens: int,
    gpu_memory_fraction: float,
    tp: int = 1,
) -> int:
    """How many KV blocks an instance of `tp` GPUs holds beside the model's weights.

    Raises:
        ValueError: the weights leave no room for a single block.
    """
    free_bytes = tp * gpu_memory_bytes * gpu_memory_fraction - weights_bytes
    blocks = int(free_bytes / (kv_bytes_per_token * block_tokens))
    if blocks < 1:
        raise ValueError(
            f"{weights_bytes / 1e9:.1f} GB of weights do not fit {tp} GPU(s) of {gpu_memory_bytes / 1e9:.1f} GB "
            f"at gpu_memory_fraction={gpu_memory_fraction}; use a higher tp or give kv_blocks"
        )
    return blocks


class Blocks(Protocol):
    """The KV blocks of one instance. `free_blocks` counts remembered ones that nobody holds too; `remembers` is False
    where no block ever is."""

    remembers: bool
    block_tokens: int
    total_blocks: int

    @property
    def free_blocks(self) -> int: ...
    def blocks(self, tokens: int) -> int: ...
    def held(self, owner: int) -> int: ...
    def hits(self, named: Named, most: int) -> int: ...
    def needs(self, named: Named, blocks: int) -> int: ...
    def take(self, owner: int, blocks: int, named: Named) -> None: ...
    def grow(self, owner: int, blocks: int) -> None: ...
    def fill(self, owner: int, blocks: int, named: Named) -> None: ...
    def give(self, owner: int) -> None: ...


class KVPool:
    """The KV blocks of one instance; ``free_blocks + sum(held) == total_blocks`` always."""

    __slots__ = ("_held", "block_tokens", "free_blocks", "remembers", "total_blocks")

    def __init__(self, total_blocks: int, block_tokens: int = 16) -> None:
        if total_blocks < 1 or block_tokens < 1:
            raise ValueError(f"kv_blocks is {total_blocks} and block_tokens {block_tokens}; both must be at least 1")
        self.remembers = False
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self.free_blocks = total_blocks
        self._held: dict[int, int] = {}

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_tokens)

    def held(self, owner: int) -> int:
        """Blocks that request `owner` holds now."""
        return self._held.get(owner, 0)

    def hits(self, named: Named, most: int) -> int:
        """Leading blocks of a sequence that are remembered: none are."""
        return 0

    def needs(self, named: Named, blocks: int) -> int:
        """Free blocks that a sequence of `blocks` blocks would take."""
        return blocks

    def fill(self, owner: int, blocks: int, named: Named) -> None:
        """The first `blocks` blocks of request `owner` are full: nothing to remember."""

    def take(self, owner: int, blocks: int, named: Named = hash) -> None:
        """Gives `blocks` blocks to request `owner`, which holds none.

        Raises:
            AssertionError: more than are free, or `owner` holds blocks already.
        """
        if blocks > self.free_blocks or owner in self._held:
            raise AssertionError(
                f"request {owner} takes {blocks} KV blocks; {self.free_blocks} are free, it holds {self.held(owner)}"
            )
        self._held[owner] = blocks
        self.free_blocks -= blocks

    def grow(self, owner: int, blocks: int) -> None:
        """Gives request `owner`, which holds some, `blocks` more.

        Raises:
            AssertionError: more than are free.
        """
        if blocks > self.free_blocks:
            raise AssertionError(f"request {owner} takes {blocks} more KV blocks; {self.free_blocks} are free")
        self._held[owner] += blocks
        self.free_blocks -= blocks

    def give(self, owner: int) -> None:
        """Takes all blocks of request `owner` back."""
        self.free_blocks += self._held.pop(owner)


class PrefixPool:
    """KV blocks that are remembered by name when they are given back, until they are needed for something else.

    As in vLLM's block pool: full blocks have names; a free block keeps its own and can be taken up again by whoever
    asks for that name; new blocks come from those never used, then from the least recently given back, of one
    sequence the last block first. Several requests can hold a block at once; it is free when none does.
    """

    def __init__(self, total_blocks: int, block_tokens: int = 16) -> None:
        if total_blocks < 1 or block_tokens < 1:
            raise ValueError(f"kv_blocks is {total_blocks} and block_tokens {block_tokens}; both must be at least 1")
        self.remembers = True
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self._fresh = total_blocks  # never used
        self._idle: OrderedDict[int, None] = OrderedDict()  # free again, the least recently given back first
        self._holders: dict[int, int] = {}  # of blocks in use
        self._names: dict[int, Hashable] = {}
        self._remembered: dict[Hashable, int] = {}
        self._held: dict[int, list[int]] = {}
        self._full: dict[int, int] = {}  # blocks of a request that have their names

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds, remembered ones among them."""
        return self._fresh + len(self._idle)

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy."""
        return -(-tokens // self.block_tokens)

    def held(self, owner: int) -> int:
        """Blocks that request `owner` holds now."""
        return len(self._held.get(owner, ()))

    def hits(self, named: Named, most: int) -> int:
        """Leading blocks of a sequence that are remembered, at most `most`."""
        found = 0
        while found < most and named(found) in self._remembered:
            found += 1
        return found

    def needs(self, named: Named, blocks: int) -> int:
        """Free blocks that a sequence of `blocks` blocks would take: all but those that others hold for it."""
        found = self.hits(named, blocks - 1)  # the last token is always computed
        return blocks - sum(self._remembered[named(place)] in self._holders for place in range(found))

    def take(self, owner: int, blocks: int, named: Named) -> None:
        """Gives `blocks` blocks to request `owner`, which holds none: remembered ones first.

        Raises:
            AssertionError: more than are free, or `owner` holds blocks already.
        """
        if owner in self._held or self.needs(named, blocks) > self.free_blocks:
            raise AssertionError(
                f"request {owner} takes {blocks} KV blocks; {self.free_blocks} are free, it holds {self.held(owner)}"
            )
        found = [self._remembered[named(place)] for place in range(self.hits(named, blocks - 1))]
        for block in found:
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
        self._held[owner] = found
        self._full[owner] = len(found)
        self.grow(owner, blocks - len(found))

    def grow(self, owner: int, blocks: int) -> None:
        """Gives request `owner` `blocks` more.

        Raises:
            AssertionError: more than are free.
        """
        if blocks > self.free_blocks:
            raise AssertionError(f"request {owner} takes {blocks} more KV blocks; {self.free_blocks} are free")
        held = self._held[owner]
        for _ in range(blocks):
            if self._fresh:
                block = self.total_blocks - self._fresh
                self._fresh -= 1
            else:
                block, _ = self._idle.popitem(last=False)
                if block in self._names:
                    del self._remembered[self._names.pop(block)]
            self._holders[block] = 1
            held.append(block)

    def fill(self, owner: int, blocks: int, named: Named) -> None:
        """The first `blocks` blocks of request `owner` are full: they get their names, unless another has it."""
        held = self._held[owner]
        for place in range(self._full[owner], blocks):
            name = named(place)
            if name not in self._remembered:
                self._remembered[name] = held[place]
                self._names[held[place]] = name
        self._full[owner] = max(blocks, self._full[owner])

    def give(self, owner: int) -> None:
        """Takes all blocks of request `owner` back; those with names can be had again under them."""
        del self._full[owner]
        for block in reversed(self._held.pop(owner)):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._idle[block] = None
