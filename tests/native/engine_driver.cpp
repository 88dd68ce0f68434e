// The CPU engine through its C interface: random small calls, each run by one worker and then by several under random
// policies in one long-lived workspace; the bits must be equal and the counts must add up. Built with
// -fsanitize=thread, this is what shows that the real engine's data goes from worker to worker in order.
//   engine_driver SEED CALLS SPIN_LIMIT        prints one line of counts, or what went wrong (exit status 1)
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine.h"

namespace {

struct Rng {
  uint64_t state;
  uint32_t next() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)((state * 2685821657736338717ull) >> 32);
  }
  int below(int n) { return (int)(((uint64_t)next() * (uint32_t)n) >> 32); }
  float unit() { return (float)next() / 4294967296.0f - 0.5f; }
};

// A tensor of random numbers of about `scale`, in any of the engine's element types.
struct Tensor {
  std::vector<uint8_t> bytes;
  Tensor(Rng& r, int64_t size, int dtype, float scale) : bytes((size_t)size * (dtype == WEAVE_FP32 ? 4 : 2)) {
    for (int64_t i = 0; i < size; ++i) {
      const float f = r.unit() * scale;
      if (dtype == WEAVE_FP32) {
        memcpy(&bytes[(size_t)i * 4], &f, 4);
        continue;
      }
      uint32_t bits;
      memcpy(&bits, &f, 4);
      // Truncated, not rounded, and to zero where fp16 would need a subnormal: any number of about the size will do.
      uint16_t half = (uint16_t)(bits >> 16);
      if (dtype == WEAVE_FP16) {
        const int exponent = (int)(bits >> 23 & 255) - 127 + 15;
        half = (uint16_t)((bits >> 16 & 0x8000) | (exponent <= 0 ? 0 : exponent << 10 | (bits >> 13 & 0x3ff)));
      }
      memcpy(&bytes[(size_t)i * 2], &half, 2);
    }
  }
  void* data() { return bytes.data(); }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  Rng r{std::strtoull(argv[1], nullptr, 10) * 0x9e3779b97f4a7c15ull + 1};
  const int calls = std::atoi(argv[2]);
  WeaveWorkspace* alone = weave_workspace_create();
  WeaveWorkspace* shared = weave_workspace_create();
  long long launches = 0, tasks = 0, steals = 0;
  for (int call = 0; call < calls; ++call) {
    WeaveCall c = {};
    c.tokens = r.below(10) ? 1 + r.below(r.below(2) ? 8 : 48) : 0;
    c.top_k = 1 + r.below(3);
    c.hidden = 1 + r.below(150);
    c.intermediate = 1 + r.below(140);
    c.experts = c.experts_global = 1 + r.below(r.below(2) ? 3 : 16);
    c.dtype = r.below(3);
    c.weights_dtype = r.below(3);
    c.ids_int64 = r.below(2);
    c.activation = r.below(4);
    c.interleaved = c.activation != WEAVE_RELU2 && r.below(2);
    c.weight_on_input = r.below(2);
    c.alpha = 1, c.limit = r.below(2) ? INFINITY : 2.0f, c.up_offset = (float)r.below(2);
    const int64_t up = (c.activation == WEAVE_RELU2 ? 1 : 2) * c.intermediate;
    Tensor x(r, c.tokens * c.hidden, c.dtype, 2), w13(r, c.experts * up * c.hidden, c.dtype, 0.3f);
    Tensor w2(r, c.experts * c.hidden * c.intermediate, c.dtype, 0.3f), weights(r, c.tokens * c.top_k, c.weights_dtype, 1);
    Tensor b13(r, c.experts * up, c.dtype, 1), b2(r, c.experts * c.hidden, c.dtype, 1);
    Tensor residual(r, c.tokens * c.hidden, c.dtype, 2);
    std::vector<int64_t> wide((size_t)(c.tokens * c.top_k));
    std::vector<int32_t> narrow(wide.size()), map((size_t)c.experts);
    const int hot = r.below((int)c.experts), skew = r.below(4);
    for (size_t i = 0; i < wide.size(); ++i)
      narrow[i] = (int32_t)(wide[i] = r.below(4) < skew ? hot : r.below((int)c.experts + 2) - 1);  // -1 and E: skipped
    for (int32_t& to : map) to = r.below((int)c.experts + 1) - 1;
    int32_t valid = r.below((int)c.tokens + 3);
    c.x = x.data(), c.w13 = w13.data(), c.w2 = w2.data(), c.topk_weights = weights.data();
    if (r.below(2)) c.b13 = b13.data(), c.b2 = b2.data();
    c.topk_ids = c.ids_int64 ? (void*)wide.data() : (void*)narrow.data();
    if (r.below(3) == 0) c.expert_map = map.data();
    if (r.below(3) == 0) c.num_valid = &valid;
    if (r.below(2)) c.residual = residual.data(), c.residual_row = c.hidden;
    c.x_row = c.hidden, c.w13_row = c.hidden, c.w13_expert = up * c.hidden;
    c.w2_row = c.intermediate, c.w2_expert = c.hidden * c.intermediate;
    c.b13_expert = up, c.b2_expert = c.hidden, c.weights_row = c.ids_row = c.top_k, c.out_row = c.hidden;

    WeaveOptions o = {};
    o.workers = 1, o.policy = 0, o.min_steal = 1, o.static_share = 70, o.batch = 4, o.width_cap = 256;
    o.parts_up = 1 + r.below(2) * r.below(3), o.parts_down = 1 + r.below(2) * r.below(3);
    o.combine_tokens = 8;
    o.spin_limit = (uint32_t)std::atoi(argv[3]);
    std::vector<uint8_t> want(x.bytes.size(), 0xee), got(x.bytes.size());
    c.out = want.data();
    int status = weave_run(alone, &c, &o, nullptr);
    if (status != WEAVE_OK) {
      std::printf("call %d, one worker: status %d\n", call, status);
      return 1;
    }
    for (int again = 0; again < 4; ++again, ++launches) {
      o.workers = 1 + r.below(6), o.policy = r.below(6), o.victim = r.below(2), o.steal_one = r.below(2);
      o.min_steal = 1 + r.below(2), o.static_share = r.below(101), o.batch = 1 << r.below(3), o.combine_tokens = 1 + r.below(9), o.trace = r.below(2);
      o.width_cap = r.below(2) ? 8 << r.below(3) : 64 + 16 * r.below(13);
      if (r.below(2)) weave_workspace_poison(shared);
      // The output may be the input itself: then a combine task that came too early would spoil what others still read.
      // Or the residual: then one that ran twice, or added to another's token, would show.
      Tensor input = x, added = residual;
      const int in_place = r.below(3);
      c.x = input.data(), c.out = in_place == 0 ? input.bytes.data() : got.data();
      if (c.residual) c.residual = added.data();
      if (c.residual && in_place == 1) c.out = added.bytes.data();
      std::fill(got.begin(), got.end(), 0xdd);
      WeaveRunStats stats;
      status = weave_run(shared, &c, &o, &stats);
      c.x = x.data();
      if (c.residual) c.residual = residual.data();
      if (status == WEAVE_OK && want.size() && memcmp(want.data(), c.out, want.size())) status = -1;
      std::vector<WeaveWorkerStats> workers((size_t)weave_worker_stats(shared, nullptr, 0));
      weave_worker_stats(shared, workers.data(), (int64_t)workers.size());
      int64_t ran = 0;
      for (const WeaveWorkerStats& w : workers) ran += w.tasks, steals += w.steals;
      if (status == WEAVE_OK && ran != stats.tasks[0] + stats.tasks[1] + stats.tasks[2]) status = -2;
      if (status == WEAVE_OK && o.trace && stats.events + stats.events_dropped != ran) status = -3;
      if (status != WEAVE_OK) {
        std::printf("call %d, policy %d, %d workers: %s (status %d)\n", call, o.policy, o.workers,
                    status == -1   ? "other bits than with one worker"
                    : status == -2 ? "tasks run and tasks planned differ"
                    : status == -3 ? "events and tasks differ"
                                   : "the launch failed",
                    status);
        return 1;
      }
      tasks += ran;
    }
  }
  weave_workspace_destroy(alone);
  weave_workspace_destroy(shared);
  std::printf("launches %lld tasks %lld steals %lld\n", launches, tasks, steals);
  return 0;
}
