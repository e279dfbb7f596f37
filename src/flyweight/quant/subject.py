"""A model under measurement: its decoder, and a text in its own tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flyweight.checkpoint.hub import resolve
from flyweight.checkpoint.reader import Checkpoint
from flyweight.device import pick_device

if TYPE_CHECKING:
    from torch import Tensor

    from flyweight.kernels.native.executor import NativeDecoder
    from flyweight.models.decoder import Decoder
    from flyweight.models.kv_scheme import KVScheme


class NativeWhole:
    """The CPU's native decoder as an evaluation asks for one: whole sequences, all their logits."""

    def __init__(self, decoder: NativeDecoder, scheme: KVScheme):
        import torch

        self.decoder = decoder
        self.config = decoder.config
        self.kv_scheme = scheme
        self.device = torch.device("cpu")
        self.dtype = torch.float32

    def forward_whole(self, tokens: Tensor) -> Tensor:
        """Float32 logits [batch, tokens, vocab] of sequences [batch, tokens]."""
        import torch

        from flyweight.engine.embedding import BLOCK, pack
        from flyweight.engine.memory import CacheShape

        count, length = tokens.shape
        batch = pack(tokens.tolist(), self.device)
        batch = replace(batch, output_rows=torch.arange(count * length))
        shape = CacheShape.of(self.config, self.decoder.cache_dtype)
        caches = shape.shared(count * -(-length // BLOCK), BLOCK, self.device)
        return self.decoder.forward(batch, caches).view(count, length, -1)


@dataclass(frozen=True)
class Subject:
    checkpoint: Checkpoint
    decoder: Decoder | NativeWhole
    ids: list[int]
    bos: int | None

    @property
    def longest_window(self) -> int:
        """Tokens that its context holds behind the BOS of each window."""
        return self.decoder.config.context_length - (self.bos is not None)

    @property
    def kv_dtype(self) -> str:
        """In which keys and values are seen."""
        format = self.decoder.kv_scheme.format
        return str(self.decoder.dtype).removeprefix("torch.") if format is None else format.name


@dataclass(frozen=True)
class Rounding:
    """What is rounded to fewer bits as a model is loaded and run, as options name it."""

    head: str | None = None
    vptq_books: str | None = None
    kv_dtype: str | None = None
    prompt_dtype: str | None = None


AS_FILES_ASK = Rounding()


def load_subject(
    model: str,
    text: str,
    *,
    device: str | None,
    dtype: str | None,
    exact: bool = True,
    rounding: Rounding = AS_FILES_ASK,
) -> Subject:
    from flyweight.engine.loading import choose_dtype
    from flyweight.kernels.linear.prompts import check_prompt_dtype
    from flyweight.models import native
    from flyweight.models.balanced_keys import balance_keys
    from flyweight.models.config import ModelConfig
    from flyweight.models.decoder import Decoder
    from flyweight.models.kv_scheme import choose_kv_scheme
    from flyweight.models.narrow_books import narrow_books
    from flyweight.models.narrow_head import narrow_head

    place = pick_device(device)
    checkpoint = Checkpoint(resolve(model))
    # before the tokenizer, for which transformers may read config.json too
    config = ModelConfig.from_dict(checkpoint.config)
    ids, bos = tokens_of(checkpoint, text)
    weights = narrow_head(checkpoint, rounding.head)
    computed = choose_dtype(dtype, checkpoint.config, place)
    scheme = choose_kv_scheme(rounding.kv_dtype, checkpoint, config)
    weights = narrow_books(balance_keys(weights, scheme), rounding.vptq_books, place)
    prompt_dtype = rounding.prompt_dtype
    plain = prompt_dtype is None and scheme.format is None
    if place.type == "cpu" and plain and native.why_not(config, computed) is None:
        whole = NativeWhole(native.load(weights, exact=exact), scheme)
        return Subject(checkpoint, whole, ids, bos)
    decoder = Decoder.load(weights, device=place, dtype=computed, exact=exact)
    if prompt_dtype is not None:
        decoder.narrow_prompts(check_prompt_dtype(prompt_dtype))
    decoder.kv_scheme = scheme
    return Subject(checkpoint, decoder, ids, bos)


def tokens_of(checkpoint: Checkpoint, text: str) -> tuple[list[int], int | None]:
    """The text's own tokens, and the BOS id if this model's texts begin with one; without
    transformers, which takes a second to import, where that leaves nothing out.
    """
    bare = checkpoint.bare_tokenizer()
    if bare is None:
        return encode(checkpoint.tokenizer(), text)
    first = bare.tokenizer.encode("a").ids[0]
    ids = bare.tokenizer.encode(text, add_special_tokens=False).ids
    return ids, bare.begin_id if first == bare.begin_id else None


def encode(tokenizer: Any, text: str) -> tuple[list[int], int | None]:
    """The text's own tokens, and the BOS id if this tokenizer begins texts with one."""
    begins_with_bos = (
        tokenizer.bos_token_id is not None and tokenizer.encode("a")[0] == tokenizer.bos_token_id
    )
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids, tokenizer.bos_token_id if begins_with_bos else None
