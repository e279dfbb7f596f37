#include "host_grid.hpp"

#include <ucontext.h>
#include <memory>
#include <thread>
#include <vector>

__thread Cta* cta;
__thread Index threadIdx, blockIdx;
Index gridDim, blockDim;

// Words must lie aligned in memory, as on a GPU: the compiler checks every address (-fsanitize=alignment). What lies on a fiber's
// stack is a thread's registers, which have none.
struct SourcePlace { const char* file; u32 line, column; };
static SourcePlace misaligned;  // the last such load or store of this launch
static thread_local uintptr_t registers_begin, registers_end;
extern "C" void __ubsan_handle_type_mismatch_v1(const SourcePlace* place, uintptr_t address) {
  if (address < registers_begin || address >= registers_end) misaligned = *place;
}

struct Launch { void (*kernel)(void**); void** args; };
static Launch launch;
struct Fibers : Cta {
  std::vector<ucontext_t> contexts;
  std::vector<char> over;
  ucontext_t scheduler;
};

void pause_fiber() {
  auto mine = static_cast<Fibers*>(cta);
  swapcontext(&mine->contexts[mine->at], &mine->scheduler);
  threadIdx.x = mine->at;
}

static void fiber_main() {
  launch.kernel(launch.args);
  auto mine = static_cast<Fibers*>(cta);
  mine->over[mine->at] = 1;
  swapcontext(&mine->contexts[mine->at], &mine->scheduler);
}

static void run_cta(u32 x, u32 y) {
  constexpr size_t STACK = 256 << 10;
  Fibers mine{};
  cta = &mine;
  blockIdx = {x, y, 0};
  const int threads = blockDim.x;
  std::vector<Meeting> warps(threads / 32);
  std::vector<u64> exchange[6];
  mine.contexts.resize(threads), mine.over.assign(threads, 0), mine.warps = warps.data();
  for (int i = 0; i < 6; i++) exchange[i].resize(threads), mine.exchange[i] = exchange[i].data();
  std::unique_ptr<char[]> stacks(new char[STACK * threads]);  // not written to: most of it is never used
  registers_begin = (uintptr_t)stacks.get(), registers_end = registers_begin + STACK * threads;
  for (int i = 0; i < threads; i++) {
    getcontext(&mine.contexts[i]);
    mine.contexts[i].uc_stack.ss_sp = &stacks[STACK * i], mine.contexts[i].uc_stack.ss_size = STACK;
    mine.contexts[i].uc_link = nullptr;
    makecontext(&mine.contexts[i], fiber_main, 0);
  }
  for (int left = threads; left;) {
    left = 0;
    for (int i = 0; i < threads; i++)
      if (!mine.over[i]) mine.at = threadIdx.x = i, left++, swapcontext(&mine.scheduler, &mine.contexts[i]);
  }
}

int run_grid(void (*kernel)(void** args), int x, int y, int block, void** args) {
  misaligned = {};
  gridDim = {(u32)x, (u32)y, 0}, blockDim = {(u32)block, 0, 0};
  launch = {kernel, args};
  std::vector<std::thread> ctas;
  for (int i = 0; i < x * y; i++) ctas.emplace_back(run_cta, i % x, i / x);
  for (auto& one : ctas) one.join();
  return misaligned.line;
}
