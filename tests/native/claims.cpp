// The claims of a stage in sequence, for a simulator that must make the same ones.
#include <vector>

#include "scheduler.h"
#include "thread_team.h"

using namespace weave;

extern "C" {

// The worker order[i] makes its next claim, undisturbed, unless it had one in vain before. Writes task and victim, NONE
// where there was none.
void claims_in_order(const Knobs* knobs, u32 tasks, u32 workers, u32 experts, const u32* expert_group, u32 tasks_per_group,
                     const u32* order, u32 orders, u32* task, u32* victim) {
  u64 tick = 0;
  std::vector<u64> queue(workers);
  std::vector<Claimer> claimers(workers);
  std::vector<char> gone(workers, 0);
  const Serial lanes;
  for (u32 w = 0; w < workers; ++w)
    claimers[w].begin(Stage{&tick, queue.data(), tasks, workers, expert_group, experts, tasks_per_group}, *knobs, w);
  for (u32 i = 0; i < orders; ++i) {
    const u32 w = order[i];
    task[i] = victim[i] = NONE;
    if (gone[w]) continue;
    const u64 raw = claimers[w].issue();
    task[i] = claimers[w].next(lanes, raw);
    victim[i] = task[i] == NONE ? NONE : claimers[w].stolen_from;
    gone[w] = task[i] == NONE;
  }
}
}
