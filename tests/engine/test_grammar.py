"""Constraints on the next token: any in the engine, JSON schemas by llguidance."""

import json

import pytest
import torch
from toy_engine import VOCABULARY, alone, params, run, toy_engine

from flyweight.engine.request import Constraint
from flyweight.errors import RequestError


class EveryThird(Constraint):
    """Token k must be divisible by 3 and greater than the one before, modulo the vocabulary."""

    def __init__(self):
        self.seen = []

    def allowed(self, generated):
        self.seen.append(list(generated))
        return torch.arange(VOCABULARY) % 3 == 0


def test_a_constraint_sees_every_token_and_only_its_own_request_obeys():
    engine = toy_engine()
    made = []

    def constraint():
        made.append(EveryThird())
        return made[-1]

    free = engine.submit([5, 6, 7], params())
    bound = engine.submit(
        [5, 6, 7], params(n=2, temperature=1.0, seed=1, logprobs=1), constraint=constraint
    )
    tokens = run(engine, free, bound)
    assert tokens[0] == alone([5, 6, 7], params())
    assert all(token % 3 == 0 for answer in tokens[1:] for token in answer) and len(made) == 2
    assert made[0].seen == [tokens[1][:count] for count in range(12)]
    assert any(item.logprob < max(item.top.values()) for item in bound[0].logprobs), (
        "logprobs stay the model's own"
    )


@pytest.fixture(scope="module")
def grammars(smollm2):
    pytest.importorskip(
        "llguidance", reason="the grammar library is not installed: pip install llguidance"
    )
    from transformers import AutoTokenizer

    from flyweight.engine.grammar import Grammars

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return Grammars(tokenizer, 49_152 + 16, [2]), tokenizer


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_lets_its_documents_through_and_then_only_the_end(grammars):
    make, tokenizer = grammars
    text = json.dumps({"name": "Ünal", "age": 41}, ensure_ascii=False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    constraint = make(json.dumps(PERSON))()
    for at, token in enumerate(tokens):
        allowed = constraint.allowed(tokens[:at])
        assert allowed.shape == (49_168,) and allowed[token] and not allowed[2], tokenizer.decode(
            tokens[: at + 1]
        )
    assert constraint.allowed(tokens).nonzero().flatten().tolist() == [2]


def test_what_does_not_fit_is_not_allowed(grammars):
    make, tokenizer = grammars
    one, other = make(json.dumps(PERSON))(), make(json.dumps(PERSON))()
    assert not one.allowed([])[tokenizer.encode("Sure", add_special_tokens=False)[0]]
    begun = tokenizer.encode('{"name": "', add_special_tokens=False)
    assert other.allowed(begun).sum() > 40_000, "samples walk the schema apart"
    assert one.allowed([]).sum() < 10


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": 5}', "type must be a string"),
        ("{", "cannot be"),
        ('{"not": {}}', "not"),
        ('{"type": "string", "pattern": "(("}', "regex parse error: unclosed group"),
        # nothing is wrong with it until something is to follow it
        (
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
            "cannot be followed: ",
        ),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused(grammars, schema, message):
    with pytest.raises(RequestError, match=message):
        grammars[0](schema)


def test_a_token_that_was_not_allowed_ends_the_answer_and_is_told(grammars):
    make, tokenizer = grammars
    constraint = make(json.dumps(PERSON))()
    constraint.allowed([])
    assert constraint.allowed(
        tokenizer.encode("Sure", add_special_tokens=False)
    ).nonzero().flatten().tolist() == [2]
    assert "cannot be followed any further" in constraint.error


def test_a_schema_that_takes_too_long_or_too_much_is_refused_and_remembered(smollm2, monkeypatch):
    """In a process apart: the compilation itself could not be interrupted."""
    pytest.importorskip(
        "llguidance", reason="the grammar library is not installed: pip install llguidance"
    )
    from transformers import AutoTokenizer

    from flyweight.engine.grammar import Grammars
    from flyweight.engine.grammar_limits import GrammarLimits

    make = Grammars(
        AutoTokenizer.from_pretrained(smollm2),
        49_168,
        [2],
        limits=GrammarLimits(seconds=1, megabytes=8),
    )
    # 45 seconds and 1.6 GB without a limit
    costly = json.dumps({"type": "integer", "multipleOf": 2_999_999})
    for _ in range(2):
        with pytest.raises(
            RequestError,
            match=r"the JSON schema cannot be followed: it cannot be compiled within 1 s and 8 MB",
        ):
            make(costly)
        monkeypatch.setattr(make.trials, "measure", None)  # the second time nobody tries
    monkeypatch.undo()
    assert make(json.dumps(PERSON))().allowed([]).any(), "the next one is not its victim"


def test_processes_of_trials_end_with_what_started_them():
    pytest.importorskip("llguidance", reason="pip install llguidance")
    from flyweight.engine.grammar_kinds import translate
    from flyweight.engine.grammar_limits import GrammarLimits, Trials

    trials = Trials(GrammarLimits(), vocabulary=300)
    _, grammar = translate(json.dumps(PERSON))
    assert trials.measure(grammar) > 0
    (process,) = trials.idle
    del trials
    assert process.poll() is not None
    assert process.stdin.closed and process.stdout.closed


def test_grammars_may_speak_of_tokens_by_number_and_name(grammars):
    """As those of tool calls do; the trial in the process apart must know them too."""
    make, tokenizer = grammars
    last = len(tokenizer) - 1
    constraint = make(f'lark:start: "a" <[{last}]> <|im_end|>')()
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    assert constraint.allowed([]).nonzero().flatten().tolist() == [letter]
    assert constraint.allowed([letter]).nonzero().flatten().tolist() == [last]
    assert constraint.allowed([letter, last])[end]
    with pytest.raises(
        RequestError, match=r"the grammar cannot be followed: .*unknown special token"
    ):
        make("lark:start: <nobody>")


def test_a_schema_inside_a_larger_grammar_is_tried_under_the_same_limits(grammars):
    """As the arguments of a tool are."""
    with pytest.raises(
        RequestError,
        match="the grammar cannot be followed: it cannot be compiled within 2 s and 64 MB",
    ):
        grammars[0]('lark:start: "call" %json {"type": "integer", "multipleOf": 2999999}')


@pytest.mark.parametrize("grammar", ["regex:a\ud800", 'lark:start: "\ud800"'])
def test_a_grammar_that_is_not_unicode_is_refused(grammars, grammar):
    with pytest.raises(RequestError, match="cannot be read"):
        grammars[0](grammar)


def test_the_cache_of_grammars_is_bounded_in_number_and_bytes():
    from flyweight.engine.grammar_limits import GrammarCache, GrammarLimits

    cache = GrammarCache(GrammarLimits(cached=3, cached_bytes=100))
    for name, size in (("a", 10), ("b", 20), ("c", 30)):
        cache.put(name, name.upper(), size)
    assert cache.get("a") == "A" and cache.bytes == 60
    cache.put("d", "D", 5)
    assert (cache.get("b"), cache.get("a"), cache.bytes) == (None, "A", 45), (
        "the longest unused goes first"
    )
    cache.put("e", "E", 90)
    assert (cache.get("c"), cache.get("d"), cache.get("a"), cache.bytes) == (None, None, "A", 100)
    cache.put("f", "F", 101)
    assert cache.get("f") is None and cache.bytes == 100, (
        "what is larger than the cache is not kept"
    )


def test_masks_made_side_by_side_are_those_made_alone(grammars):
    from flyweight.engine.grammar import mask_bits

    make, tokenizer = grammars
    maker = make(
        json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    )
    texts = ["", '{"a"', '{"a": 12', "no object"]
    asked = [(maker(), tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    alone = [mask_bits([(maker(), tokens)])[0] for _, tokens in asked]
    together = mask_bits(asked)
    assert all((row == one).all() for row, one in zip(together, alone, strict=True))
    assert len({row.tobytes() for row in together}) == len(texts)
    assert asked[-1][0].error and [constraint.error for constraint, _ in asked[:-1]] == [None] * 3
