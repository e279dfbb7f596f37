"""Options that several verbs share: what they are called, what they take and what help says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyweight.cpu import use_threads
from flyweight.errors import OptionError

# where and how a model runs

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; the GPU if there is one.")]
Fraction = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Of the device's memory, for weights and KV cache together (CPU: of what is free, for "
        "the cache alone); 0.9 (CPU: 0.25).",
    ),
]
Context = Annotated[int | None, typer.Option(min=2, help="Longest context to make room for.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,  # no machine has more, and libraries that cannot start them all crash
        callback=use_threads,
        help="Of a CPU; the cores that this process may use.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, float16 or bfloat16; float32 on a CPU, else the model's own. A CPU without "
        "16-bit arithmetic computes in float32."
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        help="Bits of the head: int8, int4 or stored; default: "
        "as the model asks for, else as stored."
    ),
]
VptqBooks = Annotated[
    str | None,
    typer.Option(help="Codebooks of VPTQ weights: int8 (faster on a GPU) or stored (default)."),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        help="Of the KV cache: fp8 or int8 (half the memory), model (the type of activations) or "
        "auto, as the model's files ask for: the default."
    ),
]
Speculate = Annotated[
    str | None,
    typer.Option(
        help="Guess tokens and check several in one step: ngram (from the text so far), model:NAME "
        "(a smaller model's), eagle3:FOLDER or mtp (a head's on the model's hidden states), auto "
        "(as far as it pays) or off: the default. The answer stays the same."
    ),
]
PromptDtype = Annotated[
    str | None,
    typer.Option(
        help="Of 4-bit weights: int8 or fp8, in which steps of more than 256 tokens multiply; "
        "faster prompts, less exact. Off unless given."
    ),
]
Offload = Annotated[
    int,
    typer.Option(
        min=0,
        help="On a GPU: so many layers stay in the host's memory and come over the bus for each "
        "step; for models somewhat larger than the GPU.",
    ),
]
Native = Annotated[
    bool | None,
    typer.Option(
        "--native/--no-native",
        help="On a CPU: kernels in C that read weights in the bits of their file, or torch's; "
        "where they can run the model, unless given.",
    ),
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FOLDER",
        help="A LoRA adapter of PEFT, by the name that requests call it; may be repeated.",
    ),
]

# what is benched, and how

Models = Annotated[
    list[str],
    typer.Argument(
        help="MODEL or NAME=MODEL: a folder, name, hub id or preset:NAME[:SCHEME]; NAME is what "
        "the rows call the scheme. The first is the baseline."
    ),
]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        help="native, native-server, transformers, transformers-compiled, vllm, vllm-server, "
        "sglang or openai; can be given several times.",
    ),
]
Out = Annotated[
    Path,
    typer.Option("--out", "-o", help="Result rows (JSONL); rows found there are not run again."),
]
Repeats = Annotated[
    int, typer.Option(min=1, help="Runs of each cell; ten or more give p10 and p90.")
]
Seed = Annotated[int, typer.Option(help="Of the random prompts.")]
Name = Annotated[
    str | None,
    typer.Option("--model-name", help="What the rows call the model; default: its own name."),
]
Quantization = Annotated[
    str | None,
    typer.Option(help="By the engine's own name, such as awq or awq_marlin (vllm, sglang)."),
]
TensorParallel = Annotated[
    int, typer.Option(min=1, help="GPUs to split the model over (vllm, sglang).")
]
Url = Annotated[
    str | None,
    typer.Option(help="Of a server that runs already, such as http://localhost:8000 (openai)."),
]
Extra = Annotated[
    list[str] | None,
    typer.Option("--option", help="KEY=VALUE for the engine itself, by its own names."),
]
Check = Annotated[
    bool,
    typer.Option(
        help="Compare greedy tokens with the baseline's before timing, and those of each run with "
        "what the weights mean; wrong ones fail."
    ),
]
Sampling = Annotated[
    str | None,
    typer.Option(
        help="How tokens are chosen, such as "
        '"temperature=0.7,top_p=0.9"; also top_k, '
        "min_p, "
        "seed and penalties. Default: greedily."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the rows instead of a table.")]


def split(text: str) -> list[str]:
    """Words with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(option: str, text: str) -> list[int]:
    words = split(text)
    if not words or not all(word.isdigit() and int(word) > 0 for word in words):
        raise OptionError(f"--{option} {text}: positive whole numbers with commas are wanted")
    return [int(word) for word in words]
