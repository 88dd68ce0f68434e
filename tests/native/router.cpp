// The router (device/router.h) on a CPU, its text as it is: every thread of a block is a fiber, and what a warp or a block
// does together is a meeting of fibers. Whoever does not meet, or meets for something else, is found; so is a read outside
// the memory that was named, and what one lane reads before another has written it, since lanes run one after the other.
//
// Not the GPU: memory is in order here, and products are exact.
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <vector>

// The engine has a number of that name.
#pragma push_macro("WEAVE_BF16")
#undef WEAVE_BF16
#include "arithmetic.h"
#pragma pop_macro("WEAVE_BF16")

namespace emulated {

struct Meeting {
  unsigned members = 0, here = 0, round = 0, kind = 0, other = 0;
  // Of the members, by their place: what they brought, and what all of them take away.
  std::vector<unsigned> words[6];
};

struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned thread, block;
  bool finished = false;
  const Meeting* waits = nullptr;  // until its round is over
  unsigned round = 0;
  std::vector<Copy> copies;  // that it has not waited for
};

struct Index {
  unsigned x;
};
Fiber* now = nullptr;
ucontext_t scheduler;
std::vector<Meeting> warps, blocks;  // [blocks x warps], [blocks]
unsigned threads_of_block = 0, blocks_of_grid = 0;
std::function<void()> body;

void yield() { swapcontext(&now->context, &scheduler); }

// The first thing that went wrong; nobody runs on after it.
const char* failure = nullptr;
void fail(const char* what) {
  if (!failure) failure = what;
  yield();
}

// All members bring up to six words, then see each other's.
const Meeting& meet(Meeting& m, unsigned place, unsigned kind, std::initializer_list<unsigned> words) {
  if (m.here == 0)
    m.kind = kind;
  else if (m.kind != kind)
    fail("members of a warp or block meet for different things");
  unsigned i = 0;
  for (unsigned word : words) m.words[i++][place] = word;
  if (++m.here == m.members) {
    m.here = 0, ++m.round;
  } else {
    now->waits = &m, now->round = m.round;
    yield();
  }
  return m;
}
enum Kind { SYNC, SHUFFLE, VOTE, BEST, MATCH, ADD, MULTIPLY, READ };
Meeting& my_warp() { return warps[now->block * (threads_of_block / 32) + now->thread / 32]; }
Meeting& my_block() { return blocks[now->block]; }
// What was brought must stay until all have read it.
const Meeting& in_warp(Kind kind, std::initializer_list<unsigned> words) { return meet(my_warp(), now->thread % 32, kind, words); }
void read_by_warp() { meet(my_warp(), now->thread % 32, READ, {}); }

void enter() {
  body();
  now->finished = true;
  yield();
}

// Blocks `first` to `first + count` at once, in an order that follows from `seed`.
void run(unsigned first, unsigned count, unsigned threads, unsigned grid, unsigned seed, const std::function<void()>& what) {
  threads_of_block = threads, blocks_of_grid = grid, body = what;
  const auto meetings = [](std::vector<Meeting>& all, unsigned number, unsigned members) {
    all.assign(number, Meeting());
    for (Meeting& m : all) {
      m.members = members;
      for (auto& words : m.words) words.assign(members, 0);
    }
  };
  meetings(warps, grid * (threads / 32), 32);
  meetings(blocks, grid, threads);
  constexpr size_t STACK = 64 << 10;
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (unsigned i = 0; i < count * threads; ++i) {
    fibers.push_back(std::make_unique<Fiber>());
    Fiber& f = *fibers.back();
    f.thread = i % threads, f.block = first + i / threads;
    f.stack.reset(new char[STACK]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  std::mt19937 order(seed);
  std::vector<Fiber*> left;
  for (auto& f : fibers) left.push_back(f.get());
  // Blocks stand still for a while, some of them at a time.
  std::vector<bool> still(grid);
  bool ran = true;
  for (unsigned turn = 0; !left.empty(); ++turn) {
    if (turn % 64 == 0)
      for (unsigned i = 0; i < grid; ++i) still[i] = order() & 1;
    if (!ran) still.assign(grid, false);
    const bool everybody = std::find(still.begin(), still.end(), true) == still.end();
    std::shuffle(left.begin(), left.end(), order);
    ran = false;
    for (Fiber* f : left) {
      if (still[f->block] || (f->waits && f->waits->round == f->round)) continue;
      f->waits = nullptr;
      now = f, ran = true;
      swapcontext(&scheduler, &f->context);
      if (failure) return;
    }
    if (!ran && everybody) failure = "everybody waits for somebody who does not come";
    if (failure) return;
    std::vector<Fiber*> rest;
    for (Fiber* f : left)
      if (!f->finished) rest.push_back(f);
    left = rest;
  }
}

// Memory that may be read past the caches' ordinary path.
struct Range {
  const char* from;
  size_t size;
};
std::vector<Range> readable;
template <class T>
T load(const T* p) {
  for (const Range& r : readable)
    if ((const char*)p >= r.from && (const char*)(p + 1) <= r.from + r.size) {
      if ((size_t)p % sizeof(T)) fail("a load is not aligned");
      return *p;
    }
  fail("a load is outside the memory that may be read");
  return T();
}

}  // namespace emulated

void weave_step() {}
void weave_yield() { emulated::yield(); }

#define threadIdx (emulated::Index{emulated::now->thread})
#define blockIdx (emulated::Index{emulated::now->block})
#define gridDim (emulated::Index{emulated::blocks_of_grid})
#define __global__
#define __shared__ static  // one block at a time runs what has any
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T>
T __ldg(const T* p) { return emulated::load(p); }
template <class T>
T __ldcg(const T* p) { return emulated::load(p); }
inline float __uint_as_float(unsigned u) { return weave::float_of(u); }
inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
inline void __syncwarp() { emulated::in_warp(emulated::SYNC, {}); }
inline void __syncthreads() { emulated::meet(emulated::my_block(), emulated::now->thread, emulated::SYNC, {}); }
inline bool __syncthreads_and(bool v) {
  emulated::Meeting& m = emulated::my_block();
  emulated::meet(m, emulated::now->thread, emulated::VOTE, {v});
  bool all = true;
  for (unsigned other : m.words[0]) all = all && other;
  emulated::meet(m, emulated::now->thread, emulated::READ, {});
  return all;
}
template <class T>
T __shfl_sync(unsigned, T v, unsigned from) {
  static_assert(sizeof(T) <= 4);
  unsigned word = 0;
  __builtin_memcpy(&word, &v, sizeof(T));
  word = emulated::in_warp(emulated::SHUFFLE, {word}).words[0][from];
  __builtin_memcpy(&v, &word, sizeof(T));
  emulated::read_by_warp();
  return v;
}

// What is PTX gets other names, and is given anew.
#define pack2 ptx_pack2
#define unpack ptx_unpack
#define load_if ptx_load_if
#define multiply_16x8x16 ptx_multiply_16x8x16
#define prefetch_l2 ptx_prefetch_l2
#define launch_dependents_may_start ptx_launch_dependents_may_start
#define fence_async_proxy_shared ptx_fence_async_proxy_shared
#define wait_for_previous_launch ptx_wait_for_previous_launch
#define copy_async_16 ptx_copy_async_16
#define copy_async_wait ptx_copy_async_wait
#include "ptx.h"
#undef pack2
#undef unpack
#undef load_if
#undef multiply_16x8x16
#undef prefetch_l2
#undef launch_dependents_may_start
#undef fence_async_proxy_shared
#undef wait_for_previous_launch
#undef copy_async_16
#undef copy_async_wait

namespace weave {

template <bool IS_BF16>
u32 pack2(float first, float second) {
  const auto narrow = [](float v) -> u32 { return IS_BF16 ? Bf16::narrow(v) : Fp16::narrow(v); };
  return narrow(first) | narrow(second) << 16;
}
template <bool IS_BF16>
float unpack(u16 v) {
  return IS_BF16 ? Bf16::widen(v) : Fp16::widen(v);
}
inline u32 load_if(bool wanted, const u32* p, u32 otherwise) { return wanted ? emulated::load(p) : otherwise; }
inline void prefetch_l2(const void* p) { emulated::load((const char*)p); }
inline void launch_dependents_may_start() {}
inline void fence_async_proxy_shared() {}
inline void wait_for_previous_launch() {}
// As late as may be: a thread's copies are made when it waits for them.
inline void copy_async_16(void* to, const void* from, u32 bytes) {
  emulated::now->copies.push_back({to, from, bytes});
}
inline void copy_async_wait() {
  for (const emulated::Copy& c : emulated::now->copies) {
    if (c.bytes != 0 && c.bytes != 16) emulated::fail("a copy of some of its 16 bytes");
    *(uint4*)c.to = c.bytes ? emulated::load((const uint4*)c.from) : uint4{0, 0, 0, 0};
  }
  emulated::now->copies.clear();
}

// Matrix fragments of mma.m16n8k16 as the PTX ISA has them: with g = lane / 4 and t = lane % 4, element i of a lane's
// eight of A is row g, or g + 8 for i in 2, 3, 6, 7, and column 2 t + i % 2, plus 8 from i = 4 on; element i of its four
// of B is row 2 t + i % 2, plus 8 from i = 2 on, and column g; element i of its four sums is row g, plus 8 from i = 2 on,
// and column 2 t + i % 2.
template <bool IS_BF16>
void multiply_16x8x16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const emulated::Meeting& m = emulated::in_warp(emulated::MULTIPLY, {a0, a1, a2, a3, b0, b1});
  const auto element = [&](u32 first_register, u32 of_lane, u32 i) {
    return (double)unpack<IS_BF16>((u16)(m.words[first_register + i / 2][of_lane] >> i % 2 * 16));
  };
  // Of A the lane's two rows, of B its two columns.
  const u32 g = emulated::now->thread % 32 / 4, t = emulated::now->thread % 4;
  double a[2][16], b[2][16];
  for (u32 lane = 0; lane < 32; ++lane) {
    for (u32 i = 0; i < 8 && lane / 4 == g; ++i) a[i % 4 / 2][lane % 4 * 2 + i % 2 + i / 4 * 8] = element(0, lane, i);
    for (u32 i = 0; i < 4 && lane / 8 == t; ++i) b[lane / 4 % 2][lane % 4 * 2 + i % 2 + i / 2 * 8] = element(4, lane, i);
  }
  for (u32 i = 0; i < 4; ++i) {
    double sum = c[i];
    for (u32 k = 0; k < 16; ++k) sum += a[i / 2][k] * b[i % 2][k];
    c[i] = (float)sum;
  }
  emulated::read_by_warp();
}

struct WarpLanes {
  u32 lane() const { return threadIdx.x % 32; }
  u32 lanes() const { return 32; }
  u32 warp() const { return 0; }
  u32 warps() const { return 1; }
  u32 rank() const { return lane(); }
  u32 size() const { return 32; }
  u32 lanes_below() const { return (1u << lane()) - 1; }
  u32 match(u32 v) const {
    const emulated::Meeting& m = emulated::in_warp(emulated::MATCH, {v});
    u32 same = 0;
    for (u32 i = 0; i < 32; ++i) same |= (u32)(m.words[0][i] == v) << i;
    emulated::read_by_warp();
    return same;
  }
  void sync_warp() const { __syncwarp(); }
  void sync() const { __syncwarp(); }
  u32 team_largest(u32 v, u32*) const { return largest(v); }
  u32 largest(u32 v) const {
    const emulated::Meeting& m = emulated::in_warp(emulated::BEST, {v, 0});
    u32 most = 0;
    for (u32 i = 0; i < 32; ++i)
      if (m.words[0][i] > most) most = m.words[0][i];
    emulated::read_by_warp();
    return most;
  }
  u32 best(u32 key, u32 at) const {
    const emulated::Meeting& m = emulated::in_warp(emulated::BEST, {key, at});
    u32 most = 0, lowest = NONE;
    for (u32 i = 0; i < 32; ++i)
      if (m.words[0][i] > most) most = m.words[0][i];
    for (u32 i = 0; i < 32; ++i)
      if (m.words[0][i] == most && m.words[1][i] < lowest) lowest = m.words[1][i];
    emulated::read_by_warp();
    return lowest;
  }
  float sum(float v) const {
    const emulated::Meeting& m = emulated::in_warp(emulated::ADD, {bits_of(v)});
    float parts[32];
    for (u32 i = 0; i < 32; ++i) parts[i] = float_of(m.words[0][i]);
    for (u32 step = 16; step; step >>= 1)
      for (u32 i = 0; i < step; ++i) parts[i] += parts[i + step];
    emulated::read_by_warp();
    return parts[0];
  }
};
struct BlockTeam : WarpLanes {
  u32 warps_;
  BlockTeam(u32 first_warp, u32 warps, u32) : warps_(warps) {
    if (first_warp != 0 || warps * 32 != emulated::threads_of_block) emulated::fail("a team is not the whole block");
  }
  u32 warp() const { return threadIdx.x / 32; }
  u32 warps() const { return warps_; }
  u32 rank() const { return threadIdx.x; }
  u32 size() const { return warps_ * 32; }
  void sync() const { __syncthreads(); }
  u32 team_largest(u32 v, u32* scratch) const {
    v = largest(v);
    if (lane() == 0) scratch[warp()] = v;
    sync();
    return largest(lane() < warps_ ? scratch[lane()] : 0);
  }
};

}  // namespace weave

#include "router.h"

using namespace weave;

namespace {

constexpr unsigned char UNTOUCHED = 0xa5;
constexpr size_t GUARD = 4096;

bool untouched(const char* from, size_t size) {
  for (size_t i = 0; i < size; ++i)
    if ((unsigned char)from[i] != UNTOUCHED) return false;
  return true;
}

void note(const char* what) {
  if (!emulated::failure) emulated::failure = what;
}

}  // namespace

extern "C" {

void emulate_allow(const void* const* from, const u64* sizes, u32 count) {
  emulated::readable.clear();
  for (u32 i = 0; i < count; ++i) emulated::readable.push_back({(const char*)from[i], sizes[i]});
  emulated::failure = nullptr;
}
// What went wrong since then, or null.
const char* emulate_failure() { return emulated::failure; }

u32 emulate_segment() { return SEGMENT; }

#if !WEAVE_MANY
// As weave_experts does: `grid` blocks. ids, weights: [grid][slots], what each block's table says.
void emulate_few(const Launch* launch, u32 grid, u32 seed, u32* ids, float* weights) {
  const Launch& p = *launch;
  const u32 slots = p.tokens * p.top_k;
  const size_t scratch = (size_t)(team_choice_words(p.router.experts) + 1) * 4;
  struct Memory {
    std::vector<char> ring;
    alignas(16) Smem smem;
    alignas(16) char own[OWN_BYTES + GUARD];
  };
  std::vector<std::unique_ptr<Memory>> memory;
  for (u32 i = 0; i < grid; ++i) {
    memory.push_back(std::make_unique<Memory>());
    memory[i]->ring.assign(p.ring_bytes + GUARD, (char)UNTOUCHED);
    __builtin_memset(memory[i]->own, UNTOUCHED, OWN_BYTES + GUARD);
  }
  static const Maps maps = {};
  u32 left = 0;
  emulated::run(0, grid, THREADS, grid, seed, [&] {
    Memory& m = *memory[blockIdx.x];
    const Block b = {p, maps, m.ring.data(), m.smem};
    prefetch_router(p);
    RouterTickets tickets(p);
    SlotTable table(p);
    if (!route(b, table, m.ring.data(), (u64*)m.own, tickets, [] { return true; })) emulated::fail("a block gave up");
    for (u32 slot = threadIdx.x; slot < slots; slot += THREADS) {
      u32 e = table(slot);
      for (u32 looks = 1; e == NOT_YET; ++looks, e = table(slot))
        if (!table.may_look_again(looks)) emulated::fail("a block gave up");
      ids[blockIdx.x * slots + slot] = e;
      weights[blockIdx.x * slots + slot] = e == NONE ? 0.f : table.weight(slot);
    }
    __syncthreads();
    if (threadIdx.x == 0) ++left;
    __syncthreads();
    if (threadIdx.x < 32 && left == grid) reset_router(p);
  });
  for (const auto& m : memory)
    if (!untouched(m->ring.data() + scratch, m->ring.size() - scratch) || !untouched(m->own + OWN_BYTES, GUARD))
      note("shared memory that is not the router's was written");
  const u32* state = (const u32*)p.router.state;
  for (u32 i = 0; i < sizeof(RouterState) / 4; ++i)
    if (state[i]) note("a counter is not zero at the end");
}
#elif WEAVE_ROUTER
// What weave_route and then blocks of the sort do, `grid` of the first, one block after the other; a block of the sort takes
// `chunk` tokens and has `room` words for choices.
void emulate_many(const Launch* launch, u32 grid, u32 seed, u32 chunk, u32 room) {
  const Launch& p = *launch;
  constexpr u32 WARPS_OF_SORT = 16;
#if WEAVE_ROUTER > 1
  for (u32 block = 0; block < grid; ++block)
    emulated::run(block, 1, ROUTE_WARPS * 32, grid, seed + block, [&] { weave_route(p); });
#endif
  const u32 chunks = div_up(p.tokens, chunk);
  std::vector<u32> words(room + GUARD);
  for (u32 i = 0; i < chunks; ++i) {
    __builtin_memset(words.data(), UNTOUCHED, words.size() * 4);
    emulated::run(i, 1, WARPS_OF_SORT * 32, chunks, seed + i, [&] {
      const SlotTable table(p);
      const u32 first = i * chunk, end = first + chunk < table.tokens ? first + chunk : table.tokens;
      choose_tokens(p, words.data(), WARPS_OF_SORT, first, end);
    });
    if (!untouched((const char*)(words.data() + room), GUARD * 4)) note("memory that is not the router's was written");
  }
}
#endif
}
