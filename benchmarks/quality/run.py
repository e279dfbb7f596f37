"""Quality of every scheme, ours and the published packages', on one model; rows as docs/results.md
says.

    python benchmarks/quality/run.py --model smollm2-135m --text valid.txt --calibration train.txt
        --out rows.jsonl
    python benchmarks/quality/run.py --model coder.gguf --natural --text valid.txt c4.txt code.txt
        --calibration train.txt --out rows.jsonl
    python benchmarks/quality/run.py --out rows.jsonl --table

The model's off-grid equivalent (or, with `--natural`, the model as it is) is quantized once per
scheme and seed, and each result is measured on all of each text by the same evaluator. Jobs run in
`--jobs` worker processes on one device: a small model leaves a GPU idle most of the time. A job
that fails becomes a `failed` row with its reason; one that is finished in OUT is not done again,
unless it is one of ours and the solvers have changed since. Blocks of ours that were finished when
time ran out are not done again either, as long as the folder WORK is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import table

# Slow ones first, so that no worker is left with one at the end; what is not named here is quick
# and follows as it comes.
FIRST = (
    "int4-best",
    "int4-best-symmetric",
    "autoround-int4-asym",
    "autoround-int4",
    "vptq-3bit",
    "vptq-4bit",
    "vptq-2bit",
    "w8a16-sparse-awq",
    "w8a8-sparse-smooth-gptq",
    "w4a16-sparse-gptq",
    "awq-int3",
    "awq-int4",
    "w8a16-smooth-awq",
    "w8a16-awq",
    "w8a8-smooth-gptq",
    "w8a8-smooth",
)
QUANT = Path(__file__).parents[2] / "src" / "flyweight" / "quant"


def solvers_digest() -> str:
    """Which solvers and schemes made a row: ours are made again when they change, a
    peer's are not.
    """
    files = sorted(path for path in QUANT.rglob("*") if path.suffix in (".py", ".toml"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


@dataclass(frozen=True)
class Job:
    tool: str
    scheme: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.tool}/{self.scheme}/{self.seed}"

    @property
    def package(self) -> str:
        """What a worker has to load for it."""
        return "flyweight" if self.tool == "original" else self.tool


@dataclass(frozen=True)
class Setting:
    """What is the same for every job; `model` is the folder that is quantized, float32."""

    model: str
    texts: tuple[str, ...]
    calibration: str
    work: str
    device: str
    samples: int
    length: int
    windows: int | None
    learn_steps: int
    keep: bool
    recipes: tuple[tuple[str, str], ...] = ()  # name → file, for schemes that are none of ours
    products: str = "float32"  # of the evaluation
    measurers: int = 1  # workers that may measure at the same time
    tune_steps: int = 0  # of recipes that learn by tuning alone; 0: their own number


# -- in a worker -----------------------------------------------------------------------------------


class Worker:
    """One process: job after job is quantized and measured. What a job has made is kept until it is
    measured, so that a run that was cut off between the two measures it without making it again.
    """

    def __init__(self, setting: Setting) -> None:
        from flyweight.checkpoint.reader import Checkpoint

        self.setting, self.resumed = setting, 0
        self.samples: dict[tuple[int, float, float], Any] = {}
        self.rulers: list[Any] = []
        self.checkpoint = Checkpoint(Path(setting.model))

    def measured(self, folder: Path | None) -> list[dict[str, Any]]:
        """Facts of `folder`, or of the original, on each text. Few workers at a time: the logits of
        many would fill a GPU. The original stays loaded: to load it takes longer than to judge a
        small model.
        """
        import measure
        from filelock import FileLock

        setting = self.setting
        lane = os.getpid() % setting.measurers
        with FileLock(Path(setting.work) / f"measuring-{lane}.lock"):
            if not self.rulers:
                original = measure.Original(
                    Path(setting.model), device=setting.device, products=setting.products
                )
                self.rulers = [
                    measure.Ruler(original, Path(text), windows=setting.windows)
                    for text in setting.texts
                ]
            if folder is None:
                facts = measure.facts_of(self.checkpoint)
                return [facts | ruler.facts() for ruler in self.rulers]
            return measure.measure_folder(self.rulers, folder)

    def calibration(self, seed: int, own: float = 0.0, tuning: float = 0.0) -> Any:
        """The samples that every tool gets, and those that a recipe has the model write."""
        key = (seed, own, tuning)
        if key not in self.samples:
            made = self.written(*key) if own + tuning else self.drawn(seed)
            self.samples[key] = made
        return self.samples[key]

    def drawn(self, seed: int) -> Any:
        from flyweight.quant.calibration import draw_samples, read_text
        from flyweight.quant.subject import encode

        ids, bos = encode(self.checkpoint.tokenizer(), read_text(self.setting.calibration))
        return draw_samples(
            ids,
            count=self.setting.samples,
            length=self.setting.length,
            seed=seed,
            bos=bos,
            source=Path(self.setting.calibration).name,
        )

    def written(self, seed: int, own: float, tuning: float) -> Any:
        """Beside the model: one worker has it written, the others read it."""
        import torch
        from filelock import FileLock
        from safetensors.torch import load_file, save_file

        from flyweight.quant.own_text import with_own_text

        setting, drawn = self.setting, self.calibration(seed)
        folder = Path(setting.model)
        name = f"{folder.name}-own-{drawn.digest}-{own:g}-{tuning:g}.safetensors"
        kept = folder.with_name(name)
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                device = torch.device(setting.device)
                both = with_own_text(drawn, folder, share=own, device=device, tuning=tuning)
                half = kept.with_suffix(".half")
                save_file({"tokens": both.tokens, "tuning": torch.tensor(both.tuning)}, half)
                half.rename(kept)
        found = load_file(kept)
        tokens = found["tokens"]
        own_samples = len(tokens) - len(drawn.tokens)
        later = int(found["tuning"])
        return dataclasses.replace(drawn, tokens=tokens, own=own_samples, tuning=later)

    def run(self, job: Job) -> list[dict[str, Any]]:
        """The `quantize` row and a `quality` row for each text, without what every row has."""
        import shutil

        if job.tool == "original":
            return [{"bench": "quality", **facts} for facts in self.measured(None)]
        output = (
            Path(self.setting.work)
            / solvers_digest()
            / job.name.replace("/", "-").replace(":", "-")
        )
        kept = output.with_name(f"{output.name}.json")
        if not kept.exists():
            made = self.make(job, output)
            kept.write_text(json.dumps(made))
        made = json.loads(kept.read_text())
        calibration = {
            key: made[key]
            for key in ("calibration", "calibration_tokens", "learn_steps", "tune_steps")
            if key in made
        }
        found = [
            {"bench": "quality", **calibration, **facts}
            for facts in self.measured(Path(made.pop("folder")))
        ]
        if not self.setting.keep:
            kept.unlink()
            shutil.rmtree(output, ignore_errors=True)
        return [
            made | {key: found[0][key] for key in ("checkpoint", "size_gb", "bits_per_weight")},
            *found,
        ]

    def make(self, job: Job, output: Path) -> dict[str, Any]:
        """The `quantize` row of a job, and the folder that it made."""
        import shutil

        import torch

        chosen = self.chosen(job) if job.tool == "flyweight" else None
        own = chosen.own_shares if chosen is not None else (0.0, 0.0)
        samples = self.calibration(job.seed, *own)
        output.parent.mkdir(exist_ok=True)
        shutil.rmtree(output, ignore_errors=True)
        started, on_gpu = time.perf_counter(), self.setting.device.startswith("cuda")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        folder = (
            self.ours(job, chosen, samples, output)
            if chosen is not None
            else peers.MAKERS[job.tool](
                job.scheme,
                Path(self.setting.model),
                samples.tokens,
                output,
                device=self.setting.device,
                seed=job.seed,
                steps=self.setting.learn_steps or 200,
            )
        )
        seconds = time.perf_counter() - started
        if on_gpu:
            torch.cuda.empty_cache()  # others measure now
        # then the seconds are those of the rest
        resumed = {"resumed_blocks": self.resumed} if self.resumed else {}
        return {
            "bench": "quantize",
            "device": self.setting.device,
            "seconds": round(seconds, 2),
            "peak_host_gb": host_gb(),
            "peak_gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if on_gpu else 0.0,
            **resumed,
            # of those that learn, where it is not their own number
            **({"learn_steps": self.setting.learn_steps} if self.setting.learn_steps else {}),
            **({"tune_steps": chosen.tune_steps} if chosen and chosen.tune_steps else {}),
            "calibration": samples.facts(),
            "calibration_tokens": samples.tokens.numel(),
            "folder": str(folder),
        }

    def chosen(self, job: Job) -> Any:
        """The recipe of a job of ours."""
        from flyweight.quant import recipe

        files = dict(self.setting.recipes)
        chosen = (
            recipe.load(Path(files[job.scheme])) if job.scheme in files else recipe.find(job.scheme)
        )
        if chosen.learn_steps and self.setting.learn_steps:
            share = self.setting.learn_steps / chosen.learn_steps
            chosen = dataclasses.replace(
                chosen,
                learn_steps=self.setting.learn_steps,
                tune_steps=round(share * chosen.tune_steps),
            )
        elif chosen.tune_steps and self.setting.tune_steps:
            chosen = dataclasses.replace(chosen, tune_steps=self.setting.tune_steps)
        return chosen

    def ours(self, job: Job, chosen: Any, samples: Any, output: Path) -> Path:
        from flyweight.quant.quantize import quantize

        batch, self.resumed = 16 if self.setting.device.startswith("cuda") else 4, 0

        def listen(event: Any) -> None:
            self.resumed += event.kind == "resumed"
            if event.kind == "tuned" and event.block % 100 == 0:
                print(f"{job.name}: tuned {event.block} of {event.blocks} steps", flush=True)

        return quantize(
            self.setting.model,
            output=output,
            recipe=chosen,
            calibration=samples,
            seed=job.seed,
            device=self.setting.device,
            batch=batch,
            overwrite=True,
            resume=True,
            listen=listen,
        ).output


def host_gb() -> float:
    import resource

    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)


def work(setting: Setting, threads: int, pipe: Any) -> None:
    """The loop of a worker process: a job comes in, rows or the reason of a failure go out."""
    # read when CUDA starts; quantizing is deterministic with it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(threads)
    worker: Worker | None = None
    while (job := pipe.recv()) is not None:
        try:
            worker = worker or Worker(setting)
            pipe.send((worker.run(job), ""))
        except Exception as error:  # whatever a peer raises is a result too
            pipe.send(([], f"{type(error).__name__}: {error}"[:500]))
        if setting.device.startswith("cuda"):
            torch.cuda.empty_cache()


# -- in the parent ---------------------------------------------------------------------------------


class Seat:
    """A worker process that is replaced when it dies, or when another package comes: they change
    global settings.
    """

    def __init__(self, setting: Setting, threads: int) -> None:
        self.setting, self.threads, self.package, self.process, self.pipe = (
            setting,
            threads,
            "",
            None,
            None,
        )

    def run(self, job: Job, deadline: float) -> tuple[list[dict[str, Any]], str]:
        if self.process is None or self.package != job.package:
            self.leave()
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process, self.package = (
                context.Process(
                    target=work, args=(self.setting, self.threads, theirs), daemon=True
                ),
                job.package,
            )
            self.process.start()
            theirs.close()
        try:
            self.pipe.send(job)
            if not self.pipe.poll(max(1.0, deadline - time.monotonic())):
                self.leave(kill=True)
                return [], "stopped: out of time"
            return self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(5)
            code, self.process = self.process.exitcode, None
            return [], f"the worker died with exit code {code}"

    def leave(self, *, kill: bool = False) -> None:
        if self.process is None:
            return
        if kill:
            self.process.kill()
        else:
            self.pipe.send(None)
        self.process.join(30)
        self.process = None


class Here:
    """This process in the place of a worker: nothing is started and imported once more, and nothing
    is stopped when time is up.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.package = ""
        self.worker: Worker | None = None

    def run(self, job: Job, deadline: float) -> tuple[list[dict[str, Any]], str]:
        self.package = job.package
        try:
            self.worker = self.worker or Worker(self.setting)
            return self.worker.run(job), ""
        except Exception as error:  # whatever a peer raises is a result too
            return [], f"{type(error).__name__}: {error}"[:500]

    def leave(self) -> None:
        self.worker = None


class Rows:
    """OUT: an environment row per run, then the rows of each job, written when the job ends."""

    def __init__(self, path: Path, setting: Setting, model: str) -> None:
        from flyweight.bench.rows import environment_row

        self.path, self.model, self.lock = path, model, threading.Lock()
        environment = environment_row(setting.device)
        environment["peers"] = peer_versions()
        self.environment = environment["id"]
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write([environment])

    def write(self, rows: list[dict[str, Any]]) -> None:
        with self.lock, self.path.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)

    def add(self, job: Job, found: list[dict[str, Any]], reason: str) -> None:
        from flyweight.bench.rows import make_row

        shared = {
            "job": job.name,
            "tool": job.tool,
            "model": self.model,
            "scheme": job.scheme,
            "seed": job.seed,
            "weights": "trained",
        } | ({"solvers": solvers_digest()} if job.tool == "flyweight" else {})
        if reason:
            return self.write(
                [make_row("quality", self.environment, status="failed", reason=reason, **shared)]
            )
        self.write(
            [
                make_row(
                    row["bench"],
                    self.environment,
                    **shared,
                    **{k: v for k, v in row.items() if k != "bench"},
                )
                for row in found
            ]
        )


def peer_versions() -> dict[str, str]:
    import importlib.metadata as metadata

    found = {}
    for tool, package in peers.PACKAGES.items():
        try:
            found[tool] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def make_jobs(
    schemes: list[str], tools: list[str], seeds: list[int], recipes: list[str]
) -> list[Job]:
    """The first seed before the others, so that a run that is cut short has every scheme once; else
    as the schemes are named, or as FIRST says of all.
    """
    from flyweight.quant import recipe

    named = recipe.named()
    every = schemes == ["all"]
    wanted = [*named, *recipes] if every else list(dict.fromkeys([*schemes, *recipes]))
    jobs = [Job("original", "fp32", 0)]
    place = {scheme: i for i, scheme in enumerate(FIRST if every else wanted)}
    for part in (seeds[:1], seeds[1:]):
        ours = [
            Job("flyweight", scheme, seed)
            for seed in part
            for scheme in wanted
            if scheme in named or scheme in recipes or scheme.startswith("vptq:")
        ]
        theirs = [
            Job(tool, scheme, seed)
            for seed in part
            for tool in tools
            for scheme in peers.SCHEMES[tool]
            if every or scheme in wanted
        ]
        needed = [job for job in [*theirs, *ours] if job.seed == seeds[0] or calibrated(job)]
        jobs += sorted(needed, key=lambda job: place.get(job.scheme, len(place)))
    return jobs


def finished_jobs(rows: list[dict[str, Any]], model: str, texts: Sequence[str]) -> set[str]:
    """Names of the jobs that need not be done again: measured on every one of the texts."""
    now, found = solvers_digest(), defaultdict(set)
    for row in rows:
        good = row["bench"] == "quality" and row.get("status") == "ok" and row["model"] == model
        if good and (row["tool"] != "flyweight" or row.get("solvers") == now):
            found[row["job"]].add(row["text"])
    return {job for job, seen in found.items() if seen >= set(texts)}


def calibrated(job: Job) -> bool:
    """Without calibration one seed says it all."""
    from flyweight.quant import recipe

    if job.tool == "flyweight" and job.scheme in recipe.named():
        return recipe.find(job.scheme).calibrated
    return not job.scheme.startswith("rtn")


def run(
    jobs: list[Job],
    setting: Setting,
    rows: Rows,
    *,
    seats: int,
    deadline: float,
    spare: float = 0.0,
) -> None:
    waiting, lock, done = list(jobs), threading.Lock(), 0
    threads = max(
        1,
        (os.cpu_count() or 1)
        // (2 * max(1, seats) if setting.device.startswith("cuda") else max(1, seats)),
    )

    def take(package: str) -> Job:
        """The next job of the package that the seat has loaded, or else simply the next."""
        with lock:
            if not waiting or time.monotonic() > deadline - spare:
                raise queue.Empty
            return waiting.pop(
                next((i for i, job in enumerate(waiting) if job.package == package), 0)
            )

    def sit() -> None:
        nonlocal done
        seat: Seat | Here = Seat(setting, threads) if seats else Here(setting)
        while True:
            try:
                job = take(seat.package)
            except queue.Empty:
                return seat.leave()
            started = time.monotonic()
            found, reason = seat.run(job, deadline)
            rows.add(job, found, reason)
            done += 1
            result = reason or "perplexity " + ", ".join(
                f"{row['perplexity']:.4f}" for row in found if row["bench"] == "quality"
            )
            print(
                f"[{done}/{len(jobs)}] {job.name}: {result} ({time.monotonic() - started:.1f} s)",
                flush=True,
            )

    if not seats:
        return sit()
    sitting = [threading.Thread(target=sit) for _ in range(min(seats, len(jobs)))]
    for thread in sitting:
        thread.start()
    for thread in sitting:
        thread.join()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="a name, folder or GGUF file; its off-grid copy is measured",
    )
    parser.add_argument(
        "--natural",
        action="store_true",
        help="measure the model as it is: its weights lie on no 4-bit grid",
    )
    parser.add_argument("--name", help="what the rows call the model; default: its file or folder")
    parser.add_argument("--text", nargs="+", default=[], help="what is evaluated, text files")
    parser.add_argument(
        "--tf32", action="store_true", help="evaluate with TF32 products, several times as fast"
    )
    parser.add_argument("--calibration", help="what is calibrated on, another text file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schemes", nargs="*", default=["all"])
    parser.add_argument(
        "--recipes",
        nargs="*",
        type=Path,
        default=[],
        help="recipe files, measured under their names",
    )
    parser.add_argument("--peers", nargs="*", default=[], choices=list(peers.SCHEMES))
    parser.add_argument("--only-peers", action="store_true")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--jobs", type=int, default=1, help="worker processes; 0: one after the other in this one"
    )
    parser.add_argument(
        "--measurers", type=int, default=1, help="workers that may measure at the same time"
    )
    parser.add_argument(
        "--minutes", type=float, default=10000, help="stop after so many; run again to go on"
    )
    parser.add_argument(
        "--spare", type=float, default=0, help="minutes before that in which nothing is begun"
    )
    parser.add_argument("--windows", type=int, help="only the first so many windows of the text")
    parser.add_argument(
        "--learn-steps",
        type=int,
        default=0,
        help="another number of learning steps, for quick trials; tuning's change with it",
    )
    parser.add_argument(
        "--tune-steps",
        type=int,
        default=0,
        help="another number of tuning steps, of recipes that have no learning steps",
    )
    parser.add_argument("--work", type=Path, help="where models are made; default: beside OUT")
    parser.add_argument("--keep", action="store_true", help="keep the models")
    parser.add_argument("--device", default="")
    parser.add_argument(
        "--table", action="store_true", help="print the comparison of the rows in OUT, run nothing"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.table:
        return table.show(options.out)
    deadline = time.monotonic() + 60 * options.minutes
    import torch
    from offgrid import make_offgrid

    work_folder = (options.work or options.out.with_suffix(".work")).absolute()
    name = (options.name or Path(options.model).stem) + ("" if options.natural else "-offgrid")
    model = work_folder / name  # what is made of it remembers what it was called
    if not model.exists():
        work_folder.mkdir(parents=True, exist_ok=True)
        make_offgrid(options.model, model, spread=1.0 if options.natural else 1.3)
    setting = Setting(
        str(model),
        tuple(options.text),
        options.calibration,
        str(work_folder),
        options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        options.samples,
        options.length,
        options.windows,
        options.learn_steps,
        options.keep,
        tuple((path.stem, str(path.absolute())) for path in options.recipes),
        "tf32" if options.tf32 else "float32",
        options.measurers,
        options.tune_steps,
    )
    finished = finished_jobs(
        table.read(options.out), name, [Path(text).name for text in options.text]
    )
    names = [path.stem for path in options.recipes]
    jobs = [
        job
        for job in make_jobs(options.schemes, options.peers, options.seeds, names)
        if job.name not in finished
    ]
    if options.only_peers:
        jobs = [job for job in jobs if job.tool != "flyweight"]
    print(f"{len(jobs)} jobs to do, {len(finished)} done before", flush=True)
    if jobs:
        run(
            jobs,
            setting,
            Rows(options.out, setting, name),
            seats=options.jobs,
            deadline=deadline,
            spare=60 * options.spare,
        )
    table.show(options.out)


if __name__ == "__main__":
    main()
