"""Who owns which block of the paged KV cache: reference counts, and reuse of blocks that hold the
same prefix.

A full block is known by its digest, which chains the digest of the block before it with its own
token ids, so that equal digests mean equal prefixes. A block that nobody refers to stays findable
until it is needed for something else; the least recently used goes first, and a sequence's last
blocks before its first ones, because a prefix is useful only from its beginning.

Blocks are registered when a step is scheduled, not when it has run: in each layer all K and V of a
step are written before any attention reads, so a request may share blocks that another one fills in
the very same step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def digests(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Of the full blocks of these tokens, the first after `parent`; the salt stands before a
    sequence's first block.
    """
    found, step, data = [], 8 * block_size, array("q", tokens).tobytes()
    for begin in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + data[begin : begin + step], digest_size=16).digest()
        found.append(parent)
    return found


def salt_of(name: str | None, adapter: str | None = None) -> bytes:
    """What stands before the first block: of one length for all names, so that none can be mistaken
    for another and tokens.

    Keys and values that an adapter has changed are another model's: nobody else may find them.
    """
    salt = b"" if name is None else _digest(name.encode("utf-8", "surrogatepass"), b"salt")
    return salt if adapter is None else _digest(salt + adapter.encode(), b"adapter")


def _digest(data: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, person=person).digest()


class BlockPool:
    """`blocks` blocks of `block_size` tokens each. Sequences hold lists of block numbers; the pool
    counts the holders.
    """

    def __init__(self, blocks: int, block_size: int):
        self.blocks = blocks
        self.block_size = block_size
        self.references = [0] * blocks
        # next to be taken first
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.digest_of: list[bytes | None] = [None] * blocks
        self.block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        return len(self.free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix. They are not held yet: `hold` them before
        anything else is taken.
        """
        found = []
        for item in digests:
            if (block := self.block_of.get(item)) is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1
            self.free.pop(block, None)

    def take(self, count: int) -> list[int] | None:
        """Blocks for new tokens, whatever they held before forgotten; None (and nothing taken) if
        there are too few.
        """
        if count > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.references[block] = 1
            if (old := self.digest_of[block]) is not None:
                del self.block_of[old]
                self.digest_of[block] = None
        return taken

    def register(self, block: int, name: bytes) -> None:
        """Make a held, full block findable. Where two blocks hold the same prefix, the first one
        stays the known one.
        """
        if name not in self.block_of and self.digest_of[block] is None:
            self.block_of[name] = block
            self.digest_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None
                # nobody can find it again: take it before the findable ones
                if self.digest_of[block] is None:
                    self.free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Drop the prefix cache (say, because the weights changed)."""
        self.block_of.clear()
        self.digest_of = [None] * self.blocks

    def check_integrity(self, held: Sequence[Sequence[int]] = ()) -> None:
        """Raise unless every block is free or held, never both, and counted once for each of the
        given holders.
        """
        counts = [0] * self.blocks
        for owner in held:
            for block in owner:
                counts[block] += 1
        for block, references in enumerate(self.references):
            if references != counts[block]:
                raise AssertionError(
                    f"block {block} is counted {references} times but held {counts[block]} times"
                )
            if (references == 0) != (block in self.free):
                raise AssertionError(
                    f"block {block} has {references} holders and is "
                    f"{'' if block in self.free else 'not '}free"
                )
        for name, block in self.block_of.items():
            if self.digest_of[block] != name:
                raise AssertionError(f"block {block} is known by a digest it does not carry")
        if len(self.block_of) != sum(name is not None for name in self.digest_of):
            raise AssertionError("a block carries a digest by which it cannot be found")
