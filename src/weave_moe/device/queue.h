// Claiming tasks: a dispenser for each stage, a queue for each worker and stage, and stealing.
//
// A stage has `tasks` tasks, numbered in the plan's order. State, all zero before a launch:
//   tick       u64: tickets handed out in the low half, number of non-empty queues in the high half
//   queue[w]   u64: {tag 16 | hi 24 | lo 24}, the window [lo, hi) of positions that worker w still owns; empty if lo >= hi
// A ticket stands for a batch of tasks that the policy fixes: one task (counter), a small strided window put into the
// worker's own queue (steal), or a whole list (static). So nothing belongs to a worker before it has taken a ticket, and
// a worker that is done takes the tickets of workers that never started.
//
// No task is lost or run twice. At any time a task is in exactly one place: not dispensed, in one queue's window, in one
// worker's hand, or claimed.
//  (a) Tickets are disjoint, by the fetch-and-add.
//  (b) An empty word is changed by its owner alone: thieves swap only words they saw non-empty. So the plain store that
//      refills an empty word overwrites nothing. `own` is exact whenever it is empty, because it then came from the
//      owner's own successful swap or from the value that a failed one returned.
//  (c) Within a tag lo only rises and hi only falls, and each refill has a new tag: no value recurs, so a swap that
//      succeeds has found the very window it read.
//  (d) The count of non-empty queues is a hint. Wrong, it can only make a thief leave early or look once more in vain:
//      a worker never leaves a stage while its own word is non-empty, so every window is drained by somebody.
// Progress. No loop here waits for another worker; a swap fails only because another claim succeeded. A worker enters a
// stage only when its queue of the stage before is empty and that stage's dispenser is exhausted, so every earlier task
// is finished, running, or in the queue of a running worker, which runs it before anything that waits. A task waits only
// on tasks of earlier stages. So every wait ends, even if one worker is the only one that ever runs.
// All claims are relaxed: a task number is an index into a plan that every worker has acquired before it uses a claim,
// and data goes from task to task through the counters of scheduler.h. The model: queue.pml.
#pragma once
#include "plan.h"

namespace weave {

enum Policy : u32 { COUNTER = 0, STEAL = 1, STATIC_STRIDED = 2, STATIC_EXPERT = 3, STATIC_TAIL = 4, WINDOW = 5 };
enum Victim : u32 { LARGEST = 0, RANDOM = 1 };

struct Knobs {
  u32 policy;
  u32 victim;        // LARGEST or RANDOM
  u32 steal_one;     // 0: half of the victim's window; 1: one task
  u32 min_steal;     // skip victims with fewer tasks than this (at least 1)
  u32 static_share;  // STATIC_TAIL: percent of the tasks in static lists
  u32 batch;         // STEAL: most tasks of a ticket, 1, 2 or 4
};

struct Stage {
  u64* tick;
  u64* queue;               // [workers]
  u32 tasks, workers;
  // STATIC_EXPERT only: tasks of expert e are [expert_group[e], expert_group[e + 1]) x tasks_per_group.
  const u32* expert_group;
  u32 experts, tasks_per_group;
};

constexpr u32 WINDOW_LIMIT = (1u << 24) - 1;  // most tasks in a stage whose queues can be stolen from: hi has 24 bits

WEAVE_FN u64 window_word(u32 tag, u32 lo, u32 hi) { return (u64)(tag & 0xffff) << 48 | (u64)hi << 24 | lo; }
WEAVE_FN u32 window_tag(u64 w) { return (u32)(w >> 48); }
WEAVE_FN u32 window_hi(u64 w) { return (u32)(w >> 24) & 0xffffff; }
WEAVE_FN u32 window_lo(u64 w) { return (u32)w & 0xffffff; }
WEAVE_FN bool window_empty(u64 w) { return window_lo(w) >= window_hi(w); }

// STEAL: rounds of one ticket a worker; a ticket is worth 4 tasks while at least 6 remain for each worker, then 2 while
// at least 3 remain, then 1. Within a round of b tasks a ticket, place j of ticket s is task base + s + j * workers:
// workers that run at the same time work on neighbouring tasks.
struct Batches {
  u32 workers, fours, twos;  // rounds of each size; single tasks after them
};
WEAVE_FN Batches make_batches(u32 tasks, u32 workers, u32 most) {
  Batches b;
  b.workers = workers;
  b.fours = most >= 4 && tasks >= 6 * workers ? (tasks - 6 * workers) / (4 * workers) + 1 : 0;
  const u32 rest = tasks - 4 * workers * b.fours;
  b.twos = most >= 2 && rest >= 3 * workers ? (rest - 3 * workers) / (2 * workers) + 1 : 0;
  return b;
}
struct Span {
  u32 lo, hi;
};
WEAVE_FN Span batch_window(const Batches& b, u32 tasks, u32 ticket) {
  const u32 first_two = b.fours * b.workers, first_one = first_two + b.twos * b.workers;
  u32 lo, size;
  if (ticket < first_two) {
    lo = 4 * ticket, size = 4;
  } else if (ticket < first_one) {
    lo = 4 * first_two + 2 * (ticket - first_two), size = 2;
  } else {
    lo = 4 * first_two + 2 * (first_one - first_two) + (ticket - first_one), size = 1;
  }
  Span s;
  s.lo = lo < tasks ? lo : tasks;
  s.hi = lo + size < tasks ? lo + size : tasks;
  return s;
}
WEAVE_FN u32 batch_task(const Batches& b, u32 position) {
  const u32 end_fours = 4 * b.workers * b.fours, end_twos = end_fours + 2 * b.workers * b.twos;
  if (position >= end_twos) return position;
  const bool four = position < end_fours;
  const u32 start = four ? 0 : end_fours, size = four ? 4 : 2;
  const u32 at = position - start, round = at / (size * b.workers), rest = at - round * size * b.workers;
  const u32 ticket = rest / size, place = rest - ticket * size;
  return start + round * size * b.workers + ticket + place * b.workers;
}

// Tasks first, first + stride, ... (count of them), in no queue: a static list or a single task.
struct Run {
  u32 next, count, stride;
};
WEAVE_FN u32 strided_count(u32 tasks, u32 first, u32 stride) { return first < tasks ? div_up(tasks - first, stride) : 0; }
WEAVE_FN u32 tail_start(const Knobs& k, u32 tasks) { return (u32)((u64)tasks * k.static_share / 100); }

// STATIC_EXPERT, list `list`: experts <= workers: list / w of expert e's tasks, w = workers / experts lists an expert;
// otherwise experts list, list + workers, ... one after the other. `expert` is where the list stands.
WEAVE_FN Run expert_run(const Stage& s, u32 expert, u32 list) {
  Run r;
  const u32 lists = s.experts <= s.workers ? s.workers / s.experts : 1;
  const u32 sub = s.experts <= s.workers ? list - expert * lists : 0;
  const u32 begin = s.expert_group[expert] * s.tasks_per_group, end = s.expert_group[expert + 1] * s.tasks_per_group;
  r.next = begin + sub;
  r.stride = lists;
  r.count = strided_count(end, begin + sub, lists);
  return r;
}
WEAVE_FN u32 first_expert(const Stage& s, u32 list) {
  const u32 e = s.experts <= s.workers ? list / (s.workers / s.experts) : list;
  return e < s.experts ? e : NONE;
}

struct ClaimCounts {
  u32 tasks, tickets, steals, sweeps, lost;  // lost: swaps that another worker beat
};

// What one worker knows of one stage. `issue` starts a claim with one atomic whose result nobody waits for yet;
// `resolve` uses it. Between the two the worker does something else; nothing else of the claimer may be called.
struct Claimer {
  enum : u32 { RETRY = 0xfffffffeu, DRY = 0xfffffffdu };

  Stage stage;
  Knobs knobs;
  Batches batches;
  u32 worker;
  u64 own;          // the own queue's word; exact whenever empty
  Run run;
  u32 list, expert; // STATIC_EXPERT: where the claimed list stands
  bool exhausted;   // the dispenser has no ticket left
  u32 others;       // non-empty queues, as the last ticket said
  u32 stolen_from;  // victim of the last task claimed, NONE if it was not stolen
  u32 random;
  ClaimCounts counts;

  WEAVE_FN void begin(const Stage& s, const Knobs& k, u32 me) {
    stage = s;
    knobs = k;
    worker = me;
    batches = make_batches(s.tasks, s.workers, k.batch);
    own = 0;  // the word itself is empty: its last user drained it
    run = Run{0, 0, 0};
    list = 0;
    expert = NONE;
    exhausted = false;
    others = 0;
    stolen_from = NONE;
    random = me * 2654435761u + 12345u;
    counts = ClaimCounts{0, 0, 0, 0, 0};
  }
  WEAVE_FN bool stealing() const { return knobs.policy == STEAL || knobs.policy == WINDOW; }

  WEAVE_FN u64 issue() {
    if (run.count) return 0;
    if (!window_empty(own)) return cas_relaxed(&stage.queue[worker], own, own + 1);
    if (!exhausted) return add_relaxed(stage.tick, (u64)1);
    return stealing() ? load_relaxed(stage.tick) : 0;
  }

  // Whether a claim would find nothing, given a recent value of the stage's tick: tickets only go up.
  WEAVE_FN bool dry(u64 tick) const {
    if (run.count || !window_empty(own)) return false;
    const u32 tickets = (u32)tick;
    if (knobs.policy == COUNTER) return tickets >= stage.tasks;
    return knobs.policy == STEAL && !(u32)(tick >> 32) && batch_window(batches, stage.tasks, tickets).lo >= stage.tasks;
  }

  // A task, or RETRY (a thief came first: issue again), or DRY (own queue and dispenser are empty).
  WEAVE_FN u32 resolve(u64 raw) {
    stolen_from = NONE;
    if (run.count) return take_run();
    if (!window_empty(own)) {
      if (raw != own) {
        own = raw;
        counts.lost++;
        return RETRY;
      }
      const u32 position = window_lo(own);
      own += 1;
      if (window_empty(own)) add_relaxed_unread(stage.tick, MINUS_ONE_HIGH);
      counts.tasks++;
      return task_of(position);
    }
    others = (u32)(raw >> 32);
    if (exhausted) return DRY;
    return open_ticket((u32)raw);
  }

  // Take work from another worker's queue, its far end. All lanes call; lane 0 holds the claimer's state.
  // A task, or NONE: nothing left worth stealing.
  template <class Lanes>
  WEAVE_FN u32 steal(const Lanes& lanes) {
    for (u32 tries = 0; tries < 8; ++tries) {
      random = random * 1664525u + 1013904223u;
      const u32 salt = lanes.first(random);
      const u32 start = (salt >> 8) % stage.workers;
      u64 best = 0, best_word = 0;
      for (u32 v = lanes.lane(); v < stage.workers; v += lanes.lanes()) {
        const u64 w = load_relaxed(&stage.queue[v]);
        const u32 size = window_empty(w) ? 0 : window_hi(w) - window_lo(w);
        if (size < knobs.min_steal || !size) continue;
        const u32 rank = stage.workers - (v >= start ? v - start : v + stage.workers - start);
        const u64 key = (knobs.victim == LARGEST ? (u64)size << 40 : 0) | (u64)rank << 20 | v;
        if (key > best) best = key, best_word = w;
      }
      counts.sweeps++;
      const u64 chosen = lanes.max(best);
      if (!chosen) return NONE;
      const u64 word = lanes.from(best == chosen, best_word);
      u32 task = NONE;
      if (lanes.lane() == 0) task = rob((u32)chosen & 0xfffff, word);
      task = lanes.first(task);
      if (task != NONE) return task;
    }
    return NONE;  // leaving is always safe: an owner runs what is left in its queue
  }

  // The next task of the stage, or NONE when there is nothing left for this worker. `raw` is an issued claim.
  template <class Lanes>
  WEAVE_FN u32 next(const Lanes& lanes, u64 raw) {
    u32 task = RETRY;
    if (lanes.lane() == 0) task = resolve(raw);
    for (;;) {
      task = lanes.first(task);
      if (task == RETRY) {
        if (lanes.lane() == 0) task = resolve(issue());
        continue;
      }
      if (task != DRY) return task;
      const bool look = stealing() && lanes.first(others) != 0;
      return look ? steal(lanes) : NONE;
    }
  }

 private:
  WEAVE_FN u32 task_of(u32 position) const { return knobs.policy == STEAL ? batch_task(batches, position) : position; }

  WEAVE_FN u32 take_run() {
    const u32 task = run.next;
    run.next += run.stride;
    run.count--;
    counts.tasks++;
    if (knobs.policy == STATIC_EXPERT) next_expert();
    return task;
  }
  // With more experts than workers a list goes on with the next of its experts.
  WEAVE_FN void next_expert() {
    while (!run.count && stage.experts > stage.workers && expert + stage.workers < stage.experts) {
      expert += stage.workers;
      run = expert_run(stage, expert, list);
    }
  }

  WEAVE_FN u32 open_ticket(u32 ticket) {
    const u32 n = stage.tasks, G = stage.workers;
    counts.tickets++;
    if (stealing()) {
      Span w;
      if (knobs.policy == STEAL) {
        w = batch_window(batches, n, ticket);
      } else {
        w.lo = ticket < G ? (u32)((u64)n * ticket / G) : n;
        w.hi = ticket < G ? (u32)((u64)n * (ticket + 1) / G) : n;
      }
      if (w.lo >= w.hi) {
        // An empty window of the article's form is no reason to stop: a later list may hold tasks.
        exhausted = knobs.policy == STEAL || ticket >= G;
        return exhausted ? DRY : RETRY;
      }
      if (w.hi - w.lo > 1) publish(w.lo + 1, w.hi);
      counts.tasks++;
      return task_of(w.lo);
    }
    run.count = 0;
    if (knobs.policy == COUNTER) {
      single(ticket);
    } else if (ticket >= G) {
      // STATIC_TAIL: tickets after the lists are single tasks of the rest.
      single(knobs.policy == STATIC_TAIL ? tail_start(knobs, n) + (ticket - G) : n);
    } else if (knobs.policy == STATIC_EXPERT) {
      list = ticket;
      expert = first_expert(stage, list);
      if (expert != NONE) {
        run = expert_run(stage, expert, list);
        next_expert();
      }
    } else {
      const u32 end = knobs.policy == STATIC_TAIL ? tail_start(knobs, n) : n;
      run.next = ticket;
      run.stride = G;
      run.count = strided_count(end, ticket, G);
    }
    if (run.count) return take_run();
    if (knobs.policy == COUNTER || ticket >= G) exhausted = true;
    return exhausted ? DRY : RETRY;  // an empty list: take the next ticket
  }
  WEAVE_FN void single(u32 task) {
    run.next = task;
    run.stride = 1;
    run.count = task < stage.tasks ? 1 : 0;
  }

  // Only while the own word is empty (b). The store may be relaxed: a window is a pair of numbers, nothing is read through it.
  WEAVE_FN void publish(u32 lo, u32 hi) {
    own = window_word(window_tag(own) + 1, lo, hi);
    store_relaxed(&stage.queue[worker], own);
    add_relaxed_unread(stage.tick, ONE_HIGH);
  }

  WEAVE_FN u32 rob(u32 victim, u64 word) {
    for (;;) {
      if (window_empty(word)) return NONE;
      const u32 lo = window_lo(word), hi = window_hi(word);
      const u32 take = knobs.steal_one ? 1 : (hi - lo + 1) / 2;
      const u32 split = hi - take;
      const u64 found = cas_relaxed(&stage.queue[victim], word, window_word(window_tag(word), lo, split));
      if (found == word) {
        if (split == lo) add_relaxed_unread(stage.tick, MINUS_ONE_HIGH);
        if (take > 1) publish(split + 1, hi);
        counts.steals++;
        counts.tasks++;
        stolen_from = victim;
        return task_of(split);
      }
      counts.lost++;
      word = found;
    }
  }
};

}  // namespace weave
