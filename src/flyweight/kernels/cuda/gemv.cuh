// y[r, n] = sum_k x[r, k] · W[n, k] for few rows: every weight format, norm before and activation after included.
//
// Work split: one CTA an SM. Weights lie in tiles of 16 outputs × all of K, cut into blocks of 64 inputs in the very
// order in which the matrix units want them; a CTA owns some tiles: gemv.cu a contiguous run, qkv_attention.cu those of a head,
// gemv_split.cu a slice of the inputs of a run.
//
//      tile t      | block 0 | block 1 | … |        a stage = STAGE_BLOCKS blocks of one tile, one bulk copy
//                    warp 0    warp 1              the warps take a stage's units in turn
//
// A producer warp streams stages through a ring in shared memory. It fills the ring, but for HELD stages, BEFORE it waits
// for the kernel before this one, of some formats when that one has asked for its last weights (await_turn): memory is hardly
// idle between two dependent kernels. The ring is sized so that two kernels fit on an SM at once. Warps keep their partial
// sums of many tiles in shared memory and meet once in SLOTS tiles.
// Limit: bytes of weights / bandwidth.
//
// What happens between x and the first multiplication delays the whole chain, so little does: integer weights are
// multiplied as integers. x becomes 16-bit integers, one scale for each group of inputs, split into a high and a low
// byte that sit in neighbouring columns of B; codes go into A as they are (int8) or masked (int4: the high nibbles of
// a word are 16 times too large and have accumulators of their own, or are shifted where there are many columns). No code is
// ever converted to a float, and total += s · s_x · (acc − z · sum x) is exact up to the scales.
// Where two of four inputs are kept, the sparse matrix units pick x; a zero point then takes out the sum of the x picked,
// which a second product, with ones for weights, gives; where zero points lie in the middle (SYMMETRIC) codes are signed, and there
// is nothing to take out.
//
// Eight rows stay in registers instead where there is room for them (IN_REGISTERS): gemv_registers.cuh.
//
// BALANCED: CTAs own runs of stages instead of whole tiles, so that all have the same share however few tiles there are:
//
//      | tile 0  |  tile 1  |  tile 2  |  tile 3  |       a CTA that begins inside a tile multiplies that part first, and leaves its
//      |   CTA 0     |    CTA 1     |    CTA 2    |       sums for the CTA before it (mail.cuh), which ends with that tile
//
// OWN_COPIES (before Hopper): no producer. A warp copies the blocks that it will multiply itself, and waits for its own copies: nobody
// polls a barrier, which older hardware does in a loop that takes the place of other warps' instructions. A stage then is OWN_UNITS
// units of each warp, and a tile's ends may leave some of them without. Of one row a warp has the same inputs in every tile, and may hold
// them in registers (HELD_INPUTS): sums then lie where inputs were. KEPT stages behind the ring's it fetches into registers before
// x is there, and multiplies them in their turn, while the ring fills again.
//
// Here: sizes, the ring, and the order of things. gemv_inputs.cuh brings x, gemv_products.cuh multiplies, gemv_outputs.cuh ends.
//
// PAIRED (x in registers): the two CTAs of a cluster share their tiles, each has one half of the inputs. So a CTA reads half of x, and has
// half of it to prepare. Tiles of the other one come first: their sums are on their way while this CTA's own are multiplied.
//
//      CTA 0:  inputs 0 … K/2:    | tiles 3, 4, 5: sums go to CTA 1 | tiles 0, 1, 2 |        and those that come are added
//      CTA 1:  inputs K/2 … K:    | tiles 0, 1, 2: sums go to CTA 0 | tiles 3, 4, 5 |
//
// LoRA adapters of one row: gemv_delta.cuh. GATED_INPUT: x is act(gate) · up of a row with both.
//
// defines: FORMAT, SPARSE (0), SYMMETRIC (0), STATIC (0), FP16, SCALE_FP16, KDIM, NDIM, ROWS, GROUP, NORM, EPILOGUE, BIAS, WARPS, STAGES,
// STAGE_BLOCKS, SLOTS, SLICES (1), HELD, IN_REGISTERS (0), PAIRED (0), BESIDE (0), INDEXED (0), GATED_INPUT (0, or an activation: ROWS is 1), ADAPTER_RANK (0),
// AS_HALVES (0), BALANCED (0), PREFETCHED (0), OWN_COPIES (0), OWN_UNITS, KEPT (0), HELD_INPUTS (0), SLOT_BLOCKS (0: experts_sum.cu)
#ifndef SLOT_BLOCKS
#define SLOT_BLOCKS 0  // blocks of a tile that one expert has: inputs are those of several, one after the other
#endif
#include "common.cuh"
#include "linear.cuh"
#include "piece.cuh"
#include "output.cuh"
#include "turns.cuh"

#ifndef PAIRED
#define PAIRED 0
#endif
#if PAIRED
#define SLICES 2
#define CLUSTER 2
#include "wgmma.cuh"
#endif
#ifndef SLICES
#define SLICES 1
#endif
#ifndef INDEXED  // one row whose inputs lie in another order: channel_scale says where, 16 bits each
#define INDEXED 0
#endif
#ifndef BESIDE
#define BESIDE 0
#endif
#ifndef IN_REGISTERS
#define IN_REGISTERS 0
#endif
#ifndef BALANCED
#define BALANCED 0
#endif
#ifndef OWN_COPIES
#define OWN_COPIES 0
#define OWN_UNITS 1
#endif
#ifndef KEPT
#define KEPT 0
#endif
#ifndef HELD_INPUTS  // of one row with OWN_COPIES, in groups
#define HELD_INPUTS 0
#endif
#ifndef PREFETCHED
#define PREFETCHED 0  // stages that a producer brings to L2 while it waits for inputs
#endif
#if BALANCED
#include "mail.cuh"
#endif
#ifndef GATED_INPUT
#define GATED_INPUT 0
#endif
static_assert(!GATED_INPUT || ROWS == 1, "one row has both in registers");
#define PLACES (HELD_INPUTS ? 2 : 1)  // for partial sums, by turns: with two, warps meet once at a round's end
#define ALL_THREADS (THREADS + (OWN_COPIES ? 0 : 32) + (ADAPTER_RANK ? 32 : 0))  // with those that fetch, and that add an adapter
constexpr bool QUARTERS = FORMAT == BIT_PLANES && !WHOLE_BLOCKS;     // of blocks have sums of x: gemv_bits.cuh
constexpr bool IN_QUARTERS = QUARTERS && !AS_HALVES;                 // columns of B are
static_assert(!AS_HALVES || QUARTERS, "what it is for");
#define ROW_SCALED (FORMAT == BIT_PLANES && CODING == TRELLIS && GROUP >= KDIM)  // when a tile's sums are all there: gemv_trellis.cuh
constexpr int BLOCKS = (KDIM + 63) / 64;                           // blocks of 64 inputs in a tile
constexpr int TILES = (NDIM + 15) / 16;
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
// A CTA has the inputs of one of SLICES slices, whole CUTs of blocks, as even as they come.
constexpr int CUT = GROUPED && GROUP < KDIM && GROUP > 64 * UNIT_BLOCKS ? GROUP / 64 : UNIT_BLOCKS;
constexpr int CUTS = (BLOCKS + CUT - 1) / CUT, LONGEST = (CUTS + SLICES - 1) / SLICES * CUT;
constexpr int SLICE = LONGEST < BLOCKS ? LONGEST : BLOCKS;          // blocks of the longest
constexpr int UNITS = !GROUPED || FLOATS ? 1 : QUARTERS ? 4 * SLICE : FORMAT != BIT_PLANES && GROUP == 32 ? 2 * SLICE : (SLICE + UNIT_BLOCKS - 1) / UNIT_BLOCKS;  // scales of x
constexpr int TILE_STAGES = (SLICE + STAGE_BLOCKS - 1) / STAGE_BLOCKS;
constexpr int STAGE_GROUPS = !GROUPED ? 0 : (STAGE_BLOCKS * 64 + GROUP - 1) / GROUP;
constexpr int OWN_BLOCKS = OWN_UNITS * UNIT_BLOCKS;                 // of a stage, in a warp
constexpr int OWN_GROUPS = !GROUPED ? 0 : (OWN_BLOCKS * 64 + GROUP - 1) / GROUP;
constexpr int OWN_BYTES = OWN_BLOCKS * BLOCK_BYTES + OWN_GROUPS * GROUP_BYTES;
constexpr int STAGE_BYTES = OWN_COPIES ? WARPS * OWN_BYTES : STAGE_BLOCKS * BLOCK_BYTES + STAGE_GROUPS * GROUP_BYTES;
constexpr int SUMS = !SPARSE || !GROUPED || SIGNED ? 0 : GROUP == 32 ? 2 : 1;  // accumulators of x where weights are kept, for zero points
constexpr int COLUMN_TILES = IN_QUARTERS ? ROWS : (ROWS * (IN_REGISTERS || AS_HALVES ? 1 : PLANES) + 7) / 8;
constexpr int SETS = FORMAT == BIT_PLANES || ((COLUMN_TILES > 2 || SPARSE || IN_REGISTERS) && !(GROUPED && GROUP == 32)) ? 1 : 2;  // of accumulators, for the halves of a block
constexpr int XBLOCK = FLOATS || AS_HALVES ? 128 : 64;     // bytes of a column that meet one block
constexpr int XROW = FLOATS || AS_HALVES ? SLICE * 128 + 64 : (SLICE | 1) * 64;  // neighbours hit different banks
constexpr int THREADS = WARPS * 32, ON_SM = IN_REGISTERS && !BESIDE ? 1 : 2;  // threads that multiply; kernels that registers leave room for
constexpr bool FULL = CUTS % SLICES == 0 && SLICE % STAGE_BLOCKS == 0 && STAGE_BLOCKS % (UNIT_BLOCKS * WARPS) == 0;  // no warp is ever idle
constexpr int STAGE_UNITS = (STAGE_BLOCKS + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
constexpr int PIECES = SLICE * 8;                                   // 8 inputs each
constexpr int X_BYTES = IN_REGISTERS ? 0 : ROWS * (AS_HALVES ? 1 : PLANES) * XROW;
constexpr int STATS = ROWS == 1 || IN_REGISTERS ? WARPS : (PIECES + 31) / 32;       // parts of a row, one warp each
constexpr int PIECES_AHEAD = WARPS > 8 ? 2 : 4;

static_assert(!OWN_COPIES || (STAGE_BLOCKS == WARPS * OWN_BLOCKS && !IN_REGISTERS), "a stage is a share of each warp");
static_assert(!OWN_COPIES || !GROUPED || OWN_BLOCKS * 64 % GROUP == 0 || GROUP % (OWN_BLOCKS * 64) == 0 || GROUP >= KDIM,
              "a share holds whole groups, or a group whole shares");
static_assert(!HELD_INPUTS || (OWN_COPIES && ROWS == 1 && GROUPED && !FLOATS && FORMAT != BIT_PLANES && !KEPT), "what inputs in registers are for");
static_assert(!HELD_INPUTS || PLACES * SLOTS * WARPS * 64 <= X_BYTES, "sums come where inputs were");
static_assert(!BALANCED || (SLICES == 1 && !IN_REGISTERS), "what balanced runs are for");
static_assert(!INDEXED || (ROWS == 1 && !CHANNELS && X_BYTES >= 2 * KDIM), "a row has room where it is converted");
static_assert(SLICES == 1 || !QUANTIZED, "the row's maximum is not known to a slice");
static_assert(OWN_COPIES || (TILE_STAGES - 1) * STAGE_BLOCKS < CUTS / SLICES * CUT - (CUTS * CUT - BLOCKS), "no stage of any slice is empty");
static_assert(OWN_COPIES || !GROUPED || GROUP >= KDIM || (STAGE_BLOCKS * 64) % GROUP == 0 || GROUP % (STAGE_BLOCKS * 64) == 0 || TILE_STAGES == 1,
              "a stage holds whole groups, or a group whole stages");

DEVICE void gate_inputs(float (&v)[8], uint4 up) {
  float other[8];
  widen(other, up);
#if GATED_INPUT
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = gated<GATED_INPUT>(v[j], other[j]);
#endif
}
#if ADAPTER_RANK
#include "gemv_delta.cuh"
#else
#define ADAPTER_ARGUMENTS
#define ADAPTER_GIVEN
#endif

struct __align__(128) LinearShared {
  u8 ring[STAGES][STAGE_BYTES];
#if IN_REGISTERS
  float sums[UNITS][8];  // of x
#elif HELD_INPUTS
  union __align__(16) {
    u8 x[X_BYTES];
    float partial[PLACES * SLOTS][WARPS][16][ROWS];  // from when inputs are in registers
  };
  XGroup groups[UNITS][ROWS];
#else
  u8 x[X_BYTES];
  XGroup groups[UNITS][ROWS];
#endif
  union __align__(16) {
#if !HELD_INPUTS
    float partial[SLOTS][WARPS][16][ROWS];
#endif
    u16 norm[IN_REGISTERS && NORM ? (SLICE + SLICE % 2) * 64 : 2];  // before there are sums
  };
  float2 row_stats[ROWS][STATS];  // sum of squares, maximum
#if ROWS > 1
  float2 row_most[ROWS];          // the norm's factor, maximum
#endif
  u64 full[STAGES], empty[STAGES];
#if OWN_COPIES
  u32 asked;  // warps that have asked for all their weights
#endif
#if ADAPTER_RANK
  AdapterShared adapter;
#endif
#if PAIRED
  __align__(16) float received[SLOTS * 16 * ROWS + ROWS];  // the other CTA's sums of our tiles, and of its squares of each row
  __align__(16) float squares[ROWS];                       // this CTA's
  u64 met;                                                 // they are here
#endif
};

// Which blocks of a tile this CTA has. BALANCED: stages of its first tile that it has not, and of its last tile that it has.
struct Slice {
  int first, blocks, skipped = 0, last = TILE_STAGES;
};
DEVICE Slice slice_at(int i) {
  if (SLICES == 1) return {0, BLOCKS};
  const int first = i * CUTS / SLICES * CUT, next = (i + 1) * CUTS / SLICES * CUT;
  return {first, min(next, BLOCKS) - first};
}

#if FORMAT == BIT_PLANES && CODING == TRELLIS
#include "gemv_trellis.cuh"
#elif FORMAT == BIT_PLANES
#include "gemv_bits.cuh"
#elif !IN_REGISTERS
#include "gemv_products.cuh"
#endif
#include "gemv_inputs.cuh"
#if IN_REGISTERS
#include "gemv_registers.cuh"
#endif
#include "gemv_outputs.cuh"

DEVICE int stages_of(Slice slice, int tiles) { return tiles * TILE_STAGES - (BALANCED ? slice.skipped + TILE_STAGES - slice.last : 0); }
DEVICE int slice_groups(Slice slice) { return min(((slice.first + slice.blocks) * 64 + GROUP - 1) / GROUP, GROUPS); }  // up to its end

// Where stage `start` of a slice of a tile lies, and how much of it there is.
struct Stage {
  const u8* weights;
  const Record* records;
  int bytes, record_bytes;
};
DEVICE Stage stage_at(const Linear& a, Slice slice, int tile, int start) {
  const u8* weights = a.weights + ((size_t)tile * BLOCKS + slice.first + start) * BLOCK_BYTES;
  Stage s = {weights, (const Record*)a.records, min(STAGE_BLOCKS, slice.blocks - start) * BLOCK_BYTES, 0};
  if constexpr (GROUPED) {
    const int group = (slice.first + start) * 64 / GROUP, last = SLICES == 1 ? GROUPS : slice_groups(slice);
    s.records += ((size_t)tile * GROUPS + group) * RECORD_LENGTH;
    s.record_bytes = min(STAGE_GROUPS, last - group) * GROUP_BYTES;
  }
#if SLOT_BLOCKS
  constexpr int SLOT_GROUPS = GROUPED ? SLOT_BLOCKS * 64 / GROUP : 0;
  const size_t place = (size_t)a.experts[start / SLOT_BLOCKS] * TILES + tile;
  s.weights = a.weights + place * SLOT_BLOCKS * BLOCK_BYTES;
  s.records = (const Record*)a.records + place * SLOT_GROUPS * RECORD_LENGTH;
#endif
  return s;
}

#if KEPT
// A warp's share of a stage, in registers.
struct Share {
  uint4 words[OWN_BLOCKS][BLOCK_WORDS];
  LaneRecords records[GROUPED ? OWN_GROUPS : 1];
};
#endif

#if OWN_COPIES
// A warp's part of the ring: STAGES shares, fetched STAGES stages ahead, each into the slot that was multiplied last. Addresses are
// counted up, and computed only where a tile begins.
template <typename TileAt> struct OwnRing {
  // whole groups to a share: records, too, lie one stage further on at each step
  static constexpr bool STEADY = GROUPED && GROUP < KDIM && OWN_BLOCKS * 64 % GROUP == 0;
  static constexpr int RECORD_STEP = STEADY ? STAGE_BLOCKS * 64 / GROUP * GROUP_BYTES : 0;
  LinearShared& sh;
  const Linear& a;
  Slice slice;
  TileAt tile_at;
  int left, lane, first;  // stages of the CTA that are not asked for yet; the first of this warp's blocks in a stage
  u32 ring, at;           // where this lane's part of its shares lies in shared memory; the slot that comes next
  const u8* own;          // that slot
  int tile, stage;        // what is asked for next
  const u8 *weights, *records;
  u32* turns;             // of this SM, or null: linears fill their rings whenever they begin
#if KEPT
  Share kept[KEPT];
  int taken;              // stages that are multiplied
#endif

  // By all threads.
  DEVICE OwnRing(LinearShared& sh, const Linear& a, Slice slice, TileAt tile_at, int stages, int warp, int lane)
      : sh(sh), a(a), slice(slice), tile_at(tile_at), left(stages), lane(lane), first(warp * OWN_BLOCKS),
        ring(shared_address(sh.ring[0] + warp * OWN_BYTES + lane * 16)), at(0), own(sh.ring[0] + warp * OWN_BYTES), tile(0),
        stage(BALANCED ? slice.skipped : 0), turns(nullptr) {
    if (left > 0) aim();
#if BY_COUNTERS
    if (a.turns && launches_overlap()) turns = a.turns + 2 * processor();
    if (turns) {
      if (threadIdx.x == 0) sh.asked = 0, await_turn_beside(turns);
      named_barrier(1, THREADS);
    }
#endif
  }
  // Addresses of this lane's first 16 bytes of `stage` of `tile`.
  DEVICE void aim() {
    const size_t index = place_of(tile_at(tile)).weights, block = slice.first + stage * STAGE_BLOCKS + first;
    weights = a.weights + (index * BLOCKS + block) * BLOCK_BYTES + lane * 16;
    if constexpr (GROUPED) records = (const u8*)a.records + (index * GROUPS + block * 64 / GROUP) * GROUP_BYTES + lane * 16;
  }
  DEVICE void step() {  // behind a stage that is asked for
    stage++;
    weights += STAGE_BLOCKS * BLOCK_BYTES;
    if (STEADY) records += RECORD_STEP;
    else if (GROUPED && stage < TILE_STAGES) aim();
#if BY_COUNTERS
    if (turns && left == 0) give_turn();
#endif
  }
#if KEPT
  DEVICE void keep() {  // the stages behind the ring's
    taken = 0;
#pragma unroll
    for (int j = 0; j < KEPT; j++)
      if (left > 0) {
        left--;
        if (stage == TILE_STAGES) stage = 0, tile++, aim();
        const int block = stage * STAGE_BLOCKS + first, blocks = FULL ? OWN_BLOCKS : min(OWN_BLOCKS, slice.blocks - block);
#pragma unroll
        for (int b = 0; b < OWN_BLOCKS; b++)
#pragma unroll
          for (int i = 0; i < BLOCK_WORDS; i++)
            if (FULL || b < blocks) kept[j].words[b][i] = stream_load(weights + (b * BLOCK_WORDS + i) * 512);
        if constexpr (GROUPED) {
#pragma unroll
          for (int i = 0; i < OWN_GROUPS * 2; i++)
            if (FULL || i / 2 * GROUP < blocks * 64)
              kept[j].records[i / 2].of[i % 2] = stream_load1(records - lane * 16 + i / 2 * GROUP_BYTES + (lane / 4 + i % 2 * 8) * sizeof(Record));
        }
        step();
      }
  }
#endif
  DEVICE void fetch() {  // the next stage, into the slot that comes next
    if (left-- > 0) {
      if (stage == TILE_STAGES) stage = 0, tile++, aim();
      const int block = stage * STAGE_BLOCKS + first, blocks = FULL ? OWN_BLOCKS : min(OWN_BLOCKS, slice.blocks - block);
      const u32 to = ring + at;
#pragma unroll
      for (int i = 0; i < OWN_BLOCKS * BLOCK_BYTES; i += 512)
        if ((FULL && i + 512 <= OWN_BLOCKS * BLOCK_BYTES) || i + lane * 16 < blocks * BLOCK_BYTES) copy16(to + i, weights + i);
      if constexpr (GROUPED) {
        const int group = (slice.first + block) * 64 / GROUP, last = SLICES == 1 ? GROUPS : slice_groups(slice);
        const int size = (FULL && STEADY ? OWN_GROUPS : min(OWN_GROUPS, last - group)) * GROUP_BYTES;
#pragma unroll
        for (int i = 0; i < OWN_GROUPS * GROUP_BYTES; i += 512)
          if (i + lane * 16 < size && (FULL || blocks > 0)) copy16(to + OWN_BLOCKS * BLOCK_BYTES + i, records + i);
      }
      step();
    }
    copy_group();  // of no copies, where there are none: groups are counted
  }
  DEVICE void give_turn() {  // the last warp to ask for its last share lets the next kernel on this SM begin
    if (lane == 0 && atomicAdd(&sh.asked, 1) == WARPS - 1) count_up(turns + 1);
  }
  DEVICE void advance() {
    at += STAGE_BYTES;
    own += STAGE_BYTES;
    if (at == STAGES * STAGE_BYTES) at = 0, own -= STAGES * STAGE_BYTES;
  }
  DEVICE void fill() {
    for (int i = 0; i < STAGES; i++) fetch(), advance();
#if KEPT
    keep();
#endif
  }
  DEVICE const u8* wait() const {
    copy_wait<STAGES - 1>();
    __syncwarp();
    return own;
  }
  DEVICE void release() {
    __syncwarp();
    fetch();
    advance();
  }
};
#endif

// The ring is filled before this kernel's inputs are there, but for its last HELD stages: those come while x is prepared, when there
// would be nothing to fetch otherwise. `early` runs ahead of the wait. Tiles but for the first `known` are told by `learn`.
template <typename TileAt, typename Early, typename Learn>
DEVICE void produce(LinearShared& sh, const Linear& a, Slice slice, int count, TileAt tile_at, Early early, int known, Learn learn, int lane) {
  const int skipped = BALANCED ? slice.skipped : 0, stages = stages_of(slice, count);
  int slot = 0, parity = 1;
  auto stage_of = [&](int i) {
    return stage_at(a, slice, place_of(tile_at((i + skipped) / TILE_STAGES)).weights, (i + skipped) % TILE_STAGES * STAGE_BLOCKS);
  };
  auto await_inputs = [&](int next) {
    early();
    for (int i = next; i < min(stages, next + PREFETCHED); i++) {
      const Stage s = stage_of(i);
      for (int line = lane * 128; line < s.bytes; line += 32 * 128) prefetch_l2(s.weights + line);
      for (int line = lane * 128; line < s.record_bytes; line += 32 * 128) prefetch_l2((const u8*)s.records + line);
    }
    wait_for_inputs();
  };
  u32* const turns = a.turns ? a.turns + 2 * processor() : nullptr;  // asked once: a preempted CTA may go on elsewhere
  if (turns) await_turn(turns, lane);
  for (int i = 0; i < stages; i++) {
    if (i == known * TILE_STAGES) learn();
    if (i == STAGES - HELD) await_inputs(i);
    if (i >= STAGES) barrier_wait(&sh.empty[slot], parity);
    const Stage s = stage_of(i);
    copy_begin(&sh.full[slot], s.bytes + s.record_bytes, lane);
    copy_bytes(sh.ring[slot], s.weights, s.bytes, &sh.full[slot], lane);
    if (GROUPED) copy_bytes(sh.ring[slot] + STAGE_BLOCKS * BLOCK_BYTES, s.records, s.record_bytes, &sh.full[slot], lane);
    copy_end(&sh.full[slot]);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  if (turns && lane == 0) count_up(turns + 1);
  if (stages <= STAGES - HELD) await_inputs(stages);
}
template <typename TileAt, typename Early>
DEVICE void produce(LinearShared& sh, const Linear& a, Slice slice, int count, TileAt tile_at, Early early, int lane) {
  produce(sh, a, slice, count, tile_at, early, 0, [] {}, lane);
}

DEVICE float as_float(float v) { return v; }
DEVICE float as_float(int v) { return __int_as_float(v); }

struct Ring {  // the stage that comes next
  LinearShared& sh;
  int slot = 0;
  u32 parity = 0;
  DEVICE const u8* wait() const {
    barrier_wait(&sh.full[slot], parity);
    return sh.ring[slot];
  }
  DEVICE void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&sh.empty[slot]);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

#if !IN_REGISTERS && FORMAT != BIT_PLANES
// A unit of a tile, of which `block` is the first of its slice's blocks: into `whole`, or scaled into `total`. `fragment(b)`: its weights.
template <typename Fragments, typename Records>
DEVICE void multiply_fragments(const LinearShared& sh, Slice slice, Fragments fragment, const Records& records, const Inputs& inputs, int block,
                               float (&total)[COLUMN_TILES][2], accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], int lane) {
  const u8* xs = inputs.x + block * XBLOCK;
  if constexpr (!GROUPED) {
    multiply_block(fragment(0), xs, whole);
  } else {
    group_sum acc[SETS + SUMS][COLUMN_TILES][4] = {};
#pragma unroll
    for (int b = 0; b < UNIT_BLOCKS; b++)
      if (UNIT_BLOCKS == 1 || BLOCKS % UNIT_BLOCKS == 0 || block + b < slice.blocks) multiply_block(fragment(b), xs + b * XBLOCK, acc);
#if FORMAT == FP8_BLOCKS
    add_scaled(whole, acc, *(const float2*)records);
#else
    add_unit(total, acc, records, sh.groups[GROUP == 32 ? 2 * block : block / UNIT_BLOCKS], (slice.first + block) * 2 + 1 < GROUPS, lane / 4, lane % 4);
#endif
  }
}
DEVICE void multiply_unit(const LinearShared& sh, Slice slice, const u8* weights, const Record* records, const Inputs& inputs, int block,
                          float (&total)[COLUMN_TILES][2], accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], int lane) {
  auto loaded = [=](int b) { return load_fragment(weights + b * BLOCK_BYTES, lane); };
  multiply_fragments(sh, slice, loaded, records, inputs, block, total, whole, lane);
}
#endif

#if OWN_COPIES
// This warp's share of a stage that begins with block `start` of the slice.
DEVICE void multiply_stage(const LinearShared& sh, Slice slice, const u8* own, const Inputs& inputs, int start,
                           float (&total)[COLUMN_TILES][2], accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], int warp, int lane) {
  const int first = start + warp * OWN_BLOCKS;
  const Record* records = (const Record*)(own + OWN_BLOCKS * BLOCK_BYTES);
#pragma unroll
  for (int unit = 0; unit < OWN_BLOCKS; unit += UNIT_BLOCKS) {
    const int block = first + unit, group = GROUPED ? block * 64 / GROUP - first * 64 / GROUP : 0;
    if (!FULL && block >= slice.blocks) break;
    multiply_unit(sh, slice, own + unit * BLOCK_BYTES, records + group * RECORD_LENGTH, inputs, block, total, whole, lane);
  }
}
#if HELD_INPUTS
// This warp's inputs of a tile, of which it has the same blocks in every tile.
struct HeldInputs {
  Column of[TILE_STAGES][OWN_BLOCKS];
  DEVICE HeldInputs(const Inputs& inputs, Slice slice, int warp) {
#pragma unroll
    for (int stage = 0; stage < TILE_STAGES; stage++)
#pragma unroll
      for (int b = 0; b < OWN_BLOCKS; b++) {
        const int block = stage * STAGE_BLOCKS + warp * OWN_BLOCKS + b;
        of[stage][b] = load_column(inputs.x + (FULL ? block : min(block, slice.blocks - 1)) * XBLOCK);
      }
  }
};
DEVICE void multiply_held(const LinearShared& sh, Slice slice, const u8* own, const Column (&held)[OWN_BLOCKS], int start,
                          float (&total)[COLUMN_TILES][2], int warp, int lane) {
  const int first = start + warp * OWN_BLOCKS;
  const Record* records = (const Record*)(own + OWN_BLOCKS * BLOCK_BYTES);
#pragma unroll
  for (int unit = 0; unit < OWN_BLOCKS; unit += UNIT_BLOCKS) {
    const int block = first + unit, group = block * 64 / GROUP - first * 64 / GROUP;
    if (!FULL && block >= slice.blocks) break;
    group_sum acc[SETS + SUMS][COLUMN_TILES][4] = {};
#pragma unroll
    for (int b = 0; b < UNIT_BLOCKS; b++)
      if (UNIT_BLOCKS == 1 || BLOCKS % UNIT_BLOCKS == 0 || block + b < slice.blocks)
        multiply(load_fragment(own + (unit + b) * BLOCK_BYTES, lane), held[unit + b], acc, 0);
    add_unit(total, acc, records + group * RECORD_LENGTH, sh.groups[GROUP == 32 ? 2 * block : block / UNIT_BLOCKS],
             (slice.first + block) * 2 + 1 < GROUPS, lane / 4, lane % 4);
  }
}
#endif
#if KEPT
DEVICE void multiply_share(const LinearShared& sh, Slice slice, const Share& share, const Inputs& inputs, int start,
                           float (&total)[COLUMN_TILES][2], accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], int warp, int lane) {
#pragma unroll
  for (int unit = 0; unit < OWN_BLOCKS; unit += UNIT_BLOCKS) {
    const int block = start + warp * OWN_BLOCKS + unit;
    if (!FULL && block >= slice.blocks) break;
    auto kept = [&](int b) { return fragment_of(share.words[unit + b]); };
    multiply_fragments(sh, slice, kept, share.records[GROUPED ? unit * 64 / GROUP : 0], inputs, block, total, whole, lane);
  }
}
#endif
#elif !IN_REGISTERS
// One stage of one tile, this warp's units of it.
// `turn`: which of the stage's units this warp begins with; it moves on from stage to stage where units and warps do not match.
DEVICE void multiply_stage(const LinearShared& sh, Slice slice, const u8* ring, const Inputs& inputs, int start,
                           float (&total)[COLUMN_TILES][2], accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], int turn, int lane) {
  const int blocks = FULL ? STAGE_BLOCKS : min(STAGE_BLOCKS, slice.blocks - start);
  const Record* records = (const Record*)(ring + STAGE_BLOCKS * BLOCK_BYTES);
#pragma unroll
  for (int unit = turn * UNIT_BLOCKS, n = 0; n < (STAGE_BLOCKS + UNIT_BLOCKS * WARPS - 1) / (UNIT_BLOCKS * WARPS);
       n++, unit += WARPS * UNIT_BLOCKS) {
    if (!FULL && unit >= blocks) break;
    const int block = start + unit, group = GROUPED ? block * 64 / GROUP - start * 64 / GROUP : 0;
    multiply_unit(sh, slice, ring + unit * BLOCK_BYTES, records + group * RECORD_LENGTH, inputs, block, total, whole, lane);
  }
}
#endif

// Barriers, and the start of the kernel after this one.
DEVICE void begin_linear(LinearShared& sh) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < (OWN_COPIES ? 0 : STAGES); i++) {
      barrier_init(&sh.full[i], COPY_ARRIVALS);
      barrier_init(&sh.empty[i], WARPS);
    }
#if ADAPTER_RANK
    barrier_init(&sh.adapter.ready, 1);
#endif
#if PAIRED
    barrier_init(&sh.met, COPY_ARRIVALS);
    copy_begin(&sh.met, sizeof(sh.received), 0);
#endif
    fence_barriers();
  }
  __syncthreads();
  launch_dependents();  // at once: while this CTA is here, the SM has room for exactly one of the next kernel's
#if PAIRED
  cluster_arrive();
#endif
}

// Tiles tile_at(done) … tile_at(count - 1) as they come through the ring, times the rows that are loaded; `rounds` ends them.
template <typename Rounds, typename Ring>
DEVICE void consume(LinearShared& sh, const Inputs& inputs, Slice slice, int done, int count, Rounds& rounds, Ring& ring, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  rounds.begin(done);
  int turn = warp;
#if HELD_INPUTS
  const HeldInputs held(inputs, slice, warp);
  named_barrier(1, THREADS);  // before sums come there
#endif
  for (int tile = done; tile < count; tile++) {
    float total[COLUMN_TILES][2] = {};  // of the tile
    accumulator whole[SETS + SUMS][COLUMN_TILES][4] = {};
#if HELD_INPUTS
#pragma unroll
    for (int stage = 0; stage < TILE_STAGES; stage++) {  // registers have no index
      if (BALANCED && ((tile == 0 && stage < slice.skipped) || (tile + 1 == count && stage >= slice.last))) continue;
      const u8* here = ring.wait();
      multiply_held(sh, slice, here, held.of[stage], stage * STAGE_BLOCKS, total, warp, lane);
      ring.release();
    }
    auto& partial = sh.partial[rounds.place + tile - done][warp];
#else
#pragma unroll(IN_REGISTERS ? TILE_STAGES : 1)
    for (int stage = BALANCED && tile == 0 ? slice.skipped : 0; stage < (BALANCED && tile + 1 == count ? slice.last : TILE_STAGES); stage++) {
#if KEPT
      const int place = ring.taken++ - STAGES;
      if (place >= 0 && place < KEPT) {
#pragma unroll
        for (int j = 0; j < KEPT; j++)
          if (place == j) multiply_share(sh, slice, ring.kept[j], inputs, stage * STAGE_BLOCKS, total, whole, turn, lane);
        continue;
      }
#endif
      const u8* here = ring.wait();
      multiply_stage(sh, slice, here, inputs, stage * STAGE_BLOCKS, total, whole, turn, lane);
      if (!FULL && !IN_REGISTERS && !OWN_COPIES) turn = (turn + WARPS - STAGE_UNITS % WARPS) % WARPS;
      ring.release();
    }
    auto& partial = sh.partial[tile - done][warp];
#endif
    if constexpr (IN_QUARTERS) {
#pragma unroll
      for (int i = 0; i < COLUMN_TILES * 2; i++) {  // lanes t have the sums of a quarter of the inputs each
        float sum = total[i / 2][i % 2];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (t == i / 2 % 4) partial[g + 8 * (i % 2)][i / 2] = sum;
      }
    } else if constexpr (GROUPED && !FLOATS && !IN_REGISTERS && !AS_HALVES) {
#pragma unroll
      for (int i = 0; i < COLUMN_TILES * 2; i++) {
        const int token = t + i / 2 * 4;
#if ROW_SCALED
        total[i / 2][i % 2] *= whole[0][0][i % 2];
#endif
        if (token < ROWS) partial[g + 8 * (i % 2)][token] = total[i / 2][i % 2];
      }
    } else {
#pragma unroll
      for (int i = 0; i < COLUMN_TILES * 4; i++) {
        const int n = i / 4, j = i % 4, token = 8 * n + 2 * t + (j & 1);
        const auto sum = SETS == 1 ? inputs.sized(whole[0][n][j], n, j & 1) : whole[0][n][j] + whole[SETS - 1][n][j];
        if (token < ROWS) partial[g + 8 * (j / 2)][token] = as_float(sum);
      }
    }
    // sums for the CTA before this one are left at once
    if (tile + 1 == count || tile + 1 - done == SLOTS || (BALANCED && tile == 0 && slice.skipped)) {
      named_barrier(1, THREADS);
      rounds.end(sh, done, tile + 1);
      done = tile + 1;
#if HELD_INPUTS
      rounds.place = SLOTS - rounds.place;  // sums that are being added stay until all have met again
#endif
      if (done < count) {
        if (PLACES == 1) named_barrier(1, THREADS);
        rounds.begin(done);
      }
    }
  }
}

// This CTA's tiles tile_at(0) … tile_at(count - 1) of the linear; it is `index` of `workers`. The producer warp comes back with false and is done;
// for the others the ring is free, and what they wrote to y is on its way. Before its first use of x, everything here is
// ahead of the kernel before this one; so is `meanwhile`, which the others run.
struct Nothing {
  DEVICE void operator()() const {}
};
template <typename TileAt, typename Early, typename Meanwhile = Nothing>
DEVICE bool linear(LinearShared& sh, const Linear& a, int count, TileAt tile_at, Early early, int index, int workers,
                   Slice whole = slice_at(0), float* mail = nullptr, Meanwhile meanwhile = {}) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if ADAPTER_RANK
  if (threadIdx.x == 0) sh.adapter.index = index, sh.adapter.workers = workers;
#endif
  begin_linear(sh);
#if ADAPTER_RANK
  if (warp >= WARPS + !OWN_COPIES) {
    adapt(sh.adapter, a, count, tile_at, index, workers, lane);
    return false;
  }
#endif
#if OWN_COPIES
  OwnRing<TileAt> ring(sh, a, whole, tile_at, stages_of(whole, count), warp, lane);
  ring.fill();
  if (warp == WARPS - 1) early();
#else
  if (warp == WARPS) {
    produce(sh, a, whole, count, tile_at, early, lane);
#if PAIRED
    __syncwarp();
    cluster_wait();
#endif
    return false;
  }
  Ring ring = {sh};
#endif
  meanwhile();
  const Inputs inputs = load_rows(sh, a, whole, ROWS, warp, lane);
#if PAIRED
  PairRounds<TileAt> rounds = {a, tile_at, index % 2};
#else
  Rounds<TileAt> rounds = {a, tile_at, count, whole, mail};
#endif
  consume(sh, inputs, whole, 0, count, rounds, ring, warp, lane);
  return true;
}
