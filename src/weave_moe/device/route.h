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
  u32* key;      // [experts] the order to choose in, by `ordered`
  u32* group;    // [MAX_EXPERT_GROUPS]
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

// Of the lane's indices below `count`, the one with the largest key, the lowest of equals.
template <class Lanes>
WEAVE_FN void best_of_lane(const Lanes& lanes, const u32* key, u32 count, u32& best, u32& at) {
  best = 0, at = NONE;
  for (u32 i = lanes.lane(); i < count; i += lanes.lanes())
    if (key[i] > best) best = key[i], at = i;
}
template <class Lanes>
WEAVE_FN u32 best_of_all(const Lanes& lanes, const u32* key, u32 count) {
  u32 best, at;
  best_of_lane(lanes, key, count, best, at);
  return lanes.best(best, at);
}

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

// Reads the logits in c.score and leaves the experts in c.chosen, the best first, and their scores in c.score. bias(e): of
// the selection, where `biased`. All lanes call, and see the result.
template <class Lanes, class Bias>
WEAVE_FN void choose_experts(const Lanes& lanes, const Routing& r, u32 experts, const Choice& c, bool biased, const Bias& bias) {
  for (u32 e = lanes.lane(); e < experts; e += lanes.lanes()) {
    const float raw = c.score[e];
    const bool live = raw >= LOWEST;  // neither NaN nor -infinity
    const float v = !live ? LOWEST : raw > HIGHEST ? HIGHEST : raw;
    c.score[e] = v;
    c.key[e] = live ? ordered(v) : DROPPED;
  }
  lanes.sync_warp();
  float top = 0, sum = 1;
  if (r.scoring == SOFTMAX) {
    top = c.score[best_of_all(lanes, c.key, experts)];
    sum = 0;
    for (u32 e = lanes.lane(); e < experts; e += lanes.lanes()) sum += expf(c.score[e] - top);
    sum = lanes.sum(sum);
  }
  for (u32 e = lanes.lane(); e < experts; e += lanes.lanes()) {
    const float v = c.score[e];
    const float score = r.scoring == SOFTMAX ? expf(v - top) / sum : score_of(r.scoring, v);
    float key = biased ? score + bias(e) : score;
    // Dead experts after all live ones, whatever their bias.
    key = key != key || c.key[e] == DROPPED ? LOWEST : key < ABOVE_LOWEST ? ABOVE_LOWEST : key;
    c.score[e] = score;
    c.key[e] = ordered(key);
  }
  lanes.sync_warp();
  if (r.groups > 1) {
    const u32 size = experts / r.groups;
    for (u32 g = lanes.lane(); g < r.groups; g += lanes.lanes()) c.group[g] = group_key(c.key + g * size, size, biased);
    lanes.sync_warp();
    for (u32 g = lanes.lane(); g < r.groups; g += lanes.lanes()) {
      u32 better = 0;
      for (u32 o = 0; o < r.groups; ++o) better += c.group[o] > c.group[g] || (c.group[o] == c.group[g] && o < g);
      if (better < r.kept_groups) continue;
      for (u32 i = 0; i < size; ++i) c.key[g * size + i] = DROPPED;
    }
    lanes.sync_warp();
  }
  u32 best, at;
  best_of_lane(lanes, c.key, experts, best, at);
  for (u32 j = 0; j < r.top_k; ++j) {
    const u32 e = lanes.best(best, at);
    if (lanes.lane() == 0) c.chosen[j] = e;
    if (at == e) {
      c.key[e] = TAKEN;
      best_of_lane(lanes, c.key, experts, best, at);
    }
  }
  lanes.sync_warp();
}

// The weight of the j-th expert chosen. Sums are in the order of the choice.
WEAVE_FN float chosen_weight(const Routing& r, const Choice& c, u32 j) {
  float w = c.score[c.chosen[j]], sum = 0;
  if (r.scoring == TOPK_SOFTMAX) {
    float top = LOWEST;
    for (u32 i = 0; i < r.top_k; ++i) top = c.score[c.chosen[i]] > top ? c.score[c.chosen[i]] : top;
    for (u32 i = 0; i < r.top_k; ++i) sum += expf(c.score[c.chosen[i]] - top);
    w = expf(w - top) / sum;
  } else if (r.renormalize) {
    for (u32 i = 0; i < r.top_k; ++i) sum += c.score[c.chosen[i]];
    w = w / (sum + 1e-20f);
  }
  return w * r.scale;
}

}  // namespace weave
