#!/usr/bin/env python3
"""Train a drafter for a model: an EAGLE-3 head, or a small student that `--speculate model:FOLDER`
runs.

    python benchmarks/train_head.py smollm2-135m ./my-head --text book.txt --text code.py --minutes
        2
    flyweight generate smollm2-135m --speculate eagle3:./my-head --prompt "Once upon a time"

    python benchmarks/train_head.py ./smollm2-fp16 ./my-student --student 4 --text book.txt
        --minutes 2
    flyweight generate ./smollm2-fp16 --speculate model:./my-student --prompt "Once upon a time"

A drafter should guess what the model says, not what books say: the texts are cut into prompts, the
model answers all of them (up to `--answer` tokens each), and the answers are what is learned,
behind their prompts, towards the model's own probabilities. With `--chat` a piece of text is a part
of a question, in the model's chat template: to be repeated, explained, summed up and so on
(`REQUESTS`). The answers are kept in OUT/answers.json and the state of training in OUT/training.pt,
so that a run that was cut off goes on where it was; both can be deleted afterwards.

A head begins as the model's last layer, its lm_head as the rows of the model's own for the
`--vocabulary` most frequent tokens. It is trained on its own results for `--unroll` guesses ahead,
as EAGLE-3 is ("training-time test"): guess j of place i sees the model's states up to i, and behind
them its own. A student begins as so many layers of the model, evenly chosen.

The last line is JSON: loss before and after, the share of right guesses (first, second, …) in
answers kept back, and how many of them are right in a row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from drafter_answers import Answered, Answers, all_prompts, answers_within
from lessons import LENGTHS, Batch, Shelf, batches, shelves_of
from safetensors.torch import save_file
from torch import Tensor, nn

from flyweight.bench.environment import commit
from flyweight.engine.llm import LLM
from flyweight.models.decoder import Decoder
from flyweight.models.heads import eagle3
from flyweight.models.taps import Taps

KEPT_BACK = 16  # a prompt in so many is never trained on
CONTEXT = LENGTHS[-1]  # tokens of a prompt and its answer, at most
SEQUENCES = 256  # answers at once
SAVED_EVERY = 15.0  # seconds of training
READ_EVERY = 20  # steps: the host is not further ahead of the device


@dataclass(frozen=True)
class Lessons:
    taught: list[Shelf]
    kept_back: list[Shelf]


def lessons_of(llm: LLM, answers: Answers) -> Lessons:
    """What the model knows of each place of its answers, and the states that heads read."""
    target = llm.decoder
    tap(target, head_config(llm, 8))
    taught, kept_back = divided(answers)
    return Lessons(shelves_of(target, taught), shelves_of(target, kept_back))


def divided(answers: Answers) -> tuple[Answers, Answers]:
    """Those that are taught, and those kept back: all answers to a prompt, since one is much like
    the other.
    """
    numbers: dict[tuple[int, ...], int] = {}
    parts: tuple[Answers, Answers] = [], []
    for one in answers:
        number = numbers.setdefault(tuple(one.prompt), len(numbers))
        parts[number % KEPT_BACK == 0].append(one)
    return parts


def frequent(shelves: list[Shelf], count: int, vocabulary: int) -> Tensor:
    """The most frequent tokens, in order of their ids; filled up with others."""
    counts = sum(shelf.tokens.flatten().bincount(minlength=vocabulary) for shelf in shelves)
    assert isinstance(counts, Tensor)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values.cpu()


class Head(nn.Module):
    """An EAGLE-3 head whose parameters have the names of its files.

    Some of the model's hidden values are a thousand times as large as others. `fc` learns from all
    of them divided by their usual size (`sizes`), which its stored weights make up for.
    """

    def __init__(self, llm: LLM, kept: Tensor, sizes: Tensor):
        super().__init__()
        target = llm.decoder
        self.config = head_config(llm, len(kept))
        self.shape = target.config
        self.register_buffer("kept", kept.to(target.device))
        self.register_buffer("sizes", sizes.to(target.device))
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(tensor.float().to(target.device))
                for name, tensor in first_weights(
                    llm, kept, eagle3.shapes(self.config, target.config.hidden_size)
                ).items()
            }
        )
        with torch.no_grad():
            width = self.shape.hidden_size
            self["fc"][:, -width:] *= self.sizes[-width:]

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight".replace(".", "/")]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self[name], self.shape.epsilon)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self[name].T

    def turn(self, x: Tensor, first: int) -> Tensor:
        """Rope of [batch, tokens, heads, size], the first token at place `first`."""
        half = x.shape[-1] // 2
        frequencies = self.shape.rope.theta ** -(torch.arange(half, device=x.device) / half)
        angles = (first + torch.arange(x.shape[1], device=x.device))[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def heads_of(self, x: Tensor, name: str, step: int) -> Tensor:
        found = self.linear(x, f"midlayer.self_attn.{name}_proj").unflatten(
            -1, (-1, self.shape.head_dim)
        )
        found = found if name == "v" else self.turn(found, step)
        return (
            found
            if name == "q"
            else found.repeat_interleave(self.shape.heads // self.shape.kv_heads, 2)
        )

    def step(self, embedded: Tensor, hidden: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The layer for every place at once, `len(seen)` guesses behind it; `seen` gets this step's
        keys and values.
        """
        x = torch.cat(
            [
                self.norm(embedded, "midlayer.input_layernorm"),
                self.norm(hidden, "midlayer.hidden_norm"),
            ],
            -1,
        )
        query, key, value = (self.heads_of(x, name, len(seen)) for name in "qkv")
        seen.append((key, value))
        size = self.shape.head_dim
        tokens = x.shape[1]
        mask = torch.full((tokens, tokens), -torch.inf, device=x.device).triu(1)
        scores = [torch.einsum("bqhd,bkhd->bhqk", query, seen[0][0]) / size**0.5 + mask]
        for keys, _ in seen[1:]:  # of a place's own guesses
            scores.append(((query * keys).sum(-1) / size**0.5).transpose(1, 2)[..., None])
        shares = torch.cat(scores, -1).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", shares[..., :tokens], seen[0][1])
        for i, (_, values) in enumerate(seen[1:]):
            mixed = mixed + shares[..., tokens + i].transpose(1, 2)[..., None] * values
        hidden = hidden + self.linear(mixed.flatten(2), "midlayer.self_attn.o_proj")
        y = self.norm(hidden, "midlayer.post_attention_layernorm")
        gated = nn.functional.silu(self.linear(y, "midlayer.mlp.gate_proj")) * self.linear(
            y, "midlayer.mlp.up_proj"
        )
        return hidden + self.linear(gated, "midlayer.mlp.down_proj")

    def guesses(
        self, states: Tensor, embedded: Tensor, count: int, places: Tensor
    ) -> Iterator[Tensor]:
        """Logits [places, vocabulary of the head] of the first, second, … guess behind the chosen
        `places` of all, counted through. `states` [batch, tokens, …] of the model; `embedded` has
        `count` tokens more, the first behind the first place.
        """
        hidden, tokens = self.linear(states / self.sizes, "fc"), states.shape[1]
        seen: list[tuple[Tensor, Tensor]] = []
        for guess in range(count):
            hidden = self.step(embedded[:, guess : guess + tokens], hidden, seen)
            chosen = hidden.flatten(0, 1).index_select(0, places)
            yield self.linear(self.norm(chosen, "norm"), "lm_head")

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        tensors = {name.replace("/", "."): value.detach() for name, value in self.weights.items()}
        tensors["fc.weight"] = tensors["fc.weight"] / self.sizes
        tensors = {name: value.to(dtype).cpu().contiguous() for name, value in tensors.items()}
        kept = self.kept.cpu()
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.isin(torch.arange(self.shape.vocab_size), kept)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))


def first_weights(llm: LLM, kept: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """fc takes the last of the model's states as they are and hardly the others, the layer is the
    model's last, which makes little of embeddings yet; lm_head and norm are the model's own. What
    the files name otherwise is small noise or ones.
    """
    target = llm.decoder
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes.items():
        if name not in ("d2t", "t2d"):
            found[name] = (
                torch.randn(shape, generator=generator) * 0.02
                if len(shape) == 2
                else torch.ones(shape)
            )
    hidden, last = target.config.hidden_size, f"model.layers.{target.config.layers - 1}."
    found["fc.weight"][:, -hidden:] = torch.eye(hidden)
    for name in list(found):
        own = (
            name.removeprefix("midlayer.")
            .replace("input_layernorm", "")
            .replace("hidden_norm", "input_layernorm")
        )
        if name.startswith("midlayer.") and own and llm.weights.has(last + own):
            stored = (
                llm.weights.tensor(last + own)
                if "norm" in own
                else llm.weights.linear(last + own[:-7]).dequantize()
            )
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                if not target.config.qk_norm:  # a head has none, and scores would be far too large
                    found[name][:, hidden:] = stored.float().cpu()
            elif stored.shape == found[name].shape:
                found[name] = stored.float().cpu()
    norm = target.norm.folded
    found["norm.weight"] = norm.weight.float().cpu()
    eye = torch.eye(hidden, dtype=target.dtype, device=target.device)
    with torch.inference_mode():
        # [hidden, vocabulary]
        rows = [target.head(part)[:, : target.config.vocab_size].float() for part in eye.split(256)]
        found["lm_head.weight"] = torch.cat(rows)[:, kept.to(target.device)].T.cpu()
    return {name: value.clone() for name, value in found.items()}


@dataclass(frozen=True)
class Missed:
    """What a drafter does not know yet: the loss, the share of right guesses (first, second, …),
    and how many are right in a row.
    """

    loss: Tensor
    right: Tensor  # [guesses]
    accepted: Tensor


def missed(guesses: Iterator[Tensor], batch: Batch, place_of: Tensor | None = None) -> Missed:
    """Cross-entropy with the model's probabilities, later guesses counting less. `place_of`: of
    each token where a smaller vocabulary has it; −1: nowhere.
    """
    shelf = batch.shelf
    total = batch.counts.new_zeros(())
    weights = batch.counts / batch.counts.sum().clamp(min=1)
    right: list[Tensor] = []
    in_a_row = batch.counts
    accepted = total
    likely, shares, best = (
        table[batch.rows].flatten(0, 1) for table in (shelf.likely, shelf.shares, shelf.best)
    )
    if place_of is not None:
        likely, best = place_of[likely], place_of[best]
        shares = shares * (likely >= 0)
        likely = likely.clamp(min=0)
    for guess, logits in enumerate(guesses):
        at = batch.places + 1 + guess
        scores = logits.float()
        known = scores.gather(-1, likely[at]) - scores.logsumexp(-1, keepdim=True)
        total = total - 0.8**guess * ((shares[at].float() * known).sum(-1) * weights).sum()
        hits = (scores.argmax(-1) == best[at]).float()
        right.append((hits * weights).sum())
        in_a_row = in_a_row * hits
        accepted = accepted + (in_a_row * weights).sum()
    return Missed(total, torch.stack(right), accepted)


class HeadLesson:
    """What a head misses of a batch."""

    def __init__(self, head: Head, table: Tensor, unroll: int):
        self.head = head
        self.table = table  # embeddings of all tokens
        self.unroll = unroll
        self.place_of = torch.full((len(table),), -1, device=table.device)
        self.place_of[head.kept] = torch.arange(len(head.kept), device=table.device)

    def __call__(self, batch: Batch) -> Missed:
        shelf, unroll = batch.shelf, self.unroll
        inner = shelf.length - unroll  # places that all guesses can be made behind
        states = shelf.states[batch.rows][:, :inner]
        embedded = self.table[shelf.tokens[batch.rows][:, 1:]]
        places = batch.places // shelf.length * inner + batch.places % shelf.length
        guesses = self.head.guesses(states.float(), embedded.float(), unroll, places)
        return missed(guesses, batch, self.place_of)


def head_config(llm: LLM, vocabulary: int) -> dict[str, Any]:
    return eagle3.RandomHead(llm.decoder, vocabulary).config


def tap(target: Decoder, config: dict[str, Any]) -> None:
    layers = target.config.layers
    places = config.get("eagle_aux_hidden_state_layer_ids") or eagle3.default_places(layers)
    target.taps = Taps(
        places, target.config.hidden_size, rows=0, dtype=target.dtype, device=target.device
    )


def usual_sizes(shelves: list[Shelf]) -> Tensor:
    """Of each of the hidden values that a head reads: its median over tokens."""
    begin, end = shelves[-1].spans[0]
    found = shelves[-1].states[0, begin:end].float().abs().median(0).values
    return found.clamp(min=1e-3)


def table_of(target: Decoder) -> Tensor:
    """Embeddings of all tokens."""
    tokens = torch.arange(target.config.vocab_size, device=target.device)
    with torch.inference_mode():
        found = torch.cat([target.embedding(some) for some in tokens.split(8192)])
    return found.clone()


def train_head(
    llm: LLM,
    lessons: Lessons,
    folder: Path,
    *,
    vocabulary: int,
    steps: int,
    minutes: float = 1e9,
    batch: int = 8192,
    unroll: int = 3,
    rate: float = 1e-3,
    captured: bool = True,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, or go on training, into `folder`; returns losses and shares of right guesses on what
    was kept back. `captured`: steps, on a GPU.
    """
    target = llm.decoder
    known = target.config.vocab_size
    kept = frequent(lessons.taught, min(vocabulary, known), known)
    head = Head(llm, kept, usual_sizes(lessons.taught))
    return train(
        head,
        HeadLesson(head, table_of(target), unroll),
        lessons,
        folder,
        steps=steps,
        minutes=minutes,
        batch=batch,
        unroll=unroll,
        rate=rate,
        device=target.device,
        say=say,
        write=lambda: head.save(folder, target.dtype),
        captured=captured,
    )


class Trainer:
    """Steps of AdamW. On a GPU those of each shelf are captured, optimizer and all: they are many
    short kernels.
    """

    def __init__(self, module: nn.Module, lesson: Callable[[Batch], Missed], *, captured: bool):
        self.module = module
        self.lesson = lesson
        self.device = next(module.parameters()).device
        self.captured = captured and self.device.type == "cuda"
        on = self.device.type == "cuda"
        self.rate = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=self.rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            capturable=on,
            foreach=on,
        )
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Batch, Missed]] = {}

    def look(self, batch: Batch) -> Missed:
        on = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on, cache_enabled=False):
            return self.lesson(batch)

    def _step(self, batch: Batch) -> Missed:
        found = self.look(batch)
        self.optimizer.zero_grad(set_to_none=True)
        found.loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        return found

    def step(self, batch: Batch, rate: float) -> Missed:
        self.rate.fill_(rate)
        if not self.captured:
            return self._step(batch)
        key = (batch.shelf.length, len(batch.rows))
        if key not in self.graphs:
            return self._capture(key, batch)
        graph, place, found = self.graphs[key]
        for name in ("rows", "places", "counts"):
            getattr(place, name).copy_(getattr(batch, name))
        graph.replay()
        return found

    def _capture(self, key: tuple[int, int], batch: Batch) -> Missed:
        """A step as usual, beside the main stream as captures want it; then it is captured."""
        place = Batch(batch.shelf, batch.rows, batch.places, batch.counts)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first = self._step(place)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            found = self._step(place)
        self.graphs[key] = (graph, place, found)
        return first


def train(
    module: nn.Module,
    lesson: Callable[[Batch], Missed],
    lessons: Lessons,
    folder: Path,
    *,
    steps: int,
    minutes: float,
    batch: int,
    unroll: int,
    rate: float,
    device: torch.device,
    say: Callable[[str], None],
    write: Callable[[], None],
    captured: bool = True,
) -> dict[str, Any]:
    """Until `steps` are done or `minutes` are over. What is kept back is looked at in a few batches
    of all lengths. `write`: the files that are run, written now and then, so that a run that is cut
    off leaves some.
    """
    trainer = Trainer(module, lesson, captured=captured)
    optimizer = trainer.optimizer
    state, done = folder / "training.pt", 0
    if state.exists():
        saved = torch.load(state, map_location=device, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = trainer.rate
        done = saved["step"]
        say(f"goes on at step {done}")

    def check() -> dict[str, Any]:
        found = []
        with torch.no_grad():
            for one in itertools.islice(batches(lessons.kept_back, batch, unroll, device), 12):
                found.append(trainer.look(one))
        right = torch.stack([one.right for one in found]).mean(0)
        return {
            "loss": round(statistics.mean(one.loss.item() for one in found), 4),
            "right": [round(share, 4) for share in right.tolist()],
            "accepted": round(statistics.mean(one.accepted.item() for one in found), 4),
        }

    def save() -> None:
        torch.save(
            {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": done},
            state,
        )
        write()

    before = check()
    begin = saved_at = time.monotonic()
    first = done
    for some in batches(lessons.taught, batch, unroll, device, done):
        seconds = time.monotonic() - begin
        share = min(1 - done / steps, 1 - seconds / max(1e-9, 60 * minutes))
        if share <= 0:
            break
        # up for 50 steps, then down to a tenth
        found = trainer.step(some, rate * min(1.0, (done + 1) / 50) * (0.1 + 0.9 * share))
        done += 1
        if done % READ_EVERY == 0:
            loss = found.loss.item()
            if done % (10 * READ_EVERY) == 0:
                shares = [round(value, 3) for value in found.right.tolist()]
                say(f"step {done}, {seconds:.1f} s: loss {loss:.3f}, right {shares}")
        if time.monotonic() - saved_at > SAVED_EVERY:
            save()
            saved_at = time.monotonic()
    seconds = time.monotonic() - begin
    save()
    return {
        "steps": done,
        "steps_s": round((done - first) / max(1e-9, seconds), 1),
        "tokens": sum(end - start for shelf in lessons.taught for start, end in shelf.spans),
        **{f"{name}_before": value for name, value in before.items()},
        **check(),
    }


def student_of(llm: LLM, layers: int) -> nn.Module:
    """A model of transformers with so many of the model's layers, evenly chosen, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = dict(llm.weights.config)
    stored.pop("quantization_config", None)
    count = stored["num_hidden_layers"]
    chosen = [round(i * (count - 1) / max(1, layers - 1)) for i in range(layers)]
    stored["num_hidden_layers"] = layers
    if kinds := stored.get("layer_types"):
        stored["layer_types"] = [kinds[i] for i in chosen]
    config = AutoConfig.for_model(**stored)
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    own = student.state_dict()
    for name, value in own.items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            parts[2] = str(chosen[int(parts[2])])
        wanted = ".".join(parts)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value.copy_(stored_weight(llm.weights, wanted).reshape(value.shape))
    student.to(llm.device)
    return student


def stored_weight(weights: Any, name: str) -> Tensor:
    """Of a checkpoint in any format, written out."""
    prefix = name.removesuffix(".weight")
    if name.endswith(".weight") and not prefix.endswith("norm"):
        return weights.linear(prefix).dequantize().float()
    return weights.tensor(name).float()


def train_student(
    llm: LLM,
    lessons: Lessons,
    folder: Path,
    *,
    layers: int,
    steps: int,
    minutes: float,
    batch: int,
    rate: float,
) -> dict[str, Any]:
    """A model with fewer layers of the same width, through transformers, which writes
    the folder.
    """
    target = llm.decoder
    student = student_of(llm, layers)
    for parameter in student.get_input_embeddings().parameters():
        parameter.requires_grad_(False)  # and with it a tied head

    def lesson(batch: Batch) -> Missed:
        logits = student(batch.shelf.tokens[batch.rows], use_cache=False).logits
        # behind a place is what a head guesses first there, and a student one token later
        behind = batch.places + 1
        return missed(iter([logits.flatten(0, 1)[behind]]), batch)

    def write() -> None:
        tensors = {name: value.to(target.dtype) for name, value in student.state_dict().items()}
        student.save_pretrained(folder, state_dict=tensors)
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = str(target.dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        if llm.tokenizer is not None:
            llm.tokenizer.inner.save_pretrained(folder)

    return train(
        student,
        lesson,
        lessons,
        folder,
        steps=steps,
        minutes=minutes,
        batch=batch,
        unroll=1,
        rate=rate,
        device=target.device,
        say=print,
        write=write,
        captured=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--text",
        action="append",
        required=True,
        help="a file to cut prompts from; may be given several times",
    )
    parser.add_argument(
        "--student",
        type=int,
        default=0,
        metavar="LAYERS",
        help="train a model of so many layers, not a head",
    )
    parser.add_argument(
        "--then-student",
        type=Path,
        metavar="FOLDER",
        help="behind the head a student of --student layers, taught by the same answers",
    )
    parser.add_argument(
        "--chat", action="store_true", help="ask about the texts, in the model's chat template"
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="of training")
    parser.add_argument("--student-minutes", type=float, help="of a student's; default: --minutes")
    parser.add_argument("--answer-minutes", type=float, default=2.0, help="of answering, at most")
    parser.add_argument("--answers", type=Path, help="answers.json of another run with this model")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--unroll", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--longest-prompt", type=int, default=512)
    parser.add_argument(
        "--asked", type=int, default=2048, help="with --chat: prompts that the model writes"
    )
    parser.add_argument(
        "--questions", help="JSON lines with `turns`, of which one in ten is never trained on"
    )
    parser.add_argument("--question-times", type=int, default=4, help="how often each is answered")
    parser.add_argument("--answer", type=int, default=192, help="tokens of an answer")
    parser.add_argument(
        "--eager", action="store_true", help="launch a head's steps one by one, not captured"
    )
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    llm = LLM(
        options.model,
        device=options.device,
        native=False if options.device == "cpu" else None,
        max_model_len=CONTEXT,
        max_num_seqs=SEQUENCES,
        blocks=SEQUENCES * CONTEXT // 16,
    )
    stored = options.answers or options.out / "answers.json"
    if not stored.exists():
        begin = time.monotonic()
        prompts = all_prompts(llm, options)
        print(f"{len(prompts)} prompts in {time.monotonic() - begin:.0f} s", flush=True)
        answers = answers_within(
            llm,
            prompts,
            options.answer,
            whole=not options.chat,
            seconds=60 * options.answer_minutes,
        )
        stored.write_text(json.dumps([asdict(answered) for answered in answers]))
        print(f"{len(answers)} answers in {time.monotonic() - begin:.0f} s", flush=True)
    answers = [Answered(**answered) for answered in json.loads(stored.read_text())]
    # the others have no place that all guesses can be checked at
    answers = [answered for answered in answers if len(answered.answer) > options.unroll]
    common: dict[str, Any] = dict(
        steps=options.steps, minutes=options.minutes, batch=options.batch, rate=options.rate
    )
    begin = time.monotonic()
    lessons = lessons_of(llm, answers)
    print(f"lessons in {time.monotonic() - begin:.0f} s", flush=True)
    facts = {"what": "training", "tree": commit(), "model": Path(options.model).name}
    student = options.then_student or (options.out if options.student else None)
    if student != options.out:
        head: dict[str, Any] = dict(
            vocabulary=options.vocabulary, unroll=options.unroll, captured=not options.eager
        )
        found = train_head(llm, lessons, options.out, **head, **common)
        print(json.dumps(facts | {"student_layers": None} | found), flush=True)
    if student is not None:
        student.mkdir(parents=True, exist_ok=True)
        common["minutes"] = options.student_minutes or options.minutes
        found = train_student(llm, lessons, student, layers=options.student, **common)
        print(json.dumps(facts | {"student_layers": options.student} | found))


if __name__ == "__main__":
    main()
