// y as in vptq.cu for one row or two, with the codebooks in bytes (tensors/vector.py: ByteBooks):
//
//      y[n] = step[n % 8] · sum_k (C[i(n / 8, k)][n % 8] + R[r(n / 8, k)][n % 8]) · x[k]  +  least[n % 8] · sum_k x[k]  +  biases
//
// An entry is 8 bytes, so shared memory serves 16 lanes at once where it served 8, and a book takes half the room and half the time
// to fetch. The sum of both entries is two additions of 32 bits (ByteBooks: no byte ever carries). x is rounded to 16-bit integers, one step a row, so that dp2a multiplies and adds
// exactly what it is given; a lane looks up whole items and multiplies them by their own x, and lanes meet once a row block.
//
//      chunk of a lane   | 8 × (main index · 8 + position), 16 bits each | 8 × residual index, 8 bits each |      vptq.cuh, OWN
//      step              | book + (half & ~7) → 8 bytes    + residuals + 128 · byte + 8 · (lane % 16) → 8 bytes    x of its column
//
// Limit: shared memory. Of 32 items entries take 2 cycles if no two of 16 lanes meet in a bank (3.1 times that for random entries,
// about 1.75 as the host orders them within windows of 8 steps), residuals 2 (16 copies: no two meet), x one; about 20 instructions
// in four schedulers are five cycles beside that.
//
// defines: those of vptq_tables.cuh (OWN, COPIES 16, 8, 4, 2 or 1), ROWS (1, 2), RESIDENT, UNITS (eights of columns a thread stages), NORM, GATED
#define KERNEL 3
#include "vptq_step.cuh"

constexpr u32 BYTE_BOOK = 8 * ENTRIES, BYTE_RESIDUAL = RES_BITS ? 8 * COPIES << RES_BITS : 0;
constexpr u32 X_AT = (BYTE_BOOK + BYTE_RESIDUAL + 511) / 512 * 512;
constexpr u32 CHUNK_X = ROWS == 1 ? 512 : 1024;  // bytes of the x of a chunk
static_assert(OWN && POS_BITS == 3 && PIECES == 1 && ITEM_BYTES == 3 && ROWS <= 2, "what vptq.cuh says of OWN");

constexpr int DEPTH = 2;  // chunks of a warp on their way; one is as fast, four are slower

typedef int Products[ROWS][8];

// Shared addresses of the books and, of this chunk and lane, of x; the copy of the residual book is this lane's.
struct Places { u32 book, residual, x; };
// Both entries of an item, added: a byte for each of its eight weights.
template <int S> DEVICE uint2 look_up(const u32 (&w)[WORDS], const Places& at) {
  const u32 half = S % 2 ? w[S / 2] >> 16 : w[S / 2];
  uint2 entry = shared_load2(at.book + (half & (ENTRIES - 1) << 3));
  if constexpr (RES_BITS > 0) {
    const u32 index = __byte_perm(w[4 + S / 4], 0, 0x4440 + S % 4);
    const uint2 more = shared_load2(index * (8 * COPIES) + at.residual);
    entry.x += more.x, entry.y += more.y;
  }
  return entry;
}
// The x of an item: both rows lie in one word; of one row two columns do, and the position's bits go to 1, 7 and 8.
template <int S> DEVICE u32 x_of(const u32 (&w)[WORDS], const Places& at) {
  const u32 half = S % 2 ? w[S / 2] >> 16 : w[S / 2];
  return ROWS == 1 ? shared_load16(and_or((half & 7) * 0x42, 0x182, at.x)) : shared_load((half & 7) * 128 + at.x);
}
// Two items at once: dp2a multiplies a pair of x with the bytes of one output, which first are brought beside each other.
template <int S> DEVICE void take_bytes(Products& acc, const u32 (&w)[WORDS], const Places& at) {
  const uint2 one = look_up<S>(w, at), two = look_up<S + 1>(w, at);
  const u32 x = x_of<S>(w, at), more = x_of<S + 1>(w, at);
  const u32 bytes[4] = {__byte_perm(one.x, two.x, 0x5140), __byte_perm(one.x, two.x, 0x7362),
                        __byte_perm(one.y, two.y, 0x5140), __byte_perm(one.y, two.y, 0x7362)};
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 pair = __byte_perm(x, more, r ? 0x7632 : 0x5410);
    int (&a)[8] = acc[r];
#pragma unroll
    for (int i = 0; i < 4; i++) a[2 * i] = dot_lower(pair, bytes[i], a[2 * i]), a[2 * i + 1] = dot_upper(pair, bytes[i], a[2 * i + 1]);
  }
}
DEVICE void take_chunk_of_bytes(Products& acc, const u32 (&w)[WORDS], const Places& at) {
  take_bytes<0>(acc, w, at), take_bytes<2>(acc, w, at), take_bytes<4>(acc, w, at), take_bytes<6>(acc, w, at);
}
// Not to be worked out again in every turn of a loop, as the compiler would to save a register.
DEVICE u32 kept(u32 value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
  return value;
}
// Adds up over the warp, writes the eight sums of each row and clears them; halves of the lanes keep halves of the outputs.
DEVICE void flush_bytes(Products& acc, float* to, int lane) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = (float)acc[r][j], acc[r][j] = 0;
#pragma unroll
    for (int kept = 4; kept; kept /= 2)
#pragma unroll
      for (int j = 0; j < kept; j++) {
        const bool upper = lane & 4 * kept;
        const float other = __shfl_xor_sync(~0u, upper ? v[j] : v[j + kept], 4 * kept);
        v[j] = (upper ? v[j + kept] : v[j]) + other;
      }
    v[0] += __shfl_xor_sync(~0u, v[0], 2);
    v[0] += __shfl_xor_sync(~0u, v[0], 1);
    if (lane % 4 == 0) to[r * 8 + lane / 4] = v[0];
  }
}

// What is the same for every output of a row, in shared memory behind the sums of the warps.
struct __align__(32) Row {
  float bias[ROWS], factor[ROWS], steps[ROWS];  // Σ bias · x, the norm's factor, what an integer of x stands for
  int whole[ROWS];                              // the sum of those integers
  u64 barrier;
};
static_assert(sizeof(Row) == 32 * ROWS, "what the host reserves");
// The warps whose runs, WARPS even shares of the chunks of `here` row blocks, have chunks of a block: the first, and behind it (from
// bit 8 on) the one after the last.
DEVICE u32 warps_of(int block, int here, int chunks) {
  const int total = here * chunks, first = (WARPS * (block * chunks + 1) + total - 1) / total - 1;
  return (u32)max(first, 0) | (u32)min(WARPS, (WARPS * (block + 1) + here - 1) / here) << 8;
}
struct Staging {  // in the place of the sums, which nobody has yet
  Sums sums[WARPS][ROWS];
  float peaks[WARPS][ROWS];
};
// Of numbers that are not negative, whose bits are in their order: one instruction.
DEVICE float warp_peak(float v) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(v))); }
// x as integers, the largest of a row the largest that there may be. `meanwhile` is done while the first of x is on its way.
template <class Work>
DEVICE void stage_integers(Row& all, Staging& s, char* to, const Inputs& in, int units, float most, float epsilon, const Work& meanwhile) {
  constexpr int BATCH = ROWS == 1 && UNITS <= 3 ? UNITS : 1;  // eights of a thread on their way, as registers allow
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float value[ROWS][UNITS][8], peak[ROWS] = {};
  Sums sums[ROWS] = {};
#pragma unroll
  for (int first = 0; first < UNITS; first += BATCH) {
    Eight eights[BATCH];
    Loaded loaded[BATCH][ROWS];
#pragma unroll
    for (int b = 0; b < BATCH; b++)
      if (const int unit = threadIdx.x + (first + b) * THREADS; unit < units) eights[b] = load_eight(in, 8 * unit);
    if (first == 0) wait_for_inputs();
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if (const int unit = threadIdx.x + (first + b) * THREADS; unit < units) loaded[b][r] = load_x(in, eights[b], r, 8 * unit);
    if (first == 0) meanwhile();
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      if ((int)threadIdx.x + (first + b) * THREADS >= units) break;
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
          value[r][first + b][j] = scaled(loaded[b][r], eights[b], j, sums[r]);
          peak[r] = largest(peak[r], fabsf(value[r][first + b][j]));
        }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const Sums sum = {warp_sum(sums[r].bias), NORM ? warp_sum(sums[r].squares) : 0.f};
    peak[r] = warp_peak(peak[r]);
    if (lane == 0) s.sums[warp][r] = sum, s.peaks[warp][r] = peak[r];
    if (threadIdx.x == 0) all.whole[r] = 0;
  }
  __syncthreads();
  float inverse[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float highest = warp_peak(lane < WARPS ? s.peaks[lane][r] : 0.f), step = highest == 0 ? 1.f : highest / most;
    inverse[r] = 1.f / step;
    if (warp != r) continue;
    const Sums mine = lane < WARPS ? s.sums[lane][r] : Sums{0.f, 0.f};
    const float sum = warp_sum(mine.bias), squares = NORM ? warp_sum(mine.squares) : 0.f;
    if (lane == 0) all.bias[r] = sum, all.factor[r] = NORM ? rsqrtf(squares / in.in_features + epsilon) : 1.f, all.steps[r] = step;
  }
  int whole[ROWS] = {};
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int unit = threadIdx.x + u * THREADS;
    if (unit >= units) break;
    u32 w[8] = {};
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const int code = (int)rintf(value[r][u][j] * inverse[r]);
        whole[r] += code;
        if (ROWS == 1) w[j / 2] |= (u32)(code & 0xffff) << 16 * (j % 2);
        else w[j] |= (u32)(code & 0xffff) << 16 * r;
      }
    if constexpr (ROWS == 1) {
      *(uint4*)(to + 16 * unit) = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
      char* const at = to + unit / 8 * 256 + unit % 8 * 16;
      *(uint4*)at = make_uint4(w[0], w[2], w[4], w[6]);
      *(uint4*)(at + 128) = make_uint4(w[1], w[3], w[5], w[7]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    whole[r] = __reduce_add_sync(~0u, whole[r]);
    if (lane == 0) atomicAdd(&all.whole[r], whole[r]);  // integers: in any order
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) vptq_bytes(
    PART(0), PART(1), PART(2), const u16* x, const u16* norm, const u16* bias, const u16* rest, u16* y, float epsilon, float most,
    int rows, int in_features, int width, int chunks, int most_blocks) {
  extern __shared__ __align__(512) u8 raw[];  // nothing else is shared: every byte counts where two launches lie on an SM
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Part part = own_part(GIVEN(0), GIVEN(1), GIVEN(2));
  const int row_blocks = (part.outputs + 7) / 8;
  const int block0 = (int)((long long)row_blocks * part.cta / part.ctas);
  const int here = (int)((long long)row_blocks * (part.cta + 1) / part.ctas) - block0;
  float* const partial = (float*)(raw + X_AT + chunks * CHUNK_X);  // [WARPS + most - 1][ROWS][8]
  Row& all = *(Row*)(partial + (WARPS + most_blocks - 1) * 8 * ROWS);
  launch_dependents();
  stage_book<BYTE_BOOK>((char*)raw, part.book, &all.barrier);
  const Inputs in = {x, norm, part.affine, part.source, in_features, rows};
  const Outputs out = {bias, rest, y, width, part.first, part.outputs, 8, rows};

  // This warp's run of chunks. The first are on their way before we wait: they depend on no other kernel.
  const int total = here * chunks, begin = total * warp / WARPS, end = total * (warp + 1) / WARPS;
  const char* next = part.stream + ((size_t)block0 * chunks + begin) * CHUNK_BYTES;
  u32 words[DEPTH][WORDS];
  const auto fetch = [&](int slot, int at) {
    if (at >= end) return;
    load_chunk(words[slot], next, lane);
    next += CHUNK_BYTES;
  };
#pragma unroll
  for (int slot = 0; slot < DEPTH; slot++) fetch(slot, begin + slot);
  constexpr int COUNT = 1 << RES_BITS, HELD = RES_BITS ? (2 * COUNT + THREADS - 1) / THREADS : 0;  // two threads an entry
  uint2 held[HELD + 1];
#pragma unroll
  for (int h = 0; h < HELD; h++)
    if (const int i = threadIdx.x + h * THREADS; i < 2 * COUNT) held[h] = ((const uint2*)part.residual)[i % COUNT];
  // A thread's outputs are all in one place of their row blocks. What its bytes mean, which warps add to the first and what else is
  // added to it is known before the products are.
  constexpr int SUMS_HERE = 8 * ROWS;
  const float* const numbers = (const float*)(part.book + BYTE_BOOK) + threadIdx.x % 8;  // [step, least][8]
  const u32 warps = kept(warps_of(threadIdx.x / SUMS_HERE, here, chunks));
  float step = 0, least = 0, added = 0;
  stage_integers(all, *(Staging*)partial, (char*)raw + X_AT, in, 32 * chunks, most, epsilon, [&] {
    step = __ldg(numbers), least = __ldg(numbers + 8);
    if (threadIdx.x < here * SUMS_HERE) added = out.added(out.place(block0 + threadIdx.x / SUMS_HERE, threadIdx.x % SUMS_HERE));
#pragma unroll
    for (int h = 0; h < HELD; h++)
      if (const int i = threadIdx.x + h * THREADS; i < 2 * COUNT)
        for (int c = i / COUNT; c < COPIES; c += 2)  // neighbours begin with different copies
          *(uint2*)(raw + BYTE_BOOK + (i % COUNT) * COPIES * 8 + (c + i) % COPIES * 8) = held[h];
  });
  book_ready(&all.barrier);

  Products acc = {};
  const u32 shared = shared_address(raw);
  const u32 own_x = kept(shared + X_AT + column_lane(lane) * 4), residual = kept(shared + BYTE_BOOK + lane % COPIES * 8);
  int block = begin / chunks, chunk = begin % chunks;
#pragma unroll 1
  for (int at = begin; at < end; at += DEPTH) {
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++) {
      if (at + slot >= end) break;
      take_chunk_of_bytes(acc, words[slot], {shared, residual, own_x + chunk * CHUNK_X});
      fetch(slot, at + slot + DEPTH);
      const bool finished = ++chunk == chunks;
      if (finished || at + slot == end - 1) flush_bytes(acc, partial + (warp + block) * SUMS_HERE, lane);
      if (finished) chunk = 0, block++;
    }
  }
  __syncthreads();

  // Runs are contiguous, so slot warp + block is unique; a thread adds the warps of an output, always in one order.
  for (int i = threadIdx.x; i < here * SUMS_HERE; i += THREADS) {
    const int b = i / SUMS_HERE, inner = i % SUMS_HERE, row = inner / 8;
    const u32 range = i == threadIdx.x ? warps : warps_of(b, here, chunks);
    float sum = 0;
#pragma unroll 4
    for (int w = range & 0xff; w < (int)(range >> 8); w++)
      if (total * (w + 1) / WARPS > total * w / WARPS) sum += partial[(w + b) * SUMS_HERE + inner];
    const int at = out.place(block0 + b, inner);
    if (at < 0) continue;
    const float products = sum * step + (float)all.whole[row] * least;
    const float value = (products * all.steps[row] + all.bias[row]) * all.factor[row];
    y[at] = to_bits(value + (i == threadIdx.x ? added : out.added(at)));
  }
}
