// What became of each task, and when. Compiled in only where it is asked for (WEAVE_TRACE); then each role notes its own
// moments of a task, so that nobody waits for a record.
#pragma once
#include "config.h"

namespace weave {

// Moments are the SM's own clock: the device's timer ticks only every 256 ns or so. Both at a block's start and end, in
// trace_clock, place them on one axis.
enum Moment : u32 {
  CLAIM,    // the weight producer has the task
  WAIT,     // consumers are free for it
  LOAD,     // the first of its weights are asked for
  COMPUTE,  // its first stage is full; combine: what it depends on is finished
  STORE,    // its products are done
  FINISH,   // others are told, or its stores are on their way
  MOMENTS
};
struct TaskRecord {
  int worker, sm, stage, expert, group, chunk, part, victim;
  i64 at[MOMENTS];
};
static_assert(sizeof(TaskRecord) == 80, "backends/cuda.py: TRACE_DTYPE");

WEAVE_FN void mark(const Block& b, u32 record, Moment moment) {
  if (TRACE && record < b.p.trace_tasks) ((TaskRecord*)b.p.trace)[(u64)blockIdx.x * b.p.trace_tasks + record].at[moment] = clock64();
}

// By the weight producer, when it has claimed a task.
WEAVE_FN void begin_record(const Block& b, const TaskSlot& t, u32 victim) {
  if (!TRACE || t.record >= b.p.trace_tasks) return;
  TaskRecord& r = ((TaskRecord*)b.p.trace)[(u64)blockIdx.x * b.p.trace_tasks + t.record];
  u32 sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  const bool combine = t.kind == COMBINE;
  r.worker = blockIdx.x, r.sm = sm, r.stage = t.kind;
  r.expert = combine ? -1 : (int)t.expert, r.group = combine ? -1 : (int)t.group;
  r.chunk = combine ? t.row : t.chunk, r.part = t.part, r.victim = (int)victim;
  mark(b, t.record, CLAIM);
}

WEAVE_FN void trace_clock(const Launch& p, u32 end) {
  if (!TRACE || !p.trace) return;
  p.trace_clock[blockIdx.x * 4 + end * 2] = nanoseconds();
  p.trace_clock[blockIdx.x * 4 + end * 2 + 1] = clock64();
}

}  // namespace weave
