// A token's experts from its logits, and their weights: the one text for CPU and GPU. What it means: routing.py.
#pragma once
#include "team.h"
#if !WEAVE_GPU
#include <math.h>
#endif

namespace weave {

enum Scoring : u32 { SOFTMAX = 0, SIGMOID = 1, SQRT_SOFTPLUS = 2, TOPK_SOFTMAX = 3 };
constexpr u32 MAX_TOP_K = 16, MAX_EXPERT_GROUPS = 32;

struct Routing {
  u32 scoring, top_k, renormalize;
  u32 groups, kept_groups;  // of neighbouring experts: a token chooses among the best `kept_groups`
  float scale;
};

// Memory of one token's choice, seen by all of the team.
struct Choice {
  float* score;   // [experts] logits, then scores
  u32* key;       // [experts, of a team rounded up to 32] sums are made from it, then keys
  u32* group;     // [MAX_EXPERT_GROUPS] their keys
  u32* chosen;    // [MAX_TOP_K]
  float* picked;  // [MAX_TOP_K] what the chosen ones weigh before they are scaled; 0 behind them
  // A team of several warps: each one's best, and a word for each warp.
  u64* best = nullptr;
  u32* scratch = nullptr;
};
WEAVE_FN u32 choice_words(u32 experts) { return 2 * experts + MAX_EXPERT_GROUPS + 2 * MAX_TOP_K; }
WEAVE_FN Choice choice_at(u32* words, u32 experts) {
  u32* group = words + 2 * experts;
  u32* chosen = group + MAX_EXPERT_GROUPS;
  return {(float*)words, words + experts, group, chosen, (float*)chosen + MAX_TOP_K};
}
// The same for a team of up to MAX_WARPS warps; words: aligned to 8 bytes.
WEAVE_FN u32 team_choice_words(u32 experts) { return (2 * MAX_TOP_K + 1) * MAX_WARPS + choice_words((experts + 31) & ~31u); }
WEAVE_FN Choice team_choice_at(u32* words, u32 experts) {
  u32* scratch = words + 2 * MAX_TOP_K * MAX_WARPS;
  Choice c = choice_at(scratch + MAX_WARPS, (experts + 31) & ~31u);
  c.best = (u64*)words, c.scratch = scratch;
  return c;
}

// Numbers that compare as the floats do; 0 is below all of them. Not for NaN.
WEAVE_FN u32 ordered(float v) {
  const u32 bits = bits_of(v + 0.f);  // -0 is 0
  return bits >> 31 ? ~bits : bits | 1u << 31;
}
WEAVE_FN float unordered(u32 key) { return float_of(key >> 31 ? key & ~(1u << 31) : ~key); }

constexpr float LOWEST = -3.402823466e+38f, HIGHEST = 3.402823466e+38f, ABOVE_LOWEST = -3.402823263e+38f;
constexpr u32 DROPPED = 0x007fffffu, TAKEN = 0;  // as keys: -infinity; nothing

WEAVE_FN float score_of(u32 scoring, float v) {
  if (scoring == SIGMOID) return 1.f / (1.f + expf(-v));
  if (scoring == SQRT_SOFTPLUS) return sqrtf(v > 20.f ? v : log1pf(expf(v)));
  return v;
}

// A group's key: its best expert's, or with a selection bias the sum of its two best.
WEAVE_FN u32 group_key(const u32* key, u32 size, bool biased) {
  u32 first = 0, second = 0;
  for (u32 i = 0; i < size; ++i) {
    const u32 k = key[i];
    if (k > first)
      second = first, first = k;
    else if (k > second)
      second = k;
  }
  return biased && size > 1 ? ordered(unordered(first) + unordered(second)) : first;
}

// A lane's experts: its rank in the team, and every `size` from there; their keys stay with the lane.
template <u32 MOST, class Team>
WEAVE_FN void best_of_lane(const Team& team, const u32 (&key)[MOST], u32& best, u32& at) {
  best = 0, at = NONE;
  WEAVE_UNROLL
  for (u32 i = 0; i < MOST; ++i)
    if (key[i] > best) best = key[i], at = team.rank() + i * team.size();
}

// How many keys are better than that of expert `rank`, by a team with a lane for each: all at once, where one after the
// other takes the time of as many exchanges. Of equal keys the lower expert is the better. keys: words aligned to 16 bytes,
// behind the last expert's zeros up to 32. All of the team call.
struct alignas(16) FourKeys {
  u32 key[4];
};
template <class Team>
WEAVE_FN u32 better_keys(const Team& team, const u32* keys, u32 experts, u32 mine) {
  u32 better = count_bits(team.match(mine) & team.lanes_below());
  for (u32 from = 0; from < experts; from += 32) {
    const u32 threshold = mine - (from + 32 <= team.rank());
    WEAVE_UNROLL
    for (u32 i = 0; i < 32; i += 4) {
      const FourKeys four = *(const FourKeys*)(keys + from + i);
      WEAVE_UNROLL
      for (u32 j = 0; j < 4; ++j) better += four.key[j] > threshold;
    }
  }
  return better;
}

// Reads the logits in c.score, each lane those of its own experts, and leaves the experts in c.chosen, the best first, and
// their scores in c.score. bias(e): of the selection, where `biased`. OF_WARP: at least the experts of a lane, were the team
// one warp; MOST: of a lane of the team. All of the team call, and see the result, which is the same bits for every team.
template <u32 OF_WARP, u32 MOST, class Team, class Bias>
WEAVE_FN void choose_experts(const Team& team, const Routing& r, u32 experts, const Choice& c, bool biased, const Bias& bias) {
  const u32 lane = team.lane(), rank = team.rank(), step = team.size();
  u32 key[MOST], best, at;
  float score[MOST];
  WEAVE_UNROLL
  for (u32 i = 0; i < MOST; ++i) {
    const u32 e = rank + i * step;
    const float raw = e < experts ? c.score[e] : 0.f;
    const bool live = raw >= LOWEST;  // neither NaN nor -infinity
    score[i] = !live ? LOWEST : raw > HIGHEST ? HIGHEST : raw;
    key[i] = e >= experts ? TAKEN : live ? ordered(score[i]) : DROPPED;
  }
  float sum = 1;
  if (r.scoring == SOFTMAX) {
    best_of_lane(team, key, best, at);
    float top = unordered(team.team_largest(best, c.scratch));  // of dead ones alone: -infinity, which is not used
    if (!(top >= LOWEST)) top = LOWEST;
    float* terms = (float*)c.key;
    WEAVE_UNROLL
    for (u32 i = 0; i < MOST; ++i) {
      score[i] = expf(score[i] - top);
      if (key[i] != TAKEN) terms[rank + i * step] = score[i];
    }
    team.sync();
    sum = 0;  // by each warp for itself, so that its order is the same for every team
    WEAVE_UNROLL
    for (u32 i = 0; i < OF_WARP; ++i) sum += lane + i * team.lanes() < experts ? terms[lane + i * team.lanes()] : 0.f;
    sum = team.sum(sum);
  }
  WEAVE_UNROLL
  for (u32 i = 0; i < MOST; ++i) {
    if (key[i] == TAKEN) continue;
    const u32 e = rank + i * step;
    const float v = r.scoring == SOFTMAX ? score[i] / sum : score_of(r.scoring, score[i]);
    float k = biased ? v + bias(e) : v;
    // Dead experts after all live ones, whatever their bias.
    k = k != k || key[i] == DROPPED ? LOWEST : k < ABOVE_LOWEST ? ABOVE_LOWEST : k;
    key[i] = ordered(k);
    c.score[e] = v;
  }
  if (r.groups > 1) {
    const u32 size = experts / r.groups;
    team.sync();  // the sum has been read
    WEAVE_UNROLL
    for (u32 i = 0; i < MOST; ++i)
      if (key[i] != TAKEN) c.key[rank + i * step] = key[i];
    team.sync();
    for (u32 g = rank; g < r.groups; g += step) c.group[g] = group_key(c.key + g * size, size, biased);
    team.sync();
    WEAVE_UNROLL
    for (u32 i = 0; i < MOST; ++i) {
      if (key[i] == TAKEN) continue;
      const u32 mine = (rank + i * step) / size;
      u32 better = 0;
      for (u32 g = 0; g < r.groups; ++g) better += c.group[g] > c.group[mine] || (c.group[g] == c.group[mine] && g < mine);
      if (better >= r.kept_groups) key[i] = DROPPED;
    }
  }
  if constexpr (MOST == 1 && OF_WARP > 1 && OF_WARP <= 8) {
    // Few experts and a lane for each: a key counts those above it.
    if (r.groups > 1 || r.scoring == SOFTMAX) team.sync();  // what lay there has been read
    if (rank < (experts + 31) / 32 * 32) c.key[rank] = key[0];
    team.sync();
    if (team.warp() * team.lanes() < experts) {
      const u32 better = better_keys(team, c.key, experts, key[0]);
      if (rank < experts && better < r.top_k) c.chosen[better] = rank;
    }
    team.sync();
    return;
  }
  // The best of each warp; of several warps then the best of these.
  const bool one = team.warps() == 1;
  best_of_lane(team, key, best, at);
  for (u32 j = 0; j < r.top_k && team.warp() * team.lanes() < experts; ++j) {
    const u32 e = team.best(best, at);
    if (e == NONE ? lane == 0 : at == e) {
      if (one)
        c.chosen[j] = e;
      else
        c.best[team.warp() * r.top_k + j] = e == NONE ? 0 : (u64)best << 32 | (NONE - e);
    }
    if (at == e) {
      WEAVE_UNROLL
      for (u32 i = 0; i < MOST; ++i)
        if (rank + i * step == e) key[i] = TAKEN;
      best_of_lane(team, key, best, at);
    }
  }
  team.sync();
  if (one) return;
  constexpr u32 AT_ONCE = 8;
  const u32 with_experts = (experts + team.lanes() - 1) / team.lanes(), warps = with_experts < team.warps() ? with_experts : team.warps();
  for (u32 i = rank; i < warps * r.top_k; i += step) {
    const u64 mine = c.best[i];
    u32 better = 0;
    for (u32 from = 0; from < warps * r.top_k; from += AT_ONCE)
      WEAVE_UNROLL
      for (u32 other = from; other < from + AT_ONCE; ++other) better += other < warps * r.top_k && c.best[other] > mine;
    if (mine && better < r.top_k) c.chosen[better] = NONE - (u32)mine;
  }
  team.sync();
}

// What the chosen experts weigh: by one warp, whose lanes may then ask for each.
template <class Lanes>
WEAVE_FN void weigh_choice(const Lanes& lanes, const Routing& r, const Choice& c) {
  for (u32 j = lanes.lane(); j < MAX_TOP_K; j += lanes.lanes()) c.picked[j] = j < r.top_k ? c.score[c.chosen[j]] : 0.f;
  lanes.sync_warp();
  if (r.scoring != TOPK_SOFTMAX) return;
  float top = LOWEST;
  for (u32 j = 0; j < r.top_k; ++j) top = c.picked[j] > top ? c.picked[j] : top;
  lanes.sync_warp();
  for (u32 j = lanes.lane(); j < r.top_k; j += lanes.lanes()) c.picked[j] = expf(c.picked[j] - top);
  lanes.sync_warp();
}
// The weight of the j-th expert chosen. Sums are in the order of the choice.
WEAVE_FN float chosen_weight(const Routing& r, const Choice& c, u32 j) {
  float w = c.picked[j];
  if (r.scoring == TOPK_SOFTMAX || r.renormalize) {
    float sum = 0;
    WEAVE_UNROLL
    for (u32 i = 0; i < MAX_TOP_K; ++i) sum += c.picked[i];
    w /= r.scoring == TOPK_SOFTMAX ? sum : sum + 1e-20f;
  }
  return w * r.scale;
}

}  // namespace weave
