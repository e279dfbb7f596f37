"""A full disk: one line says what is full and how much is needed, and no half file has the final
name.
"""

import json
import shutil
import types
import warnings

import pytest
from full_disk import MESSAGE, full_after

from flyweight import saving
from flyweight.bench import profile
from flyweight.bench.rows import ResultFile, make_row
from flyweight.commands.conversation import Conversation
from flyweight.commands.report import write
from flyweight.engine.request import SamplingParams
from flyweight.errors import ResourceError
from flyweight.kernels import compiler, triton_cache
from flyweight.kernels.native import library
from flyweight.report.blocks import Figure, Paragraph, Point, Series

FULL = rf"cannot be written \({MESSAGE}: .+ has 0.00 MB free, [\d.]+ MB are needed\); make room"


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    usage = types.SimpleNamespace(total=10**9, used=10**9, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_line_says_which_disk_is_full_and_how_much_is_needed(tmp_path, monkeypatch):
    full_after(monkeypatch, tmp_path, 1000)
    with pytest.raises(ResourceError) as error:
        saving.write_text(tmp_path / "new" / "a.md", "x" * 2_000_000)
    mount = saving.mount_of(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/new/a.md: cannot be written ({MESSAGE}: {mount} has 0.00 MB "
        "free, 2.00 MB are needed); make room, or choose another place"
    )
    assert names(tmp_path) == []


def test_what_was_there_stays_as_it_was_and_is_replaced_once_there_is_room(tmp_path, monkeypatch):
    path = tmp_path / "a.md"
    path.write_text("before")
    path.chmod(0o640)
    disk = full_after(monkeypatch, tmp_path, 10)
    with pytest.raises(ResourceError):
        saving.write_text(path, "x" * 100)
    assert path.read_text() == "before" and names(tmp_path) == ["a.md"]
    disk.room = 1000
    saving.write_text(path, "x" * 100)
    assert path.read_text() == "x" * 100 and names(tmp_path) == ["a.md"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.md").write_text("before")
    (tmp_path / "link.md").symlink_to("real.md")
    saving.write_text(tmp_path / "link.md", "after")
    assert (tmp_path / "link.md").is_symlink() and (tmp_path / "real.md").read_text() == "after"


def test_another_reason_is_told_as_it_is(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ResourceError,
        match=r"cannot be written \(Not a directory\)|cannot be written \(File exists\)",
    ):
        saving.write_text(tmp_path / "file" / "a.md", "x")


@pytest.mark.parametrize("ending", [".md", ".rst", ".html"])
def test_a_report_is_whole_or_not_there(tmp_path, monkeypatch, ending):
    full_after(monkeypatch, tmp_path, 500)
    with pytest.raises(ResourceError, match=FULL):
        write(
            tmp_path / f"report{ending}",
            [Paragraph("word " * 4000)],
            title="t",
            draw=False,
            pictures="png",
        )
    assert names(tmp_path) == []


def test_a_picture_is_whole_or_not_there(tmp_path, monkeypatch):
    plot = pytest.importorskip("flyweight.report.plot")
    pytest.importorskip("matplotlib")
    figure = Figure(
        "bars", "Title", "", "tok/s", (Series("a", (Point("x", 1.0), Point("y", 2.0))),)
    )
    assert plot.draw(figure, tmp_path / "first").exists()
    full_after(monkeypatch, tmp_path, 500)
    with pytest.raises(ResourceError, match=MESSAGE):
        plot.draw(figure, tmp_path / "second")
    assert names(tmp_path) == ["title.png"]


def test_a_saved_chat_keeps_what_was_saved_before(tmp_path, monkeypatch):
    path = tmp_path / "chat.json"
    chat = Conversation(SamplingParams())
    chat.turns = [{"role": "user", "content": "Hello"}]
    chat.do_save(str(path))
    saved = path.read_text()
    chat.turns = [{"role": "user", "content": "x" * 5000}]
    full_after(monkeypatch, tmp_path, 1000)
    with pytest.raises(ResourceError, match=MESSAGE):
        chat.do_save(str(path))
    assert path.read_text() == saved and names(tmp_path) == ["chat.json"]


def recorded(text):
    """A profile whose trace torch writes, without a word where the disk is full."""

    def export(path):
        import gzip

        with gzip.open(path, "wb") as stream:
            stream.write(text)

    return types.SimpleNamespace(export_chrome_trace=export)


def test_a_trace_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "decode.trace.json.gz"
    profile.save_trace(recorded(b'{"traceEvents": []}\n'), path)
    kept = path.read_bytes()
    with pytest.raises(ResourceError, match=r"cut off: .* is full.*make room"):
        profile.save_trace(recorded(b'{"traceEvents": [{"name": "gem'), path)
    full_after(monkeypatch, tmp_path, 5)
    with pytest.raises(ResourceError, match=MESSAGE):
        profile.save_trace(recorded(b'{"traceEvents": []}\n'), path)
    assert path.read_bytes() == kept and names(tmp_path) == [path.name]


def test_result_rows_before_a_full_disk_stay_and_no_half_row_follows(tmp_path, monkeypatch):
    file = ResultFile(tmp_path / "result.jsonl")
    environment = make_row("environment", "e", id="e", device=None)
    row = make_row("quantize", "e", scheme="int4", seconds=1.0)
    file.append([environment, row])
    before = file.path.read_text()
    disk = full_after(monkeypatch, tmp_path, 40)
    with pytest.raises(ResourceError, match=MESSAGE):
        file.append([make_row("quantize", "e", scheme="int8", seconds=2.0)])
    assert file.path.read_text() == before and file.rows == [row]
    disk.room = 10_000
    file.append([make_row("quantize", "e", scheme="int8", seconds=2.0)])
    assert [json.loads(line).get("scheme") for line in file.path.read_text().splitlines()] == [
        None,
        "int4",
        "int8",
    ]


def test_a_compiled_kernel_runs_though_the_cache_has_no_room(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(
        compiler, "cubin_path", lambda *_: compiler.cache_folder() / "gemv-sm_80-0.cubin"
    )
    monkeypatch.setattr(compiler, "_to_cubin", lambda *_: b"code" * 1000)
    monkeypatch.setattr(compiler, "_unkept", set())
    disk = full_after(monkeypatch, tmp_path, 100)
    with pytest.warns(
        UserWarning, match=rf"cannot be kept there \({MESSAGE}: .*set FLYWEIGHT_CACHE"
    ):
        assert compiler.compile_cubin("gemv.cu", {}, "sm_80") == b"code" * 1000
    with warnings.catch_warnings():  # told once
        warnings.simplefilter("error")
        assert compiler.compile_cubin("gemv.cu", {}, "sm_80") == b"code" * 1000
    assert names(tmp_path) == []
    disk.room = 100_000
    compiler.compile_cubin("gemv.cu", {}, "sm_80")
    assert (compiler.cache_folder() / "gemv-sm_80-0.cubin").read_bytes() == b"code" * 1000


@pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")
@pytest.mark.parametrize(
    "error",
    [
        library.NativeError(f"the native kernels do not compile:\nfatal error: {MESSAGE}"),
        OSError(30, "Read-only file system"),
    ],
)
def test_the_cpus_kernels_are_built_elsewhere_where_the_cache_has_no_room(
    tmp_path, monkeypatch, error
):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "cache"))
    places = []

    def compiled(command, flags, path):
        places.append(path)
        if path.is_relative_to(tmp_path):
            raise error
        path.write_bytes(b"library")

    monkeypatch.setattr(library, "compile_library", compiled)
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept there"):
        made = library.build()
    assert made == places[1] and made.read_bytes() == b"library" and made.name == places[0].name


def test_kernels_that_do_not_compile_are_not_tried_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(
        library,
        "find_compiler",
        lambda: types.SimpleNamespace(version="1", command=("cc",), is_zig=False),
    )
    tried = []

    def wrong(command, flags, path):
        tried.append(path)
        raise library.NativeError("the native kernels do not compile: expected ';'")

    monkeypatch.setattr(library, "compile_library", wrong)
    with pytest.raises(library.NativeError, match="expected"):
        library.build()
    assert len(tried) == 1


def test_a_quota_is_no_matter_of_free_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: types.SimpleNamespace(free=10**9))
    assert (
        saving.reason(OSError(122, "Disk quota exceeded"), tmp_path, needed=10)
        == "Disk quota exceeded"
    )


@pytest.fixture
def disks(tmp_path, monkeypatch):
    """Triton's own folder, on a disk of `free["usual"]` bytes, and another place with room."""
    usual, other = tmp_path / "usual", tmp_path / "other"
    other.mkdir()
    free = {"usual": 0}

    def usage(place):
        return types.SimpleNamespace(
            free=free["usual"] if usual in [place, *place.parents] else 10**9
        )

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(usual))
    monkeypatch.setattr("tempfile.tempdir", str(other))
    triton_cache.ensure_room.cache_clear()
    yield types.SimpleNamespace(usual=usual, other=other, free=free)
    triton_cache.ensure_room.cache_clear()


def test_triton_compiles_elsewhere_where_its_cache_has_no_room(disks):
    with pytest.warns(
        UserWarning, match=r"usual: compiled kernels cannot be kept.*set TRITON_CACHE_DIR"
    ):
        triton_cache.ensure_room()
    assert triton_cache.folder().is_relative_to(disks.other) and triton_cache.folder().is_dir()


def test_triton_keeps_its_cache_where_there_is_room(disks):
    disks.free["usual"] = 10**9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        triton_cache.ensure_room()
    assert triton_cache.folder() == disks.usual and not list(disks.other.iterdir())
