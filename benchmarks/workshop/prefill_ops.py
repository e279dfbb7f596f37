#!/usr/bin/env python3
"""Time the ops around the linears, as a prefill or a large decode batch runs them, and attention
over the paged cache.

    python benchmarks/workshop/prefill_ops.py OUT.jsonl [--preset qwen3-8b] [--rows 1 64 2048 16384]
        [--tokens 2048 16384]
                                     [--page 16] [--sweep]

Each op runs over copies of its inputs that exceed the L2 cache, in one CUDA graph; bytes are those
it must read and write once. `torch_us` is the same through the plain ops of kernels/reference.py.
Attention rows name the way it went: flash and cudnn (torch, whole prompts), gather (pages copied
for torch's flash attention), triton (pages in place; with --sweep every tile of SWEEP). `first_ms`
is the first call of a shape, which compiles or plans.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from flyweight.batch import Batch, KVStorage
from flyweight.bench.replay import graph_sampler
from flyweight.bench.rows import environment_row, make_row
from flyweight.kernels import reference, triton_ops
from flyweight.kernels.attention import triton as triton_attention
from flyweight.kernels.attention.plan import plan_attention
from flyweight.kernels.attention.tiles import Tile
from flyweight.kernels.linear.fused import Norm
from flyweight.models.presets import PRESETS

DTYPE = torch.bfloat16
L2_BYTES = 128 << 20
SWEEP = [
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 4),
    Tile(128, 64, 4, 3),
    Tile(128, 32, 8, 3),
    Tile(128, 128, 8, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 128, 4, 2),
]


def shape_of(preset: str) -> tuple[int, int, int, int, int]:
    """hidden, intermediate, heads, kv_heads, head_dim"""
    config = PRESETS[preset]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return (
        hidden,
        config["intermediate_size"],
        heads,
        config["num_key_value_heads"],
        config.get("head_dim") or hidden // heads,
    )


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def each_of(copies: int, make: Callable[[], tuple], op: Callable) -> Callable[[], list]:
    inputs = [make() for _ in range(copies)]
    return lambda: [op(*arguments) for arguments in inputs]


def replay_times(launch: Callable[[], object], repeats: int = 15) -> list[float]:
    """Microseconds of each replay of a graph of `launch`, after three to warm up."""
    launch()
    sample = graph_sampler(launch, 1)
    return [sample() for _ in range(repeats + 3)][3:]


def ops_at(rows: int, preset: str):
    """(name, width, bytes moved, make inputs, the op, the plain op)"""
    hidden, middle, heads, kv_heads, size = shape_of(preset)
    norm, qk_norm = random(hidden), random(heads + kv_heads, size)
    all_heads, angles = heads + 2 * kv_heads, torch.rand(rows, size // 2, device="cuda")
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), torch.arange(rows, device="cuda"))
    cache = KVStorage(
        random(-(-rows // 16), 16, kv_heads, size), random(-(-rows // 16), 16, kv_heads, size)
    )
    slots = torch.randperm(rows, device="cuda")

    def row(width: int) -> Callable[[], tuple]:
        return lambda: (random(rows, width),)

    def both(name: str, *extra, **options) -> list[Callable]:
        functions = getattr(triton_ops, name), getattr(reference, name)
        return [
            lambda *x, function=function: function(*x, *extra, **options) for function in functions
        ]

    rope = dict(cos=cos, sin=sin, norm=Norm(qk_norm, 1e-6))
    yield "rms_norm", hidden, 4 * hidden * rows, row(hidden), *both("rms_norm", norm, 1e-6)
    yield "silu_mul", middle, 6 * middle * rows, row(2 * middle), *both("silu_mul")
    moved = (2 * all_heads * size + 2 * (heads + 3 * kv_heads) * size + 8 * size) * rows
    yield (
        "rope_norm_write",
        all_heads * size,
        moved,
        lambda: (random(rows, all_heads, size), cache, slots),
        *both("rope_norm_write", **rope),
    )


def measure_ops(rows: int, preset: str):
    for name, width, moved, make, op, plain in ops_at(rows, preset):
        copies = max(2, min(64, L2_BYTES // moved))
        times = sorted(t / copies for t in replay_times(each_of(copies, make, op)))
        us = statistics.median(times)
        fields = dict(
            format="bf16",
            kernel=f"triton.{name}",
            rows=rows,
            in_features=width,
            us=round(us, 2),
            us_p10=round(times[len(times) // 10], 2),
            us_p90=round(times[-1 - len(times) // 10], 2),
            gb_s=round(moved / us / 1e3, 1),
        )
        plain_times = replay_times(each_of(copies, make, plain), repeats=5)
        yield fields | dict(torch_us=round(statistics.median(plain_times) / copies, 2))


def make_batch(
    spans: list[tuple[int, int]], *, page: int, kv_heads: int, size: int
) -> tuple[Batch, KVStorage]:
    """A step of (new tokens, cached tokens before them), its pages in random order."""
    blocks = [-(-sum(span) // page) for span in spans]
    order = torch.randperm(sum(blocks))
    tables = torch.zeros(len(spans), max(blocks), dtype=torch.int32)
    starts, slots, first = [0], [], 0
    for i, ((new, old), count) in enumerate(zip(spans, blocks, strict=True)):
        tables[i, :count], first = order[first : first + count], first + count
        at = torch.arange(old, old + new)
        slots.append(tables[i, at // page].long() * page + at % page)
        starts.append(starts[-1] + new)
    slot = torch.cat(slots).cuda()
    batch = Batch(slot, slot, slot, tables.cuda(), starts, [sum(span) for span in spans], slot[-1:])
    return batch, KVStorage(
        random(sum(blocks), page, kv_heads, size), random(sum(blocks), page, kv_heads, size)
    )


def ways(spans: list[tuple[int, int]], preset: str, page: int, sweep: bool):
    """(kernel, a call) for each way to attend."""
    _, _, heads, kv_heads, size = shape_of(preset)
    batch, cache = make_batch(spans, page=page, kv_heads=kv_heads, size=size)
    query, keys, values = random(batch.query_starts[-1], heads + 2 * kv_heads, size).split(
        [heads, kv_heads, kv_heads], 1
    )
    plan, scale = plan_attention(batch, cache), size**-0.5
    if len(spans) == 1 and spans[0][0] > 1:
        new, old = spans[0]
        q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
        slots = (batch.block_tables[0].long() * page)[:, None] + torch.arange(page, device="cuda")
        slots = slots.flatten()[: new + old]

        def whole(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=True
                )

        def gathered() -> Tensor:
            pages = (
                x.flatten(0, 1).index_select(0, slots).transpose(0, 1)[None]
                for x in (cache.keys, cache.values)
            )
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(
                    q,
                    *pages,
                    attn_mask=causal_lower_right(new, new + old),
                    scale=scale,
                    enable_gqa=True,
                )

        if not old:
            yield "torch.flash", lambda: whole(SDPBackend.FLASH_ATTENTION)
            yield "torch.cudnn", lambda: whole(SDPBackend.CUDNN_ATTENTION)
        yield "torch.gather", gathered
    for tile in SWEEP if sweep else [None]:
        name = (
            "triton"
            if tile is None
            else f"triton.{tile.rows}x{tile.columns}.w{tile.warps}.s{tile.stages}"
        )
        yield (
            name,
            lambda tile=tile: triton_attention.paged_attention(
                query, cache, plan, scale=scale, tile=tile
            ),
        )


def measure_attention(spans: list[tuple[int, int]], preset: str, page: int, sweep: bool):
    _, _, heads, kv_heads, size = shape_of(preset)
    flop = 4 * heads * size * sum(new * old + new * (new + 1) // 2 for new, old in spans)
    moved = 4 * kv_heads * size * sum(map(sum, spans))
    for name, call in ways(spans, preset, page, sweep):
        fields = dict(
            format="bf16",
            kernel=f"attention.{name}",
            rows=sum(new for new, _ in spans),
            sequences=len(spans),
            new_tokens=spans[0][0],
            cached_tokens=spans[0][1],
            page=page,
        )
        try:
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            first = time.perf_counter() - begin
            us = statistics.median(replay_times(call, repeats=9))
        except (
            Exception
        ) as error:  # a tile that does not fit, or a backend that does not take the shape
            yield fields | dict(
                status="failed", reason=f"{type(error).__name__}: {error}"[:200], us=None
            )
            continue
        yield fields | dict(
            us=round(us, 1),
            tflop_s=round(flop / us / 1e6, 1),
            gb_s=round(moved / us / 1e3, 1),
            first_ms=round(first * 1e3, 1),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", default="qwen3-8b", choices=sorted(PRESETS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 64, 2048, 16384])
    parser.add_argument("--tokens", nargs="*", type=int, default=[2048, 16384])
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--sweep", action="store_true", help="try every tile of SWEEP")
    args = parser.parse_args()
    environment = environment_row("cuda")
    cases = [[(tokens, 0)] for tokens in args.tokens]
    # a later chunk, its short end, a decoding batch, and one long context beside it
    if args.tokens:
        cases += [
            [(2048, 14336)],
            [(100, 16000)],
            [(1, 2047)] * 64,
            [(1, 32767)],
            [(512, 0), *[(1, 2047)] * 32],
        ]
    with args.out.open("a") as file, torch.inference_mode():
        file.write(json.dumps(environment) + "\n")

        def keep(fields: dict) -> None:
            if fields.get("gb_s"):
                fields["share_of_bandwidth"] = round(fields["gb_s"] / environment["copy_gb_s"], 3)
            file.write(json.dumps(make_row("kernel", environment["id"], **fields)) + "\n")
            print({name: value for name, value in fields.items() if name != "format"}, flush=True)

        for rows in args.rows:
            for fields in measure_ops(rows, args.preset):
                keep(fields)
        for spans in cases:
            for fields in measure_attention(spans, args.preset, args.page, args.sweep):
                keep(fields)


if __name__ == "__main__":
    main()
