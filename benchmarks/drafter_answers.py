"""What a drafter learns from (train_head.py): prompts, and what the model itself answers to them.

A drafter should guess what the model says, not what books say. So prompts are made of the texts, of
questions, and of what the model itself asks behind the first words of a user's turn (`OPENINGS`);
and the model answers all of them.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyweight.engine.llm import LLM

SLICE = 2048  # prompts that are answered together
EVALUATED = 10  # one question in so many is for benchmarks/speculation.py, and never trained on
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
# of what users say. Without one a model for code asks little but code.
OPENINGS = (
    "|Explain|Explain to a child how|What is|What are|What causes|What would happen if|Who was"
    "|When did|Which|Where|Why|Why do people|How does|How can I|Is it true that|Should I|Help me"
    "|Write a story about|Write a poem about|Write a letter to|Write an article about"
    "|Write a program that|Write a function that|Describe|Compare|Discuss the|Analyze the|Tell me"
    "|You are a|Pretend that you are|Imagine|Suppose that|If I have|A farmer has|I want to|My"
    "|Solve the equation|Calculate the|Find the|Give me a list of|Give me advice on|Name five"
    "|Plan a|Summarize the history of|Rewrite this sentence:|Read this and list the names:"
)
SENTENCE = re.compile(r".*[.?!](?=\s|$)", re.DOTALL)


def answers_of(
    llm: LLM, prompts: Sequences, tokens: int, *, temperature: float = 0.7, whole: bool = True
) -> Answers:
    """Each prompt with what the model says next; not `whole`: up to where its answer ends. Nobody
    reads it as text.
    """
    llm.engine.answers.decode = None
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


def pieces_of(llm: LLM, files: Sequence[str], length: int) -> list[tuple[bool, list[int]]]:
    """Texts cut into pieces of `length` tokens, in a fixed order; and whether each is of code."""
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
    random.Random(0).shuffle(pieces)
    return pieces


def prompts_of(
    llm: LLM, files: Sequence[str], length: int, most: int, *, chat: bool = False
) -> Iterator[list[int]]:
    """Pieces of the texts, `most` at most; with `chat` so many questions about them."""
    pieces = pieces_of(llm, files, length)
    if not chat:
        yield from (piece for _, piece in pieces[:most])
        return
    chance = random.Random(0)
    # something else can be asked about the same piece
    for code, piece in itertools.islice(itertools.cycle(pieces), most):
        yield llm.prepare(question(llm, piece, code, chance)).tokens


def question(llm: LLM, piece: list[int], code: bool, chance: random.Random) -> Any:
    """A message that asks something about a piece of text, of which a random part is taken."""
    assert llm.tokenizer is not None
    requests = CODE_REQUESTS if code else REQUESTS
    (request,) = chance.choices(list(requests), list(requests.values()))
    short = request.startswith("Write ") and not code
    begin = chance.randrange(len(piece) // 2)
    text = llm.tokenizer.decode(piece[begin : begin + 12] if short else piece[begin:]).strip()
    names = NAME.findall(text) or ["value"]
    return asked(request.format(piece=text, name=max(set(names), key=names.count)))


def asked(text: str) -> Any:
    return [{"role": "user", "content": text}]


def questions_of(file: str, *, evaluated: bool) -> list[str]:
    """Of JSON lines with `turns`: those that drafters are judged by (first turns), or all turns of
    the others.
    """
    lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line]
    if evaluated:
        return [line["turns"][0] for line in lines[::EVALUATED]]
    return [turn for i, line in enumerate(lines) if i % EVALUATED for turn in line["turns"]]


def beginning_of_a_turn(llm: LLM) -> list[int]:
    """The chat template up to where the user's first words are."""
    one = llm.prepare(asked("Why?")).tokens
    other = llm.prepare(asked("Tell me.")).tokens
    pairs = zip(one, other, strict=False)
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def asked_by_the_model(llm: LLM, count: int, tokens: int = 48) -> Iterator[list[int]]:
    """What the model says where a user would speak, as prompts: whatever it was taught to answer is
    among it. Of one that came to no end, its whole sentences.
    """
    assert llm.tokenizer is not None
    begin = beginning_of_a_turn(llm)
    openings = list(itertools.islice(itertools.cycle(OPENINGS.split("|")), count))
    prompts = [begin + llm.tokenizer.encode(opening) for opening in openings]
    decode = llm.engine.answers.decode
    llm.engine.answers.decode = None
    outputs = llm.generate(prompts, max_tokens=tokens, temperature=1.0, top_p=0.95)
    llm.engine.answers.decode = decode
    for opening, output in zip(openings, outputs, strict=True):
        said = output.completions[0]
        text = (opening + llm.tokenizer.decode(said.token_ids)).strip()
        if said.finish_reason != "stop":
            found = SENTENCE.match(text)
            text = found.group() if found else ""
        if text:
            yield llm.prepare(asked(text)).tokens


def all_prompts(llm: LLM, options: Any) -> Sequences:
    """Of all kinds, mixed, so that a part of them is a part of each."""
    found = list(prompts_of(llm, options.text, options.prompt, options.prompts, chat=options.chat))
    if options.chat:
        found += asked_by_the_model(llm, options.asked)
    if options.questions:
        turns = questions_of(options.questions, evaluated=False)
        found += [llm.prepare(asked(turn)).tokens for turn in turns] * options.question_times
    random.Random(1).shuffle(found)
    return [prompt for prompt in found if len(prompt) <= options.longest_prompt]
