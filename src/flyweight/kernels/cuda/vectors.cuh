// The order in which vptq_rows.cu reads x, and where a kernel that makes it writes it so: vptq_pack.cu, or decode attention.
//
// packed: [part][stage][8 rows][4 · STEPS pieces of 8 columns][row][16 bytes]. Pieces 4 p … 4 p + 3 are step p: of 64 columns the even
// (p even) or odd ones. Piece q of them has those of 16 neighbours from column 0, 32, 16, 48 on, 2 j and 2 j + 8 side by side, for
// j = 0 … 3: how a step of vptq.cu numbers its lanes. Rows that do not exist may hold anything.

// Of a unit, the even columns of 16 neighbours or (the next unit) the odd ones, within its part, counted in 16 bytes.
template <int STEPS> DEVICE size_t vector_place(int row, int unit, int groups) {  // STEPS: of a stage of its reader
  const int at = unit / 8 * 2 + unit % 2, quarter = unit / 2 % 4, piece = at % STEPS * 4 + (quarter >> 1 | (quarter & 1) << 1);
  return (((size_t)(at / STEPS) * groups + row / 8) * 4 * STEPS + piece) * 8 + row % 8;
}
