"""The block pool: no block lost, none used twice, equal prefixes found again."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flyweight.engine.kv_cache import BlockPool, digests


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, find known prefixes, grow, become findable and go, in any order."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6, 2)
        self.held: list[list[int]] = []
        # what a registered block holds, as a model that never forgets wrongly
        self.content: dict[int, bytes] = {}

    @rule(name=st.integers(0, 5))
    def start(self, name):
        chain = digests(b"", [name, 0], 1)
        found = self.pool.find(chain)
        assert [self.content[block] for block in found] == chain[: len(found)], (
            "a block was found under a foreign name"
        )
        self.pool.hold(found)
        taken = self.pool.take(2 - len(found))
        if taken is None:
            self.pool.release(found)
            return
        blocks = found + taken
        for block, item in zip(blocks, chain, strict=True):
            self.pool.register(block, item)
            self.content[block] = item
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100), count=st.integers(0, 3))
    def grow(self, which, count):
        before = self.pool.available
        taken = self.pool.take(count)
        assert (taken is None) == (count > before)
        if taken:
            assert not {block for blocks in self.held for block in blocks} & set(taken), (
                "a held block was given out"
            )
            self.held[which % len(self.held)].extend(taken)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def stop(self, which):
        self.pool.release(self.held.pop(which % len(self.held)))

    @rule()
    def forget(self):
        self.pool.forget()

    @invariant()
    def whole(self):
        self.pool.check_integrity(self.held)

    def teardown(self):
        for blocks in self.held:
            self.pool.release(blocks)
        self.pool.check_integrity()
        assert self.pool.available == self.pool.blocks


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_digest_depends_on_everything_before_it():
    assert digests(b"", [1, 2, 3, 3], 2)[1] != digests(b"", [2, 1, 3, 3], 2)[1]
    assert digests(b"a", [1], 1) != digests(b"b", [1], 1)


def test_digests_of_full_blocks_are_the_same_whether_found_at_once_or_one_after_the_other():
    whole = digests(b"salt", range(11), 4)
    first = digests(b"salt", range(4), 4)
    assert (
        whole == first + digests(first[-1], range(4, 8), 4) and digests(b"salt", range(3), 4) == []
    )


def test_the_least_recently_used_prefix_is_forgotten_first_and_from_its_end():
    pool = BlockPool(4, 1)
    chains = {name: digests(b"", [name, 0], 1) for name in (1, 2)}
    for chain in chains.values():
        blocks = pool.take(2)
        for block, item in zip(blocks, chain, strict=True):
            pool.register(block, item)
        pool.release(blocks)
    pool.take(1)
    assert [len(pool.find(chain)) for chain in chains.values()] == [1, 2]
    pool.take(2)
    assert [len(pool.find(chain)) for chain in chains.values()] == [0, 1]


def test_blocks_that_nobody_can_find_are_taken_before_findable_ones():
    pool = BlockPool(2, 1)
    known, nameless = pool.take(2)
    pool.register(known, b"known")
    pool.release([known])
    pool.release([nameless])
    assert pool.take(1) == [nameless]
    assert pool.find([b"known"]) == [known]


@pytest.mark.parametrize("damage", ["count", "free", "name"])
def test_check_integrity_sees_damage(damage):
    pool = BlockPool(3, 1)
    block = pool.take(1)[0]
    pool.register(block, b"x")
    if damage == "count":
        pool.references[block] = 2
    elif damage == "free":
        pool.free[block] = None
    else:
        pool.digest_of[block] = b"y"
    with pytest.raises(AssertionError):
        pool.check_integrity([[block]])
