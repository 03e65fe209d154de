"""KV blocks taken and given back. Knows no scheduling, no requests, no clock."""

from __future__ import annotations

__all__ = ["KVPool", "pool_blocks"]


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


class KVPool:
    """The KV blocks of one instance; ``free_blocks + sum(held) == total_blocks`` always."""

    __slots__ = ("_held", "block_tokens", "free_blocks", "total_blocks")

    def __init__(self, total_blocks: int, block_tokens: int = 16) -> None:
        if total_blocks < 1 or block_tokens < 1:
            raise ValueError(f"kv_blocks is {total_blocks} and block_tokens {block_tokens}; both must be at least 1")
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

    def take(self, owner: int, blocks: int) -> None:
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
