"""compute-sanitizer over one small shape of each hand-written kernel: memory accesses, and races in
shared memory.

    python benchmarks/sanitize.py OUT.jsonl [--tool PATH/compute-sanitizer…] [--only gemv,gemm]
        [--logs FOLDER]

A row for each kernel and check: what the tool found, and whether the result was right. Weights and
references are made on the CPU and only the kernel itself is watched, so a run is little more than
the start of an interpreter; all run side by side, once without the tool first, to compile. Every
tensor has an allocation of its own, so that a read beyond one is found. Exits with 1 where anything
was found or nothing was checked.

Of gemm.cu's rings no stage is filled twice here: a warp's first lane gives it back for all, and the
tool does not know that products, which a warp issues as one, come behind the reads of the others.

The tool is in the CUDA toolkit, and in `pip install nvidia-cuda-sanitizer-api`; of several the
first is taken that can watch the first kernel. It starts programs through TreeLauncherSubreaper,
which must lie beside it, executable: the package of 13.0.85 lacks that, and every program then
"terminated before first instrumented API call".
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHECKS = {
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": ["--racecheck-report", "analysis", "--racecheck-indirect-barrier-dependency"],
}
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
LIMIT_S = 60
FOUND = 3  # the tool's exit code where it found something


def tiled(tensor: Any, **options: Any) -> Any:
    """A linear on the GPU."""
    import torch

    from flyweight.kernels import reference
    from flyweight.kernels.linear.tiled import TiledLinear

    return TiledLinear(tensor.to("cuda"), dtype=torch.bfloat16, ops=reference, **options)


def linear(kind: str, rows: int, *, gated: bool = True, kernel: str | None = None) -> float:
    """Relative error of a linear with norm and silu·mul, or (`gated` off) the residual."""
    import torch

    from flyweight.kernels.linear.fused import Norm
    from flyweight.tensors import Float8, Int8Channel, IntGroup, Plain, Sparse24

    make = {
        "plain": Plain.random,
        "w8a8": Int8Channel.random,
        "fp8": Float8.random,
        "sparse-w8a8": Sparse24.random,
        "int4": lambda shape: IntGroup.random(shape, group_size=64),
        "sparse-int4": lambda shape: Sparse24.random(shape, inner=IntGroup, group_size=64),
    }[kind]
    tensor, x, norm = (
        make((384, 576)),
        torch.randn(rows, 576).bfloat16(),
        torch.ones(576).bfloat16(),
    )
    normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    want = tensor.matmul_reference(normed)
    module, before = tiled(tensor, activation="silu" if gated else None), Norm(norm.cuda(), 1e-6)
    if gated:
        gate, up = want.chunk(2, -1)
        return error(
            module.multiply(x.cuda(), norm=before, kernel=kernel),
            torch.nn.functional.silu(gate) * up,
        )
    residual = torch.randn(rows, 384).bfloat16()
    got = module.multiply(x.cuda(), norm=before, residual=residual.cuda(), kernel=kernel)
    return error(got, want + residual.double())


def in_registers() -> float:
    """Eight rows that stay in registers, which no linear by itself asks for."""
    import torch

    from flyweight.kernels.linear import gemv
    from flyweight.tensors import IntGroup

    tensor, x = IntGroup.random((384, 1152), group_size=128), torch.randn(8, 1152).bfloat16()
    return error(
        gemv.multiply(tiled(tensor).weight, x.cuda(), alone=True), tensor.matmul_reference(x)
    )


def eight_rows(*, quantized: bool = False) -> float:
    """Two tiles for each pair of CTAs: with more the tool takes minutes. A residual."""
    import torch

    from flyweight.tensors import Int8Channel, IntGroup

    tensor = (
        Int8Channel.random((2112, 4096))
        if quantized
        else IntGroup.random((2112, 4096), group_size=128)
    )
    x, residual = torch.randn(7, 4096).bfloat16(), torch.randn(7, 2112).bfloat16()
    got = tiled(tensor).multiply(x.cuda(), residual=residual.cuda(), kernel="gemv_cluster")
    return error(got, tensor.matmul_reference(x) + residual.double())


def integers() -> float:
    """x in planes, two teams, clusters, a residual."""
    import torch

    from flyweight.kernels.linear import gemm
    from flyweight.kernels.linear.gemm_shape import CLUSTERS, Forced
    from flyweight.tensors import IntGroup

    tensor, x, residual = (
        IntGroup.random((200, 1792), group_size=128),
        *(torch.randn(12, n).bfloat16() for n in (1792, 200)),
    )
    forced = Forced(split=CLUSTERS, cluster=2, beside=False, warpgroups=1, teams=2)
    got = gemm.multiply(tiled(tensor).weight, x.cuda(), residual=residual.cuda(), forced=forced)
    return error(got, tensor.matmul_reference(x) + residual.double())


def layer_of_experts(tokens: int) -> float:
    """One expert, chosen by everyone: then the layer is that expert."""
    import torch

    from flyweight.kernels.linear.experts.grouped import GroupedExperts
    from flyweight.kernels.linear.experts.router import DeviceRouter
    from flyweight.kernels.linear.experts.routing import Routing
    from flyweight.kernels.linear.experts.stacked import stack
    from flyweight.kernels.linear.fused import Norm
    from flyweight.tensors import IntGroup

    first, second = (
        IntGroup.random((384, 320), group_size=64),
        IntGroup.random((320, 192), group_size=64),
    )
    gate_up = stack([tiled(first, activation="silu") for _ in range(4)])
    down = stack([tiled(second) for _ in range(4)])
    ready = torch.zeros(1, dtype=torch.int32).cuda()
    routing = Routing(4, 2, normalize=True)
    layer = GroupedExperts(gate_up, down, DeviceRouter(torch.randn(4, 320).cuda(), ready, routing))
    x, norm = torch.randn(tokens, 320).bfloat16(), Norm(torch.ones(320).bfloat16().cuda(), 1e-6)
    given, out = x.cuda(), torch.empty_like(x.cuda())
    route = layer.route(given, norm=norm)
    layer.combine(layer.multiply(given, route, norm=norm), route, given, out)
    normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    gate, up = first.matmul_reference(normed).chunk(2, -1)
    return error(
        out, x.double() + second.matmul_reference((torch.nn.functional.silu(gate) * up).bfloat16())
    )


def vectors_of_parts(rows: int, columns: int, *, silu: bool = False) -> float:
    """Two weights with one input, normed."""
    import torch

    from flyweight.kernels import reference
    from flyweight.kernels.linear.fused import Norm
    from flyweight.kernels.vptq import linear as vptq
    from flyweight.tensors import VectorQuant

    tensors = [
        VectorQuant.random((64, columns), seed, length=8, main=256, residual=16)
        for seed in range(2)
    ]
    weight = vptq.join(
        [vptq.prepare(tensor.to("cuda"), dtype=torch.bfloat16, ops=reference) for tensor in tensors]
    )
    x, norm = torch.randn(rows, columns).bfloat16(), torch.ones(columns).bfloat16()
    first, second = (
        tensor.matmul_reference(reference.rms_norm(x.float(), norm.float(), 1e-6))
        for tensor in tensors
    )
    want = torch.nn.functional.silu(first) * second if silu else torch.cat([first, second], -1)
    run = weight.silu if silu else weight.project
    return error(run(x.cuda(), norm=Norm(norm.cuda(), 1e-6)), want)


def vector_quantized(rows: int) -> float:
    import torch

    from flyweight.kernels import reference
    from flyweight.kernels.vptq import linear as vptq
    from flyweight.tensors import VectorQuant

    tensor = VectorQuant.random((256, 512), length=8, main=256, residual=16)
    x = torch.randn(rows, 512).bfloat16()
    return error(
        vptq.prepare(tensor.to("cuda"), dtype=torch.bfloat16, ops=reference)(x.cuda()),
        tensor.matmul_reference(x),
    )


def written_out() -> float:
    """A weight as cuBLAS takes it, multiplied on the CPU: under racecheck cuBLAS does not run,
    whichever kernels are watched.
    """
    import torch

    from flyweight.kernels import reference
    from flyweight.kernels.vptq import decode
    from flyweight.kernels.vptq import linear as vptq
    from flyweight.tensors import VectorQuant

    tensor, x = (
        VectorQuant.random((256, 512), length=8, main=256, residual=16),
        torch.randn(4, 512).bfloat16(),
    )
    parts = vptq.prepare(tensor.to("cuda"), dtype=torch.bfloat16, ops=reference).parts
    weight = decode.dequantize(parts).cpu().double()
    return error(
        decode.stored_x(parts[0], x.cuda()).cpu().double() @ weight.T, tensor.matmul_reference(x)
    )


def attention(fused: bool) -> float:
    """Steps of a tiny model, captured by nothing: the two ways to qkv and attention against float32
    on the CPU.
    """
    import torch

    from flyweight.batch import KVStorage
    from flyweight.engine.graphs import DecodeGraphs
    from flyweight.engine.rows import Rows
    from flyweight.models.decoder import Decoder
    from flyweight.models.presets import PRESETS, PresetWeights

    config = PRESETS["qwen3-0.6b"] | dict(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    tokens = torch.randint(0, 256, (20,))
    want = Decoder.load(
        PresetWeights(config, "bf16"), device="cpu", dtype=torch.float32
    ).forward_whole(tokens[None])[0, -1:]
    device = torch.device("cuda", 0)
    decoder = Decoder.load(PresetWeights(config, "bf16"), device=device, dtype=torch.bfloat16)
    caches = [
        KVStorage(
            *(torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
        )
        for _ in range(2)
    ]
    rows = Rows(1, pages=4, vocabulary=256, device=device)
    rows.tables[:] = torch.arange(4, dtype=torch.int32)
    step = DecodeGraphs(decoder, caches, rows, separate=None if fused else "asked for").step(1)
    with decoder.active():
        for i, token in enumerate(tokens.tolist()):
            rows.tokens[0], rows.lengths[0] = token, i + 1
            step.launch()
    return error(step.logits, want.double())


def prompt(paged: bool) -> float:
    """A prompt, or a chunk of one over pages, against float64 on the CPU."""
    import torch

    from flyweight.kernels.attention.prefill import BASE_2, Heads, Span, Units, attend

    heads, length, new = Heads(4, 2, 64, torch.bfloat16), 300, 170 if paged else 300
    query, keys, values = (torch.randn(length, count, 64).bfloat16() for count in (4, 2, 2))
    query /= 8
    pages = torch.randperm(19)
    cache = torch.zeros(2, 19, 16, 2, 64, dtype=torch.bfloat16)
    at = torch.arange(length)
    cache.flatten(1, 2)[:, pages[at // 16] * 16 + at % 16] = torch.stack([keys, values])
    units = Units.cut([Span(0, new, length, 0)], heads, 16 if paged else 0, torch.device("cuda", 0))
    given, out = query[-new:].cuda(), torch.empty(new, 4, 64, dtype=torch.bfloat16, device="cuda")
    attend(
        given,
        *((x.cuda() for x in cache) if paged else (keys.cuda(), values.cuda())),
        out,
        units=units,
        heads=heads,
        tables=pages.int().cuda(),
    )
    q, k, v = (
        x.double().transpose(0, 1)
        for x in (query[-new:], keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1))
    )
    scores = (q @ k.transpose(1, 2) * BASE_2).masked_fill(at[None] > at[-new:, None], -torch.inf)
    return error(out, (scores.softmax(-1) @ v).transpose(0, 1))


def sampled() -> float:
    """Share of rows whose token is not among those that float64 keeps: greedy, filtered, biased,
    penalized and masked ones.
    """
    import numpy
    import torch

    from flyweight.engine.request import Request, SamplingParams
    from flyweight.engine.rows import Rows
    from flyweight.kernels.sample_reference import Filters, kept

    options = [
        dict(temperature=0.0),
        dict(temperature=0.7, top_k=20, top_p=0.9),
        dict(temperature=1.5, top_p=0.999),
        dict(temperature=1.0, min_p=0.1),
    ]
    more = [
        dict(temperature=0.0, logit_bias={5: 90.0}),
        dict(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.1),
    ]
    rows = Rows(len(options) + len(more), pages=1, vocabulary=5003, device=torch.device("cuda", 0))
    rows.enter(
        [
            Request(
                number=i,
                prompt=[1, 2],
                seed=i,
                limit=9,
                params=SamplingParams(**one).with_defaults({}),
            )
            for i, one in enumerate(options + more)
        ]
    )
    rows.lengths += 3
    logits = torch.randn(len(rows.lengths), 5003) * 2
    every = torch.arange(5003)
    tokens = rows.choose(
        logits[: len(options + more)].cuda(),
        torch.arange(len(options + more)).cuda(),
        {3: numpy.packbits((every % 2 == 0).numpy(), bitorder="little")},
    ).cpu()
    logits[3, 1::2] = -torch.inf
    wrong = [
        int(tokens[0]) != int(logits[0].argmax()),
        int(tokens[4]) != 5,
        not 0 <= int(tokens[5]) < 5003,
    ]
    wrong += [not kept(logits[i], Filters(**options[i])).tokens[tokens[i]] for i in (1, 2, 3)]
    return float(sum(map(bool, wrong))) / len(wrong)


def latent() -> float:
    """A row of 33 tokens: where keys and values are the identity, a head reads the cache itself."""
    import torch

    from flyweight.batch import KVStorage
    from flyweight.kernels.attention.decode import Rows, rope_pairs
    from flyweight.kernels.attention.latent import (
        LatentLayer,
        LatentShape,
        Workspace,
        latent_attention,
    )
    from flyweight.kernels.linear.fused import Norm

    shape, length = LatentShape(16, 128, 512, 64, 128, page=16), 33
    pages, table = (
        torch.randn(3, 16, 1, 576).bfloat16(),
        torch.tensor([[2, 0, 1]], dtype=torch.int32),
    )
    query, new = torch.zeros(1, 16 * 192).bfloat16(), torch.randn(1, 576).bfloat16()
    keys = torch.zeros(16, 128, 512).bfloat16()  # no score: the mean of all rows
    values = torch.eye(128, 512).bfloat16().expand(16, -1, -1).contiguous()
    turn = torch.ones(64, 32), torch.zeros(64, 32)  # by nothing
    rows = Rows(
        rope_pairs(*turn).cuda(), torch.tensor([length], dtype=torch.int32).cuda(), table.cuda()
    )
    held = pages.cuda()
    layer = LatentLayer(
        shape, 0.1, Norm(torch.ones(512).bfloat16().cuda(), 1e-6), keys.cuda(), values.cuda()
    )
    work = Workspace.make(shape, 1, dtype=torch.bfloat16, device=torch.device("cuda", 0), splits=2)
    out = torch.empty(1, 16 * 128, dtype=torch.bfloat16, device="cuda")
    latent_attention(
        query.cuda(),
        new.cuda(),
        out,
        KVStorage(held, held[..., :512]),
        rows,
        layer=layer,
        workspace=work,
    )
    own = new[:, :512].double() * torch.rsqrt(new[:, :512].double().square().mean() + 1e-6)
    older = pages[table[0].long()].flatten(0, 2)[: length - 1, :512].double()
    return error(out.view(16, 128), torch.cat([older, own]).mean(0)[:128].expand(16, -1))


def delta_rule() -> float:
    """Three steps of two sequences and a row of padding."""
    import torch

    from flyweight.batch import StateStorage
    from flyweight.kernels.gated_delta import reference
    from flyweight.kernels.gated_delta.decode import DeltaRows, delta_step
    from flyweight.kernels.gated_delta.shape import DeltaShape, DeltaWeights

    shape, tokens = (
        DeltaShape(2, 4, 64, 64, 4),
        torch.randn(2, 3, DeltaShape(2, 4, 64, 64, 4).projected).bfloat16(),
    )
    parts = (torch.randn(4, shape.channels) / 2, -torch.rand(4) / 4, torch.randn(4), torch.ones(64))
    wide = DeltaWeights(shape, *(part.double() for part in parts), 1e-6)
    weights = DeltaWeights(shape, *parts, 1e-6).to(torch.device("cuda", 0))
    cache = StateStorage(
        torch.zeros(3, 4, shape.channels, device="cuda").bfloat16(),
        torch.zeros(3, 4, 64, 64, device="cuda"),
    )
    slots, got = torch.tensor([2, 0, 1], dtype=torch.int32).cuda(), []
    for at in range(3):
        lengths = torch.tensor([at + 1, at + 1, 0], dtype=torch.int32).cuda()
        step = torch.cat([tokens[:, at], tokens[:1, 0]]).cuda()
        out = torch.zeros(3, shape.outputs, dtype=torch.bfloat16, device="cuda")
        got.append(delta_step(step, out, cache, DeltaRows(lengths, slots), weights)[:2])
    return error(torch.stack(got, 1), reference.delta_whole(tokens.double(), wide))


def in_order(rows: int) -> float:
    """GPTQ's act-order: x is brought into the order of the groups."""
    import torch

    from flyweight.kernels import dispatch
    from flyweight.tensors import IntGroup

    tensor, x = (
        IntGroup.random((200, 576), 1, "cpu", bits=4, act_order=True),
        torch.randn(rows, 576).bfloat16(),
    )
    return error(
        dispatch.prepare(tensor.to("cuda"), dtype=torch.bfloat16)(x.cuda()),
        tensor.matmul_reference(x),
    )


def accepted() -> float:
    """Three sequences with two, no and one right guess, and a row of padding; the share of places
    that are wrong.
    """
    import torch

    from flyweight.kernels.accept import ChainState, CheckedRows, accept

    def integers(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32).cuda()

    hidden, tables = torch.randn(8, 576).bfloat16(), torch.arange(24, dtype=torch.int32).view(8, 3)
    tokens, chosen, first = ([9, 4, 5, 7, 1, 1, 2, 0], [4, 5, 6, 1, 1, 3, 8, 0], [0, 3, 4])
    state = ChainState(
        torch.zeros(3, 576).bfloat16().cuda(), integers(0, 0, 0), integers(*range(12)).view(3, 4)
    )
    rows = CheckedRows(
        torch.tensor(chosen).cuda(),
        torch.tensor(tokens).cuda(),
        integers(0, 1, 2, 0, 0, 1, 2, 0),
        integers(30, 31, 32, 7, 15, 16, 17, 0),
        tables.cuda(),
        torch.tensor(first).cuda(),
    )
    accept(rows, hidden.cuda(), state)
    want = [2, 3, 5]
    right = (
        torch.equal(state.hidden.cpu(), hidden[want]),
        state.lengths.tolist() == [32, 7, 16],
        torch.equal(state.tables[:, :3].cpu(), tables[want]),
    )
    return 1 - sum(right) / len(right)


def error(got, want) -> float:
    got = got.cpu().double()
    return float("inf") if got.isnan().any() else ((got - want).norm() / want.norm()).item()


# name → (what is run, the kernels that are watched, the error that rounding explains)
CASES: dict[str, tuple[Callable[[], float], str, float]] = {
    "gemv": (lambda: linear("int4", 2), "gemv", 0.02),
    "gemv-plain": (lambda: linear("plain", 1, gated=False), "gemv", 0.02),
    "gemv-sparse": (lambda: linear("sparse-w8a8", 1), "gemv", 0.05),
    "gemv-fp8": (lambda: linear("fp8", 4), "gemv", 0.06),
    "gemv-registers": (in_registers, "gemv", 0.02),
    "gemm": (lambda: linear("w8a8", 20, gated=False), "gemm|pack", 0.05),
    "gemm-planes": (integers, "gemm|pack", 0.02),
    "gemm-many": (lambda: linear("int4", 300), "gemm|pack", 0.03),
    "gemm-sparse": (lambda: linear("sparse-int4", 70), "gemm|pack", 0.03),
    "gemm-fp8": (lambda: linear("fp8", 300), "gemm|pack", 0.06),
    "gemm-mma": (lambda: linear("int4", 40, gated=False, kernel="gemm_mma"), "gemm_mma|pack", 0.03),
    "gemm-mma-quantized": (lambda: linear("w8a8", 300, kernel="gemm_mma"), "gemm_mma|pack", 0.05),
    "batch-sparse": (lambda: linear("sparse-int4", 12), "batch|batch_pack", 0.03),
    "few": (eight_rows, "few", 0.02),
    "few-quantized": (lambda: eight_rows(quantized=True), "few", 0.05),
    "experts-few": (lambda: layer_of_experts(2), "route|experts|combine", 0.03),
    "experts-many": (lambda: layer_of_experts(40), "route|pack|gemm|combine", 0.03),
    "vptq": (lambda: vector_quantized(2), "vptq", 0.02),
    "vptq-eight": (lambda: vector_quantized(5), "vptq", 0.02),
    "vptq-rows": (lambda: vector_quantized(20), "vptq", 0.02),
    "vptq-decode": (written_out, "vptq", 0.02),
    "vptq-parts": (lambda: vectors_of_parts(100, 2048), "vptq", 0.02),
    "vptq-silu": (lambda: vectors_of_parts(200, 512, silu=True), "vptq|gemm|pack", 0.03),
    "attention": (lambda: attention(fused=False), "attention|choose|embed", 0.05),
    "qkv_attention": (lambda: attention(fused=True), "qkv_attention", 0.05),
    "prompt": (lambda: prompt(paged=False), "prefill_attention", 0.01),
    "prompt-paged": (lambda: prompt(paged=True), "prefill_attention", 0.01),
    "sample": (sampled, "sample", 0.0),
    "latent": (latent, "absorb|attend|release", 0.02),
    "gated-delta": (delta_rule, "gated_delta", 0.02),
    "act-order": (lambda: in_order(1), "gemv|gather", 0.02),
    "act-order-rows": (lambda: in_order(5), "gemv|gather|few|batch", 0.02),
    "accept": (accepted, "accept", 0.0),
}


# cases that call a kernel by its name, of Hopper alone
OF_HOPPER = {"gemm-planes", "few", "few-quantized", "vptq-silu", "prompt", "prompt-paged"}


def here() -> list[str]:
    """The cases whose kernels this GPU has."""
    from flyweight import gpu

    hopper = gpu.of(0).has_warpgroups
    return [name for name in CASES if hopper or name not in OF_HOPPER]


def run_all(command: list[str], **options) -> int | None:
    """The exit code, or None after LIMIT_S: then the processes that it started end, too, or a
    kernel that hangs would keep the GPU busy for good, and whatever is measured after it would take
    twice as long.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None


def run(name: str, check: str | None, tool: str, logs: Path) -> dict:
    """A case under the tool (None: without it)."""
    command = [sys.executable, __file__, "--worker", name]
    if check:
        command = [
            tool,
            "--tool",
            check,
            "--kernel-name",
            f"regex={CASES[name][1]}",
            "--target-processes",
            "all",
            "--error-exitcode",
            str(FOUND),
            *CHECKS[check],
            *command,
        ]
    log = logs / f"{check or 'alone'}-{name}.txt"
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        code = run_all(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    text = log.read_text(errors="replace")
    summary, result = SUMMARY.search(text), re.search(r"^relative error (\S+)", text, re.MULTILINE)
    found = int(summary[1] or summary[2]) if summary else None
    wrong = result is None or float(result[1]) > CASES[name][2]
    clean = code == 0 and not wrong and (check is None or found == 0)
    last = text.strip().splitlines()[-1][:200] if text.strip() else "no output"
    reason = (
        f"stopped after {LIMIT_S} s"
        if code is None
        else f"{found} found"
        if found
        else "a wrong result"
        if result
        else last
    )
    return {
        "kernel": name,
        "check": check,
        "found": found,
        "relative_error": result and float(result[1]),
        "exit_code": code,
        "status": "ok" if clean else "failed",
        **({} if clean else {"reason": reason}),
    }


def working(tools: list[str], name: str, logs: Path) -> str:
    """The first of the tools that can watch a kernel: whether one can depends on what lies beside
    it, and on the driver.
    """
    reasons = []
    for tool in tools:
        try:
            found = run(name, "memcheck", tool, logs)
        except OSError as error:  # not there, or not executable
            found = {"found": None, "reason": str(error)}
        if found["found"] is not None:
            return tool
        reasons.append(f"{tool}: {found.get('reason', 'no summary')}")
    sys.exit("\n".join(["no compute-sanitizer can watch a kernel here:", *reasons]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("sanitize.jsonl"))
    found_here = shutil.which(
        "compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *PLACES])
    )
    parser.add_argument("--tool", nargs="+", default=[found_here] if found_here else [])
    parser.add_argument("--only", help="names of cases, with commas; default: what this GPU has")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        import torch

        torch.manual_seed(0)
        print(f"relative error {CASES[options.worker][0]():.5f}", flush=True)
        return
    if not options.tool:
        sys.exit(
            "compute-sanitizer is not here: pip install nvidia-cuda-sanitizer-api, and name "
            "it with --tool"
        )
    from flyweight.bench.rows import ResultFile, environment_row, make_row

    logs = options.logs or Path(tempfile.mkdtemp())
    names = options.only.split(",") if options.only else here()
    logs.mkdir(parents=True, exist_ok=True)
    environment, file = environment_row("cuda", measure_bandwidth=False), ResultFile(options.out)
    with ThreadPoolExecutor(16) as pool:
        alone = list(pool.map(lambda name: run(name, None, "", logs), names))
        tool = working(options.tool, names[0], logs)
        found = list(
            pool.map(
                lambda pair: run(*pair, tool, logs),
                [(name, check) for check in CHECKS for name in names],
            )
        )
    version = (
        subprocess.run([tool, "--version"], capture_output=True, text=True)
        .stdout.strip()
        .splitlines()[-1]
    )
    file.append(
        [
            environment,
            *(make_row("sanitize", environment["id"], tool=version, **fields) for fields in found),
        ]
    )
    for fields in [*alone, *found]:
        print(
            f"{fields['check'] or 'alone':9s} {fields['kernel']:14s} {fields['status']}",
            fields.get("reason", ""),
        )
    sys.exit(any(fields["status"] != "ok" for fields in found))


if __name__ == "__main__":
    main()
