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

The last line is JSON: loss before and after, and the share of right guesses (first, second, …) in
answers kept back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flyweight.engine.llm import LLM
from flyweight.models.decoder import Decoder
from flyweight.models.heads import eagle3
from flyweight.models.taps import Taps

KEPT_BACK = 16  # a sequence in so many is never trained on
CONTEXT = 1024  # tokens of a prompt and its answer, at most
SEQUENCES = 64  # answers at once
SLICE = 512  # prompts that are answered together
SAVED_EVERY = 15.0  # seconds of training
Sequences = list[list[int]]


@dataclass(frozen=True)
class Answered:
    """What is learned from: the places of `answer`, behind those of `prompt`."""

    prompt: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer


Answers = list[Answered]
Places = tuple[Tensor, Tensor]  # rows and columns of a batch


REQUESTS = {  # what is asked about a piece of text with --chat, by how often
    "Repeat the following text word for word:\n\n{piece}": 2,
    "Sum up this text in a few sentences:\n\n{piece}": 1,
    "Explain the following to a beginner.\n\n{piece}": 1,
    "{piece}\n\nWhat is the most important point here, and why?": 1,
    "Write a short story that begins like this: {piece}": 1,
    "Give me five questions about the following, with answers.\n\n{piece}": 1,
    "Write an email to a friend about this: {piece}": 1,
}
CODE_REQUESTS = {
    "Rewrite this code with `{name}` renamed to `{name}_new`, and change nothing else.\n\n"
    "```python\n{piece}\n```": 3,
    "Explain what this code does.\n\n```python\n{piece}\n```": 1,
    "Write a test for this function.\n\n```python\n{piece}\n```": 1,
    "Add comments to this code.\n\n```python\n{piece}\n```": 2,
}
NAME = re.compile(r"\b[a-z_]{5,}\b")


def answers_of(
    llm: LLM, prompts: Sequences, tokens: int, *, temperature: float = 0.7, whole: bool = True
) -> Answers:
    """Each prompt with what the model says next; not `whole`: up to where its answer ends. Nobody
    reads it as text.
    """
    llm.engine.decode = None
    outputs = llm.generate(prompts, max_tokens=tokens, temperature=temperature, ignore_eos=whole)
    return [
        Answered(prompt, output.completions[0].token_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def answers_within(
    llm: LLM, prompts: Sequences, tokens: int, *, whole: bool, seconds: float
) -> Answers:
    """Answers to as many of the prompts as there is time for, by turns the likeliest ones and
    sampled ones: both are asked for later.
    """
    end = time.monotonic() + seconds
    found: Answers = []
    for i, begin in enumerate(range(0, len(prompts), SLICE)):
        if found and time.monotonic() >= end:
            break
        part = prompts[begin : begin + SLICE]
        temperature = 0.7 if i % 2 else 0.0
        found += answers_of(llm, part, tokens, temperature=temperature, whole=whole)
    return found


def prompts_of(
    llm: LLM, files: Sequence[str], length: int, most: int, *, chat: bool = False
) -> Sequences:
    """Texts cut into pieces of `length` tokens, as many of each file as it has, up to `most` in
    all, in an order that does not depend on the files'.
    """
    assert llm.tokenizer is not None
    pieces: list[tuple[bool, list[int]]] = []
    for file in files:
        tokens = llm.tokenizer.encode(Path(file).read_text(encoding="utf-8", errors="replace"))
        code = file.endswith(".py")
        pieces += [(code, tokens[i : i + length]) for i in range(0, len(tokens) - length, length)]
    if not pieces:
        raise SystemExit(
            f"the texts have no piece of {length} tokens: give longer ones, or --prompt"
        )
    chance = random.Random(0)
    chance.shuffle(pieces)
    if not chat:
        return [piece for _, piece in pieces[:most]]
    # something else can be asked about the same piece
    asked = itertools.islice(itertools.cycle(pieces), most)
    return [llm.prepare(question(llm, piece, code, chance)).tokens for code, piece in asked]


def question(llm: LLM, piece: list[int], code: bool, chance: random.Random) -> Any:
    """A message that asks something about a piece of text, of which a random part is taken."""
    assert llm.tokenizer is not None
    requests = CODE_REQUESTS if code else REQUESTS
    (request,) = chance.choices(list(requests), list(requests.values()))
    short = request.startswith("Write ") and not code
    begin = chance.randrange(len(piece) // 2)
    text = llm.tokenizer.decode(piece[begin : begin + 12] if short else piece[begin:]).strip()
    names = NAME.findall(text) or ["value"]
    content = request.format(piece=text, name=max(set(names), key=names.count))
    return [{"role": "user", "content": content}]


def frequent(answers: Answers, count: int, vocabulary: int) -> Tensor:
    """The most frequent tokens, in order of their ids; filled up with the first of the others."""
    counted = Counter(token for answered in answers for token in answered.tokens)
    chosen = [token for token, _ in counted.most_common(count)]
    known = set(chosen)
    chosen += itertools.islice(
        (token for token in range(vocabulary) if token not in known), count - len(chosen)
    )
    return torch.tensor(sorted(chosen))


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
        self, states: Tensor, embedded: Tensor, count: int, places: Places
    ) -> Iterator[Tensor]:
        """Logits [places, vocabulary of the head] of the first, second, … guess behind the chosen
        `places`. `states` [batch, tokens, …] of the model; `embedded` has `count`
        tokens more, the first behind the first place.
        """
        hidden, tokens = self.linear(states / self.sizes, "fc"), states.shape[1]
        seen: list[tuple[Tensor, Tensor]] = []
        for guess in range(count):
            hidden = self.step(embedded[:, guess : guess + tokens], hidden, seen)
            yield self.linear(self.norm(hidden[places], "norm"), "lm_head")

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


class Lesson:
    """What the model knows of a few sequences: states, embeddings, and its own probabilities of the
    head's tokens.
    """

    def __init__(self, target: Decoder, head: Head, batch: Taught, unroll: int):
        length = batch.tokens.shape[1] - 1 - unroll  # places that all guesses can be checked at
        places = batch.counted(length, unroll)
        with torch.inference_mode():
            logits = target.forward_whole(batch.tokens)
            assert target.taps is not None
            states = target.taps.states
            embedded = target.embedding(batch.tokens)
            best: list[Tensor] = []
            wanted: list[Tensor] = []
            for i in range(unroll):  # one at a time: a vocabulary for each place is large
                behind = logits[places[0], places[1] + (1 + i)]
                best.append(behind.argmax(-1))
                wanted.append(behind[:, head.kept])
        # clones are tensors that training may keep
        self.places = places
        self.best = [found.clone() for found in best]
        self.wanted = [found.clone() for found in wanted]
        self.states = states[:, :length].clone().float()
        self.embedded = embedded[:, 1:].clone().float()
        self.kept = head.kept

    def loss(self, head: Head, unroll: int) -> tuple[Tensor, list[Tensor]]:
        """Cross-entropy with the model's probabilities, later guesses counting less; and the share
        of right guesses.
        """
        total = self.states.new_zeros(())
        right: list[Tensor] = []
        guesses = head.guesses(self.states, self.embedded, unroll, self.places)
        for guess, logits in enumerate(guesses):
            shares = self.wanted[guess].float().softmax(-1)
            missed = -(shares * logits.log_softmax(-1)).sum(-1)
            total = total + 0.8**guess * missed.mean()
            found = self.kept[logits.argmax(-1)] == self.best[guess]
            right.append(found.float().mean())
        return total, right


@dataclass(frozen=True)
class Taught:
    """A few sequences, filled up with zeros behind their ends."""

    tokens: Tensor  # [batch, longest]
    lengths: Tensor  # [batch], on the host
    prompts: Tensor  # [batch], on the host: how long

    def counted(self, length: int, behind: int) -> Places:
        """The first `length` places that have so many tokens behind them and one more, all of them
        of the answer. Found on the host: the device need not be waited for.
        """
        places = torch.arange(length)[None]
        within = places + 1 + behind < self.lengths[:, None]
        found = within & (places + 1 >= self.prompts[:, None])
        rows, columns = found.nonzero(as_tuple=True)
        return rows.to(self.tokens.device), columns.to(self.tokens.device)


def batches(answers: Answers, size: int, device: torch.device, first: int = 0) -> Iterator[Taught]:
    """Forever, sequences of about one length together, in an order of its own for each round, from
    batch number `first` on.
    """
    ordered = sorted(answers, key=lambda answered: len(answered.tokens))
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    for number in itertools.count(first):
        order = list(range(len(groups)))
        random.Random(number // len(groups)).shuffle(order)
        group = groups[order[number % len(groups)]]
        lengths = torch.tensor([len(answered.tokens) for answered in group])
        tokens = torch.zeros(len(group), int(lengths.max()), dtype=torch.int64)
        for row, answered in enumerate(group):
            tokens[row, : lengths[row]] = torch.tensor(answered.tokens)
        prompts = torch.tensor([len(answered.prompt) for answered in group])
        yield Taught(tokens.to(device), lengths, prompts)


def head_config(llm: LLM, vocabulary: int) -> dict[str, Any]:
    return eagle3.RandomHead(llm.decoder, vocabulary).config


def tap(target: Decoder, config: dict[str, Any]) -> None:
    layers = target.config.layers
    places = config.get("eagle_aux_hidden_state_layer_ids") or eagle3.default_places(layers)
    target.taps = Taps(
        places, target.config.hidden_size, rows=0, dtype=target.dtype, device=target.device
    )


def usual_sizes(target: Decoder, batch: Taught) -> Tensor:
    """Of each of the hidden values that a head reads: its median over tokens."""
    with torch.inference_mode():
        target.forward_whole(batch.tokens)
        assert target.taps is not None
        places = batch.counted(batch.tokens.shape[1], 0)
        found = target.taps.states[places].float().abs().median(0).values
    return found.clamp(min=1e-3).clone()


def train_head(
    llm: LLM,
    answers: Answers,
    folder: Path,
    *,
    vocabulary: int,
    steps: int,
    minutes: float = 1e9,
    batch: int = 8,
    unroll: int = 3,
    rate: float = 1e-3,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, or go on training, into `folder`; returns losses and shares of right guesses on what
    was kept back.
    """
    kept_back, taught = (
        answers[::KEPT_BACK],
        [one for i, one in enumerate(answers) if i % KEPT_BACK],
    )
    target = llm.decoder
    kept = frequent(taught, min(vocabulary, target.config.vocab_size), target.config.vocab_size)
    tap(target, head_config(llm, len(kept)))
    head = Head(llm, kept, usual_sizes(target, next(batches(taught, batch, target.device))))

    def loss_of(batch: Taught) -> tuple[Tensor, list[Tensor]]:
        return Lesson(target, head, batch, unroll).loss(head, unroll)

    found = train(
        head,
        loss_of,
        (taught, kept_back),
        folder,
        steps=steps,
        minutes=minutes,
        batch=batch,
        rate=rate,
        device=target.device,
        say=say,
        write=lambda: head.save(folder, target.dtype),
    )
    return found


def train(
    module: nn.Module,
    loss_of: Callable[[Taught], tuple[Tensor, list[Tensor]]],
    texts: tuple[Answers, Answers],
    folder: Path,
    *,
    steps: int,
    minutes: float,
    batch: int,
    rate: float,
    device: torch.device,
    say: Callable[[str], None],
    write: Callable[[], None],
) -> dict[str, Any]:
    """Until `steps` are done or `minutes` are over. What is kept back is looked at in a few batches
    of all lengths. `write`: the files that are run, written now and then, so that a run that is cut
    off leaves some.
    """
    taught, kept_back = texts
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    state, done = folder / "training.pt", 0
    if state.exists():
        saved = torch.load(state, map_location=device, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
        say(f"goes on at step {done}")
    end = time.monotonic() + 60 * minutes

    def check() -> tuple[float, list[float]]:
        losses, shares = [], []
        with torch.no_grad():
            for one in itertools.islice(batches(kept_back, min(len(kept_back), batch), device), 6):
                loss, right = loss_of(one)
                losses.append(loss.item())
                shares.append([share.item() for share in right])
        means = [round(statistics.mean(column), 4) for column in zip(*shares, strict=True)]
        return round(statistics.mean(losses), 4), means

    def save() -> None:
        torch.save(
            {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": done},
            state,
        )
        write()

    before = check()
    begin = saved_at = time.monotonic()
    for lesson in batches(taught, batch, device, done):
        past, left = (time.monotonic() - begin) / max(1e-9, 60 * minutes), 1 - done / steps
        share = min(left, 1 - past)
        if share <= 0 or time.monotonic() >= end:
            break
        for group in optimizer.param_groups:  # up for 50 steps, then down to a tenth
            group["lr"] = rate * min(1.0, (done + 1) / 50) * (0.1 + 0.9 * share)
        loss, right = loss_of(lesson)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        done += 1
        if done % 200 == 0:
            shares = [round(share.item(), 3) for share in right]
            say(f"step {done}: loss {loss.item():.3f}, right {shares}")
        if time.monotonic() - saved_at > SAVED_EVERY:
            save()
            saved_at = time.monotonic()
    save()
    after = check()
    return {
        "steps": done,
        "loss_before": before[0],
        "right_before": before[1],
        "loss": after[0],
        "right": after[1],
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
    answers: Answers,
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

    def loss_of(batch: Taught) -> tuple[Tensor, list[Tensor]]:
        places = batch.counted(batch.tokens.shape[1], 0)
        with torch.inference_mode():
            wanted = target.forward_whole(batch.tokens)[places]
        wanted = wanted.clone().float()
        with torch.autocast(
            target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"
        ):
            logits = student(batch.tokens, use_cache=False).logits
        logits = logits[places].float()
        missed = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        found = logits.argmax(-1) == wanted.argmax(-1)
        return missed.mean(), [found.float().mean()]

    def write() -> None:
        tensors = {name: value.to(target.dtype) for name, value in student.state_dict().items()}
        student.save_pretrained(folder, state_dict=tensors)
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = str(target.dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        if llm.tokenizer is not None:
            llm.tokenizer.inner.save_pretrained(folder)

    kept_back, taught = (
        answers[::KEPT_BACK],
        [one for i, one in enumerate(answers) if i % KEPT_BACK],
    )
    return train(
        student,
        loss_of,
        (taught, kept_back),
        folder,
        steps=steps,
        minutes=minutes,
        batch=batch,
        rate=rate,
        device=target.device,
        say=print,
        write=write,
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
        "--chat", action="store_true", help="ask about the texts, in the model's chat template"
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="of training")
    parser.add_argument("--answer-minutes", type=float, default=2.0, help="of answering, at most")
    parser.add_argument("--answers", type=Path, help="answers.json of another run with this model")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--unroll", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=192, help="tokens of an answer")
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
        prompts = prompts_of(llm, options.text, options.prompt, options.prompts, chat=options.chat)
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
    if options.student:
        found = train_student(llm, answers, options.out, layers=options.student, **common)
    else:
        found = train_head(
            llm,
            answers,
            options.out,
            vocabulary=options.vocabulary,
            unroll=options.unroll,
            **common,
        )
    print(json.dumps({"model": options.model, "student_layers": options.student or None} | found))


if __name__ == "__main__":
    main()
