"""What single tokens are called in logprobs: their text and their bytes, which may be part of a
character.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

from flyweight.engine.byte_level import byte_alphabet
from flyweight.engine.request import TokenLogprob
from flyweight.engine.tokenizer import BROKEN, Tokenizer

BYTES = "bytes:"  # begins the name of a token that is part of a character
LEAST_LOGPROB = -9999.0  # JSON has no infinity


class TokenNames:
    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self.anchor = (
            tokenizer.inner.encode("a", add_special_tokens=False)[-1:] if tokenizer else []
        )
        self.name = functools.lru_cache(maxsize=200_000)(self._name)

    def text(self, token: int) -> str:
        return self.name(token)[0]

    def _name(self, token: int) -> tuple[str, tuple[int, ...]]:
        if self.tokenizer is None:
            return f"token_id:{token}", ()
        fast = self.tokenizer.fast
        # After another token, because some tokenizers swallow the space at the beginning of a text.
        before = fast.decode(self.anchor, skip_special_tokens=False)
        text = fast.decode([*self.anchor, token], skip_special_tokens=False)[len(before) :]
        if BROKEN not in text:
            return text, tuple(text.encode())
        piece = self.tokenizer.inner.convert_ids_to_tokens(token) or ""
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            found = bytes([int(match[1], 16)])
        elif all(letter in byte_alphabet() for letter in piece):
            found = bytes(byte_alphabet()[letter] for letter in piece)
        else:
            return text, tuple(text.encode())
        return BYTES + "".join(f"\\x{byte:02x}" for byte in found), tuple(found)

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, content = self.name(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(content)}

    def chat(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self.entry(item.token_id, item.logprob)
                | {"top_logprobs": [self.entry(token, value) for token, value in item.top.items()]}
                for item in logprobs
            ],
            "refusal": None,
        }

    def completion(
        self, logprobs: list[TokenLogprob | None], tokens: list[int], offset: int
    ) -> dict[str, Any]:
        """`offset` is that of the first token in the text; a token without logprob (a prompt's
        first) has null.
        """
        texts = [self.text(token) for token in tokens]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + (0 if text.startswith(BYTES) else len(text)))
        return {
            "tokens": texts,
            "token_logprobs": [item and finite(item.logprob) for item in logprobs],
            "top_logprobs": [
                item
                and {
                    self.text(token): finite(value)
                    for token, value in [*item.top.items(), (item.token_id, item.logprob)]
                }
                for item in logprobs
            ],
            "text_offset": offsets[:-1],
        }


def finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB
