// Atomics with explicit orders, for a GPU (NVRTC, sm_90a) and for a CPU (g++ or clang++).
//
// Only what the scheduler uses. Every operation is on naturally aligned words in memory that all workers of one
// device see; on the GPU the scope is `.gpu`. Nothing here waits, except `pause`, which only gives the core away.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define WEAVE_GPU 1
#define WEAVE_FN __device__ __forceinline__
#define WEAVE_UNROLL _Pragma("unroll")
#else
#define WEAVE_GPU 0
#define WEAVE_FN inline
#define WEAVE_UNROLL _Pragma("GCC unroll 8")
extern "C" int sched_yield(void) noexcept;
extern "C" int usleep(unsigned);
#include <string.h>
#endif

namespace weave {

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 NONE = 0xffffffffu;  // "no such expert, row, slot or task"

#if WEAVE_GPU

WEAVE_FN u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
WEAVE_FN u64 load_relaxed(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Two words side by side, each whole for itself.
WEAVE_FN void load_relaxed(const u64* p, u64& first, u64& second) {
  asm volatile("ld.relaxed.gpu.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}
WEAVE_FN u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
WEAVE_FN void store_relaxed(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
WEAVE_FN void store_relaxed(u64* p, u64 v) {
  asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
WEAVE_FN void store_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
WEAVE_FN u32 add_relaxed(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
WEAVE_FN u64 add_relaxed(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.relaxed.gpu.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
WEAVE_FN void add_relaxed_unread(u64* p, u64 v) {  // no result, so nothing waits for it
  asm volatile("red.relaxed.gpu.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
WEAVE_FN void add_release(u32* p, u32 v) {
  asm volatile("red.release.gpu.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
WEAVE_FN void or_relaxed(u32* p, u32 v) { asm volatile("red.relaxed.gpu.or.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
WEAVE_FN u32 add_acq_rel(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
WEAVE_FN u32 cas_relaxed(u32* p, u32 expected, u32 desired) {
  u32 old;
  asm volatile("atom.relaxed.gpu.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");
  return old;
}
WEAVE_FN u64 cas_relaxed(u64* p, u64 expected, u64 desired) {
  u64 old;
  asm volatile("atom.relaxed.gpu.cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(p), "l"(expected), "l"(desired) : "memory");
  return old;
}
WEAVE_FN void pause(u32) { __nanosleep(32); }
// The value, for what must not be moved to where it would be waited for earlier.
WEAVE_FN u32 not_earlier(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

#else

WEAVE_FN u32 load_relaxed(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
WEAVE_FN u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
WEAVE_FN void load_relaxed(const u64* p, u64& first, u64& second) { first = load_relaxed(p), second = load_relaxed(p + 1); }
WEAVE_FN u32 load_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
WEAVE_FN void store_relaxed(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
WEAVE_FN void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
WEAVE_FN void store_release(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
WEAVE_FN u32 add_relaxed(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
WEAVE_FN u64 add_relaxed(u64* p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
WEAVE_FN void add_relaxed_unread(u64* p, u64 v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
WEAVE_FN void add_release(u32* p, u32 v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
WEAVE_FN void or_relaxed(u32* p, u32 v) { __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
WEAVE_FN u32 add_acq_rel(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
WEAVE_FN u32 cas_relaxed(u32* p, u32 expected, u32 desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;  // the value found
}
WEAVE_FN u64 cas_relaxed(u64* p, u64 expected, u64 desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
WEAVE_FN u32 not_earlier(u32 v) { return v; }
// Workers may outnumber cores many times over, so a waiting thread first yields and then sleeps.
WEAVE_FN void pause(u32 iteration) {
  if (iteration < 256)
    sched_yield();
  else
    usleep(50);
}

#endif

// A float's bits.
WEAVE_FN u32 bits_of(float v) {
#if WEAVE_GPU
  return __float_as_uint(v);
#else
  u32 bits;
  memcpy(&bits, &v, 4);
  return bits;
#endif
}
WEAVE_FN float float_of(u32 bits) {
#if WEAVE_GPU
  return __uint_as_float(bits);
#else
  float v;
  memcpy(&v, &bits, 4);
  return v;
#endif
}
// A value that says itself that it has arrived: with the launch's number beside it in one word, whoever reads the word has
// both or neither, and needs no other word to tell it so. Numbers start at 1, over zeroed memory.
WEAVE_FN u64 tagged(u32 value, u32 tag) { return (u64)tag << 32 | value; }
WEAVE_FN bool has_tag(u64 word, u32 tag) { return (u32)(word >> 32) == tag; }

// A word of two halves: the high half counts, the low half hands out tickets.
constexpr u64 ONE_HIGH = 1ull << 32;
constexpr u64 MINUS_ONE_HIGH = 0xffffffffull << 32;

}  // namespace weave
