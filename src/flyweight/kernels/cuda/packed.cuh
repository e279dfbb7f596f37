// The order in which gemm.cu reads x, and where a kernel that makes it writes it so: pack.cu, or the one before the product.
//
// packed: [stage of SB blocks of 64][8 rows][16-byte column][row][16 bytes], the columns of 32 inputs one after the other. ORDER says
// which inputs a column of 16-bit values holds; for t = 0 … 3, s and p in {0, 1}, the four of 32 inputs hold
//   ORDER 0   8t + 4s + 2p and the next
//   ORDER 1   8t + 4s + p and + 2: how a lane takes its codes apart
//   ORDER 2   4c … 4c + 3 and 16 further, in column c: 2:4 weights (pack.cu alone writes it)
// Rows that do not exist may hold anything: a row is a column of the product, and nobody looks at theirs.

// Where a row's part of the first of the OWN columns of 32 inputs lies, counted in 16 bytes; the next column's is 8 further.
template <int STAGE, int OWN> DEVICE size_t packed_place(int row, int piece, int groups) {  // STAGE: the SB of its reader
  return (((size_t)(piece / (2 * STAGE)) * groups + row / 8) * (2 * STAGE) + piece % (2 * STAGE)) * OWN * 8 + row % 8;
}
#if PACKED  // the next kernel's SB
static_assert(ORDER < 2, "not written by others than pack.cu");
DEVICE size_t packed_place(int row, int input, int groups) {  // of one input, counted in 16 bits
  const int i = input % 8, column = ORDER ? i / 4 * 2 + i % 2 : i / 2, half = ORDER ? i / 2 % 2 : i % 2;
  return (packed_place<PACKED, 4>(row, input / 32, groups) + 8 * column) * 8 + input % 32 / 8 * 2 + half;
}
#endif
