"""Cut files and folders into pieces small enough to carry, and join them again where they arrive.

    python benchmarks/workshop/pieces.py cut PIECES MODEL.gguf texts/ --megabytes 55
    python benchmarks/workshop/pieces.py join PIECES TARGET

The pieces are one tar stream cut at fixed places; `pieces.json` has each one's size and SHA-256.
Joining writes nothing unless every piece is there and whole.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

INDEX = "pieces.json"


class Cutter(io.RawIOBase):
    """A stream that goes on in the next file when one is full."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.facts = folder, size, []
        self.current, self.digest, self.filled = None, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        data, done = memoryview(data).cast("B"), 0
        while done < len(data):
            if self.current is None or self.filled == self.size:
                self._next()
            part = data[done : done + self.size - self.filled]
            self.current.write(part)
            self.digest.update(part)
            self.filled += len(part)
            done += len(part)
        return done

    def _next(self) -> None:
        self.finish()
        self.current = (self.folder / f"piece-{len(self.facts):03}").open("wb")
        self.digest, self.filled = hashlib.sha256(), 0

    def finish(self) -> None:
        if self.current is not None:
            self.current.close()
            self.facts.append(
                {
                    "name": Path(self.current.name).name,
                    "bytes": self.filled,
                    "sha256": self.digest.hexdigest(),
                }
            )
            self.current = None


class Joined(io.RawIOBase):
    """The pieces as one stream."""

    def __init__(self, files: list[Path]) -> None:
        self.files, self.current = list(files), None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while self.current is not None or self.files:
            if self.current is None:
                self.current = self.files.pop(0).open("rb")
            if count := self.current.readinto(buffer):
                return count
            self.current.close()
            self.current = None
        return 0


def cut(folder: Path, sources: list[Path], *, size: int) -> list[dict]:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("piece-*"):
        old.unlink()
    cutter = Cutter(folder, size)
    with tarfile.open(fileobj=cutter, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for source in sources:
            archive.add(source, arcname=source.resolve().name)
    cutter.finish()
    (folder / INDEX).write_text(json.dumps(cutter.facts, indent=1) + "\n")
    return cutter.facts


def join(folder: Path, target: Path) -> None:
    facts = json.loads((folder / INDEX).read_text())
    for fact in facts:
        path = folder / fact["name"]
        if not path.exists():
            sys.exit(f"{path} is missing: {len(facts)} pieces were made")
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != fact["sha256"]:
                sys.exit(f"{path} is damaged: carry it again")
    with tarfile.open(
        fileobj=io.BufferedReader(Joined([folder / fact["name"] for fact in facts])), mode="r|"
    ) as archive:
        # Python 3.11.3 and before have none
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("cut", "join"))
    parser.add_argument("pieces", type=Path, help="the folder of the pieces")
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        help="cut: files and folders; join: the folder to unpack into",
    )
    parser.add_argument("--megabytes", type=float, default=55)
    options = parser.parse_args()
    if options.action == "join":
        return join(options.pieces, options.paths[0])
    for fact in cut(options.pieces, options.paths, size=int(options.megabytes * 1e6)):
        print(f"{fact['name']}  {fact['bytes'] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
