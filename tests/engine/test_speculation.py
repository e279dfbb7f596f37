"""Speculation changes how fast an answer comes, and nothing else."""

import itertools

import pytest
import torch
from tiny_configs import LLAMA
from toy_engine import (
    SHAPE,
    VOCABULARY,
    ToyModel,
    alone,
    imitate_capture,
    params,
    run,
    toy_engine,
)

from flyweight import LLM, SamplingParams
from flyweight.engine.request import Chunk, Constraint, Request
from flyweight.engine.speculation.late import Arrival, LateDrafts
from flyweight.engine.speculation.lengths import Fixed, Measured, StepTimes
from flyweight.engine.speculation.lookup import LookupFirst
from flyweight.engine.speculation.model import ModelDrafter, check_vocabularies
from flyweight.engine.speculation.ngram import NgramDrafter, TokenIndex
from flyweight.engine.speculation.option import Speculation
from flyweight.engine.speculation.speculator import Speculator
from flyweight.engine.speculation.trial import RETRY, SEEN, Trial
from flyweight.engine.work import Work
from flyweight.errors import OptionError
from flyweight.models import presets

PROMPTS = [[5, 6, 7, 8, 9], [1, 2, 3, 1, 2, 3, 1, 2], list(range(3, 40)), [4]]


class Oracle:
    """Knows the answers, and is wrong at every `wrong`-th token of the text."""

    guesses_ahead = False

    def __init__(self, texts, wrong=5):
        self.texts, self.wrong = texts, wrong

    def warm_up(self):
        pass

    def guesses_unread(self, works):
        return False

    def expect(self, count):
        pass

    def release(self, request):
        pass

    def learn(self, works, seconds):
        pass

    def promising(self, request):
        return True

    def propose(self, requests, most):
        found = {}
        for request in requests:
            text = next(
                text for text in self.texts if text[: len(request.tokens)] == request.tokens
            )
            begin = len(request.tokens) + request.pending
            found[request.number] = [
                (text[i] + (i % self.wrong == 0)) % VOCABULARY
                for i in range(begin, min(len(text), begin + most[request.number]))
            ]
        return found

    def observe(self, request, drafts, accepted):
        pass

    def forget(self, request):
        pass


def speculating(drafter, count=4, **options):
    engine = toy_engine(**options)
    engine.speculator = Speculator(drafter, Fixed(count))
    return engine


def by(drafter, **options):
    """Those who guess ahead in an engine whose steps follow theirs before they are read."""
    engine = speculating(drafter, captured=drafter.guesses_ahead, **options)
    engine.speculator.follows = lambda works: True
    return engine


SAMPLING = {
    "greedy": dict(),
    "sampled": dict(temperature=0.9, seed=3),
    "filtered": dict(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=4),
    "penalized": dict(
        temperature=0.7, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, seed=5
    ),
    "biased": dict(logit_bias={3: 2.0, 9: -4.0}, min_tokens=6, stop_token_ids=[11, 12, 13, 14]),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", SAMPLING)
def test_an_answer_is_the_same_with_guesses_right_and_wrong(kind, captured):
    options = params(max_tokens=24, **SAMPLING[kind])
    want = [alone(prompt, options) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, want, strict=True)]
    engine = speculating(Oracle(texts), captured=captured)
    steps = len(engine.runner.model.batches)
    assert run(engine, *(engine.submit(prompt, options) for prompt in PROMPTS)) == want
    assert (
        engine.speculator.accepted > 10 and engine.speculator.drafted > engine.speculator.accepted
    )
    if captured:
        assert len(engine.runner.shared_steps.taken) >= 4
    if kind != "biased":  # ended by its stop tokens
        assert len(engine.runner.model.batches) - steps < 24


class LateOracle(Oracle):
    """Its guesses lie on the device when they are checked."""

    def propose(self, requests, most):
        found = super().propose(requests, most)
        known = {number: guesses for number, guesses in found.items() if guesses}
        longest = max(map(len, known.values()), default=0)
        columns = [[*guesses, *[0] * (longest - len(guesses))] for guesses in known.values()]
        if not columns:
            return {}
        arrival = Arrival(torch.tensor(columns).T)
        return {
            number: LateDrafts(arrival, i, len(guesses))
            for i, (number, guesses) in enumerate(known.items())
        }


@pytest.mark.parametrize("captured", [False, True])
def test_guesses_that_the_host_has_not_read_are_checked_all_the_same(captured):
    options = params(max_tokens=24)
    want = [alone(prompt, options) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, want, strict=True)]
    engine = speculating(LateOracle(texts), captured=captured)
    assert run(engine, *(engine.submit(prompt, options) for prompt in PROMPTS)) == want
    assert (
        engine.speculator.accepted > 10 and engine.speculator.drafted > engine.speculator.accepted
    )


class UnreadOracle(LateOracle):
    """Knows how many of its guesses in flight are right, as the device does, and guesses behind
    them.
    """

    def __init__(self, texts, wrong=5):
        super().__init__(texts, wrong)
        self.latest = {}  # by request: where its latest guesses begin, and what they are

    def guesses_unread(self, works):
        latest = [self.latest.get(work.request.number, (0, ()))[1] for work in works]
        return all(
            work.drafts and len(guesses) == len(work.drafts)
            for work, guesses in zip(works, latest, strict=True)
        )

    def propose(self, requests, most):
        columns = []
        for request in requests:
            text = next(
                text for text in self.texts if text[: len(request.tokens)] == request.tokens
            )
            begin = len(request.tokens)
            if request.pending:
                before, guesses = self.latest[request.number]
                right = 0
                while right < len(guesses) and guesses[right] == text[before + right]:
                    right += 1
                begin = before + right + 1
            places = range(begin, begin + most[request.number])
            guesses = [
                (text[i] + (i % self.wrong == 0)) % VOCABULARY if i < len(text) else 0
                for i in places
            ]
            self.latest[request.number] = begin, guesses
            columns.append(guesses)
        longest = max(map(len, columns))
        arrival = Arrival(
            torch.tensor([[*guesses, *[0] * (longest - len(guesses))] for guesses in columns]).T
        )
        return {
            request.number: LateDrafts(arrival, i, len(columns[i]))
            for i, request in enumerate(requests)
        }


@pytest.mark.parametrize("kind", SAMPLING)
def test_guesses_behind_guesses_that_nobody_has_read(kind):
    options = params(max_tokens=24, **SAMPLING[kind])
    want = [alone(prompt, options) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, want, strict=True)]
    engine = speculating(UnreadOracle(texts), captured=True)
    followed = count_followed(engine)
    first = [engine.submit(prompt, options) for prompt in PROMPTS[:2]]
    for _ in range(4):  # the others' prompts come in the middle of these answers
        engine.step()
    assert run(engine, *first, *(engine.submit(prompt, options) for prompt in PROMPTS[2:])) == want
    assert (
        engine.speculator.accepted > 10 and engine.speculator.drafted > engine.speculator.accepted
    )
    assert len(followed) > 2


class AheadOracle(Oracle):
    """Guesses behind tokens in flight, at some steps."""

    guesses_ahead = True

    def __init__(self, texts, wrong=5):
        super().__init__(texts, wrong)
        self.calls = self.behind_flights = 0

    def propose(self, requests, most):
        self.calls += 1
        if self.calls % 3 == 0:
            return {}
        self.behind_flights += sum(request.pending for request in requests)
        return super().propose(requests, most)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("kind", SAMPLING)
def test_guesses_behind_tokens_in_flight_are_checked_all_the_same(kind, follows):
    """`follows`: and steps behind such guesses are launched before anybody knows how many of them
    were right.
    """
    options = params(max_tokens=24, **SAMPLING[kind])
    want = [alone(prompt, options) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, want, strict=True)]
    oracle = AheadOracle(texts)
    engine = speculating(oracle, captured=True)
    engine.speculator.follows = lambda works: follows
    behind_guesses = count_followed(engine)
    first = [engine.submit(prompt, options) for prompt in PROMPTS[:2]]
    for _ in range(6):  # the others' prompts come in the middle of these answers
        engine.step()
    assert run(engine, *first, *(engine.submit(prompt, options) for prompt in PROMPTS[2:])) == want
    assert (
        engine.speculator.accepted > 10 and engine.speculator.drafted > engine.speculator.accepted
    )
    assert oracle.behind_flights > 4
    assert (len(behind_guesses) > 2) == follows
    assert len(engine.runner.steps.taken) > 2 and len(engine.runner.shared_steps.taken) > 2


def count_followed(engine):
    """Steps that are launched behind one with guesses, which nobody has read."""
    found, launch = [], engine.runner.launch

    def counting(works, launched=None):
        if engine.flight is not None and engine.flight.speculative:
            found.append(len(works))
        return launch(works, launched)

    engine.runner.launch = counting
    return found


EITHER = pytest.mark.parametrize("drafter", [Oracle, AheadOracle])


@EITHER
def test_few_blocks_give_the_same_answers(drafter):
    """Requests are preempted in the middle of their answers, and guesses never take a block that
    another request needs.
    """
    options = params(max_tokens=40)
    want = [alone(prompt, options) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, want, strict=True)]
    engine = by(drafter(texts), blocks=24)
    requests = [engine.submit(prompt, options) for prompt in PROMPTS]
    assert run(engine, *requests) == want
    assert sum(request.preemptions for (request,) in requests) > 0


@EITHER
def test_a_prefix_that_was_guessed_is_found_again(drafter):
    """The blocks of accepted tokens hold what those of a prompt would: a continuation of the answer
    reuses them.
    """
    options = params(max_tokens=30)
    prompt = PROMPTS[0]
    answer = alone(prompt, options)
    engine = by(drafter([prompt + answer]))
    run(engine, engine.submit(prompt, options))
    engine.speculator = None
    longer = prompt + answer[:-2]
    (request,) = engine.submit(longer, options)
    assert run(engine, [request]) == [alone(longer, options)]
    assert request.cached == (len(longer) - 1) // 4 * 4


@EITHER
def test_logprobs_are_those_of_the_kept_tokens(drafter):
    options = params(max_tokens=20, logprobs=3)
    plain = toy_engine()
    (want,) = plain.submit(PROMPTS[0], options)
    run(plain, [want])
    engine = by(drafter([want.tokens]))
    (got,) = engine.submit(PROMPTS[0], options)
    run(engine, [got])
    assert [item.token_id for item in got.logprobs] == want.tokens[len(want.prompt) :]
    assert got.logprobs == want.logprobs


@EITHER
def test_an_end_inside_of_the_kept_tokens_ends_the_answer(drafter):
    answer = alone(PROMPTS[0], params(max_tokens=20))
    text = PROMPTS[0] + answer
    stop = answer[6]
    want = answer[: answer.index(stop) + 1]
    engine = by(drafter([text], wrong=100), count=8)
    (request,) = engine.submit(PROMPTS[0], params(max_tokens=20, stop_token_ids=[stop]))
    assert run(engine, [request]) == [want]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)


@EITHER
def test_max_tokens_is_the_most(drafter):
    answer = alone(PROMPTS[0], params(max_tokens=30))
    for most in range(1, 12):
        engine = by(drafter([PROMPTS[0] + answer], wrong=100), count=8)
        (request,) = engine.submit(PROMPTS[0], params(max_tokens=most))
        assert run(engine, [request]) == [answer[:most]]
        assert request.finish_reason == "length"


@EITHER
def test_a_stop_string_cuts_the_kept_tokens(drafter):
    decode = lambda tokens: "".join(f"<{token}>" for token in tokens)  # noqa: E731
    answer = alone(PROMPTS[0], params(max_tokens=20))
    stop = f"<{answer[4]}><{answer[5]}>"
    engine = by(drafter([PROMPTS[0] + answer], wrong=100), count=8, decode=decode)
    chunks: list[Chunk] = []
    (request,) = engine.submit(
        PROMPTS[0], params(max_tokens=20, stop=[stop]), listener=chunks.append
    )
    run(engine, [request])
    assert request.text == decode(answer[:4]) == "".join(chunk.text for chunk in chunks)
    assert request.stop_reason == stop
    assert [token for chunk in chunks for token in chunk.token_ids] == answer[:6]


@EITHER
def test_a_cancelled_request_gives_its_blocks_back(drafter):
    answer = alone(PROMPTS[0], params(max_tokens=60))
    engine = by(drafter([PROMPTS[0] + answer]))
    (request,) = engine.submit(PROMPTS[0], params(max_tokens=60))
    for _ in range(4):
        engine.step()
    engine.cancel([request])
    engine.scheduler.check_integrity()
    assert request.finish_reason == "cancelled"
    assert engine.pool.available == engine.pool.blocks


class Every(Constraint):
    """A constraint: of three tokens the last's neighbours."""

    def allowed(self, generated):
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        last = generated[-1] if generated else 0
        mask[[(last + i) % VOCABULARY for i in (1, 2, 3)]] = True
        return mask


def test_a_constrained_request_goes_one_by_one_beside_one_that_guesses():
    options = params(max_tokens=16)
    free = alone(PROMPTS[0], options)
    plain = toy_engine()
    bound = run(plain, plain.submit(PROMPTS[3], options, constraint=Every))[0]
    engine = speculating(Oracle([PROMPTS[0] + free, PROMPTS[3] + bound]), captured=True)
    one = engine.submit(PROMPTS[0], options)
    other = engine.submit(PROMPTS[3], options, constraint=Every)
    assert run(engine, one, other) == [free, bound]
    assert one[0].accepted > 5 and not other[0].drafted


def model_drafter(**options):
    return ModelDrafter(
        ToyModel(),
        SHAPE,
        **(
            dict(
                vocabulary=VOCABULARY,
                device=torch.device("cpu"),
                context=256,
                sequences=8,
                blocks=256,
                block_size=4,
            )
            | options
        ),
    )


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", SAMPLING)
def test_a_model_that_is_as_good_guesses_every_token(kind, captured):
    """Its shadows draw with the same noise. Blocks, rows and positions are right, or the toy would
    choose otherwise.
    """
    options = params(max_tokens=24, **SAMPLING[kind])
    want = [alone(prompt, options) for prompt in PROMPTS]
    drafter = model_drafter()
    if captured:
        imitate_capture(drafter.runner)
    engine = speculating(drafter, captured=captured)
    requests = [engine.submit(prompt, options) for prompt in PROMPTS]
    assert run(engine, *requests) == want
    for (request,) in requests:
        assert request.accepted == request.drafted or request.finish_reason == "stop"
        assert request.accepted >= request.generated // 2
    assert drafter.pool.available == drafter.pool.blocks and not drafter.shadows


class Forgetful(ToyModel):
    """Another model: every third logit is one of its own."""

    def forward(self, batch, caches):
        logits = super().forward(batch, caches)
        logits[:, ::3] = logits[:, ::3].flip(-1)
        return logits


@pytest.mark.parametrize("captured", [False, True])
def test_a_model_that_errs_is_corrected(captured):
    options = params(max_tokens=40, temperature=0.5, repetition_penalty=1.1, seed=8)
    want = [alone(prompt, options) for prompt in PROMPTS]
    drafter = model_drafter(blocks=40)  # too few for all at once
    drafter.runner.model = Forgetful()
    if captured:
        imitate_capture(drafter.runner)
    engine = speculating(drafter, captured=captured)
    requests = [engine.submit(prompt, options) for prompt in PROMPTS]
    assert run(engine, *requests) == want
    assert 0.2 < engine.speculator.accepted / engine.speculator.drafted < 0.95
    if captured:  # what the large model added is computed in captured steps too
        assert len(drafter.runner.shared_steps.taken) > 3


def test_models_of_other_vocabularies_cannot_guess():
    check_vocabularies("large", {"a": 0, "b": 1}, "small", {"b": 1, "a": 0})
    with pytest.raises(OptionError, match=r"small cannot guess for large: .*2 and 1 tokens"):
        check_vocabularies("large", {"a": 0, "b": 1}, "small", {"a": 0})
    with pytest.raises(OptionError, match="other tokens for the same ids"):
        check_vocabularies("large", {"a": 0, "b": 1}, "small", {"a": 1, "b": 0})


def decoding(number):
    return Request(number, [1], params(), seed=0, limit=100)


def learned(cost, chance_right):
    """What the policy says after steps that cost so much, and guesses of which so many were
    right.
    """
    lengths = Measured()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64):
        lengths.learn(cost(rows), rows)
    for _ in range(20):
        lengths.observe(decoding(0), 4, chance_right)
    return lengths


def test_guesses_are_made_as_far_as_they_pay():
    cheap, dear = (lambda rows: 1 + 0.03 * rows), (lambda rows: 1.0 * rows)
    assert learned(cheap, 4).most([decoding(0)])[0] == 7
    assert learned(cheap, 0).most([decoding(0)])[0] < 3
    assert learned(dear, 4).most([decoding(0)])[0] == 0
    many = [decoding(number) for number in range(64)]
    assert set(learned(cheap, 4).most(many).values()) == {0}


def test_a_step_that_was_compiled_first_says_nothing():
    times = StepTimes()
    times.learn(0.002, 1)
    times.learn(1.5, 8)
    assert times.of(8) == 0.002
    times.learn(0.003, 8)
    assert times.of(8) == times.of(30) == 0.003


def test_a_request_that_stopped_guessing_tries_again():
    lengths = learned(lambda rows: 1 + 0.3 * rows, 0)
    requests = [decoding(0)]
    assert lengths.most(requests)[0] == 0
    assert any(lengths.most(requests)[0] for _ in range(1000))


def test_what_follows_is_what_followed_before():
    index = TokenIndex([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 7, 1, 2, 3, 4])
    # the longer past wins
    assert index.after(index.match(index.tokens, 3, own=True), 3, own=True) == [5, 9, 2]
    assert index.match([8, 8, 8], 3, own=False) is None
    assert index.match([2, 3, 4], 3, own=False) == 14
    assert index.match([1, 2, 3, 4], 5, own=False) is None  # asks for more than agrees
    loop = TokenIndex([1, 2, 3, 1, 2, 3])
    assert loop.after(loop.match(loop.tokens, 3, own=True), 7, own=True) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("kind", SAMPLING)
def test_what_is_found_in_earlier_text_goes_before_a_models_guesses(kind):
    """The model, which is as good, catches up with what it has not seen, and guesses the rest."""
    options = params(max_tokens=24, **SAMPLING[kind])
    prompts = [PROMPTS[0] * 3, PROMPTS[1]]
    want = [alone(prompt, options) for prompt in prompts]
    drafter = LookupFirst(model_drafter(), 2)
    asked = []
    propose = drafter.other.propose
    drafter.other.propose = lambda requests, most: (
        asked.append(max(most.values())) or propose(requests, most)
    )
    quoted = []
    look = drafter.lookup.propose

    def look_up(requests, most):
        """Now and then: what the answer says next, and once something else."""
        found = look(requests, most)
        for request in requests:
            begin = len(request.tokens) - len(request.prompt)
            if begin % 3 == 1:
                text = want[request.number][begin : begin + most[request.number]]
                found[request.number] = [*text[:-1], (text[-1] + 1) % VOCABULARY] if text else []
                quoted.append(len(text))
        return found

    drafter.lookup.propose = look_up
    engine = speculating(drafter, count=5)
    requests = [engine.submit(prompt, options) for prompt in prompts]
    assert run(engine, *requests) == want
    assert max(quoted) == 5 and set(asked) <= {1, 2}
    assert not drafter.found and not drafter.other.shadows


def test_a_wrong_guess_counts_for_whoever_made_it():
    drafter = LookupFirst(Oracle([list(range(30))]), 2)
    request = Request(0, [1, 2, 3, 4, 5, 6, 7] * 2, params(), seed=0, limit=40)
    other = Request(1, list(range(9)), params(), seed=0, limit=40)
    found = drafter.propose([request, other], {0: 3, 1: 3})
    assert found == {0: [1, 2, 3], 1: [9, 11]}
    for one in (request, other):
        drafter.observe(one, found[one.number], 0)
    assert [drafter.lookup.readers[number].needed for number in (0, 1)] == [4, 3]


def timed(seconds, without=0.3e-3):
    """A trial that knows how long steps with 1, 2, … guesses take, and those without."""
    trial = Trial(len(seconds))
    for _ in range(SEEN):
        for guesses, each in enumerate(seconds, 1):
            trial.learn(each, 1, guesses)
        trial.learn(without, 1, 0)
    return trial


def judged(chances, trial):
    """Whether a request whose guesses are right by turns is tried to its end, and with how many
    guesses in its last step; None: not tried.
    """
    request = Request(0, [1], params(), seed=0, limit=99)
    if not trial.begins(request, 1):
        return None
    turns = itertools.cycle(chances)
    guesses = 0
    for _ in range(60):
        guesses = trial.count([request], 1)
        trial.observe(request, guesses, min(guesses, next(turns)))
        if not (pays := trial.pays(request, 1)):
            break
    trial.forget(request, 1)
    return pays, guesses


NEVER, SELDOM, OFTEN, MOSTLY = (0,), (0, 0, 0, 1), (0, 1, 0, 2), (3, 3, 3, 2)


def test_as_many_guesses_are_made_as_pay():
    times = [0.36e-3, 0.44e-3, 0.48e-3]
    assert judged(MOSTLY, timed(times)) == (True, 3)
    assert judged(OFTEN, timed(times)) == (True, 1)
    assert judged(NEVER, timed(times)) == (False, 1)
    assert judged(SELDOM, timed(times)) == (True, 1), "five tokens in the time of 4.8"
    assert judged(SELDOM, timed([0.39e-3])) == (False, 1)


def test_every_number_of_guesses_is_tried_before_one_is_chosen():
    trial = Trial(3)
    request = Request(0, [1], params(), seed=0, limit=99)
    assert not trial.begins(request, 1), "how long a step takes without guesses is not known"
    trial.learn(0.3e-3, 1, 0)
    assert trial.begins(request, 1)
    found = []
    for _ in range(3 * SEEN):
        found.append(trial.count([request], 1))
        trial.learn(0.5e-3, 1, found[-1])
        trial.observe(request, found[-1], 0)
        assert trial.pays(request, 1) == (1 not in found), "a number may pay that was not tried"
    assert found == [3] * SEEN + [2] * SEEN + [1] * SEEN
    assert trial.count([request], 2) == 1, "beside one that goes without, as it is alone"


def test_a_step_is_tried_out_where_that_can_be_done_on_the_side():
    asked = []

    def try_out(sequences):
        asked.append(sequences)
        return 0.3e-3 if sequences < 3 else None

    trial = Trial(3, try_out)
    requests = [Request(number, [1], params(), seed=0, limit=99) for number in range(3)]
    assert trial.begins(requests[0], 1) and trial.begins(requests[1], 1)
    assert asked == [1], "then its time is known"
    assert not Trial(3, try_out).begins(requests[2], 3)


def test_what_one_request_loses_is_not_held_against_the_next():
    trial = timed([0.5e-3])
    assert judged(NEVER, trial) == (False, 1)
    assert judged(MOSTLY, trial) == (True, 1)
    for _ in range(4 * RETRY):
        judged(NEVER, trial)
    found = [judged(NEVER, trial) for _ in range(4 * RETRY)]
    assert found.count(None) == 4 * (RETRY - 1), "few are tried where all lose"
    while judged(MOSTLY, trial) is None:
        pass
    assert judged(MOSTLY, trial) and judged(MOSTLY, trial)


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("pays", [False, True])
def test_answers_are_the_same_while_guesses_are_tried(kind, pays):
    """n-grams where they hit, a drafter whose guesses the device has where it pays, and nobody at
    first.
    """
    options = params(max_tokens=48, **SAMPLING[kind])
    want = [alone(prompt, options) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, want, strict=True)]
    trial = Trial(3)
    learn = trial.learn
    trial.learn = lambda seconds, sequences, guesses: learn(
        (0.1 if pays else 9.0) if guesses else 1.0, sequences, guesses
    )
    other = UnreadOracle(texts)
    engine = toy_engine(captured=True)
    engine.speculator = Speculator(LookupFirst(other, 3, trial), Fixed(7))
    followed = count_followed(engine)
    released = []
    other.release = lambda request: released.append(request.number)
    for prompt, answer in zip(PROMPTS * 2, want * 2, strict=True):
        assert run(engine, engine.submit(prompt, options)) == [answer]
    assert run(engine, *(engine.submit(prompt, options) for prompt in PROMPTS)) == want
    assert released[0] == 0, "nothing was known when the first one came"
    assert (len(released) < 4) == pays
    assert followed
    assert not engine.speculator.drafter.met


def test_earlier_answers_help_those_of_the_same_salt_alone():
    options = params(max_tokens=30)
    drafter = NgramDrafter()
    engine = speculating(drafter)
    (first,) = engine.submit(PROMPTS[0], options, cache_salt="a")
    (answer,) = run(engine, [first])
    (again,) = engine.submit(PROMPTS[0], options, cache_salt="a")
    (other,) = engine.submit(PROMPTS[0], options, cache_salt="b")
    assert run(engine, [again], [other]) == [answer, answer]
    assert again.accepted > 15 and other.accepted <= first.accepted
    assert not drafter.readers


def test_only_whole_steps_say_how_long_steps_take():
    """A step that is launched right after guesses were read is not waited for, so its time is that
    of launching alone.
    """

    class NowAndThen(Oracle):
        def promising(self, request):
            return (len(request.tokens) + request.pending) % 6 == 0

        def propose(self, requests, most):
            return super().propose([one for one in requests if self.promising(one)], most)

    text = alone(PROMPTS[0], params(max_tokens=40))
    engine = speculating(NowAndThen([PROMPTS[0] + text]), count=2, overlap=True)
    learned, kinds = [], []
    engine.speculator.lengths.learn = lambda seconds, rows: learned.append(rows)
    (request,) = engine.submit(PROMPTS[0], params(max_tokens=40))
    while engine.busy:
        known, before = len(learned), engine.flight
        engine.step()
        guessed = engine.flight is None and not request.finished
        kinds.append((before is not None, guessed, len(learned) > known))
    assert any(guessed for _, guessed, _ in kinds) and len(learned) > 10
    assert not any(told for ahead, guessed, told in kinds if not ahead and not guessed), (
        "nothing was waited for"
    )
    assert {1, 3} <= set(learned)


def test_guesses_are_read_at_once_where_that_is_faster():
    """A step between two with guesses hides the host, and costs a step for one token."""
    speculator = Speculator(NgramDrafter(), Fixed(7))
    request = Request(0, [1], params(), seed=0, limit=9)
    works = [Work(request, 0, 8, True, (1,) * 7)]
    assert not speculator.follows(works), "nothing is known yet"
    for _ in range(60):
        speculator.learn([Work(request, 0, 1, True)], 0.40e-3, 1)
        speculator.learn(works, 0.60e-3, 5)
        speculator.prepared(0.15e-3)
    assert speculator.token_seconds == pytest.approx(1 / 6e3, rel=0.3)
    assert speculator.follows(works), (
        "after half of the guesses nobody guesses again, and the host takes long"
    )
    speculator.goes_on = 1.0
    assert not speculator.follows(works), "guesses come one after the other"
    speculator.gap = 0.4e-3
    assert speculator.follows(works), "a whole step fits into what the host needs"


def test_without_a_guess_steps_are_launched_ahead():
    """The drafter is asked before the step in flight is read, and lets it fly where it has
    nothing.
    """
    engine = speculating(NgramDrafter(), captured=True)
    (request,) = engine.submit(PROMPTS[0], params(max_tokens=12))
    pending = []
    while engine.busy:
        engine.step()
        pending.append(request.pending)
    assert not request.drafted
    assert pending.count(1) >= 10


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, Speculation()),
        ("off", Speculation()),
        ("ngram", Speculation("ngram")),
        ("ngram:3", Speculation("ngram", None, 3)),
        ("auto", Speculation("auto")),
        ("auto:eagle3:a:2", Speculation("eagle3", "a", 2, while_it_pays=True)),
        ("model:preset:tiny:fp32", Speculation("model", "preset:tiny:fp32", 4)),
        ("model:a:2", Speculation("model", "a", 2)),
    ],
)
def test_the_option_is_understood(text, want):
    assert Speculation.parse(text) == want


@pytest.mark.parametrize(
    "text",
    [
        "ngrams",
        "ngram:0",
        "ngram:x",
        "model",
        "model:",
        "auto:3",
        "auto:ngram",
        "auto:model",
        "eagle3:",
        "model:a:99",
    ],
)
def test_a_wrong_option_is_refused_in_one_line(text):
    with pytest.raises(OptionError) as error:
        Speculation.parse(text)
    assert "\n" not in str(error.value)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "tiny", LLAMA)
    monkeypatch.setitem(presets.PRESETS, "tinier", LLAMA | dict(num_hidden_layers=1))
    monkeypatch.setitem(presets.PRESETS, "other", LLAMA | dict(vocab_size=50))


@pytest.mark.parametrize("native", [False, None], ids=["torch", "native where it can"])
def test_a_float32_model_gives_the_same_tokens_whoever_guesses(tiny, native):
    """Greedy and sampled requests in one batch that is short of blocks, twice, so that the second
    finds prefixes.
    """
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [5] * 20, [1, 2, 3, 4, 5, 7]]
    asked = [
        SamplingParams(temperature=t, seed=5, max_tokens=40, ignore_eos=True)
        for t in (0, 0.8, 0, 0.7)
    ]

    def answers(speculate):
        llm = LLM(
            "preset:tiny:fp32",
            device="cpu",
            blocks=36,
            block_size=4,
            native=native,
            speculate=speculate,
        )
        return [
            [output.token_ids for output in llm.generate(prompts, asked)] for _ in range(2)
        ], llm.engine.speculator

    want, _ = answers(None)
    for speculate in ("ngram", "model:preset:tinier:fp32:3", "auto"):
        got, speculator = answers(speculate)
        assert got == want, speculate
        assert speculator.accepted > 0 or speculate == "auto"


def test_a_drafter_of_another_vocabulary_is_refused(tiny):
    with pytest.raises(OptionError, match="preset:other:fp32 cannot guess for preset:tiny:fp32"):
        LLM(
            "preset:tiny:fp32",
            device="cpu",
            blocks=36,
            block_size=4,
            speculate="model:preset:other:fp32",
        )


def test_the_text_of_accepted_guesses_is_made_behind_the_next_launch():
    """The device must not wait for detokenizers and listeners: only for tokens."""
    text = alone(PROMPTS[0], params(max_tokens=24))
    engine = speculating(Oracle([PROMPTS[0] + text]), count=3, overlap=True)
    engine.answers.decode = lambda tokens: "".join(chr(33 + token) for token in tokens)
    happened: list[str] = []
    launch = engine.runner.launch

    def launching(works, launched=None):
        happened.append("launch")
        return launch(works, launched)

    engine.runner.launch = launching
    heard = []

    def listen(chunk):
        happened.append("told")
        heard.append(chunk)

    (request,) = engine.submit(PROMPTS[0], params(max_tokens=24), listener=listen)
    while engine.busy:
        engine.step()
    assert [token for chunk in heard for token in chunk.token_ids] == text
    assert "".join(chunk.text for chunk in heard) == request.text == engine.answers.decode(text)
    assert heard[-1].finish_reason == "length" and not engine.answers.untold
    assert request.accepted > 10
    assert happened[:3] == ["launch", "launch", "told"], (
        "what the first step gave is told while the second runs"
    )
