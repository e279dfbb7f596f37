"""Installed packages for one kind of GPU: small enough to carry to a machine without a network.

    pip download -d wheels --no-deps --python-version 3.12 --only-binary=:all: -r wanted.txt
    python benchmarks/workshop/one_gpu.py wheels packed --architecture 90 --without tilelang
    python benchmarks/workshop/one_gpu.py --unpack packed site      # there: site on PYTHONPATH

The libraries of torch and vLLM hold each kernel once for every GPU. What is of other GPUs becomes
zeros, which take no place in an archive. Library files are packed one by one, so that they are
unpacked side by side.
"""

from __future__ import annotations

import argparse
import fnmatch
import mmap
import shutil
import struct
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

CONTAINER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQQII")  # a fat binary, a code in it
MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, CODE = 1, 2
LARGE = 20 << 20  # a file with an archive of its own


class Part(NamedTuple):
    """The code of one kind of GPU in a container."""

    kind: int
    architecture: int
    start: int
    size: int


def containers(data: mmap.mmap | bytes) -> Iterator[list[Part]]:
    """What each fat binary in a library holds."""
    at = data.find(MAGIC)
    while at >= 0:
        end = at + 4
        if at + CONTAINER.size <= len(data):
            _, version, header, size = CONTAINER.unpack_from(data, at)
            if version == 1 and header == CONTAINER.size and at + header + size <= len(data):
                end = at + header + size
                yield list(_parts(data, at + header, end))
        at = data.find(MAGIC, end)


def _parts(data: mmap.mmap | bytes, at: int, end: int) -> Iterator[Part]:
    while at + ENTRY.size <= end:
        kind, _, header, size, _, _, architecture = ENTRY.unpack_from(data, at)
        if header < ENTRY.size or at + header + size > end:
            return
        yield Part(kind, architecture, at + header, size)
        at += header + size


def foreign(parts: list[Part], architecture: int) -> list[Part]:
    """What a GPU of `architecture` does not load: the driver takes the newest code that runs there,
    or translates PTX where there is none."""
    codes = {one.architecture for one in parts if one.kind == CODE}
    if runs := [one for one in codes if same_family(one, architecture)]:
        return [one for one in parts if (one.kind, one.architecture) != (CODE, max(runs))]
    return [one for one in parts if one.kind != PTX]


def same_family(made_for: int, architecture: int) -> bool:
    return made_for // 10 == architecture // 10 and made_for <= architecture


def strip(path: Path, architecture: int) -> int:
    """Bytes that became zeros."""
    if path.stat().st_size == 0:
        return 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        parts = [one for found in containers(data) for one in foreign(found, architecture)]
        for one in parts:
            data[one.start : one.start + one.size] = bytes(one.size)
    return sum(one.size for one in parts)


def install(wheels: Path, site: Path, without: list[str]) -> None:
    patterns = [one + end for one in without for end in ("", "/*")]
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = member.filename
                if ".data/" in name:  # of its schemes only what is imported
                    scheme, _, name = name.partition(".data/")[2].partition("/")
                    if scheme not in ("purelib", "platlib"):
                        continue
                    member.filename = name
                if not any(fnmatch.fnmatch(name, one) for one in patterns):
                    put(archive, member, site)


def put(archive: zipfile.ZipFile, member: zipfile.ZipInfo, site: Path) -> None:
    target = Path(archive.extract(member, site))
    if member.external_attr >> 16 & 0o111 and target.is_file():  # such as Triton's assembler
        target.chmod(0o755)


def pack(site: Path, target: Path) -> list[Path]:
    files = sorted(path for path in site.rglob("*") if path.is_file())
    large = [path for path in files if path.stat().st_size >= LARGE]
    groups = [[path] for path in large] + [[path for path in files if path.stat().st_size < LARGE]]
    target.mkdir(parents=True, exist_ok=True)
    names = [target / f"{i:02d}.tar.xz" for i in range(len(groups))]
    with ProcessPoolExecutor() as pool:
        return list(pool.map(_write, names, groups, [site] * len(groups)))


def _write(name: Path, files: list[Path], site: Path) -> Path:
    with tarfile.open(name, "w:xz", preset=5) as archive:
        for path in files:
            archive.add(path, path.relative_to(site))
    return name


def unpack(packed: Path, site: Path) -> None:
    site.mkdir(parents=True, exist_ok=True)
    names = sorted(packed.glob("*.tar.xz"))
    with ProcessPoolExecutor() as pool:
        list(pool.map(_read, names, [site] * len(names)))


def _read(name: Path, site: Path) -> None:
    with tarfile.open(name) as archive:
        archive.extractall(site, filter="data")


def main(arguments: list[str] | None = None) -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("source", type=Path, help="a folder of wheels; with --unpack, of archives")
    add("target", type=Path, help="a folder for the archives; with --unpack, for the packages")
    add("--unpack", action="store_true")
    add("--architecture", type=int, default=90, help="90, the default, is an H100 or H200")
    add("--without", nargs="*", default=[], help="packages, folders or patterns to leave out")
    options = parser.parse_args(arguments)
    if options.unpack:
        return unpack(options.source, options.target)
    if not any(options.source.glob("*.whl")):
        parser.error(f"no wheels in {options.source}")
    site = Path(tempfile.mkdtemp(dir=options.target.parent))
    try:
        install(options.source, site, options.without)
        for path in site.rglob("*.so*"):
            if saved := strip(path, options.architecture):
                print(f"{path.relative_to(site)}: {saved >> 20} MiB of other GPUs", file=sys.stderr)
        for name in pack(site, options.target):
            print(name, name.stat().st_size)
    finally:
        shutil.rmtree(site)


if __name__ == "__main__":
    main()
