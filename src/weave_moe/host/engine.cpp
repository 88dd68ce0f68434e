// The CPU engine: one thread a worker, each runs the scheduler core and computes its tasks. Interface: engine.h.
#include "engine.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include <stdlib.h>

#include "../device/scheduler.h"
#include "arithmetic.h"

namespace weave {
namespace {

constexpr int CHUNK_ROWS = 128;   // weight rows of a chunk, in both stages
constexpr int BLOCK_TOKENS = 16;  // tokens whose rows a worker holds in fp32 at a time

// Room for what the scheduler core may need: sizes that Workspace.launch_bytes can count on.
constexpr int CONTROL_BYTES = 512;
constexpr int PLAN_SCRATCH_BYTES = 1024;  // beside one word an expert

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

i64 scratch_bytes(u32 experts) {
  const i64 needed = (i64)plan_scratch(1, experts) * 4, counted = (i64)experts * 4 + PLAN_SCRATCH_BYTES;
  return needed < counted ? counted : needed;
}

// Memory that grows and never copies: what it held is not needed any more when it grows.
class Buffer {
 public:
  ~Buffer() { free(data_); }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void reserve(int64_t bytes, bool zero = false) {
    if (bytes <= bytes_) return;
    free(data_);
    data_ = nullptr, bytes_ = 0;
    const int64_t rounded = (bytes + 63) / 64 * 64;
    data_ = aligned_alloc(64, (size_t)rounded);
    if (!data_) throw std::bad_alloc();
    bytes_ = rounded;
    if (zero) fill(0);
  }
  void fill(int byte) {
    if (data_) memset(data_, byte, (size_t)bytes_);
  }
  int64_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

class Events {
 public:
  ~Events() { free(data_); }
  void start(int64_t expected) {
    count = dropped = 0;
    if (expected > capacity_) grow(expected);
  }
  void add(const WeaveEvent& event) {
    if (count == capacity_ && !grow(2 * capacity_ + 64)) {
      dropped++;
      return;
    }
    data_[count++] = event;
  }
  const WeaveEvent* data() const { return data_; }

  int64_t count = 0, dropped = 0;

 private:
  bool grow(int64_t capacity) {
    void* moved = realloc(data_, (size_t)capacity * sizeof(WeaveEvent));
    if (!moved) return false;
    data_ = static_cast<WeaveEvent*>(moved);
    capacity_ = capacity;
    return true;
  }
  WeaveEvent* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace
}  // namespace weave

struct WeaveWorkspace {
  std::atomic<bool> busy{false};
  // Zero when new. A launch leaves them ready for the next: counters zero, queues empty.
  weave::Buffer control, queue, up_done, down_done, up_parts, down_parts;
  // Written by a launch before it reads them.
  weave::Buffer groups, expert_group, expert_row, expert_tokens, row_slot, slot_row, totals, plan_scratch;
  weave::Buffer activation, rows, up_sums, down_sums, scratch;
  std::vector<WeaveWorkerStats> worker_stats;
  std::vector<std::unique_ptr<weave::Events>> events;
  int64_t workers = 0;

  template <class F>
  void each_state(const F& f) {
    for (weave::Buffer* b : {&control, &queue, &up_done, &down_done, &up_parts, &down_parts}) f(*b);
  }
  template <class F>
  void each_data(const F& f) {
    for (weave::Buffer* b : {&groups, &expert_group, &expert_row, &expert_tokens, &row_slot, &slot_row, &totals,
                             &plan_scratch, &activation, &rows, &up_sums, &down_sums, &scratch})
      f(*b);
  }
};

namespace weave {
namespace {

// Everything about a launch that does not change while it runs.
struct Launch {
  WeaveCall call;
  WeaveOptions options;
  ActivationRule act;
  PlanShape shape;
  Plan<u32> plan;
  Shared shared;
  u32* plan_scratch;
  void* activation;  // [rows, intermediate] of the dtype; padding rows are neither written nor read
  void* rows;        // [slots, hidden]; those of skipped slots are neither written nor read
  float* up_sums;    // [parts_up, rows, w13_rows], where parts_up > 1
  float* down_sums;  // [parts_down, rows, hidden], where parts_down > 1
  float* scratch;    // [workers, scratch_floats]
  int64_t scratch_floats, wide;
  i64 w13_rows, most_rows;
  i64 valid_tokens;
  u32 up_chunks, up_outputs, down_chunks, blocks;
  int64_t start_ns;

  // The local expert of a slot. The caller's memory is read anew each time.
  u32 expert_of(u32 slot) const {
    const i64 token = slot / (u32)call.top_k, j = slot - token * call.top_k;
    if (token >= valid_tokens) return NONE;
    const i64 at = token * call.ids_row + j;
    i64 id = call.ids_int64 ? static_cast<const int64_t*>(call.topk_ids)[at]
                            : static_cast<const int32_t*>(call.topk_ids)[at];
    if (call.expert_map) {
      if (id < 0 || id >= call.experts_global) return NONE;
      id = call.expert_map[id];
    }
    return id < 0 || id >= call.experts ? NONE : (u32)id;
  }
  float weight_of(u32 slot) const {
    const i64 token = slot / (u32)call.top_k, j = slot - token * call.top_k;
    const i64 at = token * call.weights_row + j;
    switch (call.weights_dtype) {
      case WEAVE_BF16: return Bf16::widen(static_cast<const uint16_t*>(call.topk_weights)[at]);
      case WEAVE_FP16: return Fp16::widen(static_cast<const uint16_t*>(call.topk_weights)[at]);
      default: return static_cast<const float*>(call.topk_weights)[at];
    }
  }
};

// One worker of one launch. T: the element type of the call.
template <class T>
class Worker {
  typedef typename T::Element Element;
  typedef typename T::Row Row;

 public:
  Worker(const Launch& launch, u32 index, WeaveWorkerStats* stats, Events* events)
      : l(launch), index(index), stats(stats), events(events) {
    float* scratch = launch.scratch + index * launch.scratch_floats;
    x = scratch;
    weight = x + BLOCK_TOKENS * launch.wide;
    tile = weight + launch.wide;
  }

  void run() {
    stats->first_ns = since_start();
    if (enter(l.shared)) {
      if (plan() && stage(GATE_UP) && stage(DOWN)) stage(COMBINE);
      leave(l.shared, Serial());
    }
    stats->last_ns = since_start();
  }

 private:
  int64_t since_start() const { return now_ns() - l.start_ns; }

  bool plan() {
    if (!claim_plan(l.shared)) return wait_for_plan(l.shared);
    build_plan(Serial(), l.shape, l.plan, l.plan_scratch, [this](u32 slot) { return l.expert_of(slot); });
    publish_plan(l.shared);
    return true;
  }

  // Every task of a stage that this worker gets. False: the launch has failed, so drain.
  bool stage(u32 kind) {
    Knobs knobs = {(u32)l.options.policy, (u32)l.options.victim, (u32)l.options.steal_one, (u32)l.options.min_steal,
                   (u32)l.options.static_share, (u32)l.options.batch};
    Stage s = {};
    s.tick = &l.shared.control->tick[kind];
    s.queue = l.shared.queue + kind * l.shared.workers;
    s.workers = l.shared.workers;
    s.expert_group = l.plan.expert_group;
    s.experts = l.shape.experts;
    if (kind == COMBINE) {
      s.tasks = l.blocks;
      if (knobs.policy == STATIC_EXPERT) knobs.policy = STATIC_STRIDED;  // a block of tokens has no expert
    } else {
      s.tasks_per_group = kind == GATE_UP ? l.up_chunks * l.options.parts_up : l.down_chunks * l.options.parts_down;
      s.tasks = l.plan.totals->groups * s.tasks_per_group;
    }
    Claimer claimer;
    claimer.begin(s, knobs, index);
    bool ok = true;
    while (ok) {
      const u32 task = claimer.next(Serial(), claimer.issue());
      if (task == NONE) break;
      ok = run_task(kind, task, claimer.stolen_from) && !failed(l.shared.control);
    }
    stats->tasks += claimer.counts.tasks;
    stats->tickets += claimer.counts.tickets;
    stats->steals += claimer.counts.steals;
    stats->steal_attempts += claimer.counts.sweeps;
    stats->lost += claimer.counts.lost;
    return ok;
  }

  bool run_task(u32 kind, u32 task, u32 stolen_from) {
    WeaveEvent event = {};
    event.worker = (uint16_t)index;
    event.stage = (uint8_t)kind;
    event.victim = (int32_t)stolen_from;
    event.claim_ns = since_start();
    bool ok = true;
    Tile t = {NONE, task, 0};
    Group group = {};
    if (kind == COMBINE) {
      event.expert = -1;
      ok = wait_for_block(task);
    } else {
      t = kind == GATE_UP ? tile_at(l.plan.groups, l.up_chunks, l.options.parts_up, task)
                          : tile_at(l.plan.groups, l.down_chunks, l.options.parts_down, task);
      group = l.plan.groups[t.group];
      event.expert = group.expert;
      if (kind == DOWN) ok = wait_for_group(l.shared, t.group, l.up_chunks);
    }
    event.start_ns = ended = since_start();
    if (ok) {
      if (kind == GATE_UP) gate_up(t, group);
      if (kind == DOWN) down(t, group);
      if (kind == COMBINE) combine(task);
    }
    event.end_ns = ended;
    event.group = (int32_t)t.group;
    event.chunk = (int32_t)t.chunk;
    event.part = (int32_t)t.part;
    stats->wait_ns += event.start_ns - event.claim_ns;
    stats->busy_ns += event.end_ns - event.start_ns;
    if (ok && l.options.trace) events->add(event);
    return ok;
  }

  // tile[token][row] = weights[row] . x[token], over the columns that x holds.
  void product(const Element* weights, i64 stride, const i64* row, int rows, const Columns& columns, int tokens) {
    for (int r = 0; r < rows; ++r) {
      widen_columns<T>(weights + row[r] * stride, columns, weight);
      dots(weight, x, l.wide, columns.padded(), tokens, tile + r, CHUNK_ROWS);
    }
  }

  // This K range's sums of a block of tokens go to `sums` [parts, rows, outputs].
  void keep_sums(float* sums, i64 outputs, u32 part, u32 first_row, int tokens, const i64* row, int rows) const {
    for (int t = 0; t < tokens; ++t) {
      float* to = sums + (part * l.most_rows + first_row + t) * outputs;
      for (int r = 0; r < rows; ++r) to[row[r]] = tile[t * CHUNK_ROWS + r];
    }
  }
  // The sums of all K ranges, in their order.
  void add_sums(const float* sums, i64 outputs, u32 parts, u32 first_row, int tokens, const i64* row, int rows) const {
    for (int t = 0; t < tokens; ++t)
      for (int r = 0; r < rows; ++r) {
        const float* from = sums + (first_row + t) * outputs + row[r];
        float sum = from[0];
        for (u32 part = 1; part < parts; ++part) sum += from[part * l.most_rows * outputs];
        tile[t * CHUNK_ROWS + r] = sum;
      }
  }

  void gate_up(const Tile& t, const Group& group) {
    const WeaveCall& c = l.call;
    const i64 first = (i64)t.chunk * l.up_outputs;
    const int outputs = (int)(c.intermediate - first < l.up_outputs ? c.intermediate - first : l.up_outputs);
    const bool gated = l.act.gated();
    i64 row[CHUNK_ROWS];  // gate rows, then up rows, whatever their order in w13
    for (int i = 0; i < outputs; ++i) {
      row[i] = c.interleaved ? 2 * (first + i) : first + i;
      if (gated) row[outputs + i] = c.interleaved ? 2 * (first + i) + 1 : c.intermediate + first + i;
    }
    const int rows = gated ? 2 * outputs : outputs;
    const Element* weights = static_cast<const Element*>(c.w13) + group.expert * c.w13_expert;
    const u32 parts = l.options.parts_up;
    const Columns columns = range_of(c.hidden, t.part, parts);
    for (int at = 0; at < group.tokens; at += BLOCK_TOKENS) {
      const int tokens = group.tokens - at < BLOCK_TOKENS ? group.tokens - at : BLOCK_TOKENS;
      for (int i = 0; i < tokens; ++i) gather(l.plan.row_slot[group.row + at + i], columns, x + i * l.wide);
      product(weights, c.w13_row, row, rows, columns, tokens);
      if (parts == 1)
        activate(group, at, tokens, first, outputs, row);
      else
        keep_sums(l.up_sums, l.w13_rows, t.part, group.row + at, tokens, row, rows);
    }
    if (parts > 1) {
      ended = since_start();
      if (!finish_part(l.shared, GATE_UP, t.group * l.up_chunks + t.chunk, parts)) return;
      for (int at = 0; at < group.tokens; at += BLOCK_TOKENS) {
        const int tokens = group.tokens - at < BLOCK_TOKENS ? group.tokens - at : BLOCK_TOKENS;
        add_sums(l.up_sums, l.w13_rows, parts, group.row + at, tokens, row, rows);
        activate(group, at, tokens, first, outputs, row);
      }
    }
    ended = since_start();
    finish_gate_up(l.shared, t.group);
  }

  // A token's row of x, scaled by the slot's weight where that belongs on the input.
  void gather(u32 slot, const Columns& columns, float* to) const {
    const i64 token = slot / (u32)l.call.top_k;
    widen_columns<T>(static_cast<const Element*>(l.call.x) + token * l.call.x_row, columns, to);
    if (!l.call.weight_on_input) return;
    const float w = l.weight_of(slot);
    // Only the columns that exist: an infinite weight must not reach the zeros behind them.
    for (i64 i = 0; i < columns.hi - columns.lo; ++i) to[i] = T::widen(T::narrow(to[i] * w));
  }

  void activate(const Group& group, int at, int tokens, i64 first, int outputs, const i64* row) const {
    const Element* bias = static_cast<const Element*>(l.call.b13);
    if (bias) bias += group.expert * l.call.b13_expert;
    for (int t = 0; t < tokens; ++t) {
      Element* to = static_cast<Element*>(l.activation) + (i64)(group.row + at + t) * l.call.intermediate + first;
      const float* from = tile + t * CHUNK_ROWS;
      for (int i = 0; i < outputs; ++i) {
        const float v = from[i] + (bias ? T::widen(bias[row[i]]) : 0);
        if (!l.act.gated()) {
          to[i] = T::narrow(ActivationRule::relu2(v));
          continue;
        }
        const float u = from[outputs + i] + (bias ? T::widen(bias[row[outputs + i]]) : 0);
        to[i] = T::narrow(l.act.gated_value(v, u));
      }
    }
  }

  void down(const Tile& t, const Group& group) {
    const WeaveCall& c = l.call;
    const i64 first = (i64)t.chunk * CHUNK_ROWS;
    const int rows = (int)(c.hidden - first < CHUNK_ROWS ? c.hidden - first : CHUNK_ROWS);
    i64 row[CHUNK_ROWS];
    for (int r = 0; r < rows; ++r) row[r] = first + r;
    const Element* weights = static_cast<const Element*>(c.w2) + group.expert * c.w2_expert;
    const u32 parts = l.options.parts_down;
    const Columns columns = range_of(c.intermediate, t.part, parts);
    for (int at = 0; at < group.tokens; at += BLOCK_TOKENS) {
      const int tokens = group.tokens - at < BLOCK_TOKENS ? group.tokens - at : BLOCK_TOKENS;
      for (int i = 0; i < tokens; ++i)
        widen_columns<T>(static_cast<const Element*>(l.activation) + (i64)(group.row + at + i) * c.intermediate,
                         columns, x + i * l.wide);
      product(weights, c.w2_row, row, rows, columns, tokens);
      if (parts == 1)
        store_rows(group, at, tokens, first, rows);
      else
        keep_sums(l.down_sums, c.hidden, t.part, group.row + at, tokens, row, rows);
    }
    if (parts > 1) {
      ended = since_start();
      if (!finish_part(l.shared, DOWN, t.group * l.down_chunks + t.chunk, parts)) return;
      for (int at = 0; at < group.tokens; at += BLOCK_TOKENS) {
        const int tokens = group.tokens - at < BLOCK_TOKENS ? group.tokens - at : BLOCK_TOKENS;
        add_sums(l.down_sums, c.hidden, parts, group.row + at, tokens, row, rows);
        store_rows(group, at, tokens, first, rows);
      }
    }
    ended = since_start();
    finish_down(l.shared, group.expert);
  }

  void store_rows(const Group& group, int at, int tokens, i64 first, int rows) const {
    const Element* bias = static_cast<const Element*>(l.call.b2);
    if (bias) bias += group.expert * l.call.b2_expert + first;
    for (int t = 0; t < tokens; ++t) {
      Row* to = static_cast<Row*>(l.rows) + (i64)l.plan.row_slot[group.row + at + t] * l.call.hidden + first;
      const float* from = tile + t * CHUNK_ROWS;
      for (int r = 0; r < rows; ++r) to[r] = T::narrow_row(from[r] + (bias ? T::widen(bias[r]) : 0));
    }
  }

  void block_range(u32 block, i64* begin, i64* end) const {
    *begin = (i64)block * l.options.combine_tokens;
    *end = *begin + l.options.combine_tokens < l.call.tokens ? *begin + l.options.combine_tokens : l.call.tokens;
  }
  bool wait_for_block(u32 block) const {
    i64 begin, end;
    block_range(block, &begin, &end);
    for (i64 slot = begin * l.call.top_k; slot < end * l.call.top_k; ++slot) {
      if (l.plan.slot_row[slot] == NONE) continue;
      const u32 e = l.expert_of((u32)slot);
      const u32 groups = l.plan.expert_group[e + 1] - l.plan.expert_group[e];
      if (!wait_for_expert(l.shared, e, groups * l.down_chunks)) return false;
    }
    return true;
  }
  void combine(u32 block) {
    i64 begin, end;
    block_range(block, &begin, &end);
    const i64 hidden = l.call.hidden;
    for (i64 token = begin; token < end; ++token) {
      float* y = x;
      for (i64 h = 0; h < hidden; ++h) y[h] = 0;
      for (i64 j = 0; j < l.call.top_k; ++j) {
        const u32 slot = (u32)(token * l.call.top_k + j);
        if (l.plan.slot_row[slot] == NONE) continue;
        const Row* row = static_cast<const Row*>(l.rows) + (i64)slot * hidden;
        if (l.call.weight_on_input) {
          for (i64 h = 0; h < hidden; ++h) y[h] += T::widen_row(row[h]);
        } else {
          const float w = l.weight_of(slot);
          for (i64 h = 0; h < hidden; ++h) y[h] += w * T::widen_row(row[h]);
        }
      }
      if (l.call.residual) {
        const Element* from = static_cast<const Element*>(l.call.residual) + token * l.call.residual_row;
        for (i64 h = 0; h < hidden; ++h) y[h] += T::widen(from[h]);
      }
      Element* to = static_cast<Element*>(l.call.out) + token * l.call.out_row;
      for (i64 h = 0; h < hidden; ++h) to[h] = T::narrow(y[h]);
    }
    ended = since_start();
  }

  const Launch& l;
  const u32 index;
  WeaveWorkerStats* stats;
  Events* events;
  float* x;       // [BLOCK_TOKENS, wide] rows of a block in fp32; in the combine stage, a token's sum
  float* weight;  // [wide]
  float* tile;    // [BLOCK_TOKENS, CHUNK_ROWS]
  // When the task at hand ended. Read before others are told of it, so that what waits for it starts later in a trace.
  int64_t ended = 0;
};

template <class T>
void run_workers(WeaveWorkspace* ws, const Launch& launch) {
  const u32 workers = launch.shared.workers;
  auto one = [&](u32 index) {
    Worker<T>(launch, index, &ws->worker_stats[index], ws->events[index].get()).run();
  };
  std::vector<std::thread> threads;
  threads.reserve(workers);
  u32 started = 1;
  try {
    for (; started < workers; ++started) threads.emplace_back(one, started);
  } catch (const std::system_error&) {
    // No more threads to be had. Workers need not run at the same time, so this one takes the others' turns.
  }
  one(0);
  for (u32 index = started; index < workers; ++index) one(index);
  for (std::thread& thread : threads) thread.join();
}

bool valid_call(const WeaveCall& c) {
  const i64 most = (i64)1 << 31;
  return c.tokens >= 0 && c.hidden > 0 && c.intermediate > 0 && c.experts > 0 && c.experts <= 65534 && c.top_k > 0 &&
         c.tokens <= most && c.top_k <= most && c.hidden <= most && c.intermediate <= most &&
         c.dtype >= WEAVE_BF16 && c.dtype <= WEAVE_FP32 && c.weights_dtype >= WEAVE_BF16 &&
         c.weights_dtype <= WEAVE_FP32 && c.activation >= WEAVE_SILU && c.activation <= WEAVE_RELU2 &&
         !(c.interleaved && c.activation == WEAVE_RELU2);
}
bool valid_options(const WeaveOptions& o) {
  return o.workers >= 1 && o.workers <= 1 << 20 && o.policy >= (int)COUNTER && o.policy <= (int)WINDOW &&
         (o.victim == (int)LARGEST || o.victim == (int)RANDOM) && o.min_steal >= 1 && o.static_share >= 0 &&
         o.static_share <= 100 && (o.batch == 1 || o.batch == 2 || o.batch == 4) && o.width_cap >= 8 && o.width_cap <= 256 && o.width_cap % 8 == 0 &&
         (o.width_cap < 64 || o.width_cap % 16 == 0) && o.parts_up >= 1 && o.parts_up <= 64 && o.parts_down >= 1 &&
         o.parts_down <= 64 && o.combine_tokens >= 1;
}

int32_t run(WeaveWorkspace* ws, const WeaveCall& c, const WeaveOptions& o, WeaveRunStats* stats) {
  if (!valid_call(c) || !valid_options(o)) return WEAVE_BAD_ARGUMENT;
  const int64_t start = now_ns();
  ws->worker_stats.assign((size_t)o.workers, WeaveWorkerStats{});
  ws->workers = o.workers;
  for (auto& events : ws->events) events->start(0);
  if (c.tokens == 0) return WEAVE_OK;

  Launch l = {};
  l.call = c;
  l.options = o;
  l.act = ActivationRule{c.activation, c.alpha, c.limit, c.up_offset};
  l.start_ns = start;
  l.w13_rows = l.act.gated() ? 2 * c.intermediate : c.intermediate;
  l.up_outputs = l.act.gated() ? CHUNK_ROWS / 2 : CHUNK_ROWS;
  const i64 up_chunks = (c.intermediate + l.up_outputs - 1) / l.up_outputs;
  const i64 down_chunks = (c.hidden + CHUNK_ROWS - 1) / CHUNK_ROWS;
  const i64 blocks = (c.tokens - 1) / o.combine_tokens + 1;
  if (c.tokens > WINDOW_LIMIT || c.top_k > WINDOW_LIMIT || c.tokens * c.top_k > 1 << 30) return WEAVE_TOO_LARGE;
  l.shape.slots = (u32)(c.tokens * c.top_k);
  l.shape.experts = (u32)c.experts;
  l.shape.width_cap = (u32)o.width_cap;
  const i64 groups = max_groups(l.shape.slots, l.shape.experts, l.shape.width_cap);
  const i64 rows = l.most_rows = max_rows(l.shape.slots, l.shape.experts);
  const i64 limit = WINDOW_LIMIT;
  if (groups * up_chunks > limit / o.parts_up || groups * down_chunks > limit / o.parts_down || blocks > limit)
    return WEAVE_TOO_LARGE;
  l.up_chunks = (u32)up_chunks;
  l.down_chunks = (u32)down_chunks;
  l.blocks = (u32)blocks;

  l.valid_tokens = c.tokens;
  if (c.num_valid) {
    const i64 valid = c.num_valid_int64 ? *static_cast<const int64_t*>(c.num_valid)
                                        : *static_cast<const int32_t*>(c.num_valid);
    const i64 here = valid < c.first_token ? 0 : valid - c.first_token;
    l.valid_tokens = here < c.tokens ? here : c.tokens;
  }

  static_assert(sizeof(Control) <= CONTROL_BYTES && sizeof(Group) == 16, "Workspace.launch_bytes counts these");
  ws->control.reserve(CONTROL_BYTES, true);
  ws->queue.reserve((i64)STAGES * o.workers * 8, true);
  ws->up_done.reserve(groups * 4, true);
  ws->down_done.reserve(c.experts * 4, true);
  if (o.parts_up > 1) ws->up_parts.reserve(groups * up_chunks * 4, true);
  if (o.parts_down > 1) ws->down_parts.reserve(groups * down_chunks * 4, true);
  ws->groups.reserve(groups * (i64)sizeof(Group));
  ws->expert_group.reserve((c.experts + 1) * 4);
  ws->expert_row.reserve(c.experts * 4);
  ws->expert_tokens.reserve(c.experts * 4);
  ws->row_slot.reserve(rows * 4);
  ws->slot_row.reserve((i64)l.shape.slots * 4);
  ws->totals.reserve(sizeof(PlanTotals));
  ws->plan_scratch.reserve(scratch_bytes(l.shape.experts));
  ws->activation.reserve(rows * c.intermediate * (c.dtype == WEAVE_FP32 ? 4 : 2));
  ws->rows.reserve((i64)l.shape.slots * c.hidden * (c.dtype == WEAVE_BF16 ? 2 : 4));
  if (o.parts_up > 1) ws->up_sums.reserve(o.parts_up * rows * l.w13_rows * 4);
  if (o.parts_down > 1) ws->down_sums.reserve(o.parts_down * rows * c.hidden * 4);
  l.wide = lanes_up(c.hidden > c.intermediate ? c.hidden : c.intermediate);
  l.scratch_floats = (BLOCK_TOKENS + 1) * l.wide + BLOCK_TOKENS * CHUNK_ROWS;
  ws->scratch.reserve(o.workers * l.scratch_floats * 4);

  l.plan.groups = ws->groups.as<Group>();
  l.plan.expert_group = ws->expert_group.as<u32>();
  l.plan.expert_row = ws->expert_row.as<u32>();
  l.plan.expert_tokens = ws->expert_tokens.as<u32>();
  l.plan.row_slot = ws->row_slot.as<u32>();
  l.plan.slot_row = ws->slot_row.as<u32>();
  l.plan.totals = ws->totals.as<PlanTotals>();
  l.plan_scratch = ws->plan_scratch.as<u32>();
  l.activation = ws->activation.as<void>();
  l.rows = ws->rows.as<void>();
  l.up_sums = ws->up_sums.as<float>();
  l.down_sums = ws->down_sums.as<float>();
  l.scratch = ws->scratch.as<float>();
  l.shared.control = ws->control.as<Control>();
  l.shared.queue = ws->queue.as<u64>();
  l.shared.up_done = ws->up_done.as<u32>();
  l.shared.down_done = ws->down_done.as<u32>();
  l.shared.part_done[GATE_UP] = ws->up_parts.as<u32>();
  l.shared.part_done[DOWN] = ws->down_parts.as<u32>();
  l.shared.workers = (u32)o.workers;
  l.shared.max_groups = (u32)groups;
  l.shared.experts = (u32)c.experts;
  l.shared.spin_limit = o.spin_limit;

  while (ws->events.size() < (size_t)o.workers) ws->events.emplace_back(new Events);
  if (o.trace) {
    // Twice a fair share; a worker that takes more than that makes room as it goes.
    const i64 most = groups * (up_chunks * o.parts_up + down_chunks * o.parts_down) + blocks;
    for (int w = 0; w < o.workers; ++w) ws->events[w]->start(2 * most / o.workers + 16);
  }

  switch (c.dtype) {
    case WEAVE_BF16: run_workers<Bf16>(ws, l); break;
    case WEAVE_FP16: run_workers<Fp16>(ws, l); break;
    default: run_workers<Fp32>(ws, l);
  }

  const u32 error = ws->control.as<Control>()->error;
  if (error != OK) {
    // Claims, counters and queues are wherever the workers stopped.
    ws->each_state([](Buffer& b) { b.fill(0); });
    return (int32_t)error;
  }
  if (stats) {
    stats->groups = l.plan.totals->groups;
    stats->rows = l.plan.totals->rows;
    stats->tasks[GATE_UP] = stats->groups * up_chunks * o.parts_up;
    stats->tasks[DOWN] = stats->groups * down_chunks * o.parts_down;
    stats->tasks[COMBINE] = blocks;
    for (int w = 0; w < o.workers; ++w) {
      if (ws->worker_stats[w].last_ns > stats->makespan_ns) stats->makespan_ns = ws->worker_stats[w].last_ns;
      stats->events += ws->events[w]->count;
      stats->events_dropped += ws->events[w]->dropped;
    }
  }
  return WEAVE_OK;
}

}  // namespace
}  // namespace weave

extern "C" {

WeaveWorkspace* weave_workspace_create(void) { return new (std::nothrow) WeaveWorkspace; }
void weave_workspace_destroy(WeaveWorkspace* ws) { delete ws; }

int64_t weave_workspace_bytes(const WeaveWorkspace* ws) {
  int64_t bytes = 0;
  auto add = [&](const weave::Buffer& b) { bytes += b.bytes(); };
  const_cast<WeaveWorkspace*>(ws)->each_state(add);
  const_cast<WeaveWorkspace*>(ws)->each_data(add);
  return bytes;
}

void weave_workspace_poison(WeaveWorkspace* ws) {
  ws->each_data([](weave::Buffer& b) { b.fill(0xff); });
}

int32_t weave_run(WeaveWorkspace* ws, const WeaveCall* call, const WeaveOptions* options, WeaveRunStats* stats) {
  if (ws->busy.exchange(true, std::memory_order_acquire)) return WEAVE_BUSY;
  if (stats) *stats = WeaveRunStats{};
  int32_t status;
  try {
    status = weave::run(ws, *call, *options, stats);
  } catch (const std::bad_alloc&) {
    status = WEAVE_NO_MEMORY;
  }
  ws->busy.store(false, std::memory_order_release);
  return status;
}

int64_t weave_worker_stats(const WeaveWorkspace* ws, WeaveWorkerStats* out, int64_t capacity) {
  const int64_t count = (int64_t)ws->worker_stats.size();
  for (int64_t i = 0; i < count && i < capacity; ++i) out[i] = ws->worker_stats[(size_t)i];
  return count;
}

int64_t weave_events(const WeaveWorkspace* ws, WeaveEvent* out, int64_t capacity) {
  int64_t count = 0;
  for (int64_t w = 0; w < ws->workers && w < (int64_t)ws->events.size(); ++w) {
    const weave::Events& events = *ws->events[(size_t)w];
    for (int64_t i = 0; i < events.count; ++i, ++count)
      if (count < capacity) out[count] = events.data()[i];
  }
  return count;
}

int64_t weave_sizeof(int32_t which) {
  const int64_t sizes[] = {sizeof(WeaveCall), sizeof(WeaveOptions), sizeof(WeaveWorkerStats), sizeof(WeaveRunStats),
                           sizeof(WeaveEvent)};
  return which >= 0 && which < 5 ? sizes[which] : 0;
}

double weave_bench_plan(const int32_t* ids, int64_t slots, int64_t experts, int32_t width_cap, int32_t repeats) {
  using namespace weave;
  try {
    const PlanShape shape = {(u32)slots, (u32)experts, (u32)width_cap};
    std::vector<Group> groups(max_groups(shape.slots, shape.experts, shape.width_cap));
    std::vector<u32> expert_group((size_t)experts + 1), expert_row((size_t)experts), expert_tokens((size_t)experts);
    std::vector<u32> row_slot(max_rows(shape.slots, shape.experts)), slot_row((size_t)slots);
    std::vector<u64> scratch((size_t)scratch_bytes(shape.experts) / 8 + 1);  // aligned to 8 bytes
    PlanTotals totals;
    const Plan<u32> plan = {groups.data(),   expert_group.data(), expert_row.data(), expert_tokens.data(),
                            row_slot.data(), slot_row.data(),     &totals};
    int64_t best = -1;
    for (int r = 0; r < repeats; ++r) {
      const int64_t start = now_ns();
      build_plan(Serial(), shape, plan, reinterpret_cast<u32*>(scratch.data()), [&](u32 slot) {
        const int32_t id = ids[slot];
        return id < 0 || id >= experts ? NONE : (u32)id;
      });
      const int64_t took = now_ns() - start;
      if (best < 0 || took < best) best = took;
    }
    return (double)best;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

double weave_bench_claims(int32_t policy, int32_t batch, int64_t tasks, int32_t workers, int32_t repeats, int64_t* tickets) {
  using namespace weave;
  try {
    std::vector<u64> queue((size_t)workers);
    const u32 expert_group[2] = {0, 1};
    int64_t best = -1;
    for (int r = 0; r < repeats; ++r) {
      u64 tick = 0;
      Stage stage = {&tick, queue.data(), (u32)tasks, (u32)workers, expert_group, 1, (u32)tasks};
      const Knobs knobs = {(u32)policy, LARGEST, 0, 1, 70, (u32)batch};
      Claimer claimer;
      const int64_t start = now_ns();
      claimer.begin(stage, knobs, 0);
      while (claimer.next(Serial(), claimer.issue()) != NONE) {
      }
      const int64_t took = now_ns() - start;
      if (claimer.counts.tasks != (u32)tasks) return -1;
      *tickets = claimer.counts.tickets;
      if (best < 0 || took < best) best = took;
    }
    return (double)best / (double)tasks;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"
