"""What the native CPU kernels' rounding costs: perplexity of a folder through them, beside float64
of the same weights.

    python benchmarks/cpu/native_perplexity.py FOLDER TEXT.txt [--tokens 16384] [-o ROWS.jsonl]

The reference is written out here, plain Llama in float64 over the dequantized weights, one layer at
a time over all windows; it shares nothing with the engine but the reader. The same tokens go
through the executor as it runs by default (x in 8 bits or float16, keys and values in float16) and
with `exact`. Windows do not overlap, and the first token of each is not counted. `increase` is the
ratio of perplexities less one; `error` is the standard error of the paired difference of
log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.checkpoint.reader import Checkpoint
from flyweight.engine.embedding import BLOCK, pack
from flyweight.kernels.native import library
from flyweight.models import native
from flyweight.models.config import ModelConfig
from flyweight.models.rope import rope_tables

WINDOW = 512


class Reference:
    """log p of every token after the first of each window, in float64."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.config = ModelConfig.from_dict(checkpoint.config)
        self.cos, self.sin = (table[:WINDOW].double() for table in rope_tables(self.config))

    def vector(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).double()

    def norm(self, hidden: Tensor, name: str) -> Tensor:
        scale = hidden.square().mean(-1, keepdim=True).add(self.config.epsilon).rsqrt()
        return hidden * scale * self.vector(f"{name}.weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.vector(f"{name}.bias") if self.checkpoint.has(f"{name}.bias") else None
        return F.linear(x, self.checkpoint.linear(name).dequantize().double(), bias)

    def turn(self, heads: Tensor) -> Tensor:  # [windows, heads, tokens, head_dim]
        first, second = heads.chunk(2, -1)
        return torch.cat(
            [first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1
        )

    def layer(self, hidden: Tensor, prefix: str) -> Tensor:
        size = self.config.head_dim
        normed = self.norm(hidden, prefix + "input_layernorm")
        q, k, v = (
            self.linear(normed, f"{prefix}self_attn.{name}_proj")
            .unflatten(-1, (-1, size))
            .transpose(1, 2)
            for name in "qkv"
        )
        if self.config.qk_norm:
            q, k = (
                self.norm(q, prefix + "self_attn.q_norm"),
                self.norm(k, prefix + "self_attn.k_norm"),
            )
        mixed = F.scaled_dot_product_attention(
            self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=True
        )
        hidden = hidden + self.linear(mixed.transpose(1, 2).flatten(2), prefix + "self_attn.o_proj")
        normed = self.norm(hidden, prefix + "post_attention_layernorm")
        gated = F.silu(self.linear(normed, prefix + "mlp.gate_proj")) * self.linear(
            normed, prefix + "mlp.up_proj"
        )
        return hidden + self.linear(gated, prefix + "mlp.down_proj")

    def logprobs(self, windows: Tensor) -> Tensor:
        table = self.vector("model.embed_tokens.weight")
        hidden = table[windows]
        for index in range(self.config.layers):
            hidden = self.layer(hidden, f"model.layers.{index}.")
        hidden = self.norm(hidden, "model.norm")
        head = (
            table
            if self.config.tied_embeddings
            else self.checkpoint.linear("lm_head").dequantize().double()
        )
        return torch.cat(
            [
                chosen(F.linear(one, head), tokens)
                for one, tokens in zip(hidden, windows, strict=True)
            ]
        )


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p of each token but the first, from the logits of the one before it."""
    return logits[:-1].double().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def through_kernels(checkpoint: Checkpoint, windows: Tensor, *, exact: bool) -> Tensor:
    decoder = native.load(checkpoint, exact=exact)
    config = decoder.config
    shape = (WINDOW // BLOCK, BLOCK, config.kv_heads, config.head_dim)
    caches = [
        KVStorage(*(torch.zeros(shape, dtype=decoder.cache_dtype) for _ in range(2)))
        for _ in range(config.layers)
    ]
    found = []
    for tokens in windows:
        batch = replace(
            pack([tokens.tolist()], torch.device("cpu")), output_rows=torch.arange(WINDOW)
        )
        found.append(chosen(decoder.forward(batch, caches), tokens))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    checkpoint = Checkpoint(options.folder)
    text = options.text.read_text()[: 8 * options.tokens]
    ids = torch.tensor(
        checkpoint.tokenizer().encode(text, add_special_tokens=False)[: options.tokens]
    )
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    with torch.inference_mode():
        found = {
            name: through_kernels(Checkpoint(options.folder), windows, exact=name == "exact")
            for name in ("native", "exact")
        }
        reference = Reference(checkpoint).logprobs(windows)
    for name, logprobs in found.items():
        difference = reference - logprobs
        row = dict(
            bench="native_perplexity",
            kernels=name,
            folder=Path(options.folder).name,
            text=options.text.name,
            tokens=len(reference),
            window=WINDOW,
            perplexity_float64=math.exp(-float(reference.mean())),
            perplexity=math.exp(-float(logprobs.mean())),
            increase=math.expm1(float(difference.mean())),
            error=float(difference.std()) / len(difference) ** 0.5,
            instructions=library.load().instructions().decode(),
        )
        print(json.dumps(row), flush=True)
        if options.output:
            with options.output.open("a") as stream:
                stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
