"""Who owns which slot of the state pool: what layers without keys and values remember of a
sequence.

A running sequence owns one slot. A state cannot be cut short as keys and values can, so a prefix is
found again only where its state was kept: as a step runs a prompt it may leave a copy behind at the
last border of a block (`keep`). Copies live in slots that no sequence needs; the least recently
used goes first.

A copy is written while its step runs, so it can be found from the next step on (`begin_step`), and
one that a step reads is not overwritten by the same step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class StatePool:
    def __init__(self, slots: int):
        self.slots = slots
        self.free = list(range(slots))
        self.kept: OrderedDict[bytes, int] = OrderedDict()  # by digest; the next to go first
        self.fresh: dict[bytes, int] = {}  # those that the step being made writes
        self.read: set[int] = set()  # those that it reads

    def begin_step(self) -> None:
        self.kept |= self.fresh
        self.fresh.clear()
        self.read.clear()

    def take(self) -> int | None:
        """A slot, at the price of a copy if there must be one; None: sequences have them all."""
        if self.free:
            return self.free.pop()
        victim = next((name for name, slot in self.kept.items() if slot not in self.read), None)
        return None if victim is None else self.kept.pop(victim)

    def release(self, slot: int) -> None:
        self.free.append(slot)

    def find(self, digests: Sequence[bytes]) -> tuple[int, int]:
        """The longest prefix whose state is kept: how many blocks, and the slot; (0, −1): none."""
        for count in range(len(digests), 0, -1):
            name = digests[count - 1]
            if (slot := self.kept.get(name)) is not None:
                self.kept.move_to_end(name)
                self.read.add(slot)
                return count, slot
        return 0, -1

    def keep(self, name: bytes) -> int | None:
        """A slot for a copy that the step being made writes; None: there is one, or no room."""
        if name in self.kept or name in self.fresh:
            return None
        slot = self.take()
        if slot is not None:
            self.fresh[name] = slot
        return slot

    def forget(self) -> None:
        """All copies."""
        self.begin_step()
        self.free += self.kept.values()
        self.kept.clear()

    def check_integrity(self, held: Sequence[int]) -> None:
        """Raise unless every slot is free, held by one sequence, or a copy."""
        found = sorted([*self.free, *held, *self.kept.values(), *self.fresh.values()])
        if found != list(range(self.slots)):
            raise AssertionError(
                f"{self.slots} slots of states, of which are accounted for: {found}"
            )
