"""The bytes of single tokens, where a tokenizer writes every byte as one letter.

Answers are decoded token by token, the last few together. A byte-level tokenizer's own decoding
is a table of bytes and UTF-8, which costs less here than a call of the library: with 64 answers
at once the difference is a third of what the host does in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with: printable ones are themselves, the
    others follow from U+0100.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def bytes_of(piece: str) -> bytes:
    """Of a token as the vocabulary has it; one with other letters is an added text."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[letter] for letter in piece])
    except KeyError:
        return piece.encode()


class ByteTable(dict[int, bytes]):
    """Token → bytes, filled as tokens come. Special tokens are nothing, but for those with a text
    in `shown`.
    """

    def __init__(self, tokenizer: Any, special: Collection[int], shown: Mapping[int, str]):
        super().__init__((token, b"") for token in special)
        self.update((token, text.encode()) for token, text in shown.items())
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token)
        found = b"" if piece is None else bytes_of(piece)
        self[token] = found
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join([self[token] for token in tokens]).decode("utf-8", "replace")


def byte_table(tokenizer: Any, shown: Mapping[int, str]) -> ByteTable | None:
    """For a tokenizer of the library `tokenizers` that decodes by bytes and nothing else."""
    if type(getattr(tokenizer, "decoder", None)).__name__ != "ByteLevel":
        return None
    added = tokenizer.get_added_tokens_decoder()
    special = [number for number, token in added.items() if token.special]
    return ByteTable(tokenizer, special, shown)
