// The scheduler core under schedules of our choosing: workers are fibers of one thread, and every atomic operation of the
// core is a point where another worker may run instead. Compiled against a copy of memory.h in which each operation first
// calls weave_step() and each pause calls weave_yield(); the rest of the core is the product's text.
//   interleave bounded PREEMPTIONS CASE   every schedule with at most that many preemptions
//   interleave random RUNS SEED           random launches under random schedules
// Operations are sequentially consistent here; memory orders are ThreadSanitizer's part.
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>

#include "launch.h"

void weave_step();

using namespace launch;

namespace {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};
struct Preemption {
  u32 step, to;
};

constexpr u32 MOST = 4;
Fiber fibers[MOST];
ucontext_t driver;
u32 workers, running, steps;
std::vector<Preemption> plan;  // ascending steps
size_t planned;
Rng* dice;      // random schedules only
u32 switch_in;  // a switch at one of that many steps
Worker* bodies[MOST];

void enter_fiber(u32 to, ucontext_t* from) {
  running = to;
  swapcontext(from, &fibers[to].context);
}
void switch_to(u32 to) {
  if (to == running || fibers[to].done) return;
  enter_fiber(to, &fibers[running].context);
}
u32 next_alive(u32 after) {
  for (u32 i = 1; i <= workers; ++i)
    if (!fibers[(after + i) % workers].done) return (after + i) % workers;
  return NONE;
}

void fiber_main() {
  for (;;) {  // one turn a launch
    bodies[running]->run();
    fibers[running].done = true;
    const u32 next = next_alive(running), me = running;
    if (next == NONE)
      swapcontext(&fibers[me].context, &driver);
    else
      enter_fiber(next, &fibers[me].context);
  }
}

void step(void*, u32) { weave_step(); }

// One launch under the current schedule, starting with worker `first`.
const char* run_once(Workspace& ws, const Problem& p, u32 first, u64* steals) {
  static const Hooks hooks{nullptr, step, step};
  workers = p.workers;
  const u32 number = prepare(ws);
  std::vector<Worker> all;
  for (u32 w = 0; w < workers; ++w) all.emplace_back(ws, p, hooks, w, number);
  for (u32 w = 0; w < workers; ++w) bodies[w] = &all[w], fibers[w].done = false;
  steps = 0, planned = 0;
  enter_fiber(first, &driver);
  std::vector<Outcome> outcomes;
  for (const Worker& w : all) {
    outcomes.push_back(w.out);
    for (const ClaimCounts& c : w.out.claims) *steals += c.steals;
  }
  return check(ws, p, outcomes.data());
}

Problem problem(u32 workers, u32 policy, std::vector<u32> expert_of, u32 experts, u32 up, u32 down, u32 parts_up = 1,
                u32 parts_down = 1, bool prefetch = true) {
  Problem p;
  p.top_k = 1, p.tokens = (u32)expert_of.size(), p.experts = experts, p.width_cap = 8;
  p.chunks_up = up, p.chunks_down = down, p.parts_up = parts_up, p.parts_down = parts_down;
  p.combine_tokens = p.tokens ? p.tokens : 1, p.workers = workers, p.prefetch = prefetch;
  p.knobs = Knobs{policy, LARGEST, 0, 1, 50, 4};
  p.expert_of = expert_of;
  return p;
}

// Small stages in which something of every kind happens: windows of several tasks, thefts that leave a window to publish,
// K ranges, empty lists, a down stage shorter than the workers are many.
std::vector<Problem> cases() {
  return {
      problem(2, STEAL, {0, 1}, 2, 6, 1),           // 12 tasks: one round of fours, so windows of 3
      problem(2, STEAL, {0, 1, NONE}, 3, 4, 2),     // twos, then ones
      problem(2, WINDOW, {0, 1}, 2, 4, 3),
      problem(3, WINDOW, {0, 0}, 1, 7, 2),
      problem(2, STEAL, {0, 1}, 2, 2, 1, 2, 2, false),  // K ranges in both stages
      problem(2, STATIC_TAIL, {0, 1}, 2, 3, 1),
      problem(2, STATIC_EXPERT, {0, 2}, 3, 2, 1),   // more experts than workers, one of them empty
      problem(3, COUNTER, {0}, 1, 3, 1, 1, 2),
      problem(2, STATIC_STRIDED, {1}, 2, 3, 2),
      problem(2, WINDOW, {0}, 1, 8, 1, 1, 1, false),  // the smallest in which a thief has a window to publish
  };
}

int report(const char* wrong, const Problem& p) {
  std::printf("policy %u, %u workers, %u steps: %s; preemptions:", p.knobs.policy, p.workers, steps, wrong);
  for (const Preemption& x : plan) std::printf(" %u->%u", x.step, x.to);
  std::printf("\n");
  return 1;
}

// Depth first over preemptions: each schedule is its parent's with one more, later than all of the parent's.
int bounded(u32 most, u32 which) {
  const Problem p = cases().at(which);
  Workspace ws({8, 4, 8, 64, 32, 2, 4}, 100000);
  u64 runs = 0, steals = 0, longest = 0;
  for (u32 first = 0; first < p.workers; ++first) {
    std::vector<std::vector<Preemption>> todo{{}};
    while (!todo.empty()) {
      plan = todo.back();
      todo.pop_back();
      if (const char* wrong = run_once(ws, p, first, &steals)) return report(wrong, p);
      ++runs;
      longest = std::max<u64>(longest, steps);
      if (plan.size() == most) continue;
      const u32 begin = plan.empty() ? 1 : plan.back().step + 1;
      for (u32 step = begin; step <= steps; ++step)
        for (u32 to = 0; to < p.workers; ++to) {
          todo.push_back(plan);
          todo.back().push_back({step, to});
        }
    }
  }
  std::printf("schedules %llu steps %llu steals %llu\n", runs, longest, steals);
  return 0;
}

int random_runs(u64 runs, u64 seed) {
  Rng r{seed * 0x9e3779b97f4a7c15ull + 1};
  dice = &r;
  Workspace ws({64, 8, 24, 64 + 15 * 8, 24 * 5, 3, MOST}, 100000);
  u64 steals = 0, tasks = 0;
  for (u64 i = 0; i < runs; ++i) {
    Problem p = problem(1 + r.below(MOST), r.below(6), std::vector<u32>(r.below(16)), 1 + r.below(8), 1 + r.below(5),
                        1 + r.below(5), 1 + r.below(3), 1 + r.below(3), r.below(2));
    p.top_k = 1;
    p.knobs.victim = r.below(2), p.knobs.steal_one = r.below(2), p.knobs.min_steal = 1 + r.below(4) / 3;
    p.knobs.static_share = r.below(101), p.knobs.batch = 1u << r.below(3);
    p.combine_tokens = 1 + r.below(4);
    for (u32& e : p.expert_of) e = r.below(8) ? r.below(p.experts) : NONE;
    switch_in = 2 + r.below(12);
    if (const char* wrong = run_once(ws, p, r.below(p.workers), &steals)) return report(wrong, p);
    tasks += ws.totals.groups;
  }
  std::printf("schedules %llu groups %llu steals %llu\n", runs, tasks, steals);
  return 0;
}

}  // namespace

void weave_step() {
  ++steps;
  if (dice) {
    if (!dice->below(switch_in)) switch_to(dice->below(workers));
  } else if (planned < plan.size() && plan[planned].step == steps) {
    switch_to(plan[planned++].to);
  }
}
// A wait: somebody else must run, which counts as no preemption.
void weave_yield() {
  const u32 next = next_alive(running);
  if (next != NONE) switch_to(next);
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  for (Fiber& f : fibers) {
    f.stack.resize(1 << 16);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_main, 0);
  }
  const u64 a = std::strtoull(argv[2], nullptr, 10), b = std::strtoull(argv[3], nullptr, 10);
  return std::strcmp(argv[1], "bounded") ? random_runs(a, b) : bounded((u32)a, (u32)b);
}
