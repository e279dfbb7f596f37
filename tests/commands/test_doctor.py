"""`flyweight doctor` on a CPU, and on GPUs that are not here."""

import json
import tomllib
from types import SimpleNamespace

import clean_process
import pytest
import torch

from flyweight import device as devices
from flyweight import gpu
from flyweight.bench import doctor as examination
from flyweight.bench import tune
from flyweight.commands import doctor as command
from flyweight.errors import OptionError
from flyweight.gpu import GPUS, by_name
from flyweight.kernels import tuned
from flyweight.kernels.native import library

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Seconds, not half a minute."""
    library.why_not()  # loaded from the usual cache: for an empty one they would be compiled again
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(examination, "SPEED_SHAPE", {"cpu": (64, 64)})
    monkeypatch.setattr(examination, "TABLE_SHAPE", {"cpu": (64, 64)})
    monkeypatch.setattr(examination, "RAGGED", (72, 192))
    monkeypatch.setattr(examination, "RAGGED_ROWS", (1, 5))
    monkeypatch.setattr(
        examination,
        "FORMATS",
        {name: examination.FORMATS[name] for name in ("bf16", "w4a16", "w8a8")},
    )
    monkeypatch.setattr(examination, "copy_bandwidth", lambda device: 10.0)
    monkeypatch.setattr(examination, "product_rate", lambda name, device: 7.5)
    monkeypatch.setattr(examination, "native_state", lambda: "no compiler")


def test_a_healthy_machine_passes_every_check(small):
    found = examination.examine(CPU)
    assert found["ok"] and all(check["ok"] for check in found["checks"])
    assert [one["rows"] for one in found["kernels"]["w4a16"]] == [1, 8, 64, 2048]
    assert all(one["kernel"] and one["why"] for row in found["kernels"].values() for one in row)
    assert found["speed"]["int4"] == {"gb_s": 7.5, "share": 0.75}
    assert set(found["numerics"]) == {"bf16", "w4a16", "w8a8"}
    assert json.loads(json.dumps(found)) == found, "what a bug report can hold"


def test_the_state_of_the_kernels_in_c_names_their_instructions(monkeypatch):
    library = SimpleNamespace(instructions=lambda: b"sve 256 bits, neon i8mm")
    monkeypatch.setattr("flyweight.kernels.native.library.why_not", lambda: None)
    monkeypatch.setattr("flyweight.kernels.native.library.load", lambda: library)
    assert examination.native_state() == "works (sve 256 bits, neon i8mm)"


def test_a_kernel_that_computes_something_else_fails_its_check(small, monkeypatch):
    prepare = examination.dispatch.prepare

    def wrong(tensor, *, dtype):
        linear = prepare(tensor, dtype=dtype)
        return (lambda x: linear(x) * 1.5) if tensor.kind == "int" else linear

    monkeypatch.setattr(examination, "dispatched", lambda tensor, dtype: wrong(tensor, dtype=dtype))
    found = examination.examine(CPU)
    assert not found["ok"]
    (failed,) = [check for check in found["checks"] if not check["ok"]]
    assert (
        failed["name"] == "numerics of w4a16"
        and "5.0e-01 from float64: please report this" in failed["detail"]
    )
    assert any(line.startswith("FAILED numerics of w4a16") for line in command.screen(found))


def test_a_kernel_that_raises_fails_its_check(small, monkeypatch):
    def broken(tensor, dtype):
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    monkeypatch.setattr(examination, "dispatched", broken)
    found = examination.examine(CPU)
    details = [check["detail"] for check in found["checks"] if not check["ok"]]
    assert details == ["CUDA error: an illegal memory access: please report this"] * 3


def test_a_full_disk_is_a_failed_check_that_says_what_to_do(small, monkeypatch):
    monkeypatch.setattr(examination, "_free_bytes", lambda: 1000)
    found = examination.examine(CPU)
    assert not found["ok"] and "kernels" not in found
    assert "FLYWEIGHT_CACHE" in "\n".join(command.screen(found))


def test_the_screen_has_the_table_the_reasons_and_the_shares(small):
    lines = command.screen(examination.examine(CPU))
    text = "\n".join(lines)
    assert len(lines) < 45, "one screen"
    assert "1 row " in text and "2,048 rows" in text and "torch " + torch.__version__ in text
    assert "int4 at one row 7.5 GB/s (75%)" in text and "4 of 4 checks held" in text


@pytest.mark.parametrize(("name", "small_batch"), [("sm_86:28", "gemm_mma")])
def test_kernels_of_a_gpu_that_is_not_here_are_planned(name, small_batch):
    with clean_process.pool() as pool:
        row = pool.submit(planned_int4, name).result()
    assert row[0]["kernel"] == "gemv" and row[1]["kernel"] == small_batch
    assert [one["rows"] for one in row] == [1, 8, 64, 2048] and all(one["why"] for one in row)


def planned_int4(name):
    from flyweight.kernels.dry_run import DEVICE, dry_run

    with dry_run(by_name(name)):
        return examination.planned_row("w4a16", (4096, 4096), DEVICE, torch.bfloat16)


@pytest.mark.parametrize("count", ["0", "many", ""])
def test_a_number_of_processors_is_a_number(count):
    with pytest.raises(OptionError, match=f"sm_89:{count}: .* how many SMs .* sm_89:24"):
        by_name(f"sm_89:{count}")


def test_an_unknown_architecture_is_refused():
    with pytest.raises(OptionError, match="unknown architecture 'sm_81'"):
        command.show_planned("sm_81", as_json=False)


# -- unsupported GPUs ---------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0"])
def test_a_gpu_before_ampere_is_told_what_is_needed(monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "capability", lambda index: (7, 5))
    with pytest.raises(OptionError, match=r"capability 7\.5: .* Ampere .*--device cpu works"):
        devices.pick_device(asked)
    monkeypatch.setattr(devices, "capability", lambda index: (8, 0))
    assert devices.pick_device(asked).type == "cuda"


def test_an_amd_gpu_is_told_what_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.2", raising=False)
    with pytest.raises(OptionError, match=r"an AMD GPU, .*--device cpu works"):
        devices.pick_device(None)


# -- tuning -------------------------------------------------------------------------------


LARGE = {
    1: {"gemv": 10.0, "gemm_small": 20.0, "cublas": 90.0},
    5: {"gemv": 15.0, "gemm_small": 14.9, "cublas": 90.0},
    8: {"gemv": 30.0, "gemm_small": 15.0, "cublas": 90.0},
    64: {"gemm_small": 80.0, "cublas": 60.0},
}
SMALL = {
    1: {"gemv": 3.0, "gemm_small": 6.0},
    5: {"gemv": 4.0, "gemm_small": 7.0},
    8: {"gemv": 5.0, "gemm_small": 8.0},
    64: {"gemm_small": 20.0, "cublas": 10.0},
}


def test_a_route_begins_where_a_kernel_is_clearly_faster():
    assert [(rows, kernel) for rows, kernel, _ in tune.borders(LARGE)] == [
        (1, "gemv"),
        (8, "gemm_small"),
        (64, "cublas"),
    ]


def test_small_linears_have_routes_where_they_differ():
    routes = tune.routes_of(LARGE, SMALL)
    assert [(one["rows"], one["kernel"], one.get("small", False)) for one in routes] == [
        (1, "gemv", False),
        (8, "gemm_small", False),
        (8, "gemv", True),
        (64, "cublas", False),
    ]
    for rows in LARGE:
        assert taken(routes, rows, small=False) == tune.kernel_at(tune.borders(LARGE), rows)
        assert taken(routes, rows, small=True) == tune.kernel_at(tune.borders(SMALL), rows)


def taken(routes, rows, *, small):
    """As choose.route reads them."""
    return next(
        one["kernel"]
        for one in reversed(routes)
        if rows >= one["rows"] and (small or not one.get("small"))
    )


@pytest.fixture
def l4():
    return gpu.Gpu(8, 9, 58, 101376, 102400)


def test_what_was_measured_is_written_read_and_used(monkeypatch, tmp_path, l4):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    tuned.forget()
    assert not tuned.is_measured(l4)
    monkeypatch.setattr(gpu, "of", lambda device: l4)
    monkeypatch.setattr(tune, "device_name", lambda device: 'NVIDIA "L4"')
    monkeypatch.setattr(
        tune, "measure_format", lambda name, device, counts: ("int4", tune.routes_of(LARGE, SMALL))
    )
    path = tune.tune(torch.device("cuda", 0), formats=["w4a16"])
    data = tomllib.loads(path.read_text())
    assert (
        data["gpu"]["capability"] == [8, 9]
        and data["gpu"]["processors"] == 58
        and data["gpu"]["name"] == 'NVIDIA "L4"'
    )
    assert data["formats"]["int4"]["source"] == "flyweight doctor --tune"
    assert tuned.is_measured(l4)
    assert [one.kernel for one in tuned.of(l4).formats["int4"].routes if not one.small] == [
        "gemv",
        "gemm_small",
        "cublas",
    ]
    base = tuned.read(tuned.FOLDER / "sm_80.toml")
    assert tuned.of(l4).formats["plain"].routes == base.formats["plain"].routes, (
        "what was not measured stays borrowed"
    )
    assert tuned.of(GPUS["sm_89"]).name == base.name, "another card of that kind is not that card"
    assert examination.tuned_state(l4).startswith("measured")
    monkeypatch.undo()
    tuned.forget()


def test_a_file_of_another_version_is_left_out_and_said(monkeypatch, tmp_path, l4):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "l4.toml").write_text("[gpu]\nname = 'x'\n")
    tuned.forget()
    with pytest.warns(UserWarning, match=r"l4\.toml is not used .*doctor --tune"):
        assert tuned.of(l4).name == tuned.read(tuned.FOLDER / "sm_80.toml").name
    tuned.forget()


def test_tuning_needs_a_gpu():
    with pytest.raises(OptionError, match="there is none here"):
        command.run_tuning(CPU, as_json=False)
