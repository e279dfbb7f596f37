"""Text of the original model's own, beside the calibration text.

    token drawn from the vocabulary, or a piece of the calibration text
        → the original goes on at temperature 1 → one sample

Learning at 2 or 3 bits fits the text that it sees, and forgets what the text does not show. What
the original writes by itself shows more of what it knows: other subjects, code, dialogue. No data
is needed for it, but all of the original has to fit on the device while it writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint.reader import Checkpoint
from flyweight.quant.calibration import Samples

TOGETHER = 1 << 17  # tokens of the samples that are written side by side
PIECE = 32  # tokens of the calibration text that every second sample goes on from
PAGE = 16  # tokens in a block of the cache
STRIDE = 1 << 20  # between the seeds of two runs: each sample has a seed of its own


def with_own_text(
    samples: Samples, model: Path, *, share: float, device: torch.device, tuning: float = 0.0
) -> Samples:
    """`samples`, and for each of them `share` more that the model writes, in an order drawn by the
    samples' seed: what looks only at the first ones sees both kinds. Behind them `tuning` more for
    each, which only tuning looks at.
    """
    size = len(samples.tokens)
    count = round(share * size)
    later = round(tuning * size)
    if not count + later or samples.own:
        return samples
    first = samples.tokens[:, 0].tolist()
    prompts = openings(Checkpoint(model), count + later, samples.seed, like=first)
    prompts[1::2] = pieces(samples, len(prompts) // 2, behind=len(prompts[0]) - 1)
    length = samples.tokens.shape[1]
    written = write(model, prompts, length=length, seed=samples.seed, device=device)
    both = torch.cat([samples.tokens, written[:count]])
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(samples.seed))
    tokens = torch.cat([both[order], written[count:]])
    return dataclasses.replace(samples, tokens=tokens, own=count + later, tuning=later)


def write(
    model: Path, prompts: list[list[int]], *, length: int, seed: int, device: torch.device
) -> Tensor:
    """Samples of `length` tokens, int64 [prompts, length]; the same for the same seed."""
    from flyweight import garbage
    from flyweight.engine.llm import LLM

    together = max(1, TOGETHER // length)
    blocks = together * (-(-length // PAGE) + 1)
    llm = LLM(
        model,
        device=device,
        dtype="bfloat16" if device.type == "cuda" else None,
        max_model_len=length,
        max_num_seqs=together,
        block_size=PAGE,
        blocks=blocks,
        prefix_cache=False,
        exact=True,
    )
    written = continue_all(llm, prompts, length, seed)
    del llm
    garbage.release()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return written


def openings(
    checkpoint: Checkpoint, count: int, seed: int, *, like: Sequence[int]
) -> list[list[int]]:
    """One drawn token each, behind the BOS token where all first tokens `like` are it; none that
    only marks turns or ends, and none of those that fill up the embedding and were never learned.
    """
    tokenizer = checkpoint.tokenizer()
    size = min(len(tokenizer), checkpoint.config["vocab_size"])
    allowed = torch.ones(size, dtype=torch.bool)
    allowed[[token for token in tokenizer.all_special_ids if token < size]] = False
    known = allowed.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    drawn = known[torch.randint(len(known), (count,), generator=generator)].tolist()
    begin = [tokenizer.bos_token_id] if set(like) == {tokenizer.bos_token_id} else []
    return [[*begin, token] for token in drawn]


def pieces(samples: Samples, count: int, *, behind: int) -> list[list[int]]:
    """Drawn from the samples, each behind the first `behind` tokens of its own (BOS)."""
    generator = torch.Generator().manual_seed(samples.seed)
    number, length = samples.tokens.shape
    size = min(PIECE, length // 2)
    lines = torch.randint(number, (count,), generator=generator).tolist()
    begins = torch.randint(behind, length - size, (count,), generator=generator).tolist()
    return [
        [*samples.tokens[line, :behind].tolist(), *samples.tokens[line, begin:][:size].tolist()]
        for line, begin in zip(lines, begins, strict=True)
    ]


def continue_all(llm: Any, prompts: list[list[int]], length: int, seed: int) -> Tensor:
    """Every prompt filled up to `length` tokens, [prompts, length]; a text that ends is followed by
    the next one, as in what models are trained on.
    """
    from flyweight.engine.request import SamplingParams

    params = [
        SamplingParams(
            max_tokens=length - len(prompt),
            ignore_eos=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            seed=seed * STRIDE + number,
        )
        for number, prompt in enumerate(prompts)
    ]
    answers = llm.generate(prompts, params)
    lines = [
        [*prompt, *answer.completions[0].token_ids]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return torch.tensor(lines, dtype=torch.int64)
