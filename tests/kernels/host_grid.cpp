#include "host_grid.hpp"

#include <setjmp.h>
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
// A fiber is begun by swapcontext and from then on entered and left by longjmp, which, unlike swapcontext, asks nothing of the
// system: threads give way millions of times in a launch.
struct Fiber { ucontext_t context; jmp_buf left; bool begun, over; };
struct Fibers : Cta {
  std::vector<Fiber> fibers;
  ucontext_t beginning;  // of the scheduler, where a fiber begins
  jmp_buf scheduler;
};

void pause_fiber() {
  auto mine = static_cast<Fibers*>(cta);
  if (!_setjmp(mine->fibers[mine->at].left)) _longjmp(mine->scheduler, 1);
  threadIdx.x = mine->at;
}

static void fiber_main() {
  launch.kernel(launch.args);
  auto mine = static_cast<Fibers*>(cta);
  mine->fibers[mine->at].over = true;
  _longjmp(mine->scheduler, 1);
}

// until it gives way or ends
static void __attribute__((noinline)) enter(Fibers* mine, Fiber& fiber) {
  if (_setjmp(mine->scheduler)) return;
  if (fiber.begun) _longjmp(fiber.left, 1);
  fiber.begun = true;
  swapcontext(&mine->beginning, &fiber.context);
}

static void run_cta(u32 x, u32 y) {
  constexpr size_t STACK = 256 << 10;
  Fibers mine{};
  cta = &mine;
  blockIdx = {x, y, 0};
  const int threads = blockDim.x;
  std::vector<Meeting> warps(threads / 32);
  std::vector<u64> exchange[6];
  mine.fibers.resize(threads), mine.warps = warps.data();
  for (int i = 0; i < 6; i++) exchange[i].resize(threads), mine.exchange[i] = exchange[i].data();
  std::unique_ptr<char[]> stacks(new char[STACK * threads]);  // not written to: most of it is never used
  registers_begin = (uintptr_t)stacks.get(), registers_end = registers_begin + STACK * threads;
  for (int i = 0; i < threads; i++) {
    ucontext_t& context = mine.fibers[i].context;
    getcontext(&context);
    context.uc_stack.ss_sp = &stacks[STACK * i], context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
  }
  for (int left = threads; left;) {
    left = 0;
    for (int i = 0; i < threads; i++)
      if (!mine.fibers[i].over) mine.at = threadIdx.x = i, left++, enter(&mine, mine.fibers[i]);
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
