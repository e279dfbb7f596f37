"""Are tokens that were drawn at random those of the distribution that the weights mean?

Two ways to be wrong, each with its bound:

outside     A token that the filters (top_k, top_p, min_p) leave out. It may be just behind the last
            one that is kept, by rounding: `check_loss` is by how much, in deviations of the logits,
            on average. Greedy choice is the same with one token kept.
too rare    Among kept tokens, n draws have a mean log-probability near minus the entropy.
            `check_surprise` is how many nats they are rarer; five standard errors are chance, and
            logits that rounding moves by `bound` deviations add its square in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from flyweight.bench.rows import Row
from flyweight.kernels.sample_reference import Filters, kept

ERRORS = 5.0  # standard errors that are taken for chance
FILTERS = {field.name for field in fields(Filters)}


def filters_of(sampling: Mapping[str, Any]) -> Filters | None:
    """None where more than filters decides, such as penalties: that depends on what was said."""
    if set(sampling) - FILTERS - {"seed"}:
        return None
    return Filters(**{name: value for name, value in sampling.items() if name in FILTERS})


def judge(tokens: Tensor, logits: Tensor, filters: Filters, bound: float) -> Row:
    """`tokens` [sequences, positions], `logits` [sequences, positions, vocabulary]."""
    losses = torch.empty(tokens.shape, dtype=torch.float64)
    surprises = torch.empty_like(losses)
    variances = torch.empty_like(losses)
    for place in [(i, j) for i in range(tokens.shape[0]) for j in range(tokens.shape[1])]:
        row = logits[place]
        found = kept(row, filters)
        chosen = tokens[place]
        behind = row[found.tokens].min() - row[chosen]
        losses[place] = behind.clamp(min=0) / row.std()
        shares = found.probabilities[found.tokens]
        logs = shares.log()
        expected = (shares * logs).sum()
        own = found.probabilities[chosen].log() if found.tokens[chosen] else logs.min()
        surprises[place] = expected - own
        variances[place] = (shares * logs.square()).sum() - expected.square()
    chance = ERRORS * math.sqrt(max(0.0, float(variances.sum()))) / losses.numel()
    moved = bound * float(logits.std(-1).mean()) / filters.temperature
    return {
        "check_loss": float(losses.mean()),
        "check_loss_worst": float(losses.mean(-1).max()),
        "check_bound": bound,
        "check_sequences": len(tokens),
        "check_surprise": float(surprises.mean()),
        "check_surprise_bound": chance + moved**2,
    }
