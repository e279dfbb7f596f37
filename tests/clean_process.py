"""Processes that nobody has used: one that has pretended a GPU is good for nothing else.

They are forked off a server that has imported what they need and done nothing else. A spawned one
would import torch and what its fake tensors need again, which takes longer than many a dry run.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["pytest", "torch._dynamo", "flyweight.engine.ahead", "flyweight.engine.graphs"]
)


def pool(workers: int = 1) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=CONTEXT)
