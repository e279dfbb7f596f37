"""How much an engine takes at once: tokens of a sequence, sequences and tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass

from flyweight.errors import OptionError
from flyweight.models.config import ModelConfig

# by device: sequences in one step, tokens in one step, of those of prompts beside answers that wait
# for them
DEFAULTS = {
    "cpu": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "prompt_tokens_beside": 512},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 16640, "prompt_tokens_beside": 4096},
}


@dataclass(frozen=True)
class Limits:
    """As they were asked for, completed for a model and a kind of device."""

    context: int  # tokens of a sequence
    sequences: int  # in one step
    tokens: int  # in one step
    prompt_tokens: int  # of prompts, in one step beside answers that wait for it
    block_size: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        device: str,
        *,
        max_model_len: int | None,
        max_num_seqs: int | None,
        max_num_batched_tokens: int | None,
        prompt_tokens_beside: int | None,
        block_size: int,
    ) -> Limits:
        defaults = DEFAULTS[device]
        sequences = max_num_seqs or defaults["max_num_seqs"]
        return cls(
            context=context_of(config, max_model_len),
            sequences=sequences,
            tokens=max_num_batched_tokens or max(sequences, defaults["max_num_batched_tokens"]),
            prompt_tokens=prompt_tokens_beside or defaults["prompt_tokens_beside"],
            block_size=block_size,
        )


def context_of(config: ModelConfig, wanted: int | None) -> int:
    context = wanted or config.context_length
    if context > config.context_length:
        raise OptionError(
            f"max_model_len {context} is more than the {config.context_length} tokens that this "
            "model is made for: give at most so many, or leave it out"
        )
    return context
