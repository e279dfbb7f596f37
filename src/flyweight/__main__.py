"""The command line, installed or as `python -m flyweight`.

Verbs that run a model need torch, which begins to load before anything else is imported.
"""

import io
import sys

from flyweight import preload

WITH_TORCH = ("generate", "chat", "serve", "quantize", "eval", "bench")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal or pipe that is not UTF-8 gets \xd7 for what it cannot show, not an error
            stream.reconfigure(errors="backslashreplace")
    if len(sys.argv) > 2 and sys.argv[1] in WITH_TORCH and not {"-h", "--help"} & set(sys.argv):
        preload.begin()
    try:
        from flyweight.cli import main as run
    except KeyboardInterrupt:  # while it loads; later it is the verbs' to say what was kept
        print("flyweight: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
