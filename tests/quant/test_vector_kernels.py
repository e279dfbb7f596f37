"""VPTQ's fused columns against the plain torch of `Books`: compiled where there is a GPU, else
interpreted on the CPU."""

import pytest
import torch

from flyweight.quant.books import Books

vectors = pytest.importorskip("flyweight.quant.triton.vectors", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("length", "entries", "residuals", "beam", "descent"),
    [
        (8, 300, 0, 1, False),
        (4, 200, 5, 1, True),
        (3, 140, 16, 4, False),
        (3, 140, 16, 4, True),
        (1, 16, 0, 1, True),
    ],
)
def test_a_block_of_columns_is_walked_as_by_plain_torch(
    length, entries, residuals, beam, descent, interpreted_loops
):
    columns, count = 19, 21
    matrix = random(columns, columns, seed=3) * 0.05
    matrix = matrix @ matrix.T + torch.eye(columns)
    residual = random(residuals, length, seed=2) * 0.3 if residuals else None
    books = Books(random(entries, length, seed=1), residual, beam)
    tile, values = (
        random(columns, count * length),
        random(columns, count * length, seed=4) if descent else None,
    )
    norms = dict(scale=random(columns, seed=5).abs() + 0.5, bias=random(columns, seed=6))
    expected = torch.zeros(2, columns, count + 3, dtype=torch.int64)
    rounded, errors = books.walk(
        tile, matrix, **norms, first=expected[0], second=expected[1], values=values
    )

    found, placed = (
        torch.zeros_like(expected, device=DEVICE),
        {name: value.to(DEVICE) for name, value in norms.items()},
    )
    moved = [
        None if tensor is None else tensor.to(DEVICE)
        for tensor in (tile, matrix, books.main, residual, values)
    ]
    split = Books(moved[2], None, 1).split
    search = vectors.Search(moved[2], moved[3], split, parts=1 if beam == 1 else 8, beam=beam)
    again = vectors.walk(
        moved[0], moved[1], search, **placed, first=found[0], second=found[1], values=moved[4]
    )
    if beam == 1:
        assert torch.equal(found.cpu(), expected)
        torch.testing.assert_close(
            [part.cpu() for part in again], [rounded, errors], rtol=1e-4, atol=1e-5
        )
    else:  # of two good entries in one lane only the better is tried
        assert again[1].square().mean() < 1.02 * errors.square().mean()
    assert not found[:, :, count:].any()
    decoded = books.decode(found[0, :, :count].cpu(), found[1, :, :count].cpu()).flatten(1)
    torch.testing.assert_close(
        again[0].cpu(),
        decoded * norms["scale"][:, None] + norms["bias"][:, None],
        rtol=1e-5,
        atol=1e-5,
    )
