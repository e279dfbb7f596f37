"""Another GPU's code on the GPU that is here: what is compiled, what is refused, what is said. No
GPU needed.
"""

import pytest
import torch

from flyweight import gpu, machine
from flyweight.errors import OptionError
from flyweight.gpu import GPUS, Gpu
from flyweight.kernels import compiler, imitation, jit, library

H200 = GPUS["sm_90a"]
ROPE = dict(
    FP16=0,
    HEADS=32,
    KV_HEADS=8,
    HEAD_DIM=128,
    ROTARY=128,
    PAGE=16,
    QK_NORM=1,
    WINDOW=0,
    WARPS=8,
    SHORTEST=64,
)


@pytest.fixture
def on_an_h200(monkeypatch):
    """A process on an H200 that begins without imitating anything, and ends so."""
    monkeypatch.delenv(gpu.PRETEND, raising=False)
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "none yet")
    monkeypatch.setattr(gpu, "real", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu.imitate(None)
    yield monkeypatch
    gpu.imitate(None)


@pytest.mark.parametrize(
    ("name", "target"), [("sm_80", "compute_80"), ("sm_86", "compute_86"), ("sm_89", "compute_89")]
)
def test_the_variable_gives_the_other_gpus_limits_and_its_virtual_architecture(
    on_an_h200, name, target
):
    on_an_h200.setenv(gpu.PRETEND, name)
    found = gpu.of(0)
    assert (found.major, found.minor) == (GPUS[name].major, GPUS[name].minor)
    assert found.shared_memory_per_block_optin == GPUS[name].shared_memory_per_block_optin
    assert found.processors == min(GPUS[name].processors, H200.processors)
    assert not found.has_warpgroups and not found.has_dependent_launch
    assert jit.current_architecture() == target
    assert not gpu.is_pretended(), "what is planned runs"


def test_triton_is_told(on_an_h200, monkeypatch):
    import os

    monkeypatch.setenv(gpu.PRETEND, "sm_86")
    gpu.of(0)
    assert os.environ["TRITON_OVERRIDE_ARCH"] == "sm86"


def test_without_it_nothing_changes(on_an_h200):
    assert gpu.of(0) == H200 and jit.current_architecture() == "sm_90a"


def test_fewer_processors_of_the_same_gpu_need_no_other_code(on_an_h200):
    on_an_h200.setenv(gpu.PRETEND, "sm_90a:78")
    assert gpu.of(0).processors == 78 and jit.current_architecture() == "sm_90a"


def test_any_number_of_processors_can_be_asked_for(on_an_h200):
    on_an_h200.setenv(gpu.PRETEND, "sm_89:58")  # an L4
    assert gpu.of(0).processors == 58


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sm_8", "unknown architecture"),
        ("A100", "unknown architecture"),
        ("sm_80:", "how many SMs"),
        ("sm_80:0", "how many SMs"),
    ],
)
def test_an_unknown_gpu_is_refused(on_an_h200, name, told):
    on_an_h200.setenv(gpu.PRETEND, name)
    with pytest.raises(OptionError, match=f"FLYWEIGHT_PRETEND: .*{told}"):
        gpu.of(0)


def test_a_newer_gpu_than_the_one_here_is_refused(on_an_h200):
    on_an_h200.setenv(gpu.PRETEND, "sm_120a")
    with pytest.raises(OptionError, match="cannot run the code of an sm_120a"):
        gpu.of(0)


def test_results_say_that_they_are_an_imitations(on_an_h200):
    on_an_h200.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert machine.device_name(torch.device("cuda", 0)) == "NVIDIA H200"
    on_an_h200.setenv(gpu.PRETEND, "sm_80")
    gpu.imitated()
    assert machine.device_name(torch.device("cuda", 0)) == "NVIDIA H200 as sm_80 (108 SMs)"


def test_ptx_is_of_the_virtual_architecture_and_kept_apart(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    codes = {
        arch: compiler.compile_cubin("rope.cu", ROPE, arch)
        for arch in ("compute_80", "compute_89", "sm_80")
    }
    assert library.target_of(codes["compute_80"]) == "sm_80"
    assert library.target_of(codes["compute_89"]) == "sm_89"
    assert library.target_of(codes["sm_80"]) == "cubin"
    assert sorted(path.suffix for path in (tmp_path / "kernels").iterdir()) == [
        ".cubin",
        ".ptx",
        ".ptx",
    ]
    assert compiler.compile_cubin("rope.cu", ROPE, "compute_80") == codes["compute_80"], (
        "from the cache"
    )
    with pytest.raises(compiler.KernelError, match="does not compile for compute_80"):
        compiler.compile_cubin("rope.cu", {}, "compute_80")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (dict(shared=100 << 10), "bytes of shared memory"),
        (dict(threads=1056), "threads"),
        (dict(cluster=2), "in a cluster"),
        (dict(threads=1024, registers=80), "registers"),
    ],
)
def test_a_launch_that_the_other_gpu_would_refuse_is_refused(asked, reason):
    fits = dict(name="gemv", blocks=84, threads=512, shared=99 << 10, cluster=1, registers=64)
    assert imitation.Launched(**fits).refused_by(GPUS["sm_86"]) is None
    assert reason in imitation.Launched(**fits | asked).refused_by(GPUS["sm_86"])
    assert imitation.Launched(**fits | dict(shared=100 << 10)).refused_by(GPUS["sm_80"]) is None


def test_launches_are_noted_with_what_their_code_declares(on_an_h200, monkeypatch):
    on_an_h200.setenv(gpu.PRETEND, "sm_86")
    monkeypatch.setattr(imitation, "facts", lambda kernel, device: (2048, 40))
    monkeypatch.setattr(imitation, "launches", set())
    imitation.note("gemv", 1, 0, (4, 2), 256, 1000, 1)
    assert imitation.launches == {imitation.Launched("gemv", 8, 256, 3048, 1, 40)}
    with pytest.raises(imitation.ImitationError, match="gemv asks for 103424 bytes"):
        imitation.note("gemv", 1, 0, (4, 2), 256, 99 << 10, 1)


def test_blocks_at_once_are_bound_by_threads_memory_and_registers():
    small = Gpu(8, 6, 10, 101376, 102400)
    one = imitation.Launched("x", 10, 1024, 1000, 1, 32)
    assert one.resident(small) == 10, "1,536 threads an SM"
    assert one.resident(GPUS["sm_80"]) == 2 * 108
    assert imitation.Launched("x", 10, 256, 40 << 10, 1, 32).resident(small) == 20
    assert imitation.Launched("x", 10, 256, 0, 1, 255).resident(small) == 10


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sm_75", "sm_75 is older than Ampere"),
        ("sm_70:80", "older than Ampere"),
        ("sm_91a", "did you mean 'sm_90a'"),
        ("sm_80:no", "how many SMs the GPU has, such as sm_80:"),
    ],
)
def test_a_gpu_that_is_not_known_is_refused_with_the_reason(name, told):
    with pytest.raises(OptionError, match=told):
        gpu.by_name(name)
