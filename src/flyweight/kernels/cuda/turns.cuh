// Where linears take turns, none fills its ring before the one in front of it on this SM has asked for the last of its weights: so
// these come sooner, and memory has work while one kernel ends and the next begins.
DEVICE void await_turn(u32* turns, int lane) {
  constexpr u32 most = 100000;  // cycles, should a kernel have ended without a word
  const u32 begin = cycles();
  if (lane == 0) {
    const u32 before = count_up(turns);
    u32 done[1];
    do load_relaxed(turns + 1, done);
    while ((int)(done[0] - before) < 0 && cycles() - begin < most);
  }
  __syncwarp();
}
