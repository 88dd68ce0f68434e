// Random launches on threads, in one workspace that is never cleared: every task exactly once, in order, nothing left
// behind. Built plainly it is the stress test; built with -fsanitize=thread it checks the memory orders as well.
//   stress SEED TASKS SPIN_LIMIT [POLICY]      prints one line of counts, or what went wrong (exit status 1)
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "launch.h"

using namespace launch;

namespace {

struct alignas(64) Pauses {
  Rng rng;
  u32 kind;  // 0 never, 1 short loops, 2 yields as well, 3 sleeps as well
};

void pause_somewhat(void* context, u32 worker) {
  Pauses& p = static_cast<Pauses*>(context)[worker];
  const u32 dice = p.rng.below(64);
  if (p.kind == 0 || dice < 32) return;
  if (p.kind == 1 || dice < 56) {
    for (volatile u32 i = p.rng.below(200); i; i = i - 1) {}
  } else if (p.kind == 2 || dice < 63) {
    sched_yield();
  } else {
    usleep(p.rng.below(100));
  }
}

void nothing(void*, u32) {}

const Limits LIMITS = {/*slots*/ 1536, /*experts*/ 40, /*groups*/ 40 + 1536 / 8, /*rows*/ 1536 + 15 * 40,
                       /*tiles*/ (40 + 1536 / 8) * 6, /*parts*/ 3, /*workers*/ 9};

Problem random_problem(Rng& r, i64 policy) {
  Problem p;
  p.top_k = 1 + r.below(4);
  p.tokens = r.below(8) ? r.below(r.below(2) ? 24 : LIMITS.slots / p.top_k) : 0;
  p.experts = 1 + r.below(r.below(2) ? 6 : LIMITS.experts);
  p.width_cap = r.below(2) ? 8u << r.below(3) : 64u + 16 * r.below(13);
  p.chunks_up = 1 + r.below(6);
  p.chunks_down = 1 + r.below(6);
  p.parts_up = 1 + r.below(3);
  p.parts_down = 1 + r.below(3);
  p.combine_tokens = 1 + r.below(9);
  p.workers = 1 + r.below(LIMITS.workers);
  p.prefetch = r.below(2);
  p.knobs = Knobs{policy < 0 ? r.below(6) : (u32)policy, r.below(2), r.below(2), 1 + r.below(3) / 2, r.below(101), 1u << r.below(3)};
  const u32 hot = r.below(p.experts), skew = r.below(4), skip = r.below(3) ? 0 : r.below(20);
  p.expert_of.resize(p.slots());
  for (u32& e : p.expert_of) e = r.below(100) < skip ? NONE : r.below(4) < skew ? hot : r.below(p.experts);
  return p;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  Rng r{std::strtoull(argv[1], nullptr, 10) * 0x9e3779b97f4a7c15ull + 1};
  const u64 wanted = std::strtoull(argv[2], nullptr, 10);
  Workspace ws(LIMITS, (u32)std::atoi(argv[3]));
  u64 tasks = 0, steals = 0, lost = 0, launches = 0;
  while (tasks < wanted) {
    const Problem p = random_problem(r, argc > 4 ? std::atoi(argv[4]) : -1);
    std::vector<Pauses> pauses(p.workers);
    for (Pauses& x : pauses) x = Pauses{{r.next() | 1ull}, r.below(4)};
    const u32 last_starts_late = r.below(4) == 0;
    const Hooks hooks{pauses.data(), pause_somewhat, nothing};
    const u32 number = prepare(ws);
    std::vector<Worker> workers;
    for (u32 w = 0; w < p.workers; ++w) workers.emplace_back(ws, p, hooks, w, number);
    std::vector<std::thread> threads;
    for (u32 w = 0; w < p.workers; ++w) {
      if (last_starts_late && w == p.workers - 1) usleep(300);
      threads.emplace_back([&workers, w] { workers[w].run(); });
    }
    for (std::thread& t : threads) t.join();
    std::vector<Outcome> outcomes;
    for (const Worker& w : workers) outcomes.push_back(w.out);
    if (const char* wrong = check(ws, p, outcomes.data())) {
      std::printf("launch %u, policy %u, %u workers, %u groups: %s\n", number, p.knobs.policy, p.workers, ws.totals.groups,
                  wrong);
      return 1;
    }
    ++launches;
    for (const Outcome& o : outcomes)
      for (const ClaimCounts& c : o.claims) tasks += c.tasks, steals += c.steals, lost += c.lost;
  }
  std::printf("launches %llu tasks %llu steals %llu lost %llu\n", launches, tasks, steals, lost);
  return 0;
}
