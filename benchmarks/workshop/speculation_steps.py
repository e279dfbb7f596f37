"""What a step of several rows of one sequence costs against a step of one, and how fast answers
come if guesses are right.

    python benchmarks/workshop/speculation_steps.py [--model qwen3-8b] [--scheme int4] [--context
        1024] [--head int8] [--many]
    python benchmarks/workshop/speculation_steps.py --whole-layers --model qwen3-8b --model qwen2-7b

Prints JSON lines: `rows_N` with qkv and attention in one kernel where they can be, `rows_N_apart`
in two. With `--whole-layers` there is nothing but steps in which all kernels of a layer leave each
other room, and the same ones without that, by turns; `logits_off` is how far apart their results
are, by the largest logit. Weights are random, so no guess would be right: in `answer` rows drafter
and verification run in full in every step, and only the number of accepted guesses is forced, as
the row says, with the drafter's shape and its time.

`--compile` runs nothing: it compiles what steps of presets need into FLYWEIGHT_CACHE, by all cores,
on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from trials import Constants, assignments

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.bench.environment import commit
from flyweight.engine import ahead, flight
from flyweight.engine.core import Engine
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.loading import choose_dtype, open_model
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.rows import Rows
from flyweight.engine.speculation.drafter import Drafter
from flyweight.engine.speculation.head import HeadDrafter, tap
from flyweight.engine.speculation.lengths import Fixed, Measured
from flyweight.engine.speculation.ngram import NgramDrafter
from flyweight.engine.speculation.shared_rows import SharedRows
from flyweight.engine.speculation.speculator import Speculator
from flyweight.engine.work import Work
from flyweight.kernels import jit, precompile
from flyweight.kernels.dry_run import dry_run
from flyweight.models.decoder import Decoder
from flyweight.models.heads import eagle3
from flyweight.models.heads.head import bits_of
from flyweight.models.narrow_head import narrow_head
from flyweight.models.presets import PresetWeights

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=192, ignore_eos=True).with_defaults({})


def milliseconds(work, repeats: int = 40, rounds: int = 5) -> float:
    """The median over rounds of the mean over repeats."""
    for _ in range(5):
        work()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / repeats)
    return sorted(found)[rounds // 2]


def make_rows(decoder: Decoder, context: int) -> tuple[list[KVStorage], Rows, list[Request]]:
    """Eight sequences of so many tokens."""
    config, device = decoder.config, decoder.device
    pages = context // PAGE + 2
    caches = [
        KVStorage.zeros((8 * pages, PAGE, config.kv_heads, config.head_dim), decoder.dtype, device)
        for _ in range(config.layers)
    ]
    rows = Rows(8, pages=pages, vocabulary=config.vocab_size, device=device)
    requests = [
        Request(
            i,
            [5] * context,
            GREEDY,
            seed=0,
            limit=context + 16,
            blocks=[*range(i * pages, (i + 1) * pages)],
        )
        for i in range(8)
    ]
    rows.enter(requests)
    rows.extend()
    rows.lengths.fill_(context)
    return caches, rows, requests


@torch.inference_mode()
def step_costs(decoder: Decoder, context: int, *, kernels: bool = False) -> dict[str, float]:
    caches, rows, requests = make_rows(decoder, context)
    graphs = DecodeGraphs(decoder, caches, rows)
    shared = SharedRows(rows)
    steps = DecodeGraphs(decoder, caches, shared, sizes=(1, 2, 4, 8, 16))
    apart = DecodeGraphs(decoder, caches, shared, sizes=(1, 2, 4, 8, 16), separate="measured apart")
    found = {}
    for count in (1, 2, 4, 8):
        rows.lengths.zero_()
        rows.lengths[:count] = context
        found[f"sequences_{count}"] = milliseconds(lambda n=count: graphs.logits(n))
    for count in (1, 2, 4, 8):
        number = fill_rows(shared, requests[0], context, count)
        found[f"rows_{count}"] = milliseconds(lambda n=number: steps.logits(n))
        found[f"rows_{count}_apart"] = milliseconds(lambda n=number: apart.logits(n))
    if kernels:
        for count in (1, 2, 4, 8):
            number = fill_rows(shared, requests[0], context, count)
            for row in kernel_times(lambda n=number: steps.logits(n)):
                print(
                    json.dumps({"what": "kernel", "tree": commit(), "rows": count} | row),
                    flush=True,
                )
    return {name: round(value, 4) for name, value in found.items()}


@torch.inference_mode()
def whole_layers(decoder: Decoder, context: int, rounds: int = 5) -> Iterator[dict[str, object]]:
    """Steps of rows of one sequence, with kernels that leave each other room and without."""
    caches, rows, requests = make_rows(decoder, context)
    shared = SharedRows(rows)
    kinds = {
        whole: DecodeGraphs(decoder, caches, shared, sizes=(1, 2, 4, 8, 16), whole_layers=whole)
        for whole in (True, False)
    }
    times: dict[tuple[int, bool], list[float]] = {}
    results: dict[tuple[int, bool], torch.Tensor] = {}
    for count, (whole, graphs) in itertools.product((1, 4, 8), kinds.items()):
        fill_rows(shared, requests[0], context, count)
        results[count, whole] = graphs.logits(count).float().clone()
        times[count, whole] = []
    for _, (count, whole) in itertools.product(range(rounds), times):
        number = fill_rows(shared, requests[0], context, count)
        graphs = kinds[whole]
        times[count, whole].append(milliseconds(lambda g=graphs, n=number: g.logits(n), 30, 1))
    one = statistics.median([*times[1, True], *times[1, False]])
    for (count, whole), each in times.items():
        off = (results[count, True] - results[count, False]).abs().max()
        yield {
            "rows": count,
            "whole_layers": whole,
            "beside": getattr(kinds[whole].steps[count].decode.stage, "beside", False),
            "ms": round(statistics.median(each), 4),
            "over_1": round(statistics.median(each) / one, 3),
            "each": [round(value, 4) for value in each],
            "logits_off": round(float(off / results[count, False].abs().max()), 5),
            "finite": bool(results[count, whole].isfinite().all()),
        }


def fill_rows(shared: SharedRows, request: Request, context: int, count: int) -> int:
    return shared.fill([Work(request, context - 1, count, True, (7,) * (count - 1))])


@torch.inference_mode()
def trials(decoder: Decoder, context: int, tries: Sequence[str]) -> Iterator[dict[str, object]]:
    """Steps of 2, 4 and 8 rows of one sequence with other numbers of kernels/tuned or constants,
    all by turns.
    """
    caches, rows, requests = make_rows(decoder, context)
    shared = SharedRows(rows)
    constants = Constants()
    found: dict[tuple[str, int], DecodeGraphs] = {}
    for text in ("", *tries):
        constants.set(assignments(text))
        try:
            for count in (1, 2, 4, 8):
                graphs = DecodeGraphs(decoder, caches, shared, sizes=(1, 2, 4, 8, 16))
                graphs.logits(fill_rows(shared, requests[0], context, count))
                found[text, count] = graphs
        except (ValueError, RuntimeError) as error:
            yield {"what": "trial", "try": text, "error": str(error)[:200]}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in found}
    for _ in range(3):
        for (text, count), graphs in found.items():
            number = fill_rows(shared, requests[0], context, count)
            times[text, count].append(milliseconds(lambda n=number, g=graphs: g.logits(n), 30, 1))
    constants.set({})
    one = statistics.median(times["", 1])
    for (text, count), each in times.items():
        middle = statistics.median(each)
        yield {
            "what": "trial",
            "try": text or "now",
            "rows": count,
            "ms": round(middle, 4),
            "over_1": round(middle / one, 3),
        }


def kernel_times(work, repeats: int = 8) -> list[dict[str, object]]:
    """Where the time of a step goes: microseconds from the end of the kernel before to a kernel's
    own end, since kernels begin while others run. Those of layers are named by their place in a
    layer, with the mean over layers.
    """
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    events = [one for one in profiler.events() if one.device_type != torch.autograd.DeviceType.CPU]
    ended = sorted(events, key=lambda one: one.time_range.end)
    each = len(ended) // repeats
    names = [one.name for one in ended[:each]]
    begin, end, period = layers_of(names)
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    before = None
    for i, one in enumerate(ended):
        place = i % each
        key = ((place - begin) % period if begin <= place < end else -place - 1, one.name)
        if before is not None and place:
            found.setdefault(key, []).append(
                (one.time_range.end - before, one.time_range.elapsed_us())
            )
        before = one.time_range.end
    rows = []
    for (place, name), times in found.items():
        ends, whole = zip(*times, strict=True)
        rows.append(
            {
                "place": place,
                "kernel": name[:60],
                "each_step": len(times) // repeats,
                "us": round(sum(ends) / len(ends), 3),
                "resident_us": round(sum(whole) / len(whole), 3),
            }
        )
    return rows


def layers_of(names: list[str]) -> tuple[int, int, int]:
    """Which kernels of a step are layers: from where to where, and how many make one. A layer is
    what repeats around the middle; what begins or ends a step may be of any length.
    """
    middle = len(names) // 2
    for period in range(1, min(20, middle)):
        begin = end = middle
        while begin > 0 and names[begin - 1] == names[begin - 1 + period]:
            begin -= 1
        while end + period < len(names) and names[end] == names[end + period]:
            end += 1
        if end - begin > 3 * period:
            return begin, end + period, period
    return 0, 0, 1


class Repeats(Drafter):
    """Guesses that the last token is repeated: a drafter that costs nothing."""

    guesses_ahead = False

    def promising(self, request: Request) -> bool:
        return True

    def guesses_unread(self, works: Sequence[Work]) -> bool:
        return False

    def expect(self, count: int) -> None:
        pass

    def propose(
        self, requests: Sequence[Request], most: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        return {request.number: request.tokens[-1:] * most[request.number] for request in requests}


def speed(engine: Engine, prompt: list[int]) -> tuple[float, Request]:
    """Tokens a second after the first, of the last of three runs."""
    for _ in range(3):
        (request,) = engine.submit(prompt, GREEDY)
        while engine.busy:
            engine.step()
        torch.cuda.synchronize()
    begin, end = request.chunks[0][0], request.chunks[-1][0]
    return (request.generated - 1) / (end - begin), request


def make_engine(decoder: Decoder, context: int, sequences: int = 8) -> Engine:
    config = decoder.config
    shape = CacheShape.of(config, decoder.dtype)
    return Engine(
        decoder,
        shape,
        vocabulary=config.vocab_size,
        device=decoder.device,
        max_model_len=context + 256,
        blocks=(context + 256) // PAGE * max(2, sequences // 4),
        block_size=PAGE,
        max_num_seqs=sequences,
        max_num_batched_tokens=2048,
        prefix_cache=False,
    )


def many_answers(
    decoder: Decoder, sequences: int = 64, prompt: int = 128
) -> Iterator[dict[str, object]]:
    """Throughput of many random prompts, in which there is nothing to find, by turns without
    speculation and with it.
    """
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(
        10, decoder.config.vocab_size, (sequences, prompt), generator=generator
    ).tolist()
    engine = make_engine(decoder, 1024, sequences)
    kinds = {
        "off": lambda: None,
        "auto": lambda: Speculator(NgramDrafter(), Measured()),
        "ngram": lambda: Speculator(NgramDrafter(), Fixed(7)),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn, kind in itertools.product(range(3), kinds):
        engine.speculator = kinds[kind]()
        begin = time.perf_counter()
        requests = [engine.submit(one, GREEDY)[0] for one in prompts]
        while engine.busy:
            engine.step()
        torch.cuda.synchronize()
        if turn:  # the first compiles and captures
            found[kind].append(
                sum(request.generated for request in requests) / (time.perf_counter() - begin)
            )
    middle = {kind: sorted(speeds)[len(speeds) // 2] for kind, speeds in found.items()}
    for kind, tok_s in middle.items():
        yield {
            "sequences": sequences,
            "speculate": kind,
            "tok_s": round(tok_s, 1),
            "ratio": round(tok_s / middle["off"], 4),
        }


def answers(decoder: Decoder, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    config, context = decoder.config, options.context
    engine = make_engine(decoder, context)
    prompt = torch.randint(
        10, min(5000, config.vocab_size), (context,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    yield {"guesses": 0, "tok_s": round(speed(engine, prompt)[0], 1)}
    forced = itertools.cycle((2, 3))  # accepted, so that a step gives 3.5 tokens
    flight.count_accepted = lambda drafts, *_: min(len(drafts), next(forced))
    for guesses in (3, 7):
        yield forced_row(engine, prompt, Repeats(), guesses) | {"drafter": "costs nothing"}
    head = eagle3.load(eagle3.RandomHead(decoder), decoder, bits=bits_of(decoder))
    tap(decoder, head)
    facts = {
        "drafter": "eagle3, random weights",
        "drafter_bytes": head.nbytes,
        "drafter_vocabulary": sum(head.head.sizes),
    }
    for guesses in options.guesses:
        engine = make_engine(decoder, context)  # whose steps leave hidden states
        drafter = HeadDrafter(head, engine.runner, guesses=guesses)
        row = forced_row(engine, prompt, drafter, guesses)
        yield facts | row | head_times(drafter)


def forced_row(
    engine: Engine, prompt: list[int], drafter: Drafter, guesses: int
) -> dict[str, object]:
    engine.speculator = speculator = Speculator(drafter, Fixed(guesses))
    found, request = speed(engine, prompt)
    return {
        "guesses": guesses,
        "tok_s": round(found, 1),
        "accept_flags": "forced",
        "tokens_per_step": round((request.generated - 1) / (len(request.chunks) - 1), 2),
        "draft_ms": round(speculator.figures()["draft_ms"], 3),
    }


def head_times(drafter: HeadDrafter) -> dict[str, float]:
    """Milliseconds of the device for one sequence: the step's rows through the head, and its
    guesses.
    """
    graphs = drafter.graphs
    if graphs is None:
        return {}
    return {
        "follow_ms": round(milliseconds(lambda: graphs.follow(1 + drafter.guesses)), 4),
        "chain_ms": round(milliseconds(lambda: graphs.chain(1, drafter.guesses)), 4),
    }


def load(options: argparse.Namespace, model: str, device: torch.device) -> Decoder:
    """Random weights of a preset, or a model's own."""
    if Path(model).exists():
        checkpoint, _ = open_model(model, device)
        dtype = choose_dtype(None, checkpoint.config, device)
        options.scheme = "as stored"
        return Decoder.load(narrow_head(checkpoint, options.head), device=device, dtype=dtype)
    weights = narrow_head(PresetWeights(model, options.scheme, device=device), options.head)
    return Decoder.load(weights, device=device, dtype=torch.bfloat16)


def wanted_by(model: str, options: argparse.Namespace) -> set[jit.Wanted]:
    """The kernels of steps of several rows, with and without room for each other."""
    with dry_run(gpu.GPUS["sm_90a"]):
        decoder = ahead.load(f"preset:{model}:{options.scheme}", None, options.head)
        decoder.blocks = decoder.blocks * 2  # neighbours hand over to each other
        caches = ahead.make_caches(decoder)
        pages = options.context // PAGE + 2
        vocabulary = decoder.config.vocab_size
        rows = Rows(8, pages=pages, vocabulary=vocabulary, device=decoder.device)
        with decoder.active():
            for whole in (True, False):
                graphs = DecodeGraphs(decoder, caches, SharedRows(rows), whole_layers=whole)
                for count in (1, 2, 4, 8):
                    graphs.step(count).launch()
    return jit.wanted


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        help="a preset, or a file or folder (default: qwen3-8b); several run one after the other",
    )
    parser.add_argument("--scheme", default="int4")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--head",
        default=None,
        help="bits of the model's own head, as `flyweight serve --head` takes them",
    )
    parser.add_argument(
        "--many", action="store_true", help="the throughput of 64 answers at once, too"
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="where the time of steps of several rows goes, by kernel",
    )
    parser.add_argument(
        "--try",
        dest="tries",
        action="append",
        default=[],
        help="steps with other numbers, as trials.py takes them",
    )
    parser.add_argument(
        "--whole-layers",
        action="store_true",
        help="only steps whose kernels leave each other room, and the same without, by turns",
    )
    parser.add_argument(
        "--guesses",
        type=int,
        nargs="+",
        default=[3, 4, 5, 7],
        help="of the head in a step of an answer",
    )
    parser.add_argument("--no-steps", dest="steps", action="store_false", help="only the answers")
    parser.add_argument(
        "--no-answers", dest="answers", action="store_false", help="no answers with guesses"
    )
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    options.models = options.models or ["qwen3-8b"]
    return options


def main() -> None:
    options = options_of()
    if options.compile:
        runs = [functools.partial(wanted_by, model, options) for model in options.models]
        found = precompile.precompile(runs, "sm_90a", listen=lambda *_: None)
        print(f"{found.kernels} kernels, {found.fresh} of them compiled now")
        return
    for model in options.models:
        measure(model, options)


def measure(model: str, options: argparse.Namespace) -> None:
    device = torch.device("cuda", 0)
    begin = time.perf_counter()
    decoder = load(options, model, device)
    facts = {
        "tree": commit(),
        "model": Path(model).name,
        "scheme": options.scheme,
        "head": options.head or "stored",
        "context": options.context,
        "gpu": torch.cuda.get_device_name(0),
        "load_s": round(time.perf_counter() - begin, 1),
    }
    if options.whole_layers:
        for row in whole_layers(decoder, options.context):
            print(json.dumps(facts | {"what": "whole_layers"} | row), flush=True)
        return
    if options.steps:
        costs = step_costs(decoder, options.context, kernels=options.kernels)
        ratios = {
            f"rows_{count}_over_1": round(costs[f"rows_{count}"] / costs["sequences_1"], 3)
            for count in (4, 8)
        }
        print(json.dumps(facts | {"what": "step_ms"} | costs | ratios), flush=True)
    for row in trials(decoder, options.context, options.tries) if options.tries else ():
        print(json.dumps(facts | row), flush=True)
    for row in many_answers(decoder) if options.many else ():
        print(json.dumps(facts | {"what": "throughput", "context": 128} | row), flush=True)
    for row in answers(decoder, options) if options.answers else ():
        print(json.dumps(facts | {"what": "answer"} | row), flush=True)


if __name__ == "__main__":
    main()
