// What stands between gate/up and down: act(gate) · up. tiles.py has the same numbers (ACTIVATIONS); as EPILOGUE they follow
// those of linear.cuh.
#define SILU 2
#define GELU_TANH 3
#define CLIPPED_SWIGLU 4  // of gpt-oss: the gate clipped from above, up from both sides and one added

// Each is gate · sigmoid(something): 0.5 (1 + tanh u) = sigmoid(2u). The same bits from every kernel.
template <int ACTIVATION> DEVICE float gated(float gate, float up) {
  static_assert(ACTIVATION == SILU || ACTIVATION == GELU_TANH || ACTIVATION == CLIPPED_SWIGLU, "an activation");
  float inner = gate;
  if (ACTIVATION == GELU_TANH) inner = gate * (1.5957691216f + 0.0713548163f * gate * gate);  // 2 √(2/π) (x + 0.044715 x³)
  if (ACTIVATION == CLIPPED_SWIGLU) {
    gate = fminf(gate, 7.f), up = fminf(fmaxf(up, -7.f), 7.f) + 1.f;
    inner = 1.702f * gate;
  }
  return __fdividef(gate, 1.f + __expf(-inner)) * up;
}
