"""vLLM with our kernels, vLLM without them and our own engine, by turns on one GPU.

    python benchmarks/vllm_plugin.py preset:qwen3-8b:int4 --out rows.jsonl
    python benchmarks/vllm_plugin.py preset:qwen3-8b:w8a8@on,off@1 --out rows.jsonl
    python benchmarks/vllm_plugin.py preset:gemma-3-12b:int4 --sides native off --batch 1 …
    python benchmarks/vllm_plugin.py preset:qwen3-8b:int4@native,off@workloads@greedy+top_p=0.9 …
    python benchmarks/vllm_plugin.py FOLDER --agree 512 --out rows.jsonl   teacher-forced, both ways
    python benchmarks/vllm_plugin.py preset:qwen3-30b-a3b:int4*4@on-all,off,native@1,8 --folders D …

Every side of every model is a process: `on` is vLLM with the plug-in, `on-all` the same with
`--quantization flyweight` (our reader for everything, and experts by our kernels where vLLM would
take its own), `off` is vLLM with `FLYWEIGHT_VLLM=off`, `native` is our engine. vLLM captures whole
decode steps and compiles nothing (its mode 0), which starts in a minute; as `on-compiled` and
`off-compiled` its compiler is on. All start at the same time, and are measured when all are there,
one model after the other, its sides in turns, greedy answers first. What stands behind `then`
starts when that is done. Rows name the classes that multiplied (`linear_kernels`).

MODEL@SIDES@SHAPES@SAMPLING says it for one model: `native,off@1,64@greedy+top_p=0.9`; SHAPES are
batches, workloads of `bench latency` or all of them (`workloads`), and more pairs of shapes and
sampling may follow. `preset:NAME:SCHEME*12@native,off` is the model with twelve layers on every
side; with `--folders DIR` presets are written as folders where ours is a side, and all sides read
these: only so can `--agree` compare them. A side that has not started after `--start-seconds` is
ended, and a row says that it failed. `--turn FILE`: others that lock this file wait while something
is started or measured here; with `--start-early` only while it is measured.
`--first-configs`: vLLM's Triton kernels take the first of the configurations that they would try
out (of Qwen3-Next's prompts alone there are dozens; steps have fixed ones).
`--own-late`: our engine of a model starts when that model is measured, and all engines of a model
end with it, so that more of them fit on one GPU; all that is asked of a model is then measured
before the next one.
`--alike`: our engine's experts have the numbers of one (they lie apart, so a step reads as much as
ever), and a large mixture is there in seconds.

vLLM takes half a minute to be imported, and again to look at a model's class in a process of its
own. So its engines are forks of one process that has imported it, and look at the class in their
own process.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import importlib
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flyweight.backends.base import EngineOptions, Limits, create
from flyweight.bench.cases import Case, parse_sampling
from flyweight.bench.facts import Variant, facts_of
from flyweight.bench.rows import ResultFile, Row, environment_row, make_row, rounded
from flyweight.bench.timing import batch_figures, random_prompts
from flyweight.bench.workloads import LATENCY, Workload
from flyweight.checkpoint.reader import Checkpoint
from flyweight.models import presets
from flyweight.models.random_folder import write_preset
from flyweight.plugins.vllm import claims
from flyweight.quant.subject import encode

SIDES = {  # → backend
    "on": "vllm-plugin",
    "on-all": "vllm-plugin",
    "off": "vllm",
    "on-compiled": "vllm-plugin",
    "off-compiled": "vllm",
    "native": "native",
}
GRAPHS = "decode graphs"
MODES = {"on": GRAPHS, "on-all": GRAPHS, "off": GRAPHS, "native": None}  # others are compiled
READ_FILES = {"native", "on-all"}  # the others can make up random weights
WARM = 24  # tokens
IMPORTED = [  # by the process whose forks vLLM's engines are
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.model_executor.models.qwen3",
]
GREEDY = "greedy"
THEN = "then"


MOST_CAPTURED = 512  # tokens of one step that vLLM captures by itself, in pieces where it compiles


def captured_sizes(side: str, shapes: Sequence[Workload]) -> list[int]:
    """Of decode steps; where vLLM compiles, also of the prompts that it would capture by itself."""
    found = {shape.batch for shape in shapes}
    if side not in MODES:
        prompts = {shape.batch * shape.input for shape in shapes}
        found |= {tokens for tokens in prompts if tokens <= MOST_CAPTURED}
    return sorted(found)


def engine_options(side: str, sizes: list[int], cache_gb: int, more: list[str]) -> dict[str, Any]:
    """Of vLLM. `sizes`: tokens of steps that are captured."""
    # the share is only looked at before the start, when others may have begun to load already
    extra: dict[str, Any] = dict(gpu_memory_utilization=0.05, kv_cache_memory_bytes=cache_gb << 30)
    if not sizes:
        extra |= dict(enforce_eager=True, compilation_config=dict(mode=0))
    else:
        graphs: dict[str, Any] = dict(cudagraph_capture_sizes=sizes)
        if side in MODES:
            graphs |= dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
        kernels = dict(enable_flashinfer_autotune=False)
        extra |= dict(compilation_config=graphs, kernel_config=kernels)
    pairs = (pair.split("=", 1) for pair in more)
    return extra | {name: json.loads(value) for name, value in pairs}


# -- one process with an engine ----------------------------------------------------------------


def work(channel: Connection) -> None:
    """Starts an engine and does what it is told, until it is told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    side = channel.recv()
    importlib.import_module("flyweight.engine.llm" if side == "native" else "vllm")
    order = channel.recv()
    if order["traceback_seconds"]:
        faulthandler.dump_traceback_later(order["traceback_seconds"], repeat=True)
    begin = time.perf_counter()
    try:
        if side != "native":
            look_at(order["architectures"])
        if side != "native" and order["first_configs"]:
            take_first_configs()
        if order["layers"]:
            shorten(order["layers"])
        if side == "native" and order["alike"]:
            load_experts_alike()
        reader = claims.NAME if side == "on-all" else None
        options = EngineOptions(dtype=order["dtype"], quantization=reader, extra=order["extra"])
        engine = create(SIDES[side], order["model"], options)
        engine.start(Limits(**order["limits"]))
    except BaseException as error:
        channel.send({"fault": f"{type(error).__name__}: {error}"[:800]})
        raise
    faulthandler.cancel_dump_traceback_later()
    channel.send(
        {
            "seconds": time.perf_counter() - begin,
            "kv_dtype": engine.kv_dtype,
            "kernels": getattr(engine, "linear_kernels", None),
            "torch": _torch_version(),
        }
    )
    while order := channel.recv():
        try:
            channel.send(ACTIONS[order.pop("do")](engine, **order))
        except Exception as error:
            channel.send({"fault": f"{type(error).__name__}: {error}"[:800]})
    engine.stop()


def look_at(architectures: list[str]) -> None:
    """At a model's class in this process, where vLLM would start another one for it."""
    from vllm import ModelRegistry

    for name in architectures:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def take_first_configs() -> None:
    from triton.runtime.autotuner import Autotuner

    Autotuner.prune_configs = lambda self, kwargs: self.configs[:1]


def shorten(layers: int) -> None:
    """Presets of this process have so many layers."""
    whole = presets.preset_config
    presets.preset_config = lambda name: whole(name) | dict(num_hidden_layers=layers)


def load_experts_alike() -> None:
    from families import one_for_all

    from flyweight.models.layers import Linear

    Linear.load = one_for_all(Linear.load)  # type: ignore[method-assign,assignment]


def work_forked(channel: Connection, log: str, environment: dict[str, str], gpu: bool) -> None:
    """`work` in a fork of the process that has imported vLLM, or from the beginning where a GPU
    cannot be used in forks.
    """
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if gpu and not _gpu_works():
        os.set_inheritable(channel.fileno(), True)
        command = [sys.executable, __file__, "--worker", str(channel.fileno())]
        os.execve(command[0], command, environment)
    work(channel)


def _gpu_works() -> bool:
    import torch

    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        print(f"no fork: {error}", flush=True)
        return False
    return True


def _torch_version() -> str:
    import torch

    return torch.__version__


def measure(
    engine: Any, *, shape: tuple[int, int, int], sampling: Row, vocabulary: int, seed: int
) -> Row:
    batch, input, output = shape
    engine.options.sampling.clear()
    engine.options.sampling.update(sampling)
    prompts = random_prompts(batch, input, vocabulary=vocabulary, seed=seed)
    return batch_figures(engine.generate(prompts, output), input=input, output=output)


def forced(engine: Any, *, ids: list[int]) -> Row:
    """By position: the likeliest token, its lead over the second, and the log-probability of the
    text's own.
    """
    ask = of_ours if SIDES["native"] == engine.name else of_vllm
    found = ask(engine, ids)
    ranked = [sorted(top.items(), key=lambda item: -item[1])[:2] for top, _ in found]
    return {
        "best": [two[0][0] for two in ranked],
        "lead": [two[0][1] - two[1][1] for two in ranked],
        "own": [own for _, own in found],
    }


def of_vllm(engine: Any, ids: list[int]) -> list[tuple[dict[int, float], float]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2, detokenize=False)
    prompts = [{"prompt_token_ids": ids}]
    found = engine.inner.generate(prompts, params, use_tqdm=False)[0].prompt_logprobs[1:]
    return [
        ({token: one.logprob for token, one in place.items()}, place[own].logprob)
        for place, own in zip(found, ids[1:], strict=True)
    ]


def of_ours(engine: Any, ids: list[int]) -> list[tuple[dict[int, float], float]]:
    from flyweight.engine.request import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
    found = engine.llm.generate([ids], params)[0].prompt_logprobs[1:]
    return [(one.top, one.logprob) for one in found]


ACTIONS = {"measure": measure, "forced": forced}


# -- the process that measures -----------------------------------------------------------------


class Failed(Exception):
    """An engine that cannot go on."""


@dataclass(frozen=True)
class Subject:
    """A model, the sides that it is measured on, and what is measured."""

    model: str
    sides: tuple[str, ...]
    cells: tuple[tuple[Workload, str], ...]  # with how tokens are chosen
    layers: int | None = None  # fewer than the model's own

    @classmethod
    def parse(cls, text: str, options: argparse.Namespace) -> Subject:
        model, named, *rest = f"{text}@".split("@") if "@" not in text else text.split("@")
        rest += [""] * (len(rest) % 2 or 2 * (not rest))  # shapes and sampling by turns
        model, _, layers = model.partition("*")
        sides = tuple(named.split(",")) if named else tuple(options.sides)
        wrong = [side for side in sides if side not in SIDES]
        if wrong:
            raise SystemExit(f"{text}: {wrong[0]!r} is none of {', '.join(SIDES)}")
        cells = [
            (shape, chosen)
            for shapes, sampling in zip(rest[::2], rest[1::2], strict=True)
            for chosen in (sampling.split("+") if sampling else options.sampling)
            for shape in shapes_of(shapes, options)
        ]
        count = int(layers) if layers else None
        if options.folders and model.startswith("preset:") and READ_FILES.intersection(sides):
            model = str(written(model, count, options.folders))
        return cls(model, sides, tuple(cells), count)

    @property
    def shapes(self) -> list[Workload]:
        return list(dict.fromkeys(shape for shape, _ in self.cells))


def written(preset: str, layers: int | None, folder: Path) -> Path:
    """The preset's random weights as a folder, in the format that vLLM reads fastest."""
    import torch

    target = folder / (preset.replace(":", "-") + (f"-{layers}" if layers else ""))
    if not target.exists():
        write_preset(
            preset,
            target,
            format="awq" if preset.endswith(":int4") else None,
            device="cuda" if torch.cuda.is_available() else "cpu",
            layers=layers,
        )
    return target


def shapes_of(text: str, options: argparse.Namespace) -> list[Workload]:
    if text == "workloads":
        return list(LATENCY.values())
    usual = options.batch or ([] if options.agree else [1, 8, 64])
    words = text.split(",") if text else [str(batch) for batch in usual]
    return [
        LATENCY[word]
        if word in LATENCY
        else Workload(None, int(word), options.input, options.output)
        for word in words
    ]


class Engine:
    """One side of one model, as the measuring process sees it."""

    def __init__(self, side: str, model: str, folder: Path, options: argparse.Namespace):
        self.side = side
        self.model = model
        name = f"{model.replace('/', '-').replace(':', '-')}-{side}"
        self.log = folder / f"{name}.log"
        self.told: Row = {}
        self.channel, theirs = Pipe()
        environment = environment_of(side, options)
        own = side == "native" or options.no_forks
        self.python = sys.executable
        if side == "native" and options.native_python:
            self.python = options.native_python
        self.process = (self._begun if own else self._forked)(theirs, environment)
        theirs.close()  # so that the end of the process is the end of the channel
        self.channel.send(side)

    def _begun(self, theirs: Connection, environment: dict[str, str]) -> Any:
        command = [self.python, __file__, "--worker", str(theirs.fileno())]
        with self.log.open("w") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )

    def _forked(self, theirs: Connection, environment: dict[str, str]) -> Any:
        context = multiprocessing.get_context("forkserver")
        given = (theirs, str(self.log), environment, _has_gpu())
        found = context.Process(target=work_forked, args=given)
        found.start()
        return found

    def begin(self, order: Row) -> None:
        self.channel.send(order | {"model": self.model})

    def wait(self, until: float) -> None:
        """For its start."""
        if not self.channel.poll(max(0.0, until - time.monotonic())):
            self.process.kill()
            raise Failed("had not started in time")
        self.told = self.answer()

    def ask(self, **order: Any) -> Row:
        self.channel.send(order)
        return self.answer()

    def answer(self) -> Row:
        try:
            found: Row = self.channel.recv()
        except (EOFError, OSError):
            found = {"fault": "the process ended"}
        if "fault" in found:
            raise Failed(found["fault"])
        return found

    def stop(self) -> None:
        try:
            self.channel.send(None)
            self.channel.poll(5)  # its end is the end of the channel
        except OSError:
            pass
        self.process.kill()


def environment_of(side: str, options: argparse.Namespace) -> dict[str, str]:
    found = dict(os.environ, VLLM_LOGGING_LEVEL="INFO", VLLM_USE_FLASHINFER_SAMPLER="0")
    if SIDES[side] == "vllm":
        found["FLYWEIGHT_VLLM"] = "off"
    if side == "native" and options.native_path:
        found["PYTHONPATH"] = options.native_path
        found.pop("LD_LIBRARY_PATH", None)
    return found


class Bench:
    """What is asked of one model's engines, and the rows of it."""

    def __init__(self, subject: Subject, options: argparse.Namespace, file: ResultFile):
        self.subject = subject
        self.options = options
        self.file = file
        self.id = ""  # of the environment's row
        self.facts = facts_of(Variant.parse(subject.model))
        self.vocabulary = self.facts.vocabulary or 1000
        self.engines: list[Engine] = []
        self.repeats: int = options.repeats

    @property
    def is_folder(self) -> bool:
        """Else each side makes random weights of its own."""
        return not self.subject.model.startswith("preset:")

    @property
    def limits(self) -> Limits:
        forced = [(1, self.options.agree + 16)] if self.options.agree else []
        return Limits.of([*forced, *((one.batch, one.context) for one in self.subject.shapes)])

    def launch(self, folder: Path) -> None:
        sides = self.subject.sides
        self.engines = [Engine(side, self.subject.model, folder, self.options) for side in sides]

    def begin(self, engines: Sequence[Engine]) -> None:
        limits = self.limits
        vllm = dict(batch=limits.batch, context=limits.context, tokens=None)
        order: Row = dict(dtype=self.options.dtype, architectures=architectures(self.subject.model))
        layers = None if self.is_folder else self.subject.layers
        order |= dict(traceback_seconds=self.options.traceback_seconds, layers=layers)
        order |= dict(alike=self.options.alike, first_configs=self.options.first_configs)
        for engine in engines:
            if engine.side == "native":
                engine.begin(order | dict(limits=vllm | dict(tokens=limits.tokens), extra={}))
            else:
                sizes = captured_sizes(engine.side, self.subject.shapes)
                extra = engine_options(engine.side, sizes, self.cache_gb, self.options.option)
                if self.is_folder and not Checkpoint(self.subject.model).has_tokenizer:
                    extra["skip_tokenizer_init"] = True
                engine.begin(order | dict(limits=vllm, extra=extra))

    @property
    def cache_gb(self) -> int:
        """Of keys and values, in vLLM: what the largest shape needs, and some."""
        needed = (self.limits.tokens or 0) * self.facts.kv_bytes(None)
        return self.options.cache_gb or 1 + int(1.1 * needed / 2**30)

    def late(self) -> list[Engine]:
        """Those that start when this model is measured."""
        return [one for one in self.engines if self.options.own_late and one.side == "native"]

    def early(self) -> list[Engine]:
        late = self.late()
        return [one for one in self.engines if one not in late]

    def wait(self, engines: Sequence[Engine], until: float) -> None:
        for engine in engines:
            try:
                engine.wait(until)
            except Failed as error:
                self.drop(engine, str(error))
                continue
            told = engine.told
            print(
                f"{engine.model} {engine.side}: started in {told['seconds']:.0f} s, torch "
                f"{told['torch']}, linears by {told['kernels']}",
                flush=True,
            )

    def drop(self, engine: Engine, reason: str) -> None:
        tail = engine.log.read_text(errors="replace")[-2500:]
        print(f"{engine.model} {engine.side}: {reason}\n{tail}", flush=True)
        self.write(engine, status="failed", reason=reason)
        engine.process.kill()
        self.engines.remove(engine)

    def write(self, engine: Engine, bench: str = "latency", **fields: Any) -> None:
        backend = SIDES[engine.side]
        case = Case(self.facts, create("native", self.subject.model, EngineOptions()), backend)
        told = engine.told
        row = case.fields() | {
            "kv_dtype": told.get("kv_dtype"),
            "linear_kernels": told.get("kernels"),
            "torch": told.get("torch"),
            "start_s": told.get("seconds"),
            "vllm_mode": MODES.get(engine.side, "compiled") if self.subject.shapes else "eager",
        }
        if engine.side == "native" and self.options.alike:
            row |= dict(experts="alike")
        if self.subject.layers:
            row |= dict(layers=self.subject.layers)
            if not self.is_folder:  # what is known is of the whole model
                row |= dict(size_gb=None, file_bits_per_weight=None)
        self.file.append([make_row(bench, self.id, **rounded(row | fields))])

    def speed(self, text: str) -> None:
        """`text`: how tokens are chosen."""
        for shape in [shape for shape, chosen in self.subject.cells if chosen == text]:
            for engine in self.measured(text):
                self.attempt(engine, shape, text, seed=-2, output=WARM)
                self.attempt(engine, shape, text, seed=-1, output=WARM)
            self.turns(shape, text)

    def measured(self, text: str) -> list[Engine]:
        chosen = SIDES if text == GREEDY else self.options.sampled_sides
        return [engine for engine in self.engines if engine.side in chosen]

    def attempt(self, engine: Engine, *shape: Any, **options: Any) -> Row | None:
        """None: it has failed, now or before, and is no longer among the engines."""
        if engine not in self.engines:
            return None
        try:
            return self.ask(engine, *shape, **options)
        except Failed as error:
            self.drop(engine, str(error))
            return None

    def ask(
        self, engine: Engine, shape: Workload, text: str, *, seed: int, output: int | None = None
    ) -> Row:
        return engine.ask(
            do="measure",
            shape=(shape.batch, shape.input, min(output or shape.output, shape.output)),
            sampling={} if text == GREEDY else parse_sampling(text),
            vocabulary=self.vocabulary,
            seed=seed,
        )

    def turns(self, shape: Workload, text: str) -> None:
        engines = self.measured(text)
        rates: dict[str, list[float]] = {engine.side: [] for engine in engines}
        fields = dict(workload=shape.name, batch=shape.batch, input=shape.input)
        fields |= dict(output=shape.output) | ({} if text == GREEDY else {"sampling": text})
        for repeat in range(self.repeats):
            for engine in engines if repeat % 2 else engines[::-1]:
                figures = self.attempt(engine, shape, text, seed=repeat)
                if figures is None:
                    continue
                rates[engine.side].append(figures["decode_tok_s"])
                self.write(engine, repeat=repeat + 1, **fields, **figures)
        median = {side: statistics.median(found) for side, found in rates.items() if found}
        told = ", ".join(f"{side} {rate:.1f}" for side, rate in median.items())
        last = list(median)[-1] if median else ""
        ratios = {side: rate / median[last] for side, rate in median.items() if side != last}
        over = "".join(f", {side} {ratio:.3f} x {last}" for side, ratio in ratios.items())
        what = f"{self.subject.model} batch {shape.batch} x {shape.input}+{shape.output} {text}"
        print(f"{what}: {told} tok/s{over}", flush=True)

    def agree(self) -> None:
        """Of every side with the last one."""
        ids = self.prompt()
        asked = []
        for engine in list(self.engines):
            try:
                asked.append((engine, engine.ask(do="forced", ids=ids)))
            except Failed as error:
                self.drop(engine, str(error))
        if len(asked) < 2:
            return
        *others, last = asked
        for engine, found in others:
            fields = compared(found, last[1]) | {"against": SIDES[last[0].side]}
            self.write(engine, "quality", check="forced", tool="vllm", **fields)
            print(f"{engine.model} {engine.side}: {json.dumps(fields)}", flush=True)

    def prompt(self) -> list[int]:
        count = self.options.agree
        if self.options.text is None or not Path(self.subject.model, "tokenizer.json").exists():
            return random_prompts(1, count, vocabulary=self.vocabulary, seed=0)[0]
        tokenizer = Checkpoint(self.subject.model).tokenizer()
        return encode(tokenizer, self.options.text.read_text(encoding="utf-8"))[0][:count]


def architectures(model: str) -> list[str]:
    if model.startswith("preset:"):
        config = presets.preset_config(model.split(":")[1])
    else:
        config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    return list(config.get("architectures") or [])


def compared(found: Row, other: Row) -> Row:
    pairs = zip(found["best"], other["best"], strict=True)
    different = [place for place, (mine, theirs) in enumerate(pairs) if mine != theirs]
    moved = [abs(a - b) for a, b in zip(found["own"], other["own"], strict=True)]
    return {
        "positions": len(found["best"]),
        "same_argmax": len(found["best"]) - len(different),
        "largest_gap_at_difference": max((other["lead"][i] for i in different), default=0.0),
        "logprob_difference_mean": statistics.fmean(moved),
        "logprob_difference_max": max(moved),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", nargs="+", help="presets or folders, with @SIDES… or not; `then`")
    add("--sides", nargs="+", default=["on", "off"], choices=list(SIDES), help="of models without")
    add("--batch", type=int, nargs="+", help="default: 1 8 64, or nothing with --agree")
    add("--input", type=int, default=128)
    add("--output", type=int, default=128)
    add("--sampling", nargs="+", default=[GREEDY], help="greedy, or as `bench --sampling` takes it")
    add("--sampled-sides", nargs="+", default=list(SIDES), help="for tokens that are not greedy")
    add("--repeats", type=int, default=3)
    add("--later-repeats", type=int, help="of all models but the first; default: as many")
    add("--agree", type=int, default=0, metavar="N", help="compare N teacher-forced positions")
    add("--text", type=Path, help="of --agree, for a folder with a tokenizer; else random tokens")
    add("--dtype")
    add("--turn", type=Path, help="a file that is locked while something is started or measured")
    add("--start-early", action="store_true", help="engines start before it is their turn")
    add("--folders", type=Path, help="write presets there as folders, which all sides read")
    add("--cache-gb", type=int, help="of KV cache, of each vLLM; default: what is needed")
    add("--option", action="append", default=[], metavar="NAME=JSON", help="more of vLLM's LLM")
    add("--native-path", help="PYTHONPATH of our engine, where vLLM brings its own torch")
    add("--native-python", help="of our engine; default: the one that runs this")
    add("--own-late", action="store_true", help="our engines start one model after the other")
    add("--alike", action="store_true", help="our engine's experts have the numbers of one")
    add("--first-configs", action="store_true", help="vLLM's Triton kernels are not tuned")
    add("--no-forks", action="store_true", help="every side imports vLLM itself")
    add("--start-seconds", type=float, default=600, help="after which a side counts as failed")
    add("--traceback-seconds", type=float, default=0, help="a starting side prints where it is")
    add("--logs", type=Path, help="folder for the sides' logs")
    add("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = parse()
    folder = options.logs or Path(tempfile.mkdtemp(prefix="flyweight-vllm-plugin-"))
    folder.mkdir(parents=True, exist_ok=True)
    file = ResultFile(options.out)
    if not options.no_forks:  # imports while models are looked at
        forkserver.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    waves: list[list[Bench]] = [[]]
    for text in options.models:
        if text == THEN:
            waves.append([])
        else:
            waves[-1].append(Bench(Subject.parse(text, options), options, file))
    benches = [bench for wave in waves for bench in wave]
    for bench in benches[1:]:
        bench.repeats = options.later_repeats or options.repeats
    for bench in benches:
        bench.launch(folder)
    environment = environment_row("cuda" if _has_gpu() else "cpu", measure_bandwidth=False)
    file.append([environment])
    try:
        for wave in waves:
            if options.start_early:
                start(wave, options, environment["id"])
            with turn(options.turn):
                if not options.start_early:
                    start(wave, options, environment["id"])
                run(wave, options)
    finally:
        for bench in benches:
            for engine in bench.engines:
                engine.process.kill()


@contextlib.contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """While it is locked, nobody else measures who waits for the same file."""
    if file is None:
        yield
        return
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    time.sleep(2)  # who has waited comes first


def start(benches: list[Bench], options: argparse.Namespace, environment: str) -> None:
    """What is measured together."""
    begun = time.monotonic()
    for bench in benches:
        bench.id = environment
        bench.begin(bench.early())
    for bench in benches:
        bench.wait(bench.early(), begun + options.start_seconds)


def run(benches: list[Bench], options: argparse.Namespace) -> None:
    for group in [[bench] for bench in benches] if options.own_late else [benches]:
        run_together(group, options)


def run_together(benches: list[Bench], options: argparse.Namespace) -> None:
    for bench in benches:
        late = bench.late()
        bench.begin(late)
        bench.wait(late, time.monotonic() + options.start_seconds)
    for bench in benches:
        if options.agree and bench.is_folder and len(bench.engines) > 1:
            bench.agree()
    for text in dict.fromkeys(text for bench in benches for _, text in bench.subject.cells):
        for bench in benches:
            bench.speed(text)
    for bench in benches:
        for engine in bench.engines:
            engine.stop()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Connection(int(sys.argv[2])))
    else:
        main()
