"""The tokenizer that the metadata of a GGUF file describes, written as `tokenizer.json` and
`tokenizer_config.json`.

The file holds the vocabulary, the merges, and only the *name* of the pattern that cuts a text into
words; the table below has those patterns as their authors published them. An unknown name is an
error: with another pattern most texts would still come out right, and numbers, say, wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from flyweight.checkpoint.writer import write_json
from flyweight.errors import CheckpointError, FlyweightError, UnsupportedError, unknown

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # token types

LONGEST_TOKEN = 2048  # characters: every way to cut one in two is tried

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
TEKKEN = GPT_4O.replace(_ENDING, "").replace(r"\p{N}{1,3}", r"\p{N}")  # Mistral's
# one after the other, each within what the one before has left whole
DEEPSEEK_2 = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class WordPattern:
    """How a byte-level tokenizer cuts a text before it merges."""

    split: str | tuple[str, ...] = ()  # one pattern or several; none: GPT-2's own
    digits: bool = False  # every digit stands alone
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a word that is in the vocabulary is not merged from its parts
    begin: bool = False  # starts with the BOS token unless the file says otherwise

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,) if isinstance(self.split, str) else self.split


SMOLLM, QWEN = WordPattern(digits=True), WordPattern(QWEN2, compose=True)
LLAMA_3 = WordPattern(LLAMA3, whole_words=True, begin=True)
WORD_PATTERNS = {
    "gpt-2": WordPattern(),
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "refact": SMOLLM,
    "qwen2": QWEN,
    "deepseek-r1-qwen": QWEN,
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
    "pixtral": LLAMA_3,
    "qwen35": WordPattern(QWEN35, compose=True),
    "tekken": WordPattern(TEKKEN, whole_words=True, begin=True),
    "gpt-4o": WordPattern(GPT_4O),
    "glm4": WordPattern(LLAMA3),
    "chatglm-bpe": WordPattern(LLAMA3),
    "dbrx": WordPattern(LLAMA3),
    "smaug-bpe": WordPattern(LLAMA3),
    "olmo": WordPattern(),
    "deepseek-llm": WordPattern(DEEPSEEK_2),
    "deepseek-v3": WordPattern(DEEPSEEK_3),
}


@dataclass(frozen=True)
class Vocabulary:
    """What the file says about its tokens."""

    metadata: dict[str, Any]
    file: Path  # named in errors
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: dict[str, Any], file: Path) -> Vocabulary:
        tokens = metadata.get("tokenizer.ggml.tokens") or []
        types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        if not tokens or len(types) != len(tokens):
            raise CheckpointError(
                f"{file}: {len(tokens)} tokens with {len(types)} types in 'tokenizer.ggml.*'"
            )
        if longest := next((token for token in tokens if len(token) > LONGEST_TOKEN), None):
            raise CheckpointError(
                f"{file}: a token of {len(longest):,} characters; at most {LONGEST_TOKEN} are taken"
            )
        return cls(metadata, file, tokens, types)

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def ids(self) -> dict[str, int]:
        """Fillers that round the vocabulary up to a good size are no tokens."""
        return {token: i for i, token in enumerate(self.tokens) if self.types[i] != UNUSED}

    def of_types(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def special(self) -> dict[str, str]:
        """`bos_token` and its like, by the names of tokenizer_config.json."""
        names = {
            "bos_token": "bos",
            "eos_token": "eos",
            "pad_token": "padding",
            "unk_token": "unknown",
        }
        found = {key: self.get(f"{name}_token_id") for key, name in names.items()}
        return {
            key: self.tokens[i]
            for key, i in found.items()
            if i is not None and i < len(self.tokens)
        }


def write_tokenizer(metadata: dict[str, Any], folder: Path, *, file: Path) -> None:
    vocabulary = Vocabulary.read(metadata, file)
    builders = {"gpt2": byte_level_tokenizer, "llama": sentencepiece_tokenizer}
    kind = str(vocabulary.get("model"))
    if kind not in builders:
        raise UnsupportedError(f"{file}: {unknown('tokenizer', kind, builders)}")
    try:
        tokenizer, begin = builders[kind](vocabulary)
    except FlyweightError:
        raise
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise CheckpointError(f"{file}: tokens and merges do not fit together ({error})") from error
    # All at once: each call goes through all that were added before.
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token in vocabulary.of_types(UNKNOWN, CONTROL)
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in vocabulary.of_types(USER_DEFINED)]
    )
    _add_frame(tokenizer, vocabulary, begin=begin)
    # not `tokenizer.save`: what it raises when the disk is full is no OSError
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **vocabulary.special(),
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    write_json(folder / "tokenizer_config.json", config)


def byte_level_tokenizer(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """GPT-2's kind: merges are given, every byte has a character of its own."""
    name = vocabulary.get("pre", "default")
    if name not in WORD_PATTERNS:
        raise UnsupportedError(f"{vocabulary.file}: {unknown('word pattern', name, WORD_PATTERNS)}")
    pattern = WORD_PATTERNS[name]
    merges = [tuple(merge.split(" ")) for merge in vocabulary.get("merges", ())]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids(), merges, ignore_merges=pattern.whole_words))
    if pattern.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pattern.digits else []
    steps += [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in pattern.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern.splits))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pattern.begin


def sentencepiece_tokenizer(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Llama 2's kind: scores instead of merges, `▁` for a space, unknown characters
    byte by byte.
    """
    special = vocabulary.special()
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids(),
            merges_from_scores(vocabulary),
            fuse_unk=True,
            byte_fallback=True,
            unk_token=special.get("unk_token"),
        )
    )
    prefix = vocabulary.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, True


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the joined one with the best score first."""
    ids, scores = vocabulary.ids(), vocabulary.get("scores")
    if not scores or len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.file}: {len(ids)} tokens with {len(scores or ())} "
            f"scores in 'tokenizer.ggml.*'"
        )
    ordinary = [
        i for i, kind in enumerate(vocabulary.types) if kind not in (UNKNOWN, CONTROL, UNUSED, BYTE)
    ]
    merges = []
    for i in ordinary:
        token = vocabulary.tokens[i]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [
            (-scores[i], i, ids[left], ids[right], left, right)
            for left, right in pairs
            if left in ids and right in ids
        ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_frame(tokenizer: Tokenizer, vocabulary: Vocabulary, *, begin: bool) -> None:
    """The BOS and EOS tokens that belong around every text."""
    special, ids = vocabulary.special(), vocabulary.ids()
    before = (
        [special["bos_token"]]
        if vocabulary.get("add_bos_token", begin) and "bos_token" in special
        else []
    )
    after = (
        [special["eos_token"]]
        if vocabulary.get("add_eos_token", False) and "eos_token" in special
        else []
    )
    if before or after:
        second = [f"{token}:1" for token in (*before, "$B", *after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *second],
            special_tokens=[(token, ids[token]) for token in (*before, *after)],
        )
    elif vocabulary.get("model") == "gpt2":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
