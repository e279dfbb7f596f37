"""Run by test_quantize.py in a process of its own: quantize, be killed at a given moment, resume;
again and again.

Children are forked from a process that has imported everything and runs one thread, so each costs
no start-up.

usage: interrupt.py MODEL TEXT RECIPE FOLDER MOMENT[,MOMENT…] …
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch

from flyweight.checkpoint import writer
from flyweight.quant import quantize as module
from flyweight.quant import store

torch.set_num_threads(1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str) -> object:
    """Make this process kill itself: at the Nth event (`layer N`, `block N`, `tuned N`) or the Nth
    call of a function."""
    kind, number = moment.split()
    left = [int(number)]

    def count(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            die()

    def before(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def wrapped(*args: object, **options: object) -> object:
            count()
            return function(*args, **options)

        setattr(owner, name, wrapped)

    if kind == "rename":  # the block's file is whole but not in place
        before(store.os, "replace")
    elif kind == "tensor":  # in the middle of the final assembly
        before(writer.CheckpointWriter, "add")
    elif kind == "cleanup":  # the output is in place, the work folder still there
        before(store.BlockStore, "close")
    wanted = {"layer": "layer", "block": "finished", "tuned": "tuned"}.get(kind)
    return lambda event: count() if event.kind == wanted else None


def child(arguments: dict, moment: str | None) -> int:
    process = os.fork()
    if process == 0:
        try:
            listen = arm(moment) if moment else lambda event: None
            module.quantize(**arguments, listen=listen)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def digest(folder: Path) -> str:
    return hashlib.sha256(
        b"".join(path.name.encode() + path.read_bytes() for path in sorted(folder.iterdir()))
    ).hexdigest()


def main() -> None:
    model, text, recipe, folder, *chains = sys.argv[1:]
    common = dict(model=model, recipe=recipe, calibration=text, samples=4, length=48, device="cpu")
    # In this process: it imports what every child would have to import again.
    module.quantize(**common, output=f"{folder}/whole")
    wanted = digest(Path(folder, "whole"))
    results = {}
    for number, chain in enumerate(chains):
        output = Path(folder, f"killed-{number}")
        for step, moment in enumerate(chain.split(",")):
            code = child(common | {"output": str(output), "resume": step > 0}, moment)
            assert code == -signal.SIGKILL, (moment, code)
            assert output.exists() == moment.startswith("cleanup"), (
                f"a half-made folder after {moment}"
            )
        assert child(common | {"output": str(output), "resume": True}, None) == 0, chain
        results[chain] = (
            digest(output) == wanted and not output.with_name(f".{output.name}.work").exists()
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
