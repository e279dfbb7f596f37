"""Flyweight's native CPU engine beside llama.cpp, ONNX Runtime and transformers: the same work,
threads and bits, taking turns.

    python benchmarks/cpu/engine_vs_peers.py --threads 2 --rounds 5 \\
        --peer-python PEERS/bin/python --ours 4-bit=out/int4@8 --llama 4-bit=Q4_0.gguf \\
        --ours 16-bit=FOLDER --llama 16-bit=F16.gguf

Every contender is a process of its own that loads once and then waits for work on its standard
input; while one runs, the others sleep. llama.cpp runs in the Python environment `--peer-python`
(llama-cpp-python, built for this very machine: pip builds it so from source); its files are made
by `--make-gguf SOURCE.gguf FOLDER`. ONNX Runtime runs in `--onnx-python`, its graph is made of one
of our folders by make_onnx.py. A contender belongs to a class (`4-bit=…`), and ratios are
taken within a class; file sizes stand beside them. `@8` after a folder of ours rounds its head
to 8 bits at load, as llama.cpp's quantized files have it.

Workloads, greedy, fresh random token ids in each turn:

    decode-1    a prompt of 64 tokens, then 32 tokens: milliseconds a token after the first
    decode-8    eight of them at once: milliseconds a step
    prompt-256  a prompt of 256 tokens: milliseconds to the first token

Flyweight is measured through its engine (scheduling, sampling and paged cache included),
llama.cpp through its C interface (llama_decode and the largest logit). In each round every
contender runs every workload, in changing order. A ratio is theirs / ours of one turn, and the
medians of those are shown: above 1 we are faster. The ratio of CPU time stands beside it, which
other programs on the machine disturb less (but threads that spin while they wait use it, too).
Rows go to engine_vs_peers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKLOADS = {
    "decode-1": (1, 64, 32),
    "decode-8": (8, 64, 32),
    "prompt-256": (1, 256, 1),
}  # sequences, prompt, answer
CONTEXT = 2048
BLOCK = 16


Instant = tuple[float, float]  # on the clock, and of CPU time used so far


def now() -> Instant:
    return time.perf_counter(), time.process_time()


# -- contenders: each class runs in a process of its own -------------------------------------------


class Flyweight:
    name = "flyweight"

    def __init__(self, path: str, threads: int, head_bits: int | None):
        import torch

        import flyweight
        from flyweight.checkpoint.reader import Checkpoint
        from flyweight.engine.core import Engine
        from flyweight.engine.memory import CacheShape
        from flyweight.kernels.native.executor import NativeDecoder
        from flyweight.models.native import read_parts

        torch.set_num_threads(threads)
        self.version = getattr(flyweight, "__version__", "source")
        begin = time.perf_counter()
        parts = read_parts(Checkpoint(path), head_bits=head_bits)
        shape = CacheShape(len(parts.layers), parts.kv_heads, parts.head_dim, torch.float16)
        self.engine = Engine(
            NativeDecoder(parts),
            shape,
            vocabulary=parts.vocabulary,
            device=torch.device("cpu"),
            max_model_len=CONTEXT,
            blocks=CONTEXT // BLOCK,
            block_size=BLOCK,
            max_num_seqs=8,
            prefix_cache=False,
        )
        self.load_s = time.perf_counter() - begin
        self.weight_bytes = parts.nbytes

    def run(self, prompts: list[list[int]], answer: int) -> list[Instant]:
        from flyweight.engine.request import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True).with_defaults({})
        requests = [self.engine.submit(prompt, params)[0] for prompt in prompts]
        times = [now()]
        while self.engine.busy:
            self.engine.step()
            times.append(now())
        assert all(len(request.tokens) == len(request.prompt) + answer for request in requests)
        return times


class Llama:
    name = "llama.cpp"

    def __init__(self, path: str, threads: int, head_bits: int | None):
        import llama_cpp
        import numpy

        self.api, self.numpy = llama_cpp, numpy
        self.version = llama_cpp.__version__
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, None)
        begin = time.perf_counter()
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = CONTEXT
        options.n_batch = 512
        options.n_ubatch = 512
        options.n_seq_max = 8
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.load_s = time.perf_counter() - begin
        self.weight_bytes = os.path.getsize(path)

    def step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, whether its logits are wanted) → the likeliest
        tokens.
        """
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        assert self.api.llama_decode(self.context, batch) == 0
        chosen = []
        for i, (*_, wanted) in enumerate(rows):
            if wanted:
                logits = self.numpy.ctypeslib.as_array(
                    self.api.llama_get_logits_ith(self.context, i), (self.vocabulary,)
                )
                chosen.append(int(logits.argmax()))
        return chosen

    def run(self, prompts: list[list[int]], answer: int) -> list[Instant]:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        times = [now()]
        rows = [
            (token, k, i, k == len(prompt) - 1)
            for i, prompt in enumerate(prompts)
            for k, token in enumerate(prompt)
        ]
        tokens = self.step(rows)
        times.append(now())
        for step in range(answer - 1):
            tokens = self.step(
                [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)]
            )
            times.append(now())
        return times


class Transformers:
    name = "transformers"

    def __init__(self, path: str, threads: int, head_bits: int | None):
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.version = transformers.__version__
        begin = time.perf_counter()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32
        ).eval()
        self.load_s = time.perf_counter() - begin
        self.weight_bytes = sum(parameter.nbytes for parameter in self.model.parameters())

    def run(self, prompts: list[list[int]], answer: int) -> list[Instant]:
        times = [now()]
        with self.torch.inference_mode():
            ids, cache = self.torch.tensor(prompts), None
            for _ in range(answer):
                out = self.model(
                    input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                cache = out.past_key_values
                ids = out.logits[:, -1:].argmax(-1)
                times.append(now())
        return times


class OnnxRuntime:
    """A graph of make_onnx.py, its cache bound to the same memory before and after each step."""

    name = "onnxruntime"

    def __init__(self, path: str, threads: int, head_bits: int | None):
        import numpy
        import onnxruntime

        self.numpy = numpy
        self.runtime = onnxruntime
        self.version = onnxruntime.__version__
        begin = time.perf_counter()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.load_s = time.perf_counter() - begin
        self.weight_bytes = os.path.getsize(path)
        self.caches: dict[tuple[int, int], dict[str, Any]] = {}

    def cache(self, sequences: int, length: int) -> dict[str, Any]:
        """Memory for so many tokens of each sequence, kept for the next turn."""
        key = (sequences, length)
        if key not in self.caches:
            self.caches[key] = {
                given.name: self.runtime.OrtValue.ortvalue_from_numpy(
                    self.numpy.zeros(
                        (sequences, given.shape[1], length, given.shape[3]), self.numpy.float32
                    )
                )
                for given in self.session.get_inputs()
                if given.name.startswith("past_")
            }
        return self.caches[key]

    def step(self, tokens: list[list[int]], done: int, cache: dict[str, Any]) -> list[int]:
        """The likeliest next tokens of sequences of which `done` tokens are in the cache."""
        total = done + len(tokens[0])
        numpy = self.numpy
        binding = self.session.io_binding()
        binding.bind_cpu_input("tokens", numpy.array(tokens, numpy.int64))
        binding.bind_cpu_input("last", numpy.full(len(tokens), total - 1, numpy.int32))
        binding.bind_cpu_input("total", numpy.array(total, numpy.int32))
        for name, memory in cache.items():
            binding.bind_ortvalue_input(name, memory)
            binding.bind_ortvalue_output(name.removeprefix("past_"), memory)
        binding.bind_output("logits")
        self.session.run_with_iobinding(binding)
        logits = binding.get_outputs()[-1].numpy()
        return logits[:, -1].argmax(-1).tolist()

    def run(self, prompts: list[list[int]], answer: int) -> list[Instant]:
        length = len(prompts[0])
        cache = self.cache(len(prompts), length + answer)
        times = [now()]
        tokens = self.step(prompts, 0, cache)
        times.append(now())
        for step in range(answer - 1):
            tokens = self.step([[token] for token in tokens], length + step, cache)
            times.append(now())
        return times


CONTENDERS: dict[str, type] = {
    contender.name: contender for contender in (Flyweight, Llama, OnnxRuntime, Transformers)
}


def work(arguments: argparse.Namespace) -> None:
    """The life of a contender: load, say so, then answer one line with one line."""
    contender = CONTENDERS[arguments.work](arguments.path, arguments.threads, arguments.head_bits)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            dict(
                version=contender.version,
                load_s=contender.load_s,
                peak_bytes_after_load=peak,
                weight_bytes=contender.weight_bytes,
            )
        ),
        flush=True,
    )
    for line in sys.stdin:
        request = json.loads(line)
        times = contender.run(request["prompts"], request["answer"])
        begin = 1 if len(times) > 2 else 0  # the first token is the prompt's
        count = len(times) - 1 - begin
        ms, cpu_ms = (
            1e3 * (last - first) / count
            for first, last in zip(times[begin], times[-1], strict=True)
        )
        print(json.dumps(dict(ms=ms, cpu_ms=cpu_ms)), flush=True)


# -- the referee -----------------------------------------------------------------------------------


class Process:
    """A contender of a class, at work elsewhere."""

    def __init__(self, name: str, group: str, path: str, options: argparse.Namespace):
        pythons = {"llama.cpp": options.peer_python, "onnxruntime": options.onnx_python}
        python = pythons.get(name, sys.executable)
        path, _, self.head_bits = path.partition("@")
        command = [
            python,
            __file__,
            "--work",
            name,
            "--path",
            path,
            "--threads",
            str(options.threads),
        ]
        if self.head_bits:
            command += ["--head-bits", self.head_bits]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        self.name, self.group, self.path = name, group, path
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ({self.path}) has ended with {self.process.wait()}")
        return json.loads(line)

    def run(self, prompts: list[list[int]], answer: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(dict(prompts=prompts, answer=answer)) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def referee(options: argparse.Namespace) -> None:
    asked = [("flyweight", item) for item in options.ours] + [
        ("llama.cpp", item) for item in options.llama
    ]
    asked += [("onnxruntime", item) for item in options.onnx]
    asked += [("transformers", item) for item in options.transformers]
    processes = [Process(name, *item.split("=", 1), options) for name, item in asked]
    rows, chance = [], random.Random(0)
    for turn in range(options.rounds + 1):  # the first one warms up
        for workload, (sequences, length, answer) in WORKLOADS.items():
            prompts = [
                [chance.randrange(1000, 40000) for _ in range(length)] for _ in range(sequences)
            ]
            order = processes if turn % 2 else processes[::-1]
            for process in order:
                found = process.run(prompts, answer)
                if turn:
                    rows.append(
                        dict(
                            bench="engine_vs_peers",
                            turn=turn,
                            workload=workload,
                            engine=process.name,
                            group=process.group,
                            threads=options.threads,
                            **found,
                        )
                    )
    for process in processes:
        process.end()
    loads = [
        dict(
            bench="engine_vs_peers_load",
            engine=p.name,
            group=p.group,
            file=Path(p.path).name,
            threads=options.threads,
            head_bits=p.head_bits,
            **p.facts,
        )
        for p in processes
    ]
    summary = summarize(rows)
    with open(options.output, "w") as file:
        for row in [machine(options), *loads, *rows, *summary]:
            file.write(json.dumps(row) + "\n")
    show(loads, summary)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    from flyweight.kernels.native import compiler, library

    found = compiler.find_compiler()
    model = (
        subprocess.run(["lscpu"], capture_output=True, text=True).stdout
        if os.path.exists("/usr/bin/lscpu")
        else ""
    )
    name = next(
        (
            line.split(":")[1].strip()
            for line in model.splitlines()
            if line.startswith("Model name")
        ),
        "unknown",
    )
    return dict(
        bench="environment",
        cpu=name,
        cores=os.cpu_count(),
        load_average=os.getloadavg()[0],
        instructions=library.load().instructions().decode(),
        compiler=found.version if found else None,
        threads=options.threads,
        rounds=options.rounds,
        time=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    )


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Theirs / ours, turn by turn, and the medians of that."""
    ours = {
        (row["group"], row["workload"], row["turn"]): row
        for row in rows
        if row["engine"] == "flyweight"
    }
    found = []
    for group, workload, engine in dict.fromkeys(
        (row["group"], row["workload"], row["engine"]) for row in rows
    ):
        own = [
            row
            for row in rows
            if (row["group"], row["workload"], row["engine"]) == (group, workload, engine)
        ]
        line = dict(
            bench="engine_vs_peers_summary",
            group=group,
            workload=workload,
            engine=engine,
            turns=len(own),
            ms=statistics.median(row["ms"] for row in own),
            cpu_ms=statistics.median(row["cpu_ms"] for row in own),
        )
        pairs = [
            (row, ours[group, workload, row["turn"]])
            for row in own
            if (group, workload, row["turn"]) in ours
        ]
        if engine != "flyweight" and pairs:
            line["speed_of_ours"] = statistics.median(row["ms"] / mine["ms"] for row, mine in pairs)
            line["cpu_of_ours"] = statistics.median(
                row["cpu_ms"] / mine["cpu_ms"] for row, mine in pairs
            )
        found.append(line)
    return found


def show(loads: list[dict[str, Any]], summary: list[dict[str, Any]]) -> None:
    for row in loads:
        print(
            f"{row['group']:8} {row['engine']:13} {row['version']:8} load {row['load_s']:.2f} s, "
            f"peak after it {row['peak_bytes_after_load'] / 1e6:.0f} MB, "
            f"weights {row['weight_bytes'] / 1e6:.1f} MB"
        )
    for row in summary:
        ratio = (
            f"{row['speed_of_ours']:.2f} × (CPU {row['cpu_of_ours']:.2f} ×)"
            if "speed_of_ours" in row
            else ""
        )
        name = f"{row['group']:8} {row['workload']:11} {row['engine']:13}"
        print(f"{name} {row['ms']:8.2f} ms  CPU {row['cpu_ms']:8.2f} ms  {ratio}")


def make_gguf(source: str, folder: str) -> None:
    """Q4_0, Q8_0 and F16 of a GGUF file, by llama.cpp itself."""
    import ctypes

    import llama_cpp

    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in ("Q4_0", "Q8_0", "F16"):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        params.allow_requantize = True
        if llama_cpp.llama_model_quantize(
            source.encode(), f"{folder}/{name}.gguf".encode(), ctypes.byref(params)
        ):
            raise SystemExit(f"{source} cannot be made into {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours", action="append", default=[], metavar="CLASS=FOLDER[@8]")
    parser.add_argument("--llama", action="append", default=[], metavar="CLASS=FILE")
    parser.add_argument("--onnx", action="append", default=[], metavar="CLASS=FILE")
    parser.add_argument("--transformers", action="append", default=[], metavar="CLASS=FOLDER")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the environment that has llama-cpp-python"
    )
    parser.add_argument(
        "--onnx-python", default=sys.executable, help="the environment that has onnxruntime"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default=str(HERE / "engine_vs_peers.jsonl"))
    parser.add_argument("--make-gguf", nargs=2, metavar=("SOURCE", "FOLDER"))
    parser.add_argument("--work", choices=[*CONTENDERS], help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--head-bits", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make_gguf:
        make_gguf(*options.make_gguf)
    elif options.work:
        work(options)
    else:
        referee(options)


if __name__ == "__main__":
    main()
