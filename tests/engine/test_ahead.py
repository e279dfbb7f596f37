"""Kernels found without a GPU are those that the engine asks for when it runs."""

import json
from types import SimpleNamespace

import clean_process
import dry_runs
import pytest
import torch

from flyweight import cli
from flyweight.engine import ahead
from flyweight.errors import OptionError
from flyweight.gpu import GPUS
from flyweight.kernels.precompile import precompile
from flyweight.models.presets import PresetWeights, preset_config
from flyweight.models.random_folder import write_preset


def in_a_process(function, *arguments):
    with clean_process.pool() as pool:
        return pool.submit(function, *arguments).result()


@pytest.mark.parametrize(
    ("model", "files"),
    [
        (
            "preset:tiny:int4",
            {"gemv.cu", "gemv_split.cu", "batch.cu", "gemm.cu", "qkv_attention.cu", "attention.cu"},
        ),
        (
            "preset:tiny:w8a8",
            {"batch.cu", "batch_pack.cu", "gemm.cu", "pack.cu", "token.cu", "rope.cu"},
        ),
        (
            "preset:tiny:vptq",
            {
                "vptq.cu",
                "vptq_layout.cu",
                "vptq_decode.cu",
                "vptq_pack.cu",
                "vptq_rows.cu",
                "attention.cu",
            },
        ),
        ("preset:tiny-moe:int4-sym", {"route.cu", "experts.cu", "gemm.cu", "pack.cu"}),
    ],
)
def test_nothing_that_a_model_asks_for_is_missing(model, files):
    found, asked = in_a_process(dry_runs.wanted_and_asked, model)
    assert asked <= found, sorted(asked - found)[:3]
    assert files <= {one.file for one in asked}


def test_a_dry_run_knows_that_columns_are_in_order():
    assert in_a_process(dry_runs.columns_in_order, "preset:tiny:vptq") == [True, True], (
        "other kernels than those compiled ahead"
    )


def test_up_to_16_rows_of_int4_go_through_few_or_become_integers():
    found = in_a_process(dry_runs.wanted_by, "preset:qwen3-8b:int4")
    kernels = [dict(one.defines) for one in found if one.file == "few.cu"]
    first = {(one["SETS"], one["KDIM"], one["NDIM"], one["EPILOGUE"]) for one in kernels}
    assert first == {(1, 4096, 4096, 1), (1, 12288, 4096, 1), (1, 4096, 24576, 2)}, (
        "o and down of up to 8 rows, with the residual; gate/up"
    )
    products = [
        dict(one.defines)
        for one in found
        if one.file == "gemm.cu" and ("IN_PLANES", 1) in one.defines
    ]
    qkv, o, gate_up, down = (4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)
    assert {(one["TOKENS"], one["KDIM"], one["NDIM"]) for one in products} >= {
        (16, *qkv),
        (16, *o),
        (16, *down),
        (16, *gate_up),
        (32, *gate_up),
    }
    guesses = {(one.file, dict(one.defines).get("CHUNK")) for one in found}
    assert guesses >= {("qkv_attention.cu", 2), ("qkv_attention.cu", 4), ("attention.cu", 8)}, (
        "steps that check guesses"
    )


def test_a_folder_needs_what_its_preset_does(tmp_path):
    # that it is 2:4 only its values tell
    folder = write_preset("preset:tiny:sparse-w8a8", tmp_path / "model")
    found = in_a_process(dry_runs.wanted_by, "preset:tiny:sparse-w8a8")
    parts = [in_a_process(dry_runs.wanted_by, str(folder), part, 2) for part in range(2)]
    assert found == parts[0] | parts[1] and found != parts[1]
    assert any(("SPARSE", 1) in one.defines for one in found)


def test_steps_and_passes_that_are_named_need_fewer_kernels():
    sizes, found = in_a_process(dry_runs.wanted_by_some, "preset:tiny:int4")
    everything = in_a_process(dry_runs.wanted_by, "preset:tiny:int4")
    assert sizes == [64] and ahead.whole_pass(2000) == 2000, (
        "beyond the captured sizes nothing is padded"
    )
    assert found < everything and len(found) < len(everything) / 2
    assert ahead.padded_steps([1, 2, 4, 8], (5, 8, 1)) == [1, 8]


def test_layers_of_one_kind_are_asked_once():
    config = preset_config("tiny") | dict(
        num_hidden_layers=6,
        sliding_window=512,
        use_sliding_window=True,
        layer_types=["full_attention"] * 2 + ["sliding_attention"] * 4,
    )
    assert ahead.layers_of(PresetWeights(config)) == [0, 2]
    config = preset_config("tiny-moe") | dict(num_hidden_layers=4, mlp_only_layers=[0])
    assert ahead.layers_of(PresetWeights(config)) == [0, 1]


def test_numbers_of_rows_end_at_the_most_that_there_are():
    assert ahead.row_counts(20, GPUS["sm_90a"]) == list(range(1, 18)) + [20]
    counts = ahead.row_counts(16640, GPUS["sm_90a"])
    assert {1, 16, 64, 256, 1023, 1024, 4095, 4096, 16640} <= set(counts) and counts[-1] == 16640


def test_kernels_are_compiled_once(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    heard = []
    done = precompile(
        [dry_runs.two_kernels], "sm_90a", listen=lambda *news: heard.append(news), workers=1
    )
    assert (done.kernels, done.fresh, done.folder) == (2, 2, tmp_path / "kernels")
    assert len(list(done.folder.glob("token-sm_90a-*.cubin"))) == 2
    assert heard == [
        ("dry runs", 0, 1),
        ("dry runs", 1, 1),
        ("kernels", 0, 2),
        ("kernels", 1, 2),
        ("kernels", 2, 2),
    ]
    again = precompile([dry_runs.two_kernels], "sm_90a", listen=lambda *news: None, workers=1)
    assert (again.kernels, again.fresh) == (2, 0)


def test_the_command_says_how_many_and_where(monkeypatch, tmp_path, capsys):
    from flyweight.kernels import precompile as module

    def instead(runs, architecture, **options):
        assert [run.args[0] for run in runs] == ["preset:tiny:int4"] * 3 + ["preset:tiny:w8a8"] * 3
        assert [run.keywords for run in runs[:3]] == [
            {"part": part, "parts": 3} for part in range(3)
        ]
        target = runs[0].args[1]
        assert (
            target.gpu.multi_processor_count,
            target.sequences,
            target.tokens,
            target.dtype,
        ) == (114, 64, 16640, "float16")
        assert target.head == "int8"
        return module.Compiled(86, 80, 12.34, tmp_path)

    monkeypatch.setattr(module, "precompile", instead)
    words = [
        "compile",
        "preset:tiny:int4",
        "preset:tiny:w8a8",
        "--arch",
        "sm_90a",
        "--processors",
        "114",
        "--max-num-seqs",
        "64",
    ]
    with pytest.raises(SystemExit):
        cli.main([*words, "--workers", "6", "--dtype", "float16", "--head", "int8", "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "kernels": 86,
        "compiled": 80,
        "seconds": 12.3,
        "arch": "sm_90a",
        "folder": str(tmp_path),
    }


def test_an_unknown_architecture_is_named():
    from flyweight.commands.compile import pick_gpu

    with pytest.raises(OptionError, match="unknown architecture 'sm_90'; did you mean 'sm_90a'"):
        pick_gpu("sm_90", None)
    assert (
        pick_gpu("sm_89", 128)[0].multi_processor_count
        == 128
        != GPUS["sm_89"].multi_processor_count
    )
    assert pick_gpu("sm_90a:78", None) == (GPUS["sm_90a:78"], "sm_90a"), (
        "an H20 is compiled for as an H100 is"
    )


def test_where_another_gpu_is_imitated_its_ptx_is_compiled_ahead_without_any_gpu(monkeypatch):
    from flyweight import gpu
    from flyweight.commands.compile import pick_gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "_imitated", gpu.by_name("sm_80:132"))
    found, architecture = pick_gpu(None, None)
    assert (found.processors, architecture) == (132, "compute_80")
    assert pick_gpu("sm_89", None)[1] == "sm_89", "a GPU that is named is meant"


def test_biases_of_zeros_and_tied_heads_count_as_none():
    values = {"q.bias": torch.zeros(4), "k.bias": torch.ones(4), "lm_head.weight": torch.ones(4)}
    checkpoint = SimpleNamespace(
        config=preset_config("tiny"), has=values.__contains__, tensor=values.__getitem__
    )
    assert [name for name in (*values, "o.bias") if ahead.Read(checkpoint).has(name)] == ["k.bias"]
