"""Who guesses for a model, as `--speculate` asks: a head on it, a smaller model, or n-grams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flyweight import shortage
from flyweight.engine.loading import choose_dtype, load_decoder, open_model
from flyweight.engine.memory import CacheShape
from flyweight.engine.speculation.drafter import Drafter
from flyweight.engine.speculation.head import tap
from flyweight.engine.speculation.model import ModelDrafter, check_vocabularies
from flyweight.engine.speculation.ngram import NgramDrafter
from flyweight.engine.speculation.option import Speculation
from flyweight.engine.tokenizer import Tokenizer
from flyweight.engine.work import long_prompts
from flyweight.errors import OptionError
from flyweight.models.config import ModelConfig

if TYPE_CHECKING:
    from flyweight.models.decoder import Decoder
    from flyweight.models.heads.head import DraftHead

MOST_TOKENS = 1 << 16  # that a drafting model's cache holds


@dataclass(frozen=True)
class Target:
    """The model that is guessed for."""

    name: str
    tokenizer: Tokenizer | None
    vocabulary: int
    device: torch.device
    dtype: torch.dtype


def load_head(wanted: Speculation, weights: Any, target: Decoder) -> DraftHead:
    """The head that is asked for, in the bits of the model; its model shows it what it reads."""
    from flyweight.models.heads import eagle3, mtp
    from flyweight.models.heads.head import bits_of

    if not hasattr(target, "taps"):
        raise OptionError(
            f"speculate: {wanted.kind} needs the hidden states of the model, which this decoder "
            f"does not give"
        )
    if long_prompts(target.config) is not None:
        raise OptionError(
            f"speculate: {wanted.kind} cannot guess for models whose rope changes with the length "
            f"of a prompt"
        )
    with shortage.told(
        f"{wanted.model or wanted.kind}: its weights do not fit beside those of the model"
    ):
        if wanted.kind == "mtp":
            head = mtp.load(weights, target, bits=bits_of(target))
        else:
            assert wanted.model is not None
            stored = (
                eagle3.RandomHead(target)
                if wanted.model == eagle3.RANDOM
                else open_model(wanted.model, target.device)[0]
            )
            head = eagle3.load(stored, target, bits=bits_of(target))
    tap(target, head)
    return head


def refuse_speculation(wanted: Speculation, name: str) -> None:
    if wanted.kind != "off":
        raise OptionError(
            f"speculate: the layers of {name} keep a state that a wrong guess could not be taken "
            "out of again; leave it out"
        )


def load_drafter(
    wanted: Speculation,
    target: Target,
    *,
    context: int,
    sequences: int,
    block_size: int,
) -> Drafter | None:
    """Who guesses in steps of its own; a head is part of the engine's. A model's weights and cache
    are there before the memory for the target's cache is counted.
    """
    if wanted.kind == "off" or wanted.is_head:
        return None
    if wanted.model is None:
        return NgramDrafter()
    decoder = _open(wanted.model, target)
    config = decoder.config
    shape = CacheShape.of(config, decoder.cache_dtype)
    if shape.states is not None:
        refuse_speculation(wanted, wanted.model)
    longest = min(context, config.context_length)
    blocks = -(-min(MOST_TOKENS, longest * sequences) // block_size) + sequences
    return ModelDrafter(
        decoder,
        shape,
        vocabulary=config.vocab_size,
        device=target.device,
        context=longest,
        sequences=sequences,
        blocks=blocks,
        block_size=block_size,
    )


def _open(name: str, target: Target) -> Any:
    """The decoder of a model that is to guess for another, if both mean the same by their ids."""
    weights, tokenizer = open_model(name, target.device)
    if target.tokenizer is not None and tokenizer is not None:
        words = target.tokenizer.inner.get_vocab()
        check_vocabularies(target.name, words, name, tokenizer.inner.get_vocab())
    size = ModelConfig.from_dict(weights.config).vocab_size
    check_vocabularies(target.name, target.vocabulary, name, size)
    on_gpu = target.device.type == "cuda"
    dtype = choose_dtype(None, weights.config, target.device) if on_gpu else target.dtype
    with shortage.told(f"{name}: its weights do not fit beside those of {target.name}"):
        decoder, _ = load_decoder(weights, target.device, dtype, exact=False, native=None)
    return decoder
