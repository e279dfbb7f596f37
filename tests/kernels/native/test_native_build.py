"""Sources → library: which compiler, which instructions, and what becomes of the result. check.c
runs the kernels where Python does not: without vectors, and for other processors under an
emulator.
"""

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from flyweight.kernels.native import compiler, library
from flyweight.kernels.native.compiler import Compiler, processor_flags

CHECK = Path(__file__).with_name("check.c")
needs_compiler = pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")


def compile_check(folder: Path, command: list[str], flags: list[str]) -> Path:
    program = folder / "check"
    kinds = ("integer", "half", "float", "blocks", "trellis", "panel")
    names = ("team", "input", "pack", "product", *(f"product_{kind}" for kind in kinds))
    sources = [str(CHECK), *(f"{library.SOURCES}/{name}.c" for name in names)]
    options = [
        "-std=gnu11",
        "-O0",  # optimizing would take longer than running
        "-Werror",
        "-pthread",
        f"-I{library.SOURCES}",
        *flags,
    ]
    subprocess.run(
        [*command, *options, *sources, "-o", str(program), "-lm"], check=True, capture_output=True
    )
    return program


@needs_compiler
def test_products_are_right_without_any_vectors(tmp_path: Path):
    found = compiler.find_compiler()
    assert found is not None
    program = compile_check(tmp_path, [*found.command], [])
    answer = subprocess.run([program], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, "plain C\n")


@needs_compiler
def test_every_source_compiles_without_a_warning():
    """What one compiler warns of, a newer one refuses: a pointer of another type, since gcc 14."""
    found = compiler.find_compiler()
    assert found is not None
    if found.is_zig:
        pytest.skip("zig does not stop before it makes code")
    sources = [str(path) for path in sorted(library.SOURCES.glob("*.c"))]
    command = [*found.command, *compiler.COMMON, "-fsyntax-only", "-Werror", *sources]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def other_levels_of_this_processor() -> list[str]:
    """The flags of those rows of the tables that fit this processor, but for the library's own."""
    table = {"aarch64": compiler.ARM, "x86_64": compiler.X86}.get(platform.machine(), ())
    return [flags for needed, flags in table if needed <= compiler.cpu_features()][1:]


@needs_compiler
@pytest.mark.parametrize("flags", other_levels_of_this_processor())
def test_products_are_right_with_every_smaller_instruction_set(tmp_path: Path, flags: str):
    found = compiler.find_compiler()
    assert found is not None
    spelled = [compiler.ZIG.get(flag, flag) if found.is_zig else flag for flag in flags.split()]
    program = compile_check(tmp_path, [*found.command], spelled)
    answer = subprocess.run([program], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout == "plain C\n") == (0, False)


def x86_compiler() -> list[str] | None:
    """One that makes programs for x86 on another processor."""
    if shutil.which("x86_64-linux-gnu-gcc"):
        return ["x86_64-linux-gnu-gcc"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-musl"]
    return None


@pytest.mark.skipif(
    platform.machine() == "x86_64" or not x86_compiler() or not shutil.which("qemu-x86_64"),
    reason="needs qemu-user and ziglang or gcc-x86-64-linux-gnu, to make and run code for x86",
)
def test_products_are_right_on_x86_with_avx2(tmp_path: Path):
    """The emulator knows AVX2, and none of AVX-512."""
    program = compile_check(tmp_path, x86_compiler() or [], ["-mavx2", "-mfma", "-mf16c"])
    emulator = ["qemu-x86_64", "-L", "/usr/x86_64-linux-gnu", "-cpu", "max"]
    answer = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, "avx2\n")


def arm_compiler() -> list[str] | None:
    """One that makes programs for ARM, here or on another processor."""
    if platform.machine() == "aarch64":
        return ["gcc"] if shutil.which("gcc") else None
    return ["aarch64-linux-gnu-gcc"] if shutil.which("aarch64-linux-gnu-gcc") else None


@pytest.mark.skipif(
    not arm_compiler() or not shutil.which("qemu-aarch64"),
    reason="needs qemu-user, and gcc on an ARM processor or gcc-aarch64-linux-gnu on another",
)
@pytest.mark.parametrize(
    "more, processor, name",
    [
        (set(), "neoverse-n1", "neon dotprod\n"),
        ({"i8mm"}, "max", "neon i8mm\n"),
        ({"i8mm", "sve", compiler.WIDE_SVE}, "max,sve-max-vq=2", "sve 256 bits, neon i8mm\n"),
    ],
    ids=["dotprod", "i8mm", "SVE of 256 bits"],
)
def test_products_are_right_on_every_arm_processor(tmp_path: Path, more, processor, name):
    flags = processor_flags("aarch64", frozenset({"asimddp", "asimdhp"} | more))
    program = compile_check(tmp_path, arm_compiler() or [], flags)
    emulator = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", processor]
    answer = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, name)


@pytest.mark.parametrize(
    "features, length, expected",
    [({"asimd"}, 32, 0), ({"sve"}, 32, 256), ({"sve"}, 16, 128), ({"sve"}, -1, 0)],
)
def test_sve_counts_by_the_length_of_its_vectors(monkeypatch, features, length, expected):
    """The kernel's answer has flags above the length, and is negative where it knows no SVE."""
    answer = length if length < 0 else length | 1 << 17
    prctl = mock.Mock(return_value=answer)
    monkeypatch.setattr(compiler.ctypes, "CDLL", lambda name: mock.Mock(prctl=prctl))
    assert compiler.sve_bits(features) == expected


@pytest.mark.parametrize(
    "machine, features, expected",
    [
        (
            "aarch64",
            {"asimddp", "asimdhp", "i8mm"},
            ["-march=armv8.2-a+dotprod+fp16+i8mm"],
        ),
        ("aarch64", {"asimd", "asimddp", "asimdhp", "fp"}, ["-march=armv8.2-a+dotprod+fp16"]),
        ("aarch64", {"asimd", "fp"}, []),
        (
            "aarch64",
            {"asimddp", "asimdhp", "i8mm", "sve"},
            ["-march=armv8.2-a+dotprod+fp16+i8mm"],
        ),
        (
            "aarch64",
            {"asimddp", "asimdhp", "i8mm", "sve", compiler.WIDE_SVE},
            ["-march=armv8.2-a+dotprod+fp16+i8mm+sve", "-msve-vector-bits=256"],
        ),
        ("x86_64", {"avx2", "fma", "f16c"}, ["-mavx2", "-mfma", "-mf16c"]),
        ("x86_64", {"avx2", "fma", "f16c", "avx_vnni"}, ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"]),
        ("x86_64", {"avx2"}, []),
        ("riscv64", {"v"}, []),
    ],
)
def test_flags_name_what_the_processor_has(machine: str, features: set[str], expected: list[str]):
    assert processor_flags(machine, frozenset(features)) == expected


def test_zig_is_told_in_its_own_words():
    zig = Compiler(("python", "-m", "ziglang", "cc"), "clang 22")
    assert zig.is_zig and not Compiler(("gcc",), "gcc 12").is_zig
    assert processor_flags("aarch64", frozenset({"asimddp", "asimdhp"}), zig=True) == [
        "-mcpu=generic+v8_2a+dotprod+fullfp16"
    ]


def test_vnni_is_used_where_all_of_it_is_there():
    most = frozenset({"avx2", "fma", "f16c", "avx512vl", "avx512bw", "avx512_vnni"})
    assert "-mavx512vnni" in processor_flags("x86_64", most)
    assert "-mavx512vnni" not in processor_flags("x86_64", most - {"avx512vl"})


def test_another_compiler_or_processor_is_another_library():
    gcc, clang = Compiler(("gcc",), "gcc 12"), Compiler(("clang",), "clang 19")
    paths = {
        library.library_path(gcc, []),
        library.library_path(clang, []),
        library.library_path(gcc, ["-mavx2"]),
    }
    assert len(paths) == 3


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    with pytest.raises(library.NativeError, match=r"pip install 'flyweight\[cpu\]'") as caught:
        library.build()
    assert "\n" not in str(caught.value)


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(
        library,
        "find_compiler",
        lambda: Compiler((sys.executable, "-c", "raise SystemExit('no room')"), "none"),
    )
    with pytest.raises(library.NativeError, match="no room"):
        library.build()
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_the_second_process_finds_the_library_of_the_first(monkeypatch):
    made = library.build()

    def forbidden(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(library, "compile_library", forbidden)
    assert library.build() == made


@needs_compiler
@pytest.mark.skipif(
    platform.machine() not in ("aarch64", "x86_64"), reason="others have no vectors of their own"
)
def test_the_kernels_use_the_vectors_of_this_processor():
    features = compiler.cpu_features()
    expected = (
        "plain C" if not processor_flags(platform.machine(), features) else ("neon", "sve", "avx")
    )
    assert library.load().instructions().decode().startswith(expected)
