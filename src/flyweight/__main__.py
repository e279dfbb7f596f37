"""The command line, installed or as `python -m flyweight`.

Verbs that run a model need torch, which begins to load before anything else is imported.
"""

import sys

from flyweight import preload

WITH_TORCH = ("generate", "chat", "serve", "quantize", "eval", "bench")


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] in WITH_TORCH and not {"-h", "--help"} & set(sys.argv):
        preload.begin()
    from flyweight.cli import main as run

    run()


if __name__ == "__main__":
    main()
