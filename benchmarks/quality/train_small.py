#!/usr/bin/env python3
"""Train a small Llama from text, for weights that never were on a grid: true float32, no rescaling.

    python benchmarks/quality/train_small.py ./small --text wiki.txt code/ --seconds 150
    python benchmarks/quality/run.py --model ./small --natural --text valid.txt --calibration
        wiki.txt --out rows.jsonl

A text is a file, or a folder whose .txt, .md and .py files are read; `--most` bounds what one of
them gives, so that no text drowns the others. The tokenizer (byte-level BPE) is learned from the
same texts. The state is kept in OUT/training.pt: a run that was cut off goes on where it was when
it is repeated, and OUT/model.safetensors appears when the time or the steps are used up. The rate
follows a cosine over the time, which only training itself uses up.

The last line is JSON: parameters, tokens seen, tokens/s, loss on pieces of the texts that were kept
back.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ENDINGS = (".txt", ".md", ".py", ".utf8")
KEPT_BACK = 64  # a piece in so many is never trained on
CHUNK = 100_000  # characters that the tokenizer is given at a time
WARM_UP = 0.02  # share of the time in which the rate rises,
WARM_UP_STEPS = 100  # and in how many steps at least: a slow device takes few in that time
SAVE_EVERY = 30.0  # seconds


def read_texts(paths: Sequence[Path], most: int) -> list[str]:
    """At most `most` characters of each, in pieces."""
    pieces = []
    for path in paths:
        files = (
            [path]
            if path.is_file()
            else sorted(file for file in path.rglob("*") if file.suffix in ENDINGS)
        )
        left = most
        for file in files:
            text = file.read_text(encoding="utf-8", errors="ignore")[:left]
            left -= len(text)
            pieces += [text[i : i + CHUNK] for i in range(0, len(text), CHUNK)]
            if left <= 0:
                break
    if not pieces:
        raise SystemExit(
            f"no text in {', '.join(map(str, paths))}: name files, or folders with "
            f"{', '.join(ENDINGS)} files"
        )
    return pieces


def learn_tokenizer(pieces: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


class Data:
    """All tokens in a row, cut into sequences; some of them kept back."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        sequences = tokens[: len(tokens) // length * length].view(-1, length)
        back = torch.arange(len(sequences)) % KEPT_BACK == KEPT_BACK - 1
        if not back.any():
            raise SystemExit(
                f"{len(tokens)} tokens are too few: at least {KEPT_BACK * length} are needed"
            )
        self.kept_back, self.sequences = sequences[back], sequences[~back]

    def batch(self, size: int, step: int) -> Tensor:
        """The same for the same step, whenever it is asked for."""
        generator = torch.Generator().manual_seed(step)
        return self.sequences[torch.randint(len(self.sequences), (size,), generator=generator)]


def config_of(options: argparse.Namespace, vocabulary: int) -> LlamaConfig:
    heads = options.hidden // 64
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        intermediate_size=3 * options.hidden,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )


class Training:
    """Model, optimizer and how far they have come."""

    def __init__(self, options: argparse.Namespace, config: LlamaConfig, data: Data) -> None:
        torch.manual_seed(options.seed)
        self.options, self.data = options, data
        self.device = torch.device(
            options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        )
        self.model = LlamaForCausalLM(config).to(self.device)
        shapes = list(self.model.parameters())
        groups = [
            {"params": [p for p in shapes if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in shapes if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=options.rate, betas=(0.9, 0.95), fused=self.device.type == "cuda"
        )
        self.step, self.seconds = 0, 0.0
        few = options.steps // 10 + 1 if options.steps else WARM_UP_STEPS
        self.warm_up_steps = min(WARM_UP_STEPS, few)

    @property
    def share(self) -> float:
        """Of the way."""
        of_time = self.seconds / self.options.seconds
        return max(of_time, self.step / self.options.steps) if self.options.steps else of_time

    def rate(self) -> float:
        rising = min(1.0, self.share / WARM_UP + 0.01, (self.step + 1) / self.warm_up_steps)
        return (
            self.options.rate
            * rising
            * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, self.share))) / 2)
        )

    def loss(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.device, torch.long, non_blocking=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def advance(self) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.rate()
        self.loss(self.data.batch(self.options.batch, self.step)).backward()
        # one bad batch must not end in a model of NaN
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if norm.isfinite():
            self.adam.step()
        self.adam.zero_grad()
        self.step += 1

    def run(self, kept: Path) -> None:
        saved = begin = time.perf_counter()
        before = self.seconds
        while self.share < 1:
            self.advance()
            if self.device.type == "cuda" and self.step % 16 == 0:
                torch.cuda.synchronize()  # the clock must not run ahead of the device
            now = time.perf_counter()
            self.seconds = before + now - begin
            if now - saved > SAVE_EVERY:
                saved = now
                self.save(kept)

    @torch.no_grad()
    def held_out(self) -> float:
        parts = self.data.kept_back[:256].split(self.options.batch)
        return sum(float(self.loss(part)) * len(part) for part in parts) / sum(map(len, parts))

    def save(self, kept: Path) -> None:
        half = kept.with_suffix(".half")
        torch.save(
            {
                "model": self.model.state_dict(),
                "adam": self.adam.state_dict(),
                "step": self.step,
                "seconds": self.seconds,
            },
            half,
        )
        half.rename(kept)

    def load(self, kept: Path) -> None:
        state = torch.load(kept, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.seconds = state["step"], state["seconds"]


def prepare(options: argparse.Namespace) -> tuple[PreTrainedTokenizerFast, Tensor]:
    """Tokenizer and tokens, made once: a run that goes on finds them in OUT."""
    kept = options.out / "tokens.pt"
    if kept.exists():
        return PreTrainedTokenizerFast.from_pretrained(options.out), torch.load(kept)
    options.out.mkdir(parents=True, exist_ok=True)
    pieces = read_texts(options.text, int(options.most * 1e6))
    # 4 MB say enough
    tokenizer = learn_tokenizer(pieces[:: max(1, len(pieces) // 40)], options.vocabulary)
    tokenizer.save_pretrained(options.out)
    found = list(encoded(tokenizer, pieces))
    tokens = torch.cat(found).to(torch.int16 if options.vocabulary <= 2**15 else torch.int32)
    torch.save(tokens, kept)
    return tokenizer, tokens


def encoded(tokenizer: Any, pieces: Sequence[str]) -> Iterator[Tensor]:
    for begin in range(0, len(pieces), 64):
        for one in tokenizer.backend_tokenizer.encode_batch(pieces[begin : begin + 64]):
            yield torch.tensor(one.ids)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--most", type=float, default=10, help="million characters of one text or folder"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=150,
        help="of training, those of earlier runs with the same OUT too",
    )
    parser.add_argument("--steps", type=int, default=0, help="at most so many steps")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--prepare", action="store_true", help="make tokenizer and tokens, and no model"
    )
    parser.add_argument("--device", default="")
    return parser.parse_args()


def main() -> None:
    options = parse()
    tokenizer, tokens = prepare(options)
    if options.prepare:
        return print(json.dumps({"text_tokens": len(tokens), "vocabulary": len(tokenizer)}))
    training = Training(options, config_of(options, len(tokenizer)), Data(tokens, options.length))
    kept = options.out / "training.pt"
    if kept.exists():
        training.load(kept)
    before = training.step
    began = time.perf_counter()
    training.run(kept)
    spent = time.perf_counter() - began
    training.save(kept)
    loss = training.held_out()
    if not math.isfinite(loss):
        raise SystemExit(f"training failed: the loss is {loss}; try a smaller --rate")
    training.model.float().save_pretrained(options.out)
    size = options.batch * options.length
    print(
        json.dumps(
            {
                "parameters": sum(p.numel() for p in training.model.parameters()),
                "text_tokens": len(tokens),
                "steps": training.step,
                "tokens": training.step * size,
                "tokens_per_second": round((training.step - before) * size / max(spent, 1e-9)),
                "seconds": round(training.seconds, 1),
                "held_out_loss": round(loss, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
