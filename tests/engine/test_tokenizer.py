"""Detokenizing piece by piece: whole characters, exact text, no glimpse of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyweight.engine.byte_level import byte_alphabet, byte_table
from flyweight.engine.stop_strings import StopStrings
from flyweight.engine.tokenizer import Detokenizer, Tokenizer, overlap
from flyweight.errors import RequestError


def decode(tokens):
    """A byte-level tokenizer: each token is one byte, the worst case for whole characters."""
    return bytes(tokens).decode("utf-8", errors="replace")


def pieces(text, **options):
    detokenizer, shown = Detokenizer(decode, **options), []
    for token in text.encode():
        before = detokenizer.text
        detokenizer.add(token)
        assert detokenizer.text.startswith(before), "text that was shown may not change"
        shown.append(detokenizer.text[len(before) :])
        if detokenizer.stopped_by:
            break
    before = detokenizer.text
    detokenizer.finish()
    return [*shown, detokenizer.text[len(before) :]], detokenizer


@settings(max_examples=200)
@given(text=st.text(max_size=30), independent=st.booleans())
def test_the_pieces_are_whole_characters_and_join_to_the_text(text, independent):
    shown, _ = pieces(text, context=list("é".encode()), independent=independent)
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


def test_an_emoji_family_comes_character_by_character():
    shown, _ = pieces("👩‍👩‍👧 ok 🎉")
    assert [piece for piece in shown if piece] == list("👩‍👩‍👧 ok 🎉")


def test_broken_bytes_at_the_end_are_given_out_at_the_end():
    detokenizer = Detokenizer(decode)
    for token in "a🎉".encode()[:-1]:
        detokenizer.add(token)
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == "a\ufffd"


def test_broken_bytes_in_the_middle_do_not_hold_the_text_for_ever():
    detokenizer = Detokenizer(decode)
    for token in [0xFF] * 20:
        detokenizer.add(token)
    assert detokenizer.text


@settings(max_examples=200)
@given(
    text=st.text("abé", max_size=20),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_stop_string_and_never_shows_it(text, stop):
    shown, detokenizer = pieces(text, stop=stop)
    ends = [
        (len(text[: text.find(item) + len(item)]), text.find(item)) for item in stop if item in text
    ]
    expected = text[: min(at for end, at in ends if end == min(ends)[0])] if ends else text
    assert "".join(shown) == expected
    assert (detokenizer.stopped_by is not None) == bool(ends)


def test_a_stop_string_over_several_tokens_is_held_back_and_let_go_when_it_was_none():
    shown, _ = pieces("one STOX two STOP three", stop=["STOP"])
    assert "".join(shown) == "one STOX two "
    assert shown[4:8] == ["", "", "", "STOX"]


def test_stop_strings_do_not_count_before_their_time():
    detokenizer = Detokenizer(decode, stop=["b"])
    for token in b"ab":
        detokenizer.add(token, stops=False)
    detokenizer.add(ord("b"))
    assert detokenizer.text == "ab" and detokenizer.stopped_by == "b"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [("xab", "abc", 2), ("abc", "abc", 0), ("aab", "aabaab", 3), ("x", "y", 0)],
)
def test_overlap_is_the_longest_end_that_begins_the_stop_string(text, stop, expected):
    assert overlap(text, stop) == expected


def test_the_context_decides_how_the_first_token_reads():
    def strip_leading_space(tokens):
        return decode(tokens).removeprefix(" ")

    with_context = Detokenizer(strip_leading_space, context=list(b"x"))
    for token in b" a":
        with_context.add(token)
    assert with_context.text == " a"


def test_a_prompt_that_is_not_unicode_is_refused_by_name():
    """As a shell hands over a Latin-1 file: the byte becomes half of a surrogate pair."""
    with pytest.raises(RequestError, match=r"not valid Unicode \(character 4\); is it UTF-8"):
        Tokenizer(object()).encode(b"caf\xe9 is".decode("utf-8", errors="surrogateescape"))


@given(
    text=st.text("abé", max_size=30),
    stop=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=6),
)
def test_many_stop_strings_are_looked_for_at_once_as_one_by_one(text, stop):
    """What is held back is the longest end of the text that begins any of them; and the first that
    is complete ends it.
    """
    automaton, node = StopStrings(stop), 0
    for at, character in enumerate(text):
        node = automaton.advance(node, character)
        read = text[: at + 1]
        assert (node is None) == any(item in read for item in stop)
        if node is None:
            assert automaton.first(read) == min(
                (read.find(item), item) for item in stop if item in read
            )
            return
        assert automaton.depth[node] == max(overlap(read, item) for item in stop)


def test_no_token_looks_through_the_list_of_stop_strings():
    detokenizer = Detokenizer(decode, stop=[f"{i} never comes" for i in range(1000)])
    detokenizer.stop.strings = None  # whoever does fails
    for token in b"some words, 12 never come":
        detokenizer.add(token)
    detokenizer.finish()
    assert detokenizer.text == "some words, 12 never come" and detokenizer.stopped_by is None


def test_special_tokens_that_mark_a_call_stay_in_the_text():
    """Mistral's and Llama's are special: without them an answer's calls would read like words."""
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    fast.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<end>", "[TOOL_CALLS]", "[ARGS]")]
    )
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>"))
    assert (
        tokenizer.decode([0, 3, 4, 1, 5, 0]) == "a[TOOL_CALLS]b[ARGS]a"
        and tokenizer.decode([0, 3]) == "a"
    )


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 262), max_size=12))
def test_a_table_of_bytes_decodes_as_a_byte_level_tokenizer_does(tokens):
    tokenizer = byte_tokenizer()
    table = byte_table(tokenizer, {257: "<think>"})
    shown = [part for token in tokens for part in ([token] if token != 257 else [258])]
    expected = tokenizer.decode(shown, skip_special_tokens=True).replace("<put in>", "<think>")
    assert table.decode(tokens) == expected


def byte_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<think>"])
    made.add_tokens(["<put in>", "ß and more"])
    return made


def test_other_tokenizers_decode_by_themselves():
    tokenizer = byte_tokenizer()
    tokenizer.decoder = None
    assert byte_table(tokenizer, {}) is None and byte_table(object(), {}) is None


def test_a_text_is_encoded_without_the_interpreter_lock():
    """The library holds it for one text, and lets go of it for a list of them."""
    from types import SimpleNamespace

    from flyweight.engine.tokenizer import BareTokenizer

    class Library:
        def get_added_tokens_decoder(self):
            return {}

        def encode_batch_fast(self, texts, add_special_tokens):
            return [SimpleNamespace(ids=[len(text), int(add_special_tokens)]) for text in texts]

    tokenizer = BareTokenizer(SimpleNamespace(tokenizer=Library(), end_id=0), load=lambda: None)
    assert tokenizer.encode("abc") == [3, 1] and tokenizer.encode("", special=False) == [0, 0]
