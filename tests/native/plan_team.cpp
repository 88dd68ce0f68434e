// Random plans, each built by one thread and then by several: the same arrays, and no race between the threads.
//   plan_team SEED PLANS        prints a line of counts, or what went wrong (exit status 1)
#include <cstdlib>

#include "launch.h"
#include "thread_team.h"

using namespace launch;

namespace {

struct Arrays {
  std::vector<Group> groups;
  std::vector<u32> expert_group, expert_row, expert_tokens, row_slot, slot_row;
  PlanTotals totals{};
  explicit Arrays(const PlanShape& s)
      : groups(max_groups(s.slots, s.experts, s.width_cap)),
        expert_group(s.experts + 1),
        expert_row(s.experts),
        expert_tokens(s.experts),
        row_slot(max_rows(s.slots, s.experts)),
        slot_row(s.slots) {}
  Plan<u32> plan() {
    return Plan<u32>{groups.data(),   expert_group.data(), expert_row.data(), expert_tokens.data(),
                     row_slot.data(), slot_row.data(),     &totals};
  }
  bool operator==(const Arrays& o) const {
    return !std::memcmp(&totals, &o.totals, sizeof totals) && expert_group == o.expert_group &&
           expert_row == o.expert_row && expert_tokens == o.expert_tokens && slot_row == o.slot_row &&
           std::equal(row_slot.begin(), row_slot.begin() + totals.rows, o.row_slot.begin()) &&
           !std::memcmp(groups.data(), o.groups.data(), totals.groups * sizeof(Group));
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Rng r{std::strtoull(argv[1], nullptr, 10) * 0x9e3779b97f4a7c15ull + 1};
  const u32 plans = (u32)std::atoi(argv[2]);
  u64 groups = 0;
  for (u32 i = 0; i < plans; ++i) {
    const PlanShape shape{r.below(r.below(2) ? 40 : 900), 1 + r.below(r.below(2) ? 5 : 70),
                          r.below(2) ? 8u << r.below(3) : 64 + 16 * r.below(13)};
    std::vector<u32> ids(shape.slots);
    const u32 hot = r.below(shape.experts), skew = r.below(4), skip = r.below(3) ? 0 : r.below(20);
    for (u32& e : ids) e = r.below(100) < skip ? NONE : r.below(4) < skew ? hot : r.below(shape.experts);
    const auto expert_of = [&ids](u32 slot) { return ids[slot]; };
    Arrays want(shape), got(shape);
    const u32 warps = 2 + r.below(6);
    build_plan_with(1, shape, want.plan(), expert_of);
    build_plan_with(warps, shape, got.plan(), expert_of);
    if (!(want == got)) {
      std::printf("plan %u: %u warps make another plan than one\n", i, warps);
      return 1;
    }
    groups += want.totals.groups;
  }
  std::printf("plans %u groups %llu\n", plans, groups);
  return 0;
}
