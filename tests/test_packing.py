import torch
from hypothesis import given
from hypothesis import strategies as st

from flyweight.packing import pack, packed_words, unpack


@given(
    bits=st.integers(1, 32),
    count=st.integers(0, 130),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_unpack_undoes_pack_for_every_width_and_ragged_count(bits, count, rows, seed):
    values = torch.randint(
        0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed)
    )
    words = pack(values, bits)
    assert words.dtype == torch.int32 and words.shape == (rows, packed_words(count, bits))
    assert torch.equal(unpack(words, bits, count).long(), values)


@given(bits=st.integers(1, 32), count=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_pack_is_a_dense_little_endian_bit_stream(bits, count, seed):
    values = torch.randint(
        0, 1 << bits, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    stream = sum(value << (bits * i) for i, value in enumerate(values))
    expected = stream.to_bytes(4 * packed_words(count, bits), "little")
    assert pack(torch.tensor(values), bits).numpy().tobytes() == expected
