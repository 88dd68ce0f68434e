// A launch's shared state, and what workers say to each other through it: entering, the plan's publication, finished
// tasks, leaving. One Control and its arrays are a workspace. Zero is its initial state, and a launch leaves it ready for
// the next: every counter zero but the epoch, every queue empty.
#pragma once
#include "queue.h"

namespace weave {

// Why a launch gave up. The first error stays until the host clears the workspace.
enum Error : u32 {
  OK = 0,
  OVERLAP = 1,        // two launches in one workspace at the same time
  PLAN_TIMEOUT = 2,   // the plan, the router's logits or slots, or with many tokens the counts, were not there in time
  TASK_TIMEOUT = 3,   // a task that this one needs was not finished in time
  RING_TIMEOUT = 4,   // GPU: a stage of the shared-memory ring was not filled or freed in time
};

struct Control {
  u32 entered, left;  // workers of the launch in progress
  u32 epoch;          // launches completed
  u32 error;
  u32 plan;           // PLAN_NONE, PLAN_CLAIMED, PLAN_READY
  u32 gather;         // GPU: blocks of rows of x, or chunks of slots, handed out
  u32 counted, sorted;  // GPU, sorting for many tokens: chunks that are counted; workers that are done
  u64 tick[STAGES];
  u32 call;  // GPU, many tokens: whose plan this is
  u32 pad;
};
enum PlanState : u32 { PLAN_NONE = 0, PLAN_CLAIMED = 1, PLAN_READY = 2 };

struct Shared {
  Control* control;
  u64* queue;       // [STAGES][workers]
  u32* up_done;     // [max_groups] finished gate_up tiles of a group
  u32* down_done;   // [experts] finished down tiles of an expert
  // [tiles of gate_up], [tiles of down]: finished K ranges of a tile; used only where the stage has several. One array a
  // stage, because a down tile may start while the gate_up tile of the same number is unfinished.
  u32* part_done[2];
  u32 workers, max_groups, experts;
  u32 spin_limit;   // iterations of any wait
};

// Besides the error, which stays, `left` is marked, so that the last worker of this launch learns of it at no cost.
constexpr u32 LEFT_FAILED = 1u << 31;
WEAVE_FN void fail(Control* c, u32 error) {
  cas_relaxed(&c->error, OK, error);
  or_relaxed(&c->left, LEFT_FAILED);
}
WEAVE_FN bool failed(const Control* c) { return load_relaxed(&c->error) != OK; }

// Every wait: until there is what it is for, an error elsewhere, or the limit, which is an error itself. Asked before each
// look; `looks`: so far.
WEAVE_FN bool may_look(const Shared& s, u32 looks, u32 error) {
  if (looks >= s.spin_limit) {
    fail(s.control, error);
    return false;
  }
  if ((looks & 63) == 63 && failed(s.control)) return false;
  if (looks) pause(looks);
  return true;
}
WEAVE_FN bool wait_for(const Shared& s, const u32* counter, u32 target, u32 error) {  // *counter >= target (acquire)
  for (u32 looks = 0; may_look(s, looks, error); ++looks)
    if (load_acquire(counter) >= target) return true;
  return false;
}

// A worker's arrival. False: the workspace is in use by another launch.
WEAVE_FN bool enter(const Shared& s) {
  if (add_relaxed(&s.control->entered, 1u) < s.workers) return true;
  fail(s.control, OVERLAP);
  return false;
}

// The first worker to ask builds the plan; it runs, so whoever waits for it waits for a running worker.
WEAVE_FN bool claim_plan(const Shared& s) { return cas_relaxed(&s.control->plan, PLAN_NONE, PLAN_CLAIMED) == PLAN_NONE; }
// Release: the plan's arrays are plain stores of the builder and are read plainly by everybody else.
WEAVE_FN void publish_plan(const Shared& s) { store_release(&s.control->plan, PLAN_READY); }
WEAVE_FN bool wait_for_plan(const Shared& s) { return wait_for(s, &s.control->plan, PLAN_READY, PLAN_TIMEOUT); }

// A finished tile. Release: its output rows become visible to whoever acquires the count.
WEAVE_FN void finish_gate_up(const Shared& s, u32 group) { add_release(&s.up_done[group], 1u); }
WEAVE_FN void finish_down(const Shared& s, u32 expert) { add_release(&s.down_done[expert], 1u); }
// Waited for by a down task: all gate_up tiles of its group. They are claimed by running workers (queue.h, Progress).
WEAVE_FN bool wait_for_group(const Shared& s, u32 group, u32 chunks) {
  return wait_for(s, &s.up_done[group], chunks, TASK_TIMEOUT);
}
// Waited for by a combine task: all down tiles of an expert that one of its tokens uses.
WEAVE_FN bool wait_for_expert(const Shared& s, u32 expert, u32 tiles) {
  return wait_for(s, &s.down_done[expert], tiles, TASK_TIMEOUT);
}
// One K range of a tile of `stage` (GATE_UP or DOWN) is in scratch. True for the last one, which adds them all; acquire,
// to see the others' sums. The store that resets may be relaxed: nobody else touches this count again in the launch.
WEAVE_FN bool finish_part(const Shared& s, u32 stage, u32 tile, u32 parts) {
  if (add_acq_rel(&s.part_done[stage][tile], 1u) != parts - 1) return false;
  store_relaxed(&s.part_done[stage][tile], 0u);
  return true;
}

// A worker's departure: it will not touch the shared state again. The last one out restores the initial state, so that
// a replayed launch needs nothing from the host. Acquire and release: the resets follow every other worker's last access.
// Returns what the caller was: every write of the launch happened before the last one's return.
enum Departure : u32 { NOT_THE_LAST, THE_LAST, THE_LAST_OF_A_FAILED_LAUNCH };
template <class Lanes>
WEAVE_FN Departure leave(const Shared& s, const Lanes& lanes) {
  u32 before = 0;
  if (lanes.lane() == 0) before = add_acq_rel(&s.control->left, 1u);
  before = lanes.first(before);
  if ((before & ~LEFT_FAILED) != s.workers - 1) return NOT_THE_LAST;
  const Departure last = before & LEFT_FAILED ? THE_LAST_OF_A_FAILED_LAUNCH : THE_LAST;
  lanes.sync_warp();  // a shuffle orders nothing: this carries lane 0's acquire to the lanes that reset
  for (u32 i = lanes.lane(); i < s.max_groups; i += lanes.lanes()) store_relaxed(&s.up_done[i], 0u);
  for (u32 i = lanes.lane(); i < s.experts; i += lanes.lanes()) store_relaxed(&s.down_done[i], 0u);
  if (lanes.lane() != 0) return last;
  for (u32 i = 0; i < STAGES; ++i) store_relaxed(&s.control->tick[i], (u64)0);
  store_relaxed(&s.control->gather, 0u);
  store_relaxed(&s.control->plan, (u32)PLAN_NONE);
  store_relaxed(&s.control->entered, 0u);
  store_relaxed(&s.control->left, 0u);
  store_relaxed(&s.control->epoch, s.control->epoch + 1);
  return last;
}

}  // namespace weave
