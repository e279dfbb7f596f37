// Attention of prompts and of chunks of them, with Hopper's warpgroup products.
//
//   out = softmax(q Kᵀ) V in base 2,  the token at position p sees positions 0 … p of its sequence
//
// Work split: a unit is ROWS = 64 · WGS rows of one kv head, pairs of (token, query head that shares it), so that short chunks
// fill it too, and CTAs at work at the same time read few different keys. Units are sorted longest first, some kv heads at a time
// (`section`), whose keys and values L2 holds; a CTA that is done takes the next one (`counter`), whose loads begin while results
// of the last one are written.
//
//   loader warps      q of the unit, then K and V tiles of KEYS tokens, the last one first, by tensor copies: from the step's own
//                     tensors at once, or BOX tokens at a time from pages, which keeps four warps busy
//   each warpgroup    S = Q Kᵀ of the next tile ┐ both on their way at once, from shared memory and from registers (P); when the
//                     O += P V of this one      ┘ first is done it is the other's turn, and softmax of S becomes the next P
//
// A score that is masked is −2^100, and so is the shift of a row that has seen nothing: such a tile adds ones that the next tile's
// factor of 0 takes out again. Values beyond the sequence's end may be no numbers, which times 0
// are no zeros: they are cleared. Weights are taken by the shift that a row has; only where their sum then is large, its highest
// score is looked for and followed, and results are scaled. Limit: the power that matrix units and softmax take, so an instruction
// for each score less is worth as much as there are scores.
//
// defines: FP16, HEADS, KV_HEADS, HEAD_DIM (64 or 128), KEYS, WGS, STAGES, BOX, PAGE (0: not paged)
#include "common.cuh"
#include "wgmma.cuh"

constexpr int GROUP = HEADS / KV_HEADS, ROWS = 64 * WGS, TOKENS = ROWS / GROUP;
constexpr int PARTS = HEAD_DIM / 64;                                  // of a head: what a row of 128 bytes holds
constexpr int QUERY_BYTES = ROWS * HEAD_DIM * 2, TILE_BYTES = KEYS * HEAD_DIM * 2;
constexpr int COPIES = PARTS * KEYS / BOX, LOADERS = PAGE ? 4 : 1;    // of a tile, one a lane
constexpr float MASKED = -0x1p100f;
constexpr float LARGE = FP16 ? 4096.f : 0x1p80f;                      // sums of weights that 16-bit floats hold
constexpr float LOW = FP16 ? 0 : -64, HIGH = FP16 ? 6 : 64;           // highest scores of rows whose weights need no shift
static_assert(COPIES <= 32 * LOADERS && KEYS % BOX == 0 && BOX % 8 == 0, "boxes are parts of tiles");
static_assert(!PAGE || PAGE % BOX == 0, "and of pages");

struct Unit {
  int base;      // of the sequence: its first token, or its place in the block tables
  int token, count, position;
  int head, last;  // the last tile of keys; -1: there are no more units
};
DEVICE Unit find_unit(int unit, const int* records, int tiles, int section) {
  const int within = unit % (tiles * section);
  const int* r = records + within / section * 4;
  return {r[0], r[1], r[2], r[3], unit / (tiles * section) * section + within % section, (r[3] + r[2] - 1) / KEYS};
}

struct __align__(1024) Shared {                                        // [part][row or token][64], swizzled
  u8 query[2][QUERY_BYTES];                                            // of this unit, whose results take its place, and the next
  u8 keys[STAGES][TILE_BYTES], values[STAGES][TILE_BYTES];
  u64 query_full[2], query_empty[2], keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
  Unit unit[2];
};

template <int SLOTS> struct Place {  // in a ring
  int slot = 0;
  u32 parity = 0;
  DEVICE void advance() { if (++slot == SLOTS) slot = 0, parity ^= 1; }
};

DEVICE int first_token(const Unit& u, const int* tables, int tile, int copy) {
  const int key = tile * KEYS + copy / PARTS * BOX;
  if (!PAGE) return u.base + key;
  const int written = min(key, u.position + u.count - 1);              // what lies beyond has no page
  return tables[u.base + written / max(PAGE, 1)] * PAGE + written % max(PAGE, 1) / BOX * BOX;
}
// `copy`: this lane's; the loaders have every fourth each. Bytes may arrive before the first of them says how many there will be.
DEVICE void fetch_tile(u8* to, const TensorMap& map, u64* full, u64* empty, u32 parity, int token, int head, int copy,
                       int loader) {
  barrier_wait(empty, parity ^ 1);
  if (loader == 0) copy_begin(full, TILE_BYTES, copy);
  __syncwarp();
  if (copy < COPIES)
    tensor_copy(to + (copy % PARTS * KEYS + copy / PARTS * BOX) * 128, map, copy % PARTS * 64, token, head, full);
}
DEVICE void fetch_tiles(Shared& sh, const Unit& u, Place<STAGES>& k, Place<STAGES>& v, const TensorMap& keys,
                        const TensorMap& values, const int* tables, int loader, int lane) {
  const int copy = lane * LOADERS + loader;
  int token = first_token(u, tables, u.last, copy), before = 0;
  for (int tile = u.last; tile >= -1; tile--) {                        // values follow one tile behind
    const int then = tile > 0 ? first_token(u, tables, tile - 1, copy) : 0;
    if (tile >= 0) {
      fetch_tile(sh.keys[k.slot], keys, &sh.keys_full[k.slot], &sh.keys_empty[k.slot], k.parity, token, u.head, copy, loader);
      k.advance();
    }
    if (tile < u.last) {
      fetch_tile(sh.values[v.slot], values, &sh.values_full[v.slot], &sh.values_empty[v.slot], v.parity, before, u.head, copy,
                 loader);
      v.advance();
    }
    before = token, token = then;
  }
}

// The first loader: takes units, and fetches their queries.
DEVICE void produce(Shared& sh, const TensorMap& queries, const TensorMap& keys, const TensorMap& values, const int* records,
                    const int* tables, u32* counter, int tiles, int section, int lane) {
  const int units = tiles * KV_HEADS;
  Place<2> q;
  Place<STAGES> k, v;
  for (int unit = blockIdx.x; unit < units; q.advance()) {
    const Unit u = find_unit(unit, records, tiles, section);
    if (lane == 0) {
      barrier_wait(&sh.query_empty[q.slot], q.parity ^ 1);
      sh.unit[q.slot] = u;
      copy_begin(&sh.query_full[q.slot], PARTS * TOKENS * GROUP * 128, 0);
      for (int i = 0; i < PARTS; i++)
        tensor_copy(sh.query[q.slot] + i * ROWS * 128, queries, i * 64, u.head * GROUP, u.token, &sh.query_full[q.slot]);
    }
    __syncwarp();
    fetch_tiles(sh, u, k, v, keys, values, tables, 0, lane);
    const int taken = lane == 0 ? (int)atomicInc(counter, units - 1) : 0;  // back at 0 when every CTA has found no more
    unit = gridDim.x + __shfl_sync(~0u, taken, 0);
  }
  if (lane == 0) {
    barrier_wait(&sh.query_empty[q.slot], q.parity ^ 1);
    sh.unit[q.slot].last = -1;
    barrier_arrive(&sh.query_full[q.slot]);
  }
}
// The others learn of a unit as the warpgroups do.
DEVICE void help_producing(Shared& sh, const TensorMap& keys, const TensorMap& values, const int* tables, int loader, int lane) {
  Place<2> q;
  Place<STAGES> k, v;
  for (;; q.advance()) {
    barrier_wait(&sh.query_full[q.slot], q.parity);
    const Unit u = sh.unit[q.slot];
    if (u.last < 0) return;
    fetch_tiles(sh, u, k, v, keys, values, tables, loader, lane);
  }
}

DEVICE void multiply_scores(float (&s)[KEYS / 2], u64 query, u64 keys) {
  wgmma_fence();
  wgmma_first(s, query, keys);
#pragma unroll
  for (int i = 1; i < HEAD_DIM / 16; i++)
    wgmma(s, query + (i / 4 * ROWS * 128 + i % 4 * 32 >> 4), keys + (i / 4 * KEYS * 128 + i % 4 * 32 >> 4));
  wgmma_commit();
}
DEVICE void multiply_values(float (&o)[HEAD_DIM / 2], const u32 (&p)[KEYS / 16][4], u64 values) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < KEYS / 16; i++) wgmma(o, p[i], values + i * (2048 >> 4));
  wgmma_commit();
}

struct Softmax {  // of a lane's two rows
  float shift[2] = {MASKED, MASKED}, sum[2] = {2 * LARGE, 2 * LARGE}, total[2] = {0, 0}, fade[2];  // the first tile is followed
  bool shifted;
  DEVICE void mask(float (&s)[KEYS / 2], int first, const int (&position)[2], int lane) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
      if (first + i / 4 * 8 + lane % 4 * 2 + i % 2 > position[i % 4 / 2]) s[i] = MASKED;
  }
  // Weights of this tile, by the shifts so far: false where a row's are too large.
  DEVICE bool weigh(u32 (&p)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
    return shifted ? weigh_by<true>(p, s) : weigh_by<false>(p, s);
  }
  template <bool SHIFTED> DEVICE bool weigh_by(u32 (&p)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
    auto weight = [&](int i) { return exp2_fast(SHIFTED ? s[i] - shift[i % 4 / 2] : s[i]); };
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      const float a = weight(2 * i), b = weight(2 * i + 1);
      sum[i % 2] += a + b;
      p[i / 4][i % 4] = pack2(a, b);
    }
    if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > LARGE)) return false;
    total[0] += sum[0], total[1] += sum[1];
    return true;
  }
  // Their shifts become their highest scores.
  DEVICE void follow(const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float highest = MASKED, most = sum[h];
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) highest = fmaxf(highest, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
#pragma unroll
      for (int o = 1; o < 4; o *= 2)
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o)), most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
      float to = most > LARGE ? fmaxf(shift[h], highest) : shift[h];
      if (to > LOW && to < HIGH) to = 0;
      fade[h] = exp2_fast(shift[h] - to);
      shift[h] = to, total[h] *= fade[h];
    }
    shifted = __any_sync(~0u, shift[0] != 0 || shift[1] != 0);
  }
};

// Rows of the last tile that no token has written: both warpgroups clear them, since both read them.
DEVICE void clear_beyond(u8* values, int first, int group) {
  for (int i = first * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
    for (int part = 0; part < PARTS; part++) *(uint4*)(values + part * KEYS * 128 + i * 16) = make_uint4(0, 0, 0, 0);
  fence_for_products();
  named_barrier(8 + group, 128);
}

DEVICE void write_results(u8* staging, float (&o)[HEAD_DIM / 2], Softmax& softmax, const Unit& u, u16* out, int warp, int lane) {
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float total = softmax.total[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    inverse[h] = 1.f / total;
  }
  auto place = [&](int row, int piece) {                               // of 16 bytes; 8 rows lie in different banks
    return staging + (piece / 8 * ROWS + row) * 128 + (piece % 8 ^ row % 8) * 16;
  };
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 4; i++) {
    const float by = inverse[i % 2];
    *(u32*)(place(warp * 16 + lane / 4 + i % 2 * 8, i / 2) + lane % 4 * 4) = pack2(o[2 * i] * by, o[2 * i + 1] * by);
  }
  __syncwarp();
  constexpr int PIECES = HEAD_DIM / 8;
#pragma unroll
  for (int i = lane; i < 16 * PIECES; i += 32) {
    const int row = warp * 16 + i / PIECES, token = row / GROUP;
    if (token < u.count)
      *(uint4*)(out + ((size_t)(u.token + token) * HEADS + u.head * GROUP + row % GROUP) * HEAD_DIM + i % PIECES * 8) =
          *(const uint4*)place(row, i % PIECES);
  }
}

DEVICE void consume(Shared& sh, u16* out, int warp, int lane) {
  const int group = __shfl_sync(~0u, warp / 4, 0);  // the same in all lanes, and known to be
  const u64 keys = swizzled_descriptor(sh.keys[0], 16), values = swizzled_descriptor(sh.values[0], KEYS * 128);
  Place<2> q;
  Place<STAGES> k, v;
  float s[KEYS / 2], o[HEAD_DIM / 2];
  u32 p[KEYS / 16][4];
  if (group == WGS - 1) named_arrive(1, 256);                 // the first one's turn
  for (;; q.advance()) {
    barrier_wait(&sh.query_full[q.slot], q.parity);
    const Unit u = sh.unit[q.slot];
    if (u.last < 0) return;
    const u64 query = swizzled_descriptor(sh.query[q.slot] + group * 64 * 128, 16);
    const int row = warp * 16 + lane / 4, position[2] = {u.position + row / GROUP, u.position + (row + 8) / GROUP};
    const int clear = (u.position + group * 64 / GROUP + 1) / KEYS;    // tiles before this one are seen by every row
    const int end = u.position + u.count - u.last * KEYS;              // of the last tile
    Softmax softmax;
    barrier_wait(&sh.keys_full[k.slot], k.parity);
    multiply_scores(s, query, keys + k.slot * (TILE_BYTES >> 4));
    wgmma_wait<0>();
    keep_behind(s);
    if (lane == 0) barrier_arrive(&sh.keys_empty[k.slot]);
    k.advance();
    softmax.mask(s, u.last * KEYS, position, lane);
    softmax.follow(s);
    softmax.weigh(p, s);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0;
    if (end < KEYS) {
      barrier_wait(&sh.values_full[v.slot], v.parity);
      clear_beyond(sh.values[v.slot], end, group);
    }
    auto step = [&](int tile, bool masked) {
      barrier_wait(&sh.keys_full[k.slot], k.parity);
      named_barrier(1 + group, 256);
      multiply_scores(s, query, keys + k.slot * (TILE_BYTES >> 4));
      barrier_wait(&sh.values_full[v.slot], v.parity);
      multiply_values(o, p, values + v.slot * (TILE_BYTES >> 4));
      wgmma_wait<1>();
      keep_behind(s);
      named_arrive(1 + (group + 1) % WGS, 256);
      if (lane == 0) barrier_arrive(&sh.keys_empty[k.slot]);
      if (masked) softmax.mask(s, tile * KEYS, position, lane);
      wgmma_wait<0>();
      keep_behind(o);
      if (lane == 0) barrier_arrive(&sh.values_empty[v.slot]);
      k.advance(), v.advance();
      while (!softmax.weigh(p, s)) {
        softmax.follow(s);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) o[i] *= softmax.fade[i % 4 / 2];
      }
    };
    int tile = u.last - 1;
#pragma unroll 1
    for (; tile >= clear; tile--) step(tile, true);
#pragma unroll 1
    for (; tile >= 0; tile--) step(tile, false);
    barrier_wait(&sh.values_full[v.slot], v.parity);
    multiply_values(o, p, values + v.slot * (TILE_BYTES >> 4));
    wgmma_wait<0>();
    keep_behind(o);
    if (lane == 0) barrier_arrive(&sh.values_empty[v.slot]);
    v.advance();
    named_barrier(8 + group, 128);                                     // nobody reads the queries any more
    write_results(sh.query[q.slot], o, softmax, u, out, warp, lane);
    fence_for_products();                                              // and copies
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.query_empty[q.slot]);
  }
}

extern "C" __global__ void __launch_bounds__(128 * WGS + 128, 1)
prefill_attention(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                  const __grid_constant__ TensorMap values, u16* out, const int* records, const int* tables, u32* counter,
                  int tiles, int section) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) barrier_init(&sh.query_full[i], 1), barrier_init(&sh.query_empty[i], 4 * WGS);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&sh.keys_full[i], 1), barrier_init(&sh.keys_empty[i], 4 * WGS);
      barrier_init(&sh.values_full[i], 1), barrier_init(&sh.values_empty[i], 4 * WGS);
    }
    fence_barriers();
  }
  __syncthreads();
  launch_dependents();
  wait_for_inputs();
  if (warp >= 4 * WGS) {
    give_registers<WGS == 2 ? 40 : 32>();
    const int loader = warp - 4 * WGS;
    if (loader == 0) produce(sh, queries, keys, values, records, tables, counter, tiles, section, lane);
    else if (loader < LOADERS) help_producing(sh, keys, values, tables, loader, lane);
    return;
  }
  take_registers<WGS == 2 ? 232 : 160>();
  consume(sh, out, warp, lane);
#endif
}
