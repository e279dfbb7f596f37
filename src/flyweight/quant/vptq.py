"""VPTQ: `length` neighbouring outputs of one input column become one entry of a codebook, plus one
of a residual book.

1. Columns are normalized where that pays for itself, books made by k-means weighted with the
   columns' importance.
2. The recursion of GPTQ, one column at a time: its segments take their nearest entries, later
   columns make up. Main and residual entry are chosen together: the best pair over the few nearest
   main entries.
3. Given the assignments, both books are fitted to the layer's output by conjugate gradients (a
   linear least-squares problem); coordinate descent then reassigns, column by column. Each step is
   kept only if the error falls.

Shapes are chosen so that all stored bits, books and norms included, stay within the named bits +
0.25: a big book fits a big layer. Column order costs nothing where there are neither outlier
columns nor column groups: it is not stored then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flyweight.errors import OptionError
from flyweight.quant.books import Books
from flyweight.quant.gptq import BLOCK
from flyweight.quant.kmeans import exact_sums, kmeans, nearest
from flyweight.quant.statistics import Statistics
from flyweight.tensors import VectorQuant

# bits above the named ones that books, norms, permutation and outliers may take: as groups of 64 do
ALLOWANCE = 0.25
POINTS_PER_CENTROID = 48


@dataclass(frozen=True)
class VPTQ:
    """With `bits` the shape comes from the layer's size; otherwise `length`, `main` and `residual`
    (0: none) say it.
    """

    bits: float = 0.0
    length: int = 8
    main: int = 65536
    residual: int = 0
    outliers: float = 0.0  # share of columns, by importance, that get a book of their own
    outlier_length: int = 4
    outlier_centroids: int = 4096
    normalize: bool = True
    beam: int = 4
    refits: int = 2
    damping: float = 0.01
    seed: int = 0
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if not self.bits and (self.length < 1 or self.main < 2):
            raise OptionError(
                "vptq needs a vector length and at least two centroids, not "
                f"v{self.length}-k{self.main}"
            )

    def stored_bits(self, rows: int, columns: int) -> float:
        """Bits per weight on disk."""
        wide = round(self.outliers * columns)
        index = (self.main - 1).bit_length() + (
            (self.residual - 1).bit_length() if self.residual else 0
        )
        blocks = math.ceil(rows / self.length)
        total = blocks * 32 * math.ceil((columns - wide) * index / 32) + 16 * self.length * (
            self.main + self.residual
        )
        if wide:
            total += (
                16 * math.ceil(rows / self.outlier_length) * wide
                + 16 * self.outlier_length * self.outlier_centroids
            )
            total += 16 * columns
        return (total + (32 * columns if self.normalize else 0)) / (rows * columns)


def choose_shape(settings: VPTQ, rows: int, columns: int) -> VPTQ:
    """The best shape within the allowance."""
    if not settings.bits:
        return settings
    found = []
    for length in (8, 4, 2, 1):
        index = math.floor(settings.bits * length + 1e-9)
        for residual_bits in range(0, index // 2 + 1):
            main_bits = index - residual_bits
            if main_bits > 16 or main_bits < 1:
                continue
            for normalize in (settings.normalize, False):
                shape = replace(
                    settings,
                    bits=0.0,
                    length=length,
                    main=1 << main_bits,
                    normalize=normalize,
                    residual=1 << residual_bits if residual_bits else 0,
                )
                if shape.stored_bits(rows, columns) <= settings.bits + ALLOWANCE:
                    found.append((shape_score(shape), shape))
    if not found:
        raise OptionError(
            f"no codebook for {settings.bits:g} bits fits a layer of {rows} × {columns}: take "
            'another scheme, or a recipe that keeps such layers (solver = "keep")'
        )
    return max(found, key=lambda item: item[0])[1]


def shape_score(shape: VPTQ) -> tuple[int, ...]:
    """On real layers the size of the main book counts most, then the norms, then the length of the
    vectors.
    """
    return shape.main, int(shape.normalize), shape.length


def vptq(weight: Tensor, statistics: Statistics, settings: VPTQ) -> VectorQuant:
    """weight [out, in] → codebooks and indices."""
    rows, columns = weight.shape
    shape = choose_shape(settings, rows, columns)
    solver = Solver(weight.float(), statistics, shape)
    solver.make_books()
    solver.assign()
    for _ in range(shape.refits):
        solver.improve()
    return solver.tensor()


class Solver:
    """The state of one layer: columns in the order of importance, [in, out padded to whole
    vectors].
    """

    def __init__(self, weight: Tensor, statistics: Statistics, shape: VPTQ) -> None:
        self.shape = shape
        (self.rows, self.width) = weight.shape
        self.order, self.upper = statistics.factor(act_order=True, damping=shape.damping)
        hessian = statistics.damped(shape.damping)[self.order][:, self.order]
        self.importance = hessian.diagonal().clamp(
            min=1e-6 * float(hessian.diagonal().mean()) + 1e-30
        )
        self.hessian = hessian
        self.outliers = round(shape.outliers * self.width)
        step = (
            shape.length
            * (shape.outlier_length if self.outliers else 1)
            // math.gcd(shape.length, shape.outlier_length if self.outliers else 1)
        )
        self.target = torch.nn.functional.pad(
            weight.T[self.order], (0, -self.rows % step)
        ).contiguous()
        self.scale, self.bias = self.normalization()

    def normalization(self) -> tuple[Tensor, Tensor]:
        """Per column: the mean, and the spread, both as the file will hold them."""
        real = self.target[:, : self.rows]
        if not self.shape.normalize:
            return torch.ones(self.width, device=real.device), torch.zeros(
                self.width, device=real.device
            )
        scale = real.std(1, correction=0)
        bias = real.mean(1)
        scale = scale.clamp(min=1e-4 * float(scale.mean()) + 1e-8)
        return scale.to(self.shape.dtype).float(), bias.to(self.shape.dtype).float()

    def length(self, j: int) -> int:
        return self.shape.outlier_length if j < self.outliers else self.shape.length

    def points(self, values: Tensor, begin: int, end: int, length: int) -> tuple[Tensor, Tensor]:
        """Segments [n, length] of columns begin…end of normalized `values`; their weights [n]."""
        segments = values[begin:end].unflatten(1, (-1, length))
        heft = self.importance[begin:end] * self.scale[begin:end].square()
        return segments.flatten(0, 1), heft[:, None].expand(-1, segments.shape[1]).flatten()

    def make_books(self) -> None:
        shape = self.shape
        real = (self.target - self.bias[:, None]) / self.scale[:, None]
        points, heft = self.points(real, self.outliers, self.width, shape.length)
        main = kmeans(
            points,
            heft,
            shape.main,
            seed=shape.seed,
            samples=max(1 << 14, POINTS_PER_CENTROID * shape.main),
        )
        residual = None
        if shape.residual:
            left = points - main[nearest(points, main)[0]]
            samples = max(1 << 14, POINTS_PER_CENTROID * shape.residual)
            residual = kmeans(left, heft, shape.residual, seed=shape.seed + 1, samples=samples)
        self.books = Books(main, residual, shape.beam).stored(shape.dtype)
        self.wide: Books | None = None
        if self.outliers:
            points, heft = self.points(real, 0, self.outliers, shape.outlier_length)
            book = kmeans(
                points, heft, min(shape.outlier_centroids, points.shape[0]), seed=shape.seed + 2
            )
            self.wide = Books(book, None, 1).stored(shape.dtype)

    def blocks(self) -> Iterator[tuple[slice, Books]]:
        """Some columns at a time, and their books; outlier columns share no block with others."""
        for begin, end, books in (
            (0, self.outliers, self.wide),
            (self.outliers, self.width, self.books),
        ):
            for start in range(begin, end, BLOCK):
                assert books is not None
                yield slice(start, min(start + BLOCK, end)), books

    def empty_indices(self) -> tuple[Tensor, Tensor]:
        most = self.target.shape[1] // min(self.length(0), self.length(self.width - 1))
        zeros = torch.zeros(self.width, most, dtype=torch.int64, device=self.target.device)
        return zeros, zeros.clone()

    def walk(
        self,
        books: Books,
        block: slice,
        tile: Tensor,
        matrix: Tensor,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return books.walk(
            tile,
            matrix[block, block],
            scale=self.scale[block],
            bias=self.bias[block],
            first=self.main[block],
            second=self.residual[block],
            values=values,
        )

    def assign(self) -> None:
        """The recursion of GPTQ: later columns make up for the errors of earlier ones."""
        self.main, self.residual = self.empty_indices()
        self.values = self.target.clone()
        for block, books in self.blocks():
            self.values[block], errors = self.walk(books, block, self.values[block], self.upper)
            self.values[block.stop :] -= self.upper[block, block.stop :].T @ errors

    def descend(self, values: Tensor) -> Tensor:
        """A round of coordinate descent on ‖(W − Q)·X‖²: each column moves to its own best
        rounding, given all others.
        """
        self.main, self.residual = self.empty_indices()
        found = torch.empty_like(values)
        pull = self.hessian @ (self.target - values)  # [in, out]: minus half the gradient
        for block, books in self.blocks():
            found[block], moves = self.walk(books, block, pull[block], self.hessian, values[block])
            pull -= self.hessian[:, block] @ moves
        return found

    def error(self, values: Tensor) -> float:
        difference = self.target - values
        return float(((self.hessian @ difference) * difference).sum(dtype=torch.float64))

    def improve(self) -> None:
        """Refit the books to the assignments, then reassign by coordinate descent; each is kept
        where the error falls.
        """
        books = self.books
        wide = self.wide
        before = self.error(self.values)
        self.refit()
        values = self.decode()
        # not `>`: of books that the file's type cannot hold the error is no number
        if not self.error(values) <= before:
            self.books = books
            self.wide = wide
            values = self.values
        indices = self.main, self.residual
        self.values = self.descend(values)
        if not self.error(self.values) <= self.error(values):
            (self.main, self.residual) = indices
            self.values = values

    def decode(self) -> Tensor:
        blocks = self.target.shape[1] // self.shape.length
        normal = self.books.decode(
            self.main[self.outliers :, :blocks], self.residual[self.outliers :, :blocks]
        ).flatten(1)
        if self.wide:
            wide = self.target.shape[1] // self.shape.outlier_length
            normal = torch.cat(
                [self.wide.main[self.main[: self.outliers, :wide]].flatten(1), normal]
            )
        return normal * self.scale[:, None] + self.bias[:, None]

    def refit(self, steps: int = 12) -> None:
        """Conjugate gradients on the entries of the main and residual book, the outlier columns
        held as they are.
        """
        blocks = self.target.shape[1] // self.shape.length
        length = self.shape.length
        begin = self.outliers
        main = self.main[begin:, :blocks].flatten()
        residual = (
            self.residual[begin:, :blocks].flatten() if self.books.residual is not None else None
        )

        def gather(gradient: Tensor) -> Tensor:
            """Adjoint of decode: what each entry of both books gets from a gradient [in, out]."""
            parts = (
                (gradient * self.scale[:, None])[begin:]
                .unflatten(1, (blocks, length))
                .flatten(0, 1)
            )
            sums = [exact_sums(main, parts, self.shape.main)]
            return torch.cat(
                sums
                if residual is None
                else [*sums, exact_sums(residual, parts, self.shape.residual)]
            )

        def spread(entries: Tensor) -> Tensor:
            """A change of the entries as a change of the columns [in, out]."""
            parts = entries[: self.shape.main][main]
            if residual is not None:
                parts = parts + entries[self.shape.main :][residual]
            moved = torch.zeros_like(self.target)
            moved[begin:] = parts.view(self.width - begin, -1) * self.scale[begin:, None]
            return moved

        entries = (
            self.books.main
            if self.books.residual is None
            else torch.cat([self.books.main, self.books.residual])
        )
        left = gather(self.hessian @ (self.target - self.decode()))
        counts = gather(
            self.importance[:, None] * self.scale[:, None] * torch.ones_like(self.target)
        ).clamp(min=1e-30)
        entries = entries + conjugate_gradients(
            lambda e: gather(self.hessian @ spread(e)), left, counts, steps
        )
        parts = (
            entries.split([self.shape.main, self.shape.residual])
            if self.shape.residual
            else (entries, None)
        )
        self.books = Books(parts[0], parts[1], self.shape.beam).stored(self.shape.dtype)

    def tensor(self) -> VectorQuant:
        shape = self.shape
        blocks = math.ceil(self.rows / self.shape.length)
        begin = self.outliers
        dtype = shape.dtype
        back = (
            torch.argsort(self.order) if not begin else None
        )  # no outliers: columns go back to their places, no perm stored

        def placed(per_column: Tensor) -> Tensor:
            return per_column if back is None else per_column[back]

        main = placed(self.main)[begin:, :blocks].T[None]  # [1, row blocks, columns]
        residual = (
            placed(self.residual)[begin:, :blocks].T[None]
            if self.books.residual is not None
            else None
        )
        indices = VectorQuant.join_indices(
            main,
            residual,
            main_bits=(shape.main - 1).bit_length(),
            residual_bits=(shape.residual - 1).bit_length() if shape.residual else 0,
        )
        wide_blocks = math.ceil(self.rows / shape.outlier_length)
        original = torch.argsort(self.order)
        extra = self.books.residual
        return VectorQuant(
            indices,
            self.books.main.to(dtype)[None],
            None if extra is None else extra.to(dtype)[None],
            self.width,
            self.rows,
            outlier_indices=self.main[:begin, :wide_blocks].T.to(torch.int32).contiguous()
            if begin
            else None,
            outlier_codebook=self.wide.main.to(dtype) if self.wide else None,
            perm=self.order.to(torch.int32) if begin else None,
            scale=self.scale[original].to(dtype) if shape.normalize else None,
            bias=self.bias[original].to(dtype) if shape.normalize else None,
        )


def conjugate_gradients(apply, right: Tensor, diagonal: Tensor, steps: int) -> Tensor:
    """x with apply(x) ≈ right for a symmetric positive operator, preconditioned by its rough
    diagonal.
    """
    x = torch.zeros_like(right)
    left = right.clone()
    direction = ready = left / diagonal
    product = (left * ready).sum(dtype=torch.float64)
    for _ in range(steps):
        image = apply(direction)
        step = (product / (direction * image).sum(dtype=torch.float64).clamp(min=1e-300)).float()
        x = x + step * direction
        left = left - step * image
        ready = left / diagonal
        before = product
        product = (left * ready).sum(dtype=torch.float64)
        direction = ready + (product / before.clamp(min=1e-300)).float() * direction
    return x
