"""`flyweight bench kernel` on a CPU: the rows, the grids, the peers and the layouts. Times are
never asserted."""

import json
from types import SimpleNamespace

import pytest
import torch

from flyweight import cli, gpu
from flyweight.bench import attention, chain, kernels, peers, replay, shapes
from flyweight.bench.kernels import FORMATS, Case, cases_of, measure_case
from flyweight.commands import bench_kernel
from flyweight.errors import OptionError, ResultError
from flyweight.gpu import GPUS
from flyweight.kernels import reference
from flyweight.kernels.cpu_integer import sums_exactly
from flyweight.kernels.linear.choose import Choice
from flyweight.kernels.linear.fused import TorchLinear
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.models import presets
from flyweight.report import figures
from flyweight.report.read import read
from flyweight.tensors import Int8Channel, IntGroup

CPU = torch.device("cpu")
TINY = dict(
    presets.PRESETS["qwen3-0.6b"],
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Two copies and few samples: the code path of a measurement, not its precision."""
    monkeypatch.setattr(replay, "CPU_CACHE", 1)
    monkeypatch.setitem(presets.PRESETS, "tiny", TINY)


def case(format="w4a16", **options):
    return Case(
        **dict(
            format=format,
            rows=1,
            in_features=64,
            out_features=48,
            dtype=torch.float32,
            group_size=32,
            books=(16, 4),
        )
        | options
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_format_gives_a_row_with_its_error_and_both_times(format, rows):
    row = next(
        measure_case(case(format, rows=rows), device=CPU, peers=[], samples=3, bandwidth=10.0)
    )
    assert (
        row["relative_error"] <= row["error_bound"] < 1.2e-2
        and row["status"] == "ok"
        and row["kernel"]
    )
    assert (
        row["ratio"] == pytest.approx(row["us"] / row["torch_us"]) and len(row["us_samples"]) == 3
    )
    assert row["share_of_bandwidth"] == pytest.approx(row["gb_s"] / 10) and row["us_hot"] > 0
    assert row["bits_per_weight"] <= 32 and (row["group_size"] == 32) == format.startswith(
        ("w2a16", "w3a16", "w4a16", "w8a16")
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--format", "w4a16", "--shapes", "64x48"),
        ("--format", "w8a8", "--chain", "tiny"),
        ("--format", "attention", "--shapes", "tiny", "--contexts", "16"),
    ],
)
def test_a_wrong_result_is_a_failed_row_and_exit_code_1(arguments, tmp_path, capsys, monkeypatch):
    error = kernels.relative_error
    for module in (kernels, chain, attention):
        monkeypatch.setattr(
            module, "relative_error", lambda found, expected: error(found * 1.1, expected)
        )
    out = tmp_path / "rows.jsonl"
    code, _, told = flyweight(
        *arguments,
        "--rows",
        1,
        "--peers",
        "none",
        "--samples",
        1,
        "--device",
        "cpu",
        "-o",
        out,
        capsys=capsys,
    )
    row = read([out]).rows[0]
    assert (
        code == 1
        and "wrong result" in told
        and row["status"] == "failed"
        and "wrong result" in row["reason"]
    )
    assert kernels.judged(float("nan"), 1.0)["status"] == "failed"


@pytest.mark.parametrize(("name", "rounds_inputs"), [("sm_80", False), ("sm_90a", True)])
def test_a_gpu_without_float8_may_be_off_by_what_it_does_not_round(
    monkeypatch, name, rounds_inputs
):
    monkeypatch.setattr(gpu, "of", lambda device: gpu.by_name(name))
    case = Case("fp8", rows=1, in_features=64, out_features=64, dtype=torch.bfloat16)
    tensor = FORMATS["fp8"](case, (64, 64), CPU)
    x = SimpleNamespace(is_cuda=True, device=CPU, dtype=torch.bfloat16)
    kernel = kernels.Candidate("gemv", lambda x: x, 0, lambda: lambda x: x)
    error_of_16_bit_inputs = float(
        (tensor.quantize_input(rows := torch.randn(64, 64)) - rows).norm() / rows.norm()
    )
    assert (error_of_16_bit_inputs > kernels.bound_of(kernel, tensor, x)) == rounds_inputs


def test_p10_and_p90_need_ten_samples():
    figures = kernels.figures(
        [float(i) for i in range(11)], hot=None, torch_times=[10.0], nbytes=5000, bandwidth=2.0
    )
    assert (
        figures["us"],
        figures["us_p10"],
        figures["us_p90"],
        figures["ratio"],
        figures["gb_s"],
    ) == (5, 1, 9, 0.5, 1)
    assert (
        kernels.figures([1.0], hot=[2.0], torch_times=None, nbytes=1, bandwidth=1)["us_p10"] is None
    )


def test_rows_name_the_kernel_that_runs(monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: GPUS["sm_90a"])
    linear = TiledLinear(
        IntGroup.random((4096, 4096), group_size=128), dtype=torch.bfloat16, ops=reference
    )
    found = [kernels.chosen(linear, rows) for rows in (1, 8, 64)]
    assert [one.kernel for one in found] == ["gemv", "gemv_cluster", "gemm"] and all(
        one.why for one in found
    )
    assert kernels.chosen(linear, 8, norm=True).kernel == "gemm_small"
    plain = TorchLinear(torch.relu, ops=reference, why="nothing else")
    assert kernels.chosen(plain, 8) == Choice("torch.linear", "nothing else")
    layer = {"qkv": linear, "o": linear, "gate_up": linear, "down": plain}
    assert chain.kernels_of(layer, 8) == "gemm_small + gemv_cluster + torch.linear"


def test_a_copy_of_a_linear_shares_all_but_its_weight():
    linear = TiledLinear(
        IntGroup.random((64, 128), group_size=64), dtype=torch.bfloat16, ops=reference
    )
    again = kernels.copied(linear, lambda: linear)
    assert again.ops is linear.ops and again.weight.matrix == linear.weight.matrix
    assert torch.equal(again.weight.weights, linear.weight.weights)
    assert not {t.data_ptr() for t in kernels.tensors_of(again)} & {
        t.data_ptr() for t in kernels.tensors_of(linear)
    }


def test_cold_launches_walk_over_copies_of_their_own():
    tensor = IntGroup.random((48, 64), group_size=32)
    one = kernels.find_candidates(case(), tensor, [])[0][0]
    again = one.again()
    mine, other = ([t.data_ptr() for t in kernels.tensors_of(run)] for run in (one.run, again))
    assert not set(mine) & set(other)
    x = torch.randn(1, 64)
    assert torch.equal(one.run(x), again(x))


needs_exact_sums = pytest.mark.skipif(
    not sums_exactly(), reason="this processor cannot sum products of int8 exactly"
)


@pytest.mark.parametrize(
    ("format", "peer"),
    [
        ("w4a16", "torch._weight_int4pack_mm"),
        pytest.param("w8a8", "torch._int_mm", marks=needs_exact_sums),
    ],
)
def test_a_peer_computes_the_same_product(format, peer):
    rows = list(
        measure_case(
            case(format, in_features=128, out_features=64, rows=4),
            device=CPU,
            peers=[peer],
            samples=1,
            bandwidth=1.0,
        )
    )
    assert [row["kernel"] for row in rows][1] == peer and rows[1]["relative_error"] < 1e-2
    assert rows[1]["torch_us"] == rows[0]["torch_us"]


def test_a_peer_that_cannot_run_says_why():
    rows = list(measure_case(case(), device=CPU, peers=list(peers.PEERS), samples=1, bandwidth=1.0))
    reasons = {row["kernel"]: row.get("reason") for row in rows if row["status"] == "skipped"}
    assert (
        "pip install gemlite" in reasons["gemlite"]
        and "pip install vllm" in reasons["vllm.marlin"] == reasons["vllm.machete"]
    )
    with pytest.raises(OptionError, match=r"did you mean 'torch\._int_mm'"):
        peers.names("torch._intmm")


def test_symmetric_weights_keep_their_meaning_in_tinygemm():
    tensor = IntGroup.random((64, 128), group_size=32, symmetric=True, dtype=torch.float32)
    x = torch.randn(3, 128)
    found = peers.torch_int4(tensor, rows=3, dtype=torch.float32)(x)
    assert kernels.relative_error(found, tensor.matmul_reference(x)) < 1e-2


def test_the_grids_are_those_of_the_documents():
    first, second = shapes.find(["seed-000"]), shapes.find(["seed-001"])
    assert len(first) == 30 and {shape.books for shape in first} == {(8192, 256)}
    assert [(shape.in_features, shape.out_features) for shape in first[:2]] == [
        (1024, 1024),
        (1024, 4096),
    ]
    assert len(second) == 120 and second[0].books == (4096, 256) and second[-1].books == (8192, 512)
    assert [(shape.in_features, shape.out_features) for shape in second[:2]] == [
        (1024, 1024),
        (2048, 1024),
    ]
    assert shapes.linears("qwen3-8b") == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
    }
    assert [(s.in_features, s.out_features) for s in shapes.find(["3x5", "7×9"])] == [
        (3, 5),
        (7, 9),
    ]
    with pytest.raises(OptionError, match="qwen3-8b"):
        shapes.find(["qwen3-8c"])
    assert [
        c.books
        for c in cases_of(first[:1], [1, 2], format="vptq", dtype=torch.float32, books=(16, 4))
    ] == [(8192, 256)] * 2


def flyweight(*arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "kernel", *map(str, arguments)])
    return exit.value.code, *capsys.readouterr()


@pytest.mark.parametrize(("grid", "books"), [("seed-000", False), ("seed-001", True)])
def test_the_seed_layout_has_exactly_the_columns_of_the_documents(grid, books, capsys, monkeypatch):
    monkeypatch.setattr(shapes, "COLUMNS", (32, 64))
    monkeypatch.setattr(shapes, "OUTPUTS", (16,))
    code, out, _ = flyweight(
        "--shapes", grid, "--layout", "seed", "--samples", 1, "--device", "cpu", capsys=capsys
    )
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in out.splitlines()
        if line.startswith("|")
    ]
    codebooks = ["main_centroids", "residual_centroids"] if books else []
    assert code == 0 and lines[0] == [
        "batch_size",
        "in_features",
        "out_features",
        *codebooks,
        "vptq (ms)",
        "torch (ms)",
        "ratio",
    ]
    assert len(lines) == 2 + (8 if books else 2) and lines[2][:3] == ["1", "32", "16"]


def test_rows_go_to_a_file_once_and_the_report_reads_them(tmp_path, capsys):
    arguments = (
        "--format",
        "w8a8,vptq",
        "--shapes",
        "64x48",
        "--rows",
        "1,2",
        "--codebooks",
        "16+4,16",
        "--peers",
        "none",
        "--samples",
        1,
        "--device",
        "cpu",
        "-o",
        tmp_path / "rows.jsonl",
    )
    assert flyweight(*arguments, capsys=capsys)[0] == 0
    before = (tmp_path / "rows.jsonl").read_text()
    code, out, _ = flyweight(*arguments, "--json", capsys=capsys)
    assert code == 0 and (tmp_path / "rows.jsonl").read_text() == before
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["bench"] for row in rows] == ["environment"] + ["kernel"] * 6
    results = read([tmp_path / "rows.jsonl"])
    assert {(row["format"], row.get("residual_centroids")) for row in results.rows} == {
        ("w8a8", None),
        ("vptq", 4),
        ("vptq", 0),
    }


@pytest.mark.parametrize("format", ["bf16", "w4a16", "w8a8"])
def test_a_chain_is_one_row_close_to_float64(format):
    row = next(chain.measure_chain("tiny", case(format), device=CPU, samples=2, bandwidth=1.0))
    assert (
        row["chain"] == "tiny"
        and row["relative_error"] <= row["error_bound"] < 6e-2
        and row["status"] == "ok"
    )
    assert row["torch_us"] > 0 and row["in_features"] is None


@pytest.mark.parametrize("batch", [1, 3])
def test_attention_is_close_to_float64_at_any_context(batch):
    for context in (16, 37):
        row = next(
            attention.measure_attention(
                "tiny",
                batch=batch,
                context=context,
                dtype=torch.float32,
                device=CPU,
                samples=1,
                bandwidth=1.0,
            )
        )
        assert row["relative_error"] < 1e-5 and (row["rows"], row["context"]) == (batch, context)


def test_chain_and_attention_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    common = ("--samples", 1, "--device", "cpu", "-o", out)
    assert flyweight("--chain", "tiny", "--format", "bf16,w8a8", *common, capsys=capsys)[0] == 0
    code, text, _ = flyweight(
        "--format",
        "attention",
        "--shapes",
        "tiny",
        "--rows",
        "1,2",
        "--contexts",
        "16,32",
        *common,
        capsys=capsys,
    )
    assert code == 0 and "context" in text
    rows = read([out]).rows
    assert [row.get("chain") for row in rows] == ["tiny"] * 2 + [None] * 4
    assert [(row["rows"], row["context"]) for row in rows[2:]] == [
        (1, 16),
        (1, 32),
        (2, 16),
        (2, 32),
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--format", "w4a8"), "did you mean"),
        (("--rows", "0"), "--rows 0"),
        (("--codebooks", "a+b"), "MAIN+RESIDUAL"),
        (("--layout", "seeds"), "did you mean 'seed'"),
        (("--dtype", "f16"), "did you mean"),
        (("--chain", "qwen9"), "preset"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, says, capsys):
    code, _, err = flyweight(*arguments, "--device", "cpu", "--samples", 1, capsys=capsys)
    assert code == 2 and says in err


@pytest.mark.parametrize("kind", [RuntimeError, kernels.FlyweightError, AttributeError])
def test_a_kernel_that_fails_is_a_row_with_its_reason_and_stops_no_other(kind, monkeypatch, capsys):
    def refuse(*_, **__):
        raise kind("no such instruction")

    monkeypatch.setattr(kernels.dispatch, "prepare", refuse)
    code, out, _ = flyweight("--shapes", "64x48", "--device", "cpu", "--json", capsys=capsys)
    row = json.loads(out.splitlines()[1])
    assert code == 0 and row["status"] == "failed" and "no such instruction" in row["reason"]


@needs_exact_sums
def test_int8_rows_are_quantized_inside_the_peer():
    tensor = Int8Channel.random((48, 64), dtype=torch.float32)
    x = torch.randn(2, 64)
    assert (
        kernels.relative_error(
            peers.torch_int8(tensor, rows=2, dtype=torch.float32)(x), tensor.matmul_reference(x)
        )
        < 1e-5
    )


@pytest.mark.parametrize("seconds, launches", [(1e-4, 6), (0.005, 4), (0.5, 2)])
def test_a_sample_of_long_launches_is_a_few_of_them(seconds, launches, monkeypatch):
    now, copies = [0.0], []
    monkeypatch.setattr(replay, "clock", lambda: now[0])

    def launch(copy):
        copies.append(copy)
        now[0] += seconds

    sample = replay.sampler(replay.Work(launch, 6), torch.device("cpu"))
    copies.clear()
    assert sample() == pytest.approx(1e6 * seconds) and copies == list(range(launches))


def test_heat_maps_show_our_kernels_whatever_they_are_named_and_no_peers():
    assert set(figures.PEERS) == set(peers.PEERS)
    row = {
        "format": "w8a8",
        "in_features": 64,
        "out_features": 32,
        "rows": 8,
        "us": 1.0,
        "torch_us": 2.0,
        "device_name": "a CPU",
    }
    ours, theirs = (
        row | {"kernel": "torch.int_mm", "ratio": 0.5},
        row | {"kernel": "torch._int_mm", "ratio": 3.0},
    )
    (figure,) = figures.heat_maps([ours, theirs])
    assert [
        (series.name, [(point.x, point.y) for point in series.points]) for series in figure.series
    ] == [("w8a8, 64 → 32", [("8", 0.5)])]


def test_a_gpu_that_a_kernel_has_stopped_ends_the_command_behind_its_row(tmp_path, monkeypatch):
    """CUDA's errors stay with the process: what comes after them fails as well."""

    def dead():
        raise RuntimeError("CUDA error: unspecified launch failure\nmore of it")

    def fails(**_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "empty_cache", dead)
    environment = {"bench": "environment", "id": "x", "copy_gb_s": 1.0, "status": "ok"}
    monkeypatch.setattr("flyweight.bench.rows.environment_row", lambda device: environment)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(
        ResultError, match=r"takes no more work .*unspecified launch failure.*the same command"
    ):
        bench_kernel.run(
            [({"format": "bf16", "rows": n}, fails) for n in (1, 2)],
            torch.device("cuda"),
            samples=1,
            out=out,
        )
    assert [row["status"] for row in map(json.loads, out.read_text().splitlines())] == [
        "ok",
        "failed",
    ]
