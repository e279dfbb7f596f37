"""A captured graph: what a function launches, to be replayed without Python."""

from collections.abc import Callable

import torch

from flyweight import garbage


def capture(
    launch: Callable[[], None], pool: tuple[int, int] | None = None
) -> torch.cuda.CUDAGraph:
    """What `launch` does on the GPU. It must have run before, so that all is compiled and loaded.

    Other threads may go on allocating. Python's collector may not run meanwhile: an engine that
    nobody holds any more may own graphs, and the driver breaks off a capture in a thread that
    frees one.
    """
    graph = torch.cuda.CUDAGraph()
    with garbage.held(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        launch()
    return graph
