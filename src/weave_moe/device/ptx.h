// The PTX this kernel needs and C++ has no words for: mbarriers, TMA, proxies, packing. Nothing here knows of experts.
#pragma once
#include "memory.h"

namespace weave {

struct alignas(64) TensorMap {
  char opaque[128];
};

WEAVE_FN u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
WEAVE_FN u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

WEAVE_FN void barrier_init(u64* bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals) : "memory");
}
WEAVE_FN void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
WEAVE_FN void barrier_arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
WEAVE_FN void barrier_arrive(u64* bar, u32 times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(times) : "memory");
}
WEAVE_FN void barrier_arrive_expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes) : "memory");
}
WEAVE_FN bool barrier_try_wait(u64* bar, u32 phase) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(smem_address(bar)), "r"(phase)
      : "memory");
  return done;
}

// Between ordinary accesses and those of TMA and wgmma (the async proxy), on either side of a hand-over.
WEAVE_FN void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

WEAVE_FN void fence_async_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

WEAVE_FN void prefetch_map(const TensorMap* m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }

#define WEAVE_TMA(DIMS, COORDS)                                                                               \
  "cp.async.bulk.tensor." DIMS ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint " \
  "[%0], [%1, {" COORDS "}], [%2], %3;"
WEAVE_FN void tma_load(u32 dst, const TensorMap* m, u64* bar, u64 hint, int a, int b) {
  asm volatile(WEAVE_TMA("2d", "%4, %5")::"r"(dst), "l"(m), "r"(smem_address(bar)), "l"(hint), "r"(a), "r"(b) : "memory");
}
WEAVE_FN void tma_load(u32 dst, const TensorMap* m, u64* bar, u64 hint, int a, int b, int c) {
  asm volatile(WEAVE_TMA("3d", "%4, %5, %6")::"r"(dst), "l"(m), "r"(smem_address(bar)), "l"(hint), "r"(a), "r"(b), "r"(c)
               : "memory");
}
WEAVE_FN void tma_load(u32 dst, const TensorMap* m, u64* bar, u64 hint, int a, int b, int c, int d) {
  asm volatile(WEAVE_TMA("4d", "%4, %5, %6, %7")::"r"(dst), "l"(m), "r"(smem_address(bar)), "l"(hint), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
WEAVE_FN void tma_load(u32 dst, const TensorMap* m, u64* bar, u64 hint, int a, int b, int c, int d, int e) {
  asm volatile(WEAVE_TMA("5d", "%4, %5, %6, %7, %8")::"r"(dst), "l"(m), "r"(smem_address(bar)), "l"(hint), "r"(a), "r"(b), "r"(c),
               "r"(d), "r"(e)
               : "memory");
}
#undef WEAVE_TMA

// The same box, as far as L2. What is outside the tensor is not asked for.
#define WEAVE_TMA_PREFETCH(DIMS, COORDS) \
  "cp.async.bulk.prefetch.tensor." DIMS ".L2.global.tile.L2::cache_hint [%0, {" COORDS "}], %1;"
WEAVE_FN void tma_prefetch(const TensorMap* m, u64 hint, int a, int b, int c) {
  asm volatile(WEAVE_TMA_PREFETCH("3d", "%2, %3, %4")::"l"(m), "l"(hint), "r"(a), "r"(b), "r"(c) : "memory");
}
WEAVE_FN void tma_prefetch(const TensorMap* m, u64 hint, int a, int b, int c, int d) {
  asm volatile(WEAVE_TMA_PREFETCH("4d", "%2, %3, %4, %5")::"l"(m), "l"(hint), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
WEAVE_FN void tma_prefetch(const TensorMap* m, u64 hint, int a, int b, int c, int d, int e) {
  asm volatile(WEAVE_TMA_PREFETCH("5d", "%2, %3, %4, %5, %6")::"l"(m), "l"(hint), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e)
               : "memory");
}
#undef WEAVE_TMA_PREFETCH

// From shared memory to a tensor; rows and columns outside it are dropped.
WEAVE_FN void tma_store(const TensorMap* m, u32 src, int a, int b) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(m), "r"(a), "r"(b), "r"(src) : "memory");
}
WEAVE_FN void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
WEAVE_FN void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // the source is free
WEAVE_FN void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }            // the writes are done

// 16 bytes from global to shared memory; `bytes` of them are read, the rest become zero.
WEAVE_FN void copy_async_16(u32 dst, const void* src, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
WEAVE_FN void copy_async_16(void* dst, const void* src, u32 bytes) { copy_async_16(smem_address(dst), src, bytes); }
WEAVE_FN void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // for all of this thread's
// One arrival at `bar` when all copies that this thread has issued are complete.
WEAVE_FN void copy_async_arrive(u64* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(bar)) : "memory");
}

// *p where `wanted`, else `otherwise`: a predicated load, so that several of them are in flight at once.
WEAVE_FN u32 load_if(bool wanted, const u32* p, u32 otherwise) {
  u32 v;
  asm("{ .reg .pred q; setp.ne.u32 q, %2, 0; mov.u32 %0, %3; @q ld.global.nc.u32 %0, [%1]; }"
      : "=r"(v)
      : "l"(p), "r"((u32)wanted), "r"(otherwise));
  return v;
}

// Programmatic dependent launch. The first lets the next kernel's blocks be placed as soon as all of ours have started
// and shared memory is free; the second waits until the kernel before has finished and its writes are visible.
WEAVE_FN void launch_dependents_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
WEAVE_FN void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

WEAVE_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
WEAVE_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
WEAVE_FN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// A K-major operand in 128-byte swizzle: start, and the distance in bytes from one block of 8 rows to the next.
WEAVE_FN u64 wgmma_descriptor(u32 start, u32 row_block) {
  return (u64)((start & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(row_block >> 4) << 32 | (u64)1 << 62;
}

// An 8 x 8 matrix of 16-bit elements spread over a warp, transposed.
WEAVE_FN u32 transpose_8x8(u32 v) {
  u32 t;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}

// 8 x 8 matrices of 16-bit elements, transposed on their way to shared memory: lane 8 q + r gives the address of row r of
// matrix q.
WEAVE_FN void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
WEAVE_FN void store_matrices(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

WEAVE_FN float exp2_fast(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
WEAVE_FN float reciprocal_fast(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
WEAVE_FN float tanh_fast(float v) {
  // 1 - 2 / (1 + exp(2 v)): a few ulp, unlike tanh.approx
  return 1.f - 2.f * reciprocal_fast(1.f + exp2_fast(2.885390082f * v));
}

// bf16 or fp16, two in a word, the first in the low half.
template <bool BF16>
WEAVE_FN u32 pack2(float first, float second) {
  u32 r;
  if (BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}
template <bool BF16>
WEAVE_FN float unpack(u16 v) {
  if (BF16) return __uint_as_float((u32)v << 16);
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
}

// c += a x b for 16 rows, 8 columns and 16 products, in the fragments of mma.m16n8k16.
template <bool BF16>
WEAVE_FN void multiply_16x8x16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
WEAVE_FN void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace weave
