// One new token of each sequence through a gated DeltaNet layer, from its projections to what its o multiplies with.
//
//   q, k, v = silu(conv(q, k, v)),  q, k of length 1,  q / √KEY_DIM
//   S = e^g · S + k ⊗ d,  d = σ(b) · (v − e^g · Sᵀ k),  g = decay · softplus(a + step_bias)
//   out = norm(Sᵀ q) · silu(z)
//
// Of the new S only what is written is needed: Sᵀ q = e^g · S_oldᵀ q + (k · q) · d, so one pass over the old state, which stays
// in registers, gives both of its products.
//
// Work split: a CTA has the state of one head of one sequence, [KEY_DIM × VALUE_DIM] floats.
//
//      thread:  four neighbouring columns of every GROUPS-th row       (a warp reads whole rows)
//      CTA:     sums over rows meet in shared memory; VALUE_DIM threads finish a column each
//
// Limit: bytes of the states, read once and written once. They, and the older inputs of the convolution, are read before the wait:
// what wrote them ended before this step began (attention.cu). A token at position p lies in row p mod WIDTH of `conv`: a step
// writes the one row that it does not read, so the heads that share a key can all write it.
//
// defines: FP16, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, THREADS
#include "common.cuh"

constexpr int SHARING = VALUE_HEADS / KEY_HEADS, KEYS = KEY_HEADS * KEY_DIM, OUTPUTS = VALUE_HEADS * VALUE_DIM;
constexpr int CHANNELS = 2 * KEYS + OUTPUTS, PROJECTED = CHANNELS + OUTPUTS + 2 * VALUE_HEADS;
constexpr int OWN = 2 * KEY_DIM + VALUE_DIM, PER = (OWN + THREADS - 1) / THREADS;  // channels of a head, and of a thread
constexpr int LANES = VALUE_DIM / 4, GROUPS = THREADS / LANES, ROWS = KEY_DIM / GROUPS;
constexpr int WARPS = THREADS / 32, COLUMN_WARPS = VALUE_DIM / 32;
static_assert(VALUE_DIM % 32 == 0 && VALUE_DIM <= THREADS && THREADS % LANES == 0 && KEY_DIM % GROUPS == 0 && WARPS >= 3, "");

struct Shared {
  __align__(16) float sums[2][GROUPS][VALUE_DIM];  // of Sᵀ k and Sᵀ q, by group of rows
  __align__(16) float mixed[OWN];                  // q, k and v after the convolution
  __align__(16) float change[VALUE_DIM];
  float products[3];                               // |q|², |k|², k · q
  float squares[COLUMN_WARPS];
};

DEVICE float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }
DEVICE float softplus(float x) { return x > 20.f ? x : log1pf(__expf(x)); }

extern "C" __global__ void __launch_bounds__(THREADS)
gated_delta(const u16* projected, u16* conv, float* states, const int* slots, const int* lengths, const float* conv_weight,
            const float* decay, const float* step_bias, const float* norm, u16* out, int rows, float epsilon) {
  __shared__ Shared sh;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row = blockIdx.x / VALUE_HEADS, head = blockIdx.x % VALUE_HEADS, key_head = head / SHARING;
  launch_dependents();
  const int length = row < rows ? lengths[row] : 0;
  if (length == 0) {  // after those before it all the same: the kernel that follows waits for this one alone
    wait_for_inputs();
    return;
  }
  const int slot = slots[row], position = length - 1;
  const int group = thread / LANES, column = thread % LANES * 4;
  float* own = states + ((size_t)slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM + group * VALUE_DIM + column;
  float4 s[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) s[i] = *(const float4*)(own + i * GROUPS * VALUE_DIM);

  int channel[PER];
  float older[PER], newest[PER];  // what the convolution adds up of older tokens; the weight of the new one
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int at = min(thread + i * THREADS, OWN - 1);
    channel[i] = at < KEY_DIM ? key_head * KEY_DIM + at
                 : at < 2 * KEY_DIM ? KEYS + key_head * KEY_DIM + at - KEY_DIM : 2 * KEYS + head * VALUE_DIM + at - 2 * KEY_DIM;
    older[i] = 0;
#pragma unroll
    for (int back = 1; back < WIDTH; back++)
      if (position >= back)
        older[i] += to_float(conv[((size_t)slot * WIDTH + (position - back) % WIDTH) * CHANNELS + channel[i]]) *
                    conv_weight[(WIDTH - 1 - back) * CHANNELS + channel[i]];
    newest[i] = conv_weight[(WIDTH - 1) * CHANNELS + channel[i]];
  }
  const float rate = decay[head], bias = step_bias[head], factor = thread < VALUE_DIM ? norm[thread] : 0.f;
  wait_for_inputs();

  const u16* token = projected + (size_t)row * PROJECTED;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int at = thread + i * THREADS;
    if (at >= OWN) break;
    const u16 x = token[channel[i]];
    const float y = older[i] + to_float(x) * newest[i];
    sh.mixed[at] = y * sigmoid(y);
    conv[((size_t)slot * WIDTH + position % WIDTH) * CHANNELS + channel[i]] = x;
  }
  const float gate = thread < VALUE_DIM ? to_float(token[CHANNELS + head * VALUE_DIM + thread]) : 0.f;
  const float beta = sigmoid(to_float(token[CHANNELS + OUTPUTS + head]));
  const float kept = __expf(rate * softplus(to_float(token[CHANNELS + OUTPUTS + VALUE_HEADS + head]) + bias));
  __syncthreads();
  if (warp < 3) {
    const float *a = sh.mixed + (warp == 1 ? KEY_DIM : 0), *b = sh.mixed + (warp == 0 ? 0 : KEY_DIM);
    float sum = 0;
    for (int i = lane; i < KEY_DIM; i += 32) sum += a[i] * b[i];
    sum = warp_sum(sum);
    if (lane == 0) sh.products[warp] = sum;
  }
  float4 with_key = make_float4(0, 0, 0, 0), with_query = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const float q = sh.mixed[group + i * GROUPS], k = sh.mixed[KEY_DIM + group + i * GROUPS];
    with_key.x += s[i].x * k, with_key.y += s[i].y * k, with_key.z += s[i].z * k, with_key.w += s[i].w * k;
    with_query.x += s[i].x * q, with_query.y += s[i].y * q, with_query.z += s[i].z * q, with_query.w += s[i].w * q;
  }
  *(float4*)&sh.sums[0][group][column] = with_key;
  *(float4*)&sh.sums[1][group][column] = with_query;
  __syncthreads();

  const float by_query = rsqrtf(sh.products[0] + 1e-6f) * rsqrtf((float)KEY_DIM), by_key = rsqrtf(sh.products[1] + 1e-6f);
  float result = 0;
  if (thread < VALUE_DIM) {
    float found = 0, read = 0;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) found += sh.sums[0][i][thread], read += sh.sums[1][i][thread];
    const float change = beta * (sh.mixed[2 * KEY_DIM + thread] - kept * found * by_key);
    result = kept * read * by_query + sh.products[2] * by_query * by_key * change;
    sh.change[thread] = change * by_key;
    const float squares = warp_sum(result * result);
    if (lane == 0) sh.squares[warp] = squares;
  }
  __syncthreads();
  const float4 change = *(const float4*)(sh.change + column);
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const float k = sh.mixed[KEY_DIM + group + i * GROUPS];
    *(float4*)(own + i * GROUPS * VALUE_DIM) = make_float4(kept * s[i].x + k * change.x, kept * s[i].y + k * change.y,
                                                           kept * s[i].z + k * change.z, kept * s[i].w + k * change.w);
  }
  if (thread >= VALUE_DIM) return;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < COLUMN_WARPS; i++) squares += sh.squares[i];
  const float normed = result * rsqrtf(squares / VALUE_DIM + epsilon) * factor;
  out[(size_t)row * OUTPUTS + head * VALUE_DIM + thread] = to_bits(normed * gate * sigmoid(gate));
}
