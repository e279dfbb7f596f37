"""A tokenizer without transformers, where the folder's two files leave nothing for transformers to
add.

transformers wraps the tokenizer of `tokenizer.json` and changes it by what `tokenizer_config.json`
says: tokens to be added, beginnings and ends, classes with rules of their own. Here are the folders
where it changes nothing, as `flyweight pull` makes them of GGUF files; all others are left to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# the class that is just what tokenizer.json says, as transformers 4 and 5 call it
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
SETTINGS = {"tokenizer_class", "clean_up_tokenization_spaces", "chat_template", *SPECIAL}
# which transformers reads, too
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True)
class Bare:
    tokenizer: Any  # tokenizers.Tokenizer
    end_id: int | None
    begin_id: int | None = None


def read_bare(folder: Path, settings: dict[str, Any]) -> Bare | None:
    """None where transformers might make something else of it."""
    file = folder / "tokenizer.json"
    plain = settings.get("tokenizer_class") in PLAIN
    if not plain or settings.keys() - SETTINGS or not file.is_file():
        return None
    if any((folder / name).exists() for name in OTHER_FILES):
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # transformers says what is wrong with it
        return None
    if tokenizer.padding is not None or tokenizer.truncation is not None:
        return None
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    named = [settings[name] for name in SPECIAL if settings.get(name) is not None]
    # a token that is not in the list yet would be put there
    for name in named:
        if not isinstance(name, str) or name not in added or not added[name].special:
            return None
    begin, end = (
        None if settings.get(name) is None else tokenizer.token_to_id(settings[name])
        for name in ("bos_token", "eos_token")
    )
    return Bare(tokenizer, end, begin)
