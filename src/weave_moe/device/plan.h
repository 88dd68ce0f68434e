// The plan: from the experts of all (token, slot) pairs to groups, rows, and the task at an index.
//
// Built inside the launch, by one CPU thread or one block. Rows are the slots sorted by expert, in slot order within an
// expert; each group owns `width` rows, of which the first `tokens` hold a slot and the rest are padding (row_slot NONE).
// Only the last group of an expert has padding, so row = first row of the expert + position within the expert.
//
// Tasks are not stored. A stage has one tile for each (group, chunk), and `parts` tasks for each tile; their order is
// expert, chunk, group, part, so that workers busy at the same time read the same weights.
// The same arithmetic in Python: schedule/plan.py; tests/test_plan.py holds the two equal.
#pragma once
#include "team.h"

namespace weave {

struct Group {
  u32 row;       // first row
  u32 first;     // first group of the same expert
  u32 siblings;  // number of groups of the same expert
  u16 expert;
  u16 tokens;    // 1 .. width cap
};

struct PlanShape {
  u32 slots;      // tokens x top_k
  u32 experts;    // at most 65,534
  u32 width_cap;  // most tokens in a group: 8 .. 256, a multiple of 8, of 16 from 64 up
};

struct PlanTotals {
  u32 groups, rows;
  u32 width;  // of the widest group
};

// Index: u32, or u16 where every row and slot number is below 65,535 (a plan in shared memory).
template <class Index>
struct Plan {
  Group* groups;        // [max_groups]
  u32* expert_group;    // [experts + 1] first group of each expert
  u32* expert_row;      // [experts] first row of each expert
  u32* expert_tokens;   // [experts]
  Index* row_slot;      // [max_rows] slot in a row; all ones where the row is padding
  Index* slot_row;      // [slots] row of a slot; all ones where the slot is skipped
  PlanTotals* totals;
};

WEAVE_FN u32 div_up(u32 a, u32 b) { return (a + b - 1) / b; }

// Columns that a group of `tokens` takes: multiples of 8, of 16 from 64 up (the widths of wgmma that are compiled).
WEAVE_FN u32 group_width(u32 tokens) { return tokens <= 56 ? div_up(tokens, 8) * 8 : div_up(tokens, 16) * 16; }

// How an expert's tokens are cut: evenly, at multiples of `unit`, so that only the last group is padded.
struct Cut {
  u32 groups, unit, units;
};
WEAVE_FN Cut cut_tokens(u32 tokens, u32 width_cap) {
  Cut c;
  // One group is the usual case, and a division is dear on a GPU.
  c.groups = tokens <= width_cap ? tokens != 0 : div_up(tokens, width_cap);
  const u32 each = c.groups <= 1 ? tokens : div_up(tokens, c.groups);
  c.unit = each > 56 ? 16 : 8;
  c.units = each > 56 ? div_up(tokens, 16) : div_up(tokens, 8);
  return c;
}
WEAVE_FN u32 cut_at(const Cut& c, u32 g) {
  if (!g) return 0;
  return (u32)((u64)g * c.units / c.groups) * c.unit;
}
WEAVE_FN u32 padded_tokens(u32 tokens, u32 width_cap) {
  const Cut c = cut_tokens(tokens, width_cap);
  const u32 last = c.groups <= 1 ? 0 : cut_at(c, c.groups - 1);
  return last + group_width(tokens - last);
}

struct Range {
  u32 begin, end;
};

// Upper limits, for the sizes of buffers. Any routing of `slots` stays within them.
WEAVE_FN u32 max_groups(u32 slots, u32 experts, u32 width_cap) {
  return (experts < slots ? experts : slots) + slots / width_cap;
}
WEAVE_FN u32 max_rows(u32 slots, u32 experts) {
  const u32 touched = experts < slots ? experts : slots;
  return slots + 15 * touched;
}
// Words of scratch that a plan needs: sums of warps, and a histogram for each warp that has slots. Aligned to 8 bytes.
WEAVE_FN u32 plan_scratch(u32 warps, u32 experts) { return 2 * MAX_WARPS + warps * experts; }

// Rows (high half) and groups (low half) of an expert.
WEAVE_FN u64 extent(u32 tokens, u32 width_cap) {
  return (u64)padded_tokens(tokens, width_cap) << 32 | cut_tokens(tokens, width_cap).groups;
}

// The groups of one expert; returns the width of the widest.
template <class Index>
WEAVE_FN u32 write_groups(const Plan<Index>& p, u32 expert, u32 tokens, u32 row, u32 first_group, u32 width_cap) {
  const Cut c = cut_tokens(tokens, width_cap);
  u32 width = 0;
  p.expert_group[expert] = first_group;
  for (u32 g = 0; g < c.groups; ++g) {
    const u32 lo = cut_at(c, g), hi = g + 1 < c.groups ? cut_at(c, g + 1) : tokens;
    Group out;
    out.row = row + lo;
    out.first = first_group;
    out.siblings = c.groups;
    out.expert = (u16)expert;
    out.tokens = (u16)(hi - lo);
    p.groups[first_group + g] = out;
    if (group_width(hi - lo) > width) width = group_width(hi - lo);
  }
  return width;
}

// A plan is built in two steps, so that weights can be asked for before the slots are placed: `count_tokens` makes the
// groups, and with them the tasks; `place_slots` then gives each slot its row. The same team runs both, with the same
// scratch (plan_scratch words) and a barrier between. Both are followed by what separates the plan's writes from its
// readers: a barrier of the block, or a release (scheduler.h).
//
// expert_of(slot): the local expert of a slot, or NONE where it is to be skipped. Called once or twice for each slot; more
// often where slots arrive, each by itself, from the launch's own router: NOT_YET is asked again while wait(n) holds.
constexpr u32 NOT_YET = NONE - 1;
#if defined(WEAVE_ROUTER) && WEAVE_ROUTER && !WEAVE_MANY
constexpr bool SLOTS_ARRIVE = true;
#else
constexpr bool SLOTS_ARRIVE = false;
#endif
// Slots a lane looks up at once, so that their loads overlap.
#ifdef WEAVE_LOOK_AHEAD
constexpr u32 LOOK_AHEAD = WEAVE_LOOK_AHEAD;
#else
constexpr u32 LOOK_AHEAD = 8;
#endif
// The experts of a lane's first slots, kept from one step to the next: all of them when there are few.
struct Lookup {
  u32 expert[LOOK_AHEAD];
};

// Each warp takes one contiguous range of slots, so that positions follow the slots' order.
template <class Team>
WEAVE_FN u32 slots_each(const Team& team, u32 slots) {
  return div_up(div_up(slots, team.warps()), team.lanes()) * team.lanes();
}
template <class Team>
WEAVE_FN Range slots_of_warp(const Team& team, u32 slots) {
  const u32 each = slots_each(team, slots), begin = team.warp() * each;
  Range r;
  r.begin = begin < slots ? begin : slots;
  r.end = r.begin + each < slots ? r.begin + each : slots;
  return r;
}
template <class Team>
WEAVE_FN u32 warps_with_slots(const Team& team, u32 slots) {
  return slots ? div_up(slots, slots_each(team, slots)) : 0;
}
template <class Team, class ExpertOf>
WEAVE_FN void look_up(const Team& team, const Range& r, u32 base, const ExpertOf& expert_of, Lookup& found) {
  WEAVE_UNROLL
  for (u32 i = 0; i < LOOK_AHEAD; ++i) {
    const u32 slot = base + i * team.lanes() + team.lane();
    found.expert[i] = slot < r.end ? expert_of(slot) : NONE;
  }
  if constexpr (SLOTS_ARRIVE) {
    u32 missing = 1;
    for (u32 looks = 1; missing; ++looks) {
      missing = 0;
      WEAVE_UNROLL
      for (u32 i = 0; i < LOOK_AHEAD; ++i) missing += found.expert[i] == NOT_YET;
      const bool on = missing && expert_of.may_look_again(looks);
      WEAVE_UNROLL
      for (u32 i = 0; i < LOOK_AHEAD; ++i)
        if (found.expert[i] == NOT_YET) found.expert[i] = on ? expert_of(base + i * team.lanes() + team.lane()) : NONE;
    }
  }
}

template <class Team, class Index, class ExpertOf>
WEAVE_FN void count_tokens(const Team& team, const PlanShape& s, const Plan<Index>& p, u32* scratch, const ExpertOf& expert_of,
                           Lookup& first) {
  const u32 E = s.experts, lanes = team.lanes();
  const u32 histograms = warps_with_slots(team, s.slots);
  u32* hist = scratch + 2 * MAX_WARPS + team.warp() * E;
  const Range r = slots_of_warp(team, s.slots);
  look_up(team, r, r.begin, expert_of, first);
  if (team.rank() == 0) p.totals->width = 0;
  for (u32 i = team.rank(); i < histograms * E; i += team.size()) scratch[2 * MAX_WARPS + i] = 0;
  team.sync();
  Lookup now = first;
  for (u32 base = r.begin; base < r.end; base += LOOK_AHEAD * lanes) {
    if (base != r.begin) look_up(team, r, base, expert_of, now);
  WEAVE_UNROLL
    for (u32 i = 0; i < LOOK_AHEAD; ++i) {
      if (base + i * lanes >= r.end) break;  // the same for all lanes
      if (now.expert[i] != NONE) team.increment(&hist[now.expert[i]]);
    }
  }
  team.sync();
  // Each thread takes a range of experts, usually one. Rows in the high half, groups in the low half.
  const u32 each = div_up(E, team.size());
  const u32 from = team.rank() * each < E ? team.rank() * each : E, to = from + each < E ? from + each : E;
  u64 mine = 0, total;
  for (u32 x = from; x < to; ++x) {
    u32 tokens = 0;
    for (u32 w = 0; w < histograms; ++w) {  // a histogram becomes its warp's first position within an expert
      u32* here = &scratch[2 * MAX_WARPS + w * E + x];
      const u32 count = *here;
      *here = tokens;
      tokens += count;
    }
    p.expert_tokens[x] = tokens;
    mine += extent(tokens, s.width_cap);
  }
  u32 width = 0;
  u64 before = team.team_prefix_sum(mine, &total, (u64*)scratch);
  for (u32 x = from; x < to; ++x) {
    const u32 tokens = p.expert_tokens[x];
    const u32 first_group = (u32)before, row = (u32)(before >> 32);
    p.expert_row[x] = row;
    const u32 widest = write_groups(p, x, tokens, row, first_group, s.width_cap);
    width = widest > width ? widest : width;
    before += extent(tokens, s.width_cap);
  }
  team.raise(&p.totals->width, width);
  if (team.rank() == 0) {
    p.expert_group[E] = (u32)total;
    p.totals->groups = (u32)total;
    p.totals->rows = (u32)(total >> 32);
  }
}

template <class Team, class Index, class ExpertOf>
WEAVE_FN void place_slots(const Team& team, const PlanShape& s, const Plan<Index>& p, u32* scratch, const ExpertOf& expert_of,
                          const Lookup& first) {
  const u32 E = s.experts, lanes = team.lanes();
  u32* next = scratch + 2 * MAX_WARPS + team.warp() * E;  // position of the warp's next slot of an expert
  const Range r = slots_of_warp(team, s.slots);
  for (u32 x = team.rank(); x < E; x += team.size()) {
    const u32 tokens = p.expert_tokens[x], padded = padded_tokens(tokens, s.width_cap);
    for (u32 i = tokens; i < padded; ++i) p.row_slot[p.expert_row[x] + i] = (Index)NONE;
  }
  Lookup now = first;
  for (u32 base = r.begin; base < r.end; base += LOOK_AHEAD * lanes) {
    if (base != r.begin) look_up(team, r, base, expert_of, now);
    u32 matches[LOOK_AHEAD];  // all asked for at once: they take long and do not depend on each other
  WEAVE_UNROLL
    for (u32 i = 0; i < LOOK_AHEAD; ++i) matches[i] = base + i * lanes < r.end ? team.match(now.expert[i]) : 0;
  WEAVE_UNROLL
    for (u32 i = 0; i < LOOK_AHEAD; ++i) {
      if (base + i * lanes >= r.end) break;  // the same for all lanes
      const u32 slot = base + i * lanes + team.lane(), e = now.expert[i];
      const u32 same = matches[i];
      const u32 below = same & team.lanes_below();
      const u32 row = e == NONE ? NONE : p.expert_row[e] + next[e] + count_bits(below);
      team.sync_warp();
      if (e != NONE && !below) next[e] += count_bits(same);
      team.sync_warp();
      if (slot < r.end) p.slot_row[slot] = (Index)row;
      if (e != NONE) p.row_slot[row] = (Index)slot;
    }
  }
}

template <class Team, class Index, class ExpertOf>
WEAVE_FN void build_plan(const Team& team, const PlanShape& s, const Plan<Index>& p, u32* scratch, const ExpertOf& expert_of) {
  Lookup first;
  count_tokens(team, s, p, scratch, expert_of, first);
  team.sync();
  place_slots(team, s, p, scratch, expert_of, first);
}

enum StageKind : u32 { GATE_UP = 0, DOWN = 1, COMBINE = 2, STAGES = 3 };

struct Tile {
  u32 group, chunk, part;
};
// Groups of an expert whose tiles are neighbours: as many tasks run at once as a GPU has SMs, and what they read between
// them is least where they are about as many weight rows wide as they are tokens long.
constexpr u32 TOGETHER = 8;

// The task at `index` of a stage with `chunks` chunks and `parts` K ranges a tile. Order: expert, block of TOGETHER groups,
// chunk, group, K range. `groups[tile / chunks]` is some group of the tile's expert, because an expert's tiles number
// siblings x chunks; that is all the search there is.
WEAVE_FN Tile tile_at(const Group* groups, u32 chunks, u32 parts, u32 index) {
  const u32 tile = parts == 1 ? index : index / parts;
  const Group any = groups[tile / chunks];
  u32 within = tile - any.first * chunks, first = any.first, block = any.siblings;
  if (block > TOGETHER) {
    const u32 skipped = within / (TOGETHER * chunks) * TOGETHER;
    within -= skipped * chunks;
    first += skipped;
    block = block - skipped < TOGETHER ? block - skipped : TOGETHER;
  }
  Tile t;
  t.part = index - tile * parts;
  t.chunk = block == 1 ? within : within / block;
  t.group = first + (within - t.chunk * block);
  return t;
}

}  // namespace weave
