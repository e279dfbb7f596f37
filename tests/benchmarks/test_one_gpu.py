"""Packages for one kind of GPU: code of others is gone, everything else as it was."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/workshop"))
import one_gpu


def fat_binary(*codes):
    """(kind, architecture, content) → a container as a compiler puts it into a library."""
    body = b""
    for kind, architecture, content in codes:
        body += (
            one_gpu.ENTRY.pack(kind, 0x101, 64, len(content), 0, 0, architecture).ljust(64, b"\0")
            + content
        )
    return one_gpu.CONTAINER.pack(0xBA55ED50, 1, 16, len(body)) + body


PTX, CODE = one_gpu.PTX, one_gpu.CODE


@pytest.mark.parametrize(
    ("codes", "kept"),
    [
        ([(CODE, 80, b"a" * 64), (CODE, 90, b"b" * 64), (PTX, 90, b"p" * 64)], b"b"),
        # nothing of its family: PTX
        ([(CODE, 80, b"a" * 64), (CODE, 100, b"c" * 64), (PTX, 80, b"p" * 64)], b"p"),
        ([(CODE, 86, b"a" * 64), (CODE, 80, b"d" * 64)], b""),
    ],
)
def test_only_what_the_gpu_loads_stays(tmp_path, codes, kept):
    path = tmp_path / "lib.so"
    before = b"head" + one_gpu.MAGIC + b"of nothing" + fat_binary(*codes) + b"tail"
    path.write_bytes(before)
    saved = one_gpu.strip(path, 90)
    after = path.read_bytes()
    assert len(after) == len(before) and after.startswith(b"head") and after.endswith(b"tail")
    for _, _, content in codes:
        assert (content in after) == (content[:1] == kept)
    assert saved == sum(len(content) for _, _, content in codes if content[:1] != kept)


def test_an_older_code_of_the_family_stays_where_there_is_none_of_the_gpu(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(fat_binary((CODE, 80, b"a" * 64), (CODE, 90, b"b" * 64)))
    one_gpu.strip(path, 89)
    assert b"a" * 64 in path.read_bytes() and b"b" * 64 not in path.read_bytes()


def test_wheels_become_archives_and_these_the_packages(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    library = fat_binary((CODE, 80, b"a" * 64), (CODE, 90, b"b" * 64))
    with zipfile.ZipFile(wheels / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing/__init__.py", "VALUE = 1\n")
        wheel.writestr("thing/lib.so.1", library)
        wheel.writestr("thing/other/big.py", "")
        tool = zipfile.ZipInfo("thing/bin/assembler")
        tool.external_attr = 0o100755 << 16
        wheel.writestr(tool, "#!/bin/sh\n")
        wheel.writestr("thing-1.0.data/purelib/thing/more.py", "MORE = 2\n")
        wheel.writestr("thing-1.0.data/scripts/thing", "#!python\n")
    one_gpu.main([str(wheels), str(tmp_path / "packed"), "--without", "thing/other"])
    one_gpu.main(["--unpack", str(tmp_path / "packed"), str(tmp_path / "site")])
    names = {
        str(path.relative_to(tmp_path / "site"))
        for path in (tmp_path / "site").rglob("*")
        if path.is_file()
    }
    assert names == {"thing/__init__.py", "thing/bin/assembler", "thing/lib.so.1", "thing/more.py"}
    assert os.access(tmp_path / "site/thing/bin/assembler", os.X_OK)
    assert not os.access(tmp_path / "site/thing/__init__.py", os.X_OK)
    assert (tmp_path / "site/thing/lib.so.1").read_bytes() == library.replace(b"a" * 64, bytes(64))


def test_a_folder_without_wheels_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        one_gpu.main([str(tmp_path), str(tmp_path / "packed")])
    assert "no wheels" in capsys.readouterr().err
