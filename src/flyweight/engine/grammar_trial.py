"""Compiles grammars of strangers in a process that may die of it: a program, started by
`grammar_limits.py`.

First a line of JSON about the vocabulary (`vocabulary`: how many tokens, `special`: their names).
Then for each grammar a line of JSON in (`grammar`, `seconds`, `megabytes`), a line of JSON out
(`error`, `bytes`). Beyond the processor time the kernel ends this process, and beyond the memory an
allocation fails, which ends it too; whoever waits for the line then knows. It imports nothing of
this package, so that it starts in a tenth of a second and holds little memory.

The tokens' texts do not matter: what is expensive about a grammar is its regular expressions, and
those are built over bytes. Only the numbers and names by which a grammar may speak of tokens are
there.
"""

import contextlib
import json
import sys
import threading

import llguidance

try:
    import resource
except ImportError:  # not on this system: the waiting side still limits the time
    resource = None  # type: ignore[assignment]

# bytes, less than any thread has: what does not overflow it here will not overflow there
STACK = 1 << 20
LEAST_CPU = 1  # seconds: the kernel counts whole ones


class Bytes:
    """A tokenizer of one token a byte, an end, and tokens without text up to the size of the
    vocabulary.
    """

    eos_token_id = 256
    bos_token_id = None
    unk_token_id = None

    def __init__(self, vocabulary: int, special: list[str]):
        named = [name.encode() for name in dict.fromkeys(special)]
        texts = [*(bytes([byte]) for byte in range(256)), b"<end>", *named]
        self.special_token_ids = list(range(256, len(texts)))
        self.tokens = texts + [b""] * (vocabulary - len(texts))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def pages(at: int) -> int:
    """Bytes of this process: all of its addresses (0), or what is in memory (1); 0 where the system
    does not tell.
    """
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[at]) * resource.getpagesize()
    return 0


def limit(seconds: float, megabytes: int) -> None:
    if resource is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU,
        (int(usage.ru_utime + usage.ru_stime + max(LEAST_CPU, seconds)) + 1, most),
    )
    if size := pages(0):
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 2**20, most))


def attempt(asked: dict, tokens: llguidance.LLTokenizer, answer: dict) -> None:
    limit(asked["seconds"], asked["megabytes"])
    before = pages(1)
    matcher = llguidance.LLMatcher(tokens, asked["grammar"], log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some that nothing can follow show it with the first token
    answer["error"] = brief(matcher.get_error()) if matcher.is_error() else ""
    answer["bytes"] = max(0, pages(1) - before)


def brief(error: str) -> str:
    """Its first line, which is the message; of a regular expression the last one says more."""
    lines = error.strip().splitlines() or [""]
    reason = lines[-1].removeprefix("error:")
    return lines[0] if reason == lines[-1] else lines[0] + reason


def main() -> None:
    given = Bytes(**json.loads(sys.stdin.readline()))
    tokens = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(given), n_vocab=len(given.tokens), eos_token=[256], slices=[]
    )
    threading.stack_size(STACK)
    for line in sys.stdin:
        answer: dict = {}
        thread = threading.Thread(target=attempt, args=(json.loads(line), tokens, answer))
        thread.start()
        thread.join()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
