"""The scheduler: budgets kept, nobody starved, nobody forgotten, all without a model."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyweight.engine import scheduler as schedulers
from flyweight.engine.kv_cache import BlockPool
from flyweight.engine.pace import Pace
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.scheduler import Scheduler
from flyweight.errors import OptionError


def make(blocks=32, size=4, seqs=4, budget=8, **options):
    return Scheduler(
        BlockPool(blocks, size), max_num_seqs=seqs, max_num_batched_tokens=budget, **options
    )


def request(number, length, *, answer=4, salt=b""):
    return Request(
        number=number,
        prompt=[number * 1000 + i for i in range(length)],
        params=SamplingParams(),
        seed=0,
        limit=length + answer,
        salt=salt,
    )


def play(scheduler, works):
    """What the engine does after a step: one new token for each that samples."""
    for work in works:
        if work.samples:
            work.request.tokens.append(7)
            if len(work.request.tokens) >= work.request.limit:
                scheduler.finish(work.request, "length")


@settings(max_examples=200)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(1, 12)),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(8, 16),
    seqs=st.integers(1, 4),
    budget=st.integers(4, 12),
    cancels=st.dictionaries(st.integers(0, 30), st.integers(0, 11), max_size=4),
    turns=st.booleans(),
)
def test_every_request_ends_within_budget_and_every_block_comes_back(
    arrivals, blocks, seqs, budget, cancels, turns
):
    scheduler = make(blocks, 4, seqs, budget)
    scheduler.turn_tokens = budget if turns else None
    requests = [request(i, length, answer=answer) for i, (_, length, answer) in enumerate(arrivals)]
    coming = sorted(range(len(requests)), key=lambda i: (arrivals[i][0], i))
    for step in range(3000):
        while coming and arrivals[coming[0]][0] <= step:
            scheduler.add(requests[coming.pop(0)])
        if (
            (target := cancels.get(step)) is not None
            and target < len(requests)
            and target not in coming
        ):
            scheduler.finish(requests[target], "cancelled")
            assert not requests[target].blocks
        works = scheduler.schedule()
        assert sum(work.count for work in works) <= budget
        assert len(scheduler.running) <= seqs
        assert len({work.request.number for work in works}) == len(works)
        assert works or not scheduler.busy, "work is left but nothing runs"
        for work in works:
            assert len(work.request.blocks) * 4 >= work.start + work.count == work.request.computed
        scheduler.check_integrity()
        play(scheduler, works)
        if not scheduler.busy and not coming:
            break
    assert all(item.finished for item in requests)
    assert scheduler.pool.available == blocks


def test_long_prompts_do_not_stop_a_running_answer():
    scheduler = make(blocks=200, seqs=8, budget=8)
    answering = request(0, 3, answer=40)
    scheduler.add(answering)
    play(scheduler, scheduler.schedule())
    for number in range(1, 8):
        scheduler.add(request(number, 64))
    for _ in range(30):
        works = scheduler.schedule()
        assert works[0].request is answering and works[0].count == 1
        assert sum(work.count for work in works) == 8, "the rest of the budget goes to the prompts"
        play(scheduler, works)


def test_prompts_get_a_smaller_share_beside_answers_and_the_whole_step_without():
    scheduler = make(blocks=200, seqs=8, budget=64, prompt_tokens_beside=16)
    answering = request(0, 3, answer=6)
    scheduler.add(answering)
    play(scheduler, scheduler.schedule())
    for number in range(1, 4):
        scheduler.add(request(number, 60, answer=1))
    sizes = []
    while scheduler.busy:
        works = scheduler.schedule()
        sizes.append(
            (answering.finished, sum(work.count for work in works if work.request is not answering))
        )
        play(scheduler, works)
    assert [size for finished, size in sizes if not finished] == [16] * 5
    assert [size for finished, size in sizes if finished] == [64, 36]


def test_answers_and_prompts_take_turns(monkeypatch):
    scheduler = make(blocks=40_000, seqs=8, budget=16_384, prompt_tokens_beside=1000)
    scheduler.turn_tokens = 64
    answering = [request(number, 3, answer=1000) for number in range(2)]
    for one in answering:
        scheduler.add(one)
    play(scheduler, scheduler.schedule())

    def turns(*lengths):
        """Tokens of the passes of prompts, and that a step of both answers stands between any
        two.
        """
        coming = [request(100 + i, length, answer=1, salt=None) for i, length in enumerate(lengths)]
        for one in coming:
            scheduler.add(one)
        sizes = []
        while not all(one.finished for one in coming):
            works = scheduler.schedule()
            if any(work.request in answering for work in works):
                assert [work.request for work in works] == answering and all(
                    work.count == 1 for work in works
                )
                sizes.append(None)
            else:
                sizes.append(sum(work.count for work in works))
            play(scheduler, works)
        assert not any(a is not None and b is not None for a, b in itertools.pairwise(sizes)), (
            "answers wait for one pass"
        )
        return [size for size in sizes if size is not None]

    assert turns(200) == [64, 64, 64, 8]
    assert turns(65) == [63, 2], "no token is left that would pass for an answer"
    assert turns(40, 40) == [64, 16], "several prompts share a pass"
    assert turns(90, 90, 90) == [64, 64, 64, 64, 14], "as many wait as answer, but few"
    assert turns(70, 70, 70, 70) == [280], "after a burst all are read at once"
    assert turns(60, 60, 60, 60) == [64, 64, 64, 48], "where that is worth it"
    monkeypatch.setattr(schedulers, "MANY_CACHED", 100)
    assert turns(200) == [64, 64, 48, 24], "attention to many cached tokens takes longer"
    monkeypatch.setattr(schedulers, "MANY_ANSWERS", 2)
    assert turns(130) == [64, 48, 18], (
        "a prompt that is being read counts: it may answer behind this pass"
    )
    assert turns(200) == [64, 48, 32, 32, 24], "where both is so a pass is half as large"
    monkeypatch.setattr(schedulers, "MANY_CACHED", 10_000)
    monkeypatch.setattr(schedulers, "MANY_ANSWERS", 1)
    assert turns(100) == [48, 48, 4], "steps of many answers take longer"
    assert turns(1200) == [48] * 25, "a long prompt alone makes no gap long"
    scheduler.max_num_seqs = 5
    assert turns(96, 96, 96, 96)[:2] == [48, 48], "a burst that finds no seats is none"
    for _ in range(2):
        works = scheduler.schedule()
        assert [work.request for work in works] == answering, (
            "where no prompt waits, every step is the answers'"
        )
        play(scheduler, works)


def test_a_burst_is_read_at_once_beside_its_own_first_answers_and_in_turns_beside_older_ones():
    scheduler = make(blocks=40_000, seqs=16, budget=16_384, prompt_tokens_beside=1000)
    scheduler.turn_tokens = 64
    answering = [request(number, 3, answer=1000) for number in range(8)]
    for one in answering:
        scheduler.add(one)
    play(scheduler, scheduler.schedule())

    def first_pass(number):
        for i in range(4):
            scheduler.add(request(number + i, 70, answer=1))
        sizes = []
        while (
            not all(one.missing <= 1 for one in [*scheduler.waiting, *scheduler.running])
            or not sizes
        ):
            works = scheduler.schedule()
            sizes += (
                [sum(work.count for work in works)] if any(work.count > 1 for work in works) else []
            )
            play(scheduler, works)
        return sizes[0]

    assert first_pass(100) == 280, "eight that have just begun wait as well"
    while answering[0].generated <= schedulers.BEGUN:
        play(scheduler, scheduler.schedule())
    assert first_pass(200) == 64


def test_prompts_beside_answers_are_bounded_by_their_time_where_it_is_known():
    scheduler = make(blocks=400, seqs=8, budget=600, prompt_tokens_beside=512)
    scheduler.pace = Pace()
    answering = request(0, 3, answer=200)
    scheduler.add(answering)
    play(scheduler, scheduler.schedule())
    scheduler.add(request(1, 1500, answer=1))

    def prompt_tokens():
        works = scheduler.schedule()
        play(scheduler, works)
        assert works[0].request is answering
        return sum(work.count for work in works) - 1

    assert prompt_tokens() == 512, "nothing is known yet"
    scheduler.pace.learn(0.030, prompt_tokens=0, answers=1)
    scheduler.pace.learn(0.030 + 512 * 0.0005, prompt_tokens=512, answers=1)
    assert prompt_tokens() == 90  # 1.5 times 30 ms at 0.5 ms a token
    for _ in range(200):  # the prompt grows long, and its tokens dear
        scheduler.pace.learn(0.030 + 90 * 0.01, prompt_tokens=90, answers=1)
    assert prompt_tokens() == 32, "it gets on, however slow it is"


def test_prompts_whose_logprobs_are_wanted_come_in_small_chunks(monkeypatch):
    monkeypatch.setattr("flyweight.engine.scheduler.PROMPT_LOGITS", 10)
    scheduler = make(blocks=200, seqs=8, budget=64)
    for number, wanted in enumerate((1, 1, None)):
        item = request(number, 16)
        item.params = SamplingParams(prompt_logprobs=wanted)
        scheduler.add(item)
    steps = []
    while len(steps) < 4:
        works = scheduler.schedule()
        steps.append([(work.request.number, work.count) for work in works])
        play(scheduler, works)
    assert steps[:2] == [[(0, 10)], [(0, 6), (1, 4), (2, 16)]]
    assert max(count for step in steps for number, count in step if number < 2) == 10


def test_waiting_requests_are_served_in_order_of_arrival():
    scheduler = make(seqs=1, budget=8)
    for number in range(3):
        scheduler.add(request(number, 4))
    order = []
    while scheduler.busy:
        works = scheduler.schedule()
        order += [work.request.number for work in works]
        play(scheduler, works)
    assert order == sorted(order)


def test_a_long_prompt_comes_in_chunks_and_only_the_last_one_samples():
    scheduler = make(budget=8)
    scheduler.add(request(0, 20))
    chunks = [
        (work.start, work.count, work.samples) for _ in range(3) for work in scheduler.schedule()
    ]
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_the_youngest_gives_its_blocks_up_and_is_served_first_afterwards():
    scheduler = make(blocks=4, size=4, seqs=3, budget=16)
    old, young, waiting = request(0, 7, answer=9), request(1, 7, answer=9), request(2, 7, answer=9)
    for item in (old, young, waiting):
        scheduler.add(item)
    while not young.preemptions:
        play(scheduler, scheduler.schedule())
    assert old.preemptions == 0 and not young.blocks
    assert list(scheduler.waiting) == [young, waiting]


def test_samples_of_one_prompt_share_its_blocks_in_the_very_first_step():
    scheduler = make(blocks=32, budget=16)
    twins = [request(0, 9), request(0, 9)]
    twins[1].number = 1
    for item in twins:
        scheduler.add(item)
    first, second = scheduler.schedule()
    assert (first.count, second.count) == (9, 1)
    assert first.request.blocks[:2] == second.request.blocks[:2]
    assert second.request.cached == 8


def test_requests_of_different_salt_or_none_share_nothing():
    scheduler = make(blocks=32, budget=64)
    for number, salt in enumerate((b"a", b"b", None, None)):
        item = request(0, 9, salt=salt)
        item.number = number
        scheduler.add(item)
    assert [work.count for work in scheduler.schedule()] == [9, 9, 9, 9]


def test_a_budget_below_the_number_of_seats_is_refused():
    with pytest.raises(OptionError, match="max_num_batched_tokens"):
        make(seqs=9, budget=8)
