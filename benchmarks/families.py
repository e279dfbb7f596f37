"""Every family through the GPU path: is it right, which executor runs it, how fast is it?

    python benchmarks/families.py check [NAME …] --out rows.jsonl
    python benchmarks/families.py speed gemma-3-12b:int4 qwen3-next-80b-a3b:int4@12 … --out
        rows.jsonl
    python benchmarks/families.py kernels gpt-oss-20b:mxfp4@8 … --out rows.jsonl
    python benchmarks/families.py speed,variants qwen3-next-80b-a3b:int4@12 --out rows.jsonl
    python benchmarks/families.py prompts deepseek-v2-lite:bf16 --out rows.jsonl
    python benchmarks/families.py depth qwen3-next-80b-a3b:int4 --out rows.jsonl
    python benchmarks/families.py latent --out rows.jsonl

`check` takes presets with few layers and short windows, random weights, and compares the
probabilities that the engine reports (captured steps where there are some) with a float32 model in
plain torch on the same weights. The measure is the same model in 16 bits through torch's own
products: `ratio` is the engine's error over that one's. `speed` decodes one sequence, and times a
long prompt; `share_of_copy` is of the linears' bytes, `share_of_copy_all` of routers and states,
too, which a step has to move as well. `kernels` lists the launches of the layers of a captured
step. `variants` times steps with qkv and attention in one kernel or apart, experts added up by
their second linear or by a kernel of its own, weights of qkv fetched sooner or later; `prompts`
says how long prompts of some lengths take, and how long the GPU is busy with them; `depth` what a
layer takes in models of more and fewer layers, of as many layers with the weights of few, and where
all tokens have the same experts; `latent` the attention of prompts whose values are narrower than
their keys. In these all experts of a model have the numbers of one: they lie apart, so a step reads
as much as ever, and a large mixture is there in seconds.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import itertools
import json
import re
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flyweight.bench.environment import commit
from flyweight.bench.profile import Profiler, Workload
from flyweight.engine import llm as engine
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.llm import LLM
from flyweight.engine.request import SamplingParams
from flyweight.kernels import dependent_launch, reference
from flyweight.kernels.attention import torch_runs
from flyweight.kernels.linear.experts import few
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.machine import copy_bandwidth, device_name
from flyweight.models.decode_step import unsupported_reason
from flyweight.models.decoder import Decoder
from flyweight.models.layer import Block
from flyweight.models.layers import Linear
from flyweight.models.moe import Experts
from flyweight.models.presets import PresetWeights, preset_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU tries the script itself out
PAGE = 16
VOCABULARY = 4099  # a prime: heads are filled up
WINDOW = 16
PROMPTS = (37, 5, 70)
PROMPT = 2048  # tokens of the one whose time is told
TINY = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
# preset: layers that show all of its kinds
CHECKED = {
    "gemma-3-12b": 6,
    "gemma-2-9b": 2,
    "olmo3-7b": 4,
    "granite-3.3-8b": 2,
    "smollm3-3b": 4,
    "phi-4-mini": 2,
    "glm-4-9b": 2,
    "mistral-small-24b": 2,
    "gpt-oss-20b": 2,
    "glm-4.5-air": 2,
    "deepseek-v2-lite": 2,
    "deepseek-v3": 2,
    "qwen3-8b": 2,
    "olmo2-7b": 2,
    "ministral-8b": 2,
    "ministral-3-8b": 2,
    "qwen3-next-80b-a3b": 8,  # two that attend
    "qwen3.5-9b": 8,
    "qwen3.5-35b-a3b": 8,
}
Measure = Callable[[str, LLM], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Way:
    """Of running a step of a mixture."""

    name: str
    separate: str | None = None  # why qkv and attention are two kernels
    summed: bool = True  # whether the second linear adds experts up
    early: bool | None = None  # whether qkv's weights are asked for at once; None: as loaded


WAYS = (
    Way("as it is"),
    Way("attention apart", separate="asked for"),
    Way("experts added up apart", summed=False),
    Way("both apart", separate="asked for", summed=False),
    Way("rings of qkv as in dense models", early=False),
)
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


def small_config(preset: str, layers: int, *, tiny: bool) -> dict[str, Any]:
    config = preset_config(preset)
    config |= dict(num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=2048)
    config |= dict(eos_token_id=1, bos_token_id=2, pad_token_id=0)
    if config.get("sliding_window"):
        config["sliding_window"] = WINDOW
    if config["model_type"] == "smollm3":
        config["no_rope_layers"] = [1, 0] * (layers // 2)
    if config.get("query_pre_attn_scalar") and tiny:
        config["query_pre_attn_scalar"] = 64
    for key in EXPERTS:
        if config.get(key):
            config[key] = min(config[key], 8 if tiny else 16)
            config["num_experts_per_tok"] = min(config["num_experts_per_tok"], config[key] - 2)
    if (config.get("n_group") or 1) > 1:  # whose best two experts are looked at
        config |= dict(n_group=4, topk_group=2, num_experts_per_tok=4)
    if config.get("first_k_dense_replace"):
        config["first_k_dense_replace"] = 1
    return config | (TINY if tiny else {})


def plain_decoder(weights: PresetWeights, dtype: torch.dtype) -> Decoder:
    """In torch's own ops and products."""
    decoder = Decoder.load(weights, device=DEVICE, dtype=dtype, exact=True)
    decoder.ops = reference
    for block in decoder.blocks:
        block.use_ops(reference)
    return decoder


def probabilities(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = decoder.forward_whole(torch.tensor([tokens], device=DEVICE))[0]
    return logits.double().log_softmax(-1).cpu()


def answers(weights: PresetWeights, prompts: list[list[int]]) -> tuple[LLM, list[Any], list[str]]:
    engine.open_model = lambda model, device: (weights, None)  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        llm = LLM("check", device=DEVICE, blocks=128, max_model_len=512, max_num_seqs=4)
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=4)
        outputs = llm.generate(prompts, params)
        outputs += llm.generate(prompts[:1], params)
    return llm, outputs, sorted({str(one.message).split("\n")[0][:200] for one in told})


def errors(outputs: list[Any], expected: Decoder, rounded: Decoder) -> dict[str, float]:
    """Differences of log probabilities, of ours and of torch's: usual, mean square, largest."""
    ours = []
    theirs = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.token_ids]
        true = probabilities(expected, tokens)
        other = probabilities(rounded, tokens)
        begin = len(output.prompt_token_ids) - 1
        for at, entry in enumerate(output.completions[0].logprobs, begin):
            for token, value in reported(entry):
                ours.append(value - float(true[at, token]))
                theirs.append(float(other[at, token] - true[at, token]))
    found = torch.tensor(ours)
    usual = torch.tensor(theirs)
    # an expert at a tie goes either way and moves all that follows; medians hardly see it
    medians = found.abs().median().item(), usual.abs().median().item()
    return dict(
        median=medians[0],
        torch_median=medians[1],
        rms=found.square().mean().sqrt().item(),
        largest=found.abs().max().item(),
        torch_rms=usual.square().mean().sqrt().item(),
        torch_largest=usual.abs().max().item(),
        ratio=(found.square().mean() / usual.square().mean()).sqrt().item(),
    )


def reported(entry: Any) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob), *entry.top.items()]


def check(preset: str, scheme: str, *, tiny: bool) -> dict[str, Any]:
    started = time.perf_counter()
    config = small_config(preset, CHECKED[preset], tiny=tiny)
    weights = PresetWeights(config, scheme, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in PROMPTS
    ]
    llm, outputs, told = answers(weights, prompts)
    decoder = llm.decoder
    steps = llm.engine.runner.steps
    separate = None
    if isinstance(steps, DecodeGraphs):
        separate = next(iter(steps.steps.values())).decode.separate
    row = dict(
        kind="family check",
        preset=preset,
        scheme=scheme,
        shapes="tiny" if tiny else "real",
        layers=CHECKED[preset],
        captured=isinstance(steps, DecodeGraphs),
        why_not=unsupported_reason(decoder, PAGE) if DEVICE == "cuda" else "no CUDA device",
        qkv_apart=separate,
        kernels=sorted({one.fused.kernel for b in decoder.blocks for one in b.linears.values()})[
            :6
        ],
        told=told,
    )
    row |= errors(
        outputs, plain_decoder(weights, torch.float32), plain_decoder(weights, torch.bfloat16)
    )
    return row | dict(seconds=round(time.perf_counter() - started, 1))


def one_for_all(load: Callable[..., Linear]) -> Callable[..., Linear]:
    """`Linear.load` that makes the linears of one expert, and gives copies to all others."""
    kept: dict[str, Linear] = {}

    def load_once(weights: Any, prefix: str, group: Any, **options: Any) -> Linear:
        name = group.linears[0]
        if ".experts." not in name:
            return load(weights, prefix, group, **options)
        key = re.sub(r"\d+", "", name)
        if key not in kept:
            kept[key] = load(weights, prefix, group, **options)
        found = copy.copy(kept[key])
        found.names = tuple(group.linears)
        found.fused = copy.copy(found.fused)
        return found

    return load_once


def load(name: str) -> LLM:
    """PRESET:SCHEME@8: a model with eight layers."""
    name, _, layers = name.partition("@")
    preset, _, scheme = name.partition(":")
    config = preset_config(preset)
    if layers:
        config["num_hidden_layers"] = int(layers)
    weights = PresetWeights(config, scheme or "bf16", device=DEVICE)
    engine.open_model = lambda model, device: (weights, None)  # type: ignore[assignment]
    usual = Linear.load
    Linear.load = one_for_all(usual)  # type: ignore[method-assign,assignment]
    try:
        # without a prefix cache, which would cut a prompt otherwise the second time
        return LLM(
            f"preset:{name}",
            device=DEVICE,
            max_model_len=2560,
            max_num_seqs=1,
            blocks=192,
            prefix_cache=False,
        )
    finally:
        Linear.load = usual  # type: ignore[method-assign]


def kernels(name: str, llm: LLM, steps: int = 24) -> dict[str, Any]:
    """Where the time of a step goes: microseconds from the end of the kernel before to a kernel's
    own end, since kernels begin while others run. Launches of one kernel are told apart by the one
    before them.
    """
    profiler = Profiler(llm, Workload(1, 64, steps + 2)).record("decode")
    events = [one for one in profiler.events() if one.device_type != torch.autograd.DeviceType.CPU]
    launched = [one for one in events if not one.name.startswith("Mem")]
    ended = sorted(launched, key=lambda one: one.time_range.end)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for before, one in itertools.pairwise(ended):
        since = one.time_range.end - before.time_range.end
        times = found.setdefault((one.name[:40], before.name[:40]), [])
        times.append((since, one.time_range.elapsed_us()))
    launches = [
        dict(
            kernel=kernel,
            after=before,
            each_step=round(len(times) / steps, 1),
            us=round(statistics.median(since for since, _ in times), 2),
            resident_us=round(statistics.median(resident for _, resident in times), 2),
        )
        for (kernel, before), times in found.items()
    ]
    launches.sort(key=lambda one: -one["us"] * one["each_step"])
    layers = llm.config.layers
    return dict(kind="family kernels", preset=name, layers=layers, launches=launches)


def speed(name: str, llm: LLM) -> dict[str, Any]:
    """Tokens a second of one sequence, from two runs that differ in their length alone, and how
    long a prompt of PROMPT tokens takes.
    """
    generator = torch.Generator().manual_seed(0)

    def run(prompt: int, count: int) -> float:
        tokens = torch.randint(3, 4096, (prompt,), generator=generator).tolist()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        llm.generate([tokens], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
        return time.perf_counter() - begin

    run(64, 8)
    times = [run(64, length) for length in (16, 272, 16, 272)]
    seconds = min(times[1], times[3]) - min(times[0], times[2])
    prompts = [run(PROMPT, 1) for _ in range(4)]
    steps = llm.engine.runner.steps
    copied = copy_bandwidth(torch.device(DEVICE))
    rate = 256 / seconds / copied / 1e9
    linears = llm.decoder.step_nbytes - routers(llm)
    everything = llm.decoder.step_nbytes + llm.decoder.state_nbytes
    return dict(
        kind="family speed",
        preset=name.partition("@")[0],
        layers=llm.config.layers,
        batch=1,
        tok_s=round(256 / seconds, 1),
        bytes_a_step=linears,
        bytes_a_step_all=everything,
        copy_gb_s=round(copied),
        share_of_copy=round(linears * rate, 3),
        share_of_copy_all=round(everything * rate, 3),
        prompt_ms=round(1e3 * min(prompts[1:]), 2),
        captured=steps is not None,
        why_not=unsupported_reason(llm.decoder, PAGE),
        qkv_apart=None if steps is None else next(iter(steps.steps.values())).decode.separate,
    )


def routers(llm: LLM) -> int:
    """Bytes of a step that choose experts."""
    mixtures = (block.mlp for block in llm.decoder.blocks)
    return sum(one.router_nbytes for one in mixtures if isinstance(one, Experts))


def tokens_a_second(llm: LLM) -> float:
    def run(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        llm.generate([list(range(3, 67))], greedy(count))
        return time.perf_counter() - begin

    run(8)
    times = [run(length) for length in (16, 272, 16, 272)]
    return round(256 / (min(times[1], times[3]) - min(times[0], times[2])), 1)


def prompts(name: str, llm: LLM) -> dict[str, Any]:
    """Milliseconds to the first token, those of them in which some kernel runs, and the kernels."""
    row = dict(kind="family prompts", preset=name.partition("@")[0], layers=llm.config.layers)
    for length in (128, 512, PROMPT):
        tokens = list(range(3, 3 + length))
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            llm.generate([tokens], greedy(1))
            times.append(time.perf_counter() - begin)
        with torch.profiler.profile() as profiled:
            llm.generate([tokens], greedy(1))
            torch.cuda.synchronize()
        launched = [
            one for one in profiled.events() if one.device_type != torch.autograd.DeviceType.CPU
        ]
        row[f"{length} tokens"] = dict(
            ms=round(1e3 * min(times[1:]), 2),
            busy_ms=round(sum(one.time_range.elapsed_us() for one in launched) / 1e3, 2),
            launches=len(launched),
            longest=longest(launched),
        )
    return row


def longest(launched: list[Any], count: int = 12) -> dict[str, tuple[int, float]]:
    """Kernel → its launches, and their milliseconds."""
    found: dict[str, list[float]] = {}
    for one in launched:
        found.setdefault(one.name[:48], []).append(one.time_range.elapsed_us())
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))[:count]
    return {name: (len(times), round(sum(times) / 1e3, 3)) for name, times in ordered}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def variants(name: str, llm: LLM) -> dict[str, Any]:
    """Steps captured anew each way; the first tokens tell whether all compute the same."""
    steps = llm.engine.runner.steps
    assert isinstance(steps, DecodeGraphs)
    row = dict(kind="family variants", preset=name.partition("@")[0], layers=llm.config.layers)
    sum_plan = few.sum_plan
    linears = [block.qkv.fused for block in llm.decoder.blocks]
    weights = {one: one.weight for one in linears if isinstance(one, TiledLinear)}

    def capture(way: Way) -> None:
        steps.separate = way.separate
        for one, weight in weights.items():
            early = weight.early if way.early is None else way.early
            one.weight = dataclasses.replace(weight, early=early)
        few.sum_plan = sum_plan if way.summed else lambda *_: None  # type: ignore[assignment]
        steps.steps.clear()
        steps.graphs.clear()
        gc.collect()

    for way in 2 * WAYS:  # in turns, as the GPU becomes warmer
        capture(way)
        tokens = llm.generate([list(range(3, 67))], greedy(12))[0].token_ids
        found = row.setdefault(way.name, dict(tok_s=[], tokens=list(tokens)))
        found["tok_s"].append(tokens_a_second(llm))
    capture(WAYS[0])
    llm.generate([[3, 4, 5]], greedy(4))  # others find steps as they were
    return row


def depth(name: str, llm: LLM) -> dict[str, Any]:
    """Microseconds of a step, and of one more layer: does its own work take longer in a deep model,
    or is it what lies between two visits of the same weights?
    """
    steps = llm.engine.runner.steps
    assert isinstance(steps, DecodeGraphs)
    whole = list(llm.decoder.blocks)
    count = len(whole)

    def step_us(blocks: list[Block]) -> float:
        llm.decoder.blocks = blocks
        steps.steps.clear()
        steps.graphs.clear()
        gc.collect()
        found = round(1e6 / tokens_a_second(llm), 1)
        print(f"{len(blocks)} layers: {found} us", flush=True)
        return found

    def at(block: Block, index: int) -> Block:
        """With a cache or state of its own."""
        found = copy.copy(block)
        found.plan = dataclasses.replace(block.plan, index=index)
        return found

    few = 12
    again = [copy.copy(whole[i % few]) for i in range(count)]  # the last is told by what it is
    row = dict(kind="family depth", preset=name.partition("@")[0], layers=count)
    row["all"] = step_us(whole)
    row |= {f"first {n}": step_us(whole[:n]) for n in (few, 2 * few) if n < count}
    row[f"the first {few} in turns"] = step_us(again)
    row["those, with states of their own"] = step_us([at(b, i) for i, b in enumerate(again)])
    row["the first 4 in turns"] = step_us([copy.copy(whole[i % 4]) for i in range(count)])
    for block in whole:
        if isinstance(block.mlp, Experts) and block.mlp.grouped is not None:
            block.mlp.grouped.router.weight.zero_()
    row["all, always the same experts"] = step_us(whole)
    return row


def latent(out: Path) -> None:
    """At the sizes of DeepSeek's heads: microseconds of one layer's attention, the best of five."""
    for heads, tokens in ((16, 2048), (16, 8192), (128, 2048)):
        query, keys = torch.randn(2, heads, tokens, 192, device=DEVICE).bfloat16()
        values = torch.randn(heads, tokens, 128, device=DEVICE).bfloat16()
        row = dict(kind="latent prompt attention", heads=heads, tokens=tokens)
        for attend in (torch_attention, flash_attention, cudnn_attention):
            name = attend.__name__.removesuffix("_attention")
            try:
                row[f"{name}_us"] = best_time(functools.partial(attend, query, keys, values))
            except RuntimeError as error:  # of cuDNN, where it cannot
                row[name] = str(error)[:200]
        write(row, out)


SCALE = 192**-0.5


def torch_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As torch chooses."""
    return F.scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, scale=SCALE
    )


def flash_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch_runs.attend_last(query, keys, values, SCALE)


def cudnn_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        query[None], keys[None], values[None], None, False, 0.0, True, False, scale=SCALE
    )[0]


def best_time(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(1e3 * min(times), 1)


def measure_one(name: str, measures: list[Measure], out: Path) -> None:
    try:
        begun = time.perf_counter()
        llm = load(name)
        loaded = round(time.perf_counter() - begun, 1)
        for measure in measures:
            write(measure(name, llm) | dict(seconds_to_load=loaded), out)
    except Exception as error:  # the others still tell something
        write(dict(kind="family speed", preset=name, error=repr(error)[:600]), out)
    llm = None
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def write(row: dict[str, Any], out: Path) -> None:
    name = device_name(torch.device(DEVICE)) if DEVICE == "cuda" else DEVICE
    row |= dict(gpu=name, torch=torch.__version__, tree=commit())
    if dependent_launch.enabled:
        row |= dict(overlap=True)
    print(json.dumps(row), flush=True)
    with out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


MEASURES: dict[str, Measure] = dict(
    speed=speed,
    kernels=kernels,
    variants=variants,
    depth=depth,
    prompts=prompts,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", help=f"check, latent, or of {', '.join(MEASURES)}, with commas")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--shapes", default="tiny,real")
    parser.add_argument("--schemes", default="int4,bf16")
    parser.add_argument("--out", type=Path, default=Path("families.jsonl"))
    options = parser.parse_args()
    if options.what == "latent":
        return latent(options.out)
    if options.what != "check":
        measures = [MEASURES[name] for name in options.what.split(",")]
        for name in options.names:
            measure_one(name, measures, options.out)
        return
    for shapes in options.shapes.split(","):
        for preset in options.names or CHECKED:
            for scheme in options.schemes.split(","):
                try:
                    row = check(preset, scheme, tiny=shapes == "tiny")
                except Exception as error:  # the others still tell something
                    row = dict(preset=preset, scheme=scheme, shapes=shapes, error=repr(error)[:600])
                write(row, options.out)
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
