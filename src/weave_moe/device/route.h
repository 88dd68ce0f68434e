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

// Memory of one token's choice, seen by all lanes.
struct Choice {
  float* score;  // [experts] logits, then scores
  u32* key;      // [experts] the order to choose in, by `ordered`; only where there are groups
  u32* group;    // [MAX_EXPERT_GROUPS] their keys
  u32* chosen;   // [MAX_TOP_K]
};
WEAVE_FN u32 choice_words(u32 experts) { return 2 * experts + MAX_EXPERT_GROUPS + MAX_TOP_K; }
WEAVE_FN Choice choice_at(u32* words, u32 experts) {
  return {(float*)words, words + experts, words + 2 * experts, words + 2 * experts + MAX_EXPERT_GROUPS};
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

// A lane's experts: lane, lane + lanes, ...; their keys stay with the lane.
template <u32 MOST, class Lanes>
WEAVE_FN void best_of_lane(const Lanes& lanes, const u32 (&key)[MOST], u32& best, u32& at) {
  best = 0, at = NONE;
  WEAVE_UNROLL
  for (u32 i = 0; i < MOST; ++i)
    if (key[i] > best) best = key[i], at = lanes.lane() + i * lanes.lanes();
}

// Reads the logits in c.score and leaves the experts in c.chosen, the best first, and their scores in c.score. bias(e): of
// the selection, where `biased`. MOST: at least the experts of a lane. All lanes call, and see the result.
template <u32 MOST, class Lanes, class Bias>
WEAVE_FN void choose_experts(const Lanes& lanes, const Routing& r, u32 experts, const Choice& c, bool biased, const Bias& bias) {
  const u32 lane = lanes.lane(), step = lanes.lanes();
  u32 key[MOST], best, at;
  float score[MOST];
  WEAVE_UNROLL
  for (u32 i = 0; i < MOST; ++i) {
    const u32 e = lane + i * step;
    const float raw = e < experts ? c.score[e] : 0.f;
    const bool live = raw >= LOWEST;  // neither NaN nor -infinity
    score[i] = !live ? LOWEST : raw > HIGHEST ? HIGHEST : raw;
    key[i] = e >= experts ? TAKEN : live ? ordered(score[i]) : DROPPED;
  }
  float top = 0, sum = 1;
  if (r.scoring == SOFTMAX) {
    best_of_lane(lanes, key, best, at);
    top = unordered(lanes.largest(best));  // of dead ones alone: -infinity, which is not used
    if (!(top >= LOWEST)) top = LOWEST;
    sum = 0;
    WEAVE_UNROLL
    for (u32 i = 0; i < MOST; ++i)
      if (key[i] != TAKEN) sum += expf(score[i] - top);
    sum = lanes.sum(sum);
  }
  WEAVE_UNROLL
  for (u32 i = 0; i < MOST; ++i) {
    if (key[i] == TAKEN) continue;
    const u32 e = lane + i * step;
    const float v = r.scoring == SOFTMAX ? expf(score[i] - top) / sum : score_of(r.scoring, score[i]);
    float k = biased ? v + bias(e) : v;
    // Dead experts after all live ones, whatever their bias.
    k = k != k || key[i] == DROPPED ? LOWEST : k < ABOVE_LOWEST ? ABOVE_LOWEST : k;
    key[i] = ordered(k);
    c.score[e] = v;
  }
  if (r.groups > 1) {
    const u32 size = experts / r.groups;
    WEAVE_UNROLL
    for (u32 i = 0; i < MOST; ++i)
      if (key[i] != TAKEN) c.key[lane + i * step] = key[i];
    lanes.sync_warp();
    for (u32 g = lane; g < r.groups; g += step) c.group[g] = group_key(c.key + g * size, size, biased);
    lanes.sync_warp();
    WEAVE_UNROLL
    for (u32 i = 0; i < MOST; ++i) {
      if (key[i] == TAKEN) continue;
      const u32 mine = (lane + i * step) / size;
      u32 better = 0;
      for (u32 g = 0; g < r.groups; ++g) better += c.group[g] > c.group[mine] || (c.group[g] == c.group[mine] && g < mine);
      if (better >= r.kept_groups) key[i] = DROPPED;
    }
  }
  best_of_lane(lanes, key, best, at);
  for (u32 j = 0; j < r.top_k; ++j) {
    const u32 e = lanes.best(best, at);
    if (lane == 0) c.chosen[j] = e;
    if (at == e) {
      WEAVE_UNROLL
      for (u32 i = 0; i < MOST; ++i)
        if (lane + i * step == e) key[i] = TAKEN;
      best_of_lane(lanes, key, best, at);
    }
  }
  lanes.sync_warp();
}

// The weight of the j-th expert chosen. Sums are in the order of the choice.
WEAVE_FN float chosen_weight(const Routing& r, const Choice& c, u32 j) {
  float w = c.score[c.chosen[j]];
  if (r.scoring == TOPK_SOFTMAX || r.renormalize) {
    float scores[MAX_TOP_K], top = LOWEST, sum = 0;
    WEAVE_UNROLL
    for (u32 i = 0; i < MAX_TOP_K; ++i) scores[i] = i < r.top_k ? c.score[c.chosen[i]] : LOWEST;
    WEAVE_UNROLL
    for (u32 i = 0; i < MAX_TOP_K; ++i) top = scores[i] > top ? scores[i] : top;
    const bool softmax = r.scoring == TOPK_SOFTMAX;
    WEAVE_UNROLL
    for (u32 i = 0; i < MAX_TOP_K; ++i)
      if (i < r.top_k) sum += softmax ? expf(scores[i] - top) : scores[i];
    w = softmax ? expf(w - top) / sum : w / (sum + 1e-20f);
  }
  return w * r.scale;
}

}  // namespace weave
