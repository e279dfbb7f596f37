"""A step of training as one launch: it is thousands of short kernels, which a GPU runs faster than
a host can launch them one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


class Captured:
    """`run`, called again and again with tensors of the same shapes; what it changes lies where it
    lay at the first call.

    On a GPU the first call runs as it is, beside the main stream as captures want it, and makes
    what is made only once. The second one is captured; it and all later ones copy their tensors to
    where the graph reads them. What a graph cannot hold (the host waits for a result, the memory
    is too small) runs as it is, which is said once; `forget` then drops what was left half done.
    """

    def __init__(self, run: Callable[..., None], *, forget: Callable[[], None]) -> None:
        self.run = run
        self.forget = forget
        self.places: list[Tensor] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.possible = True

    def __call__(self, *tensors: Tensor) -> None:
        if not (self.possible and tensors[0].is_cuda):
            return self.run(*tensors)
        if self.places is None:
            return self.first(tensors)
        for place, tensor in zip(self.places, tensors, strict=True):
            place.copy_(tensor)
        if self.graph is None:
            self.capture()
        if self.graph is None:
            return self.run(*tensors)
        self.graph.replay()

    def first(self, tensors: tuple[Tensor, ...]) -> None:
        self.places = [tensor.clone() for tensor in tensors]
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            self.run(*self.places)
        here.wait_stream(side)

    def capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            assert self.places is not None
            # the outer one takes the stream back where a capture fails
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                self.run(*self.places)
        except RuntimeError as error:
            self.possible = False
            self.places = None
            self.forget()
            torch.cuda.empty_cache()
            told = first_line(error)
            warnings.warn(f"no graph of a step ({told}); its kernels are launched one by one")
            return
        self.graph = graph


def first_line(error: BaseException) -> str:
    """Of the error that the others came from."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().split("\n")[0]
