// The router: logits from hidden states by the tensor cores, then each token's experts (route.h).
//
// A logit is the sum, in order, of what each SEGMENT columns give, whoever computes them and however many tokens there are:
// so a token's experts do not depend on the batch around it. Weights of fp32 are multiplied as three bf16 parts, which are
// exact but for underflow; sums are fp32.
//
// Few tokens: units (16 rows of the router's weight x a block of tokens x a segment) are claimed by ticket and leave their
// sums in memory; then tokens are claimed likewise, each by a block. What is left in memory is tagged words, so that whoever
// needs one waits for that word alone, and for units and tokens of running blocks only. A single token every block routes
// for itself, because that is sooner done than told.
// Many: a launch of its own leaves sums in memory, and the sort (many.h) chooses for its tokens before it counts them.
#pragma once
#include "config.h"

namespace weave {

constexpr u32 SEGMENT = 256, STEP = 32, ROUTER_ROWS = 16;
constexpr bool SPLIT_WEIGHT = ROUTER == ROUTER_FP32;
constexpr bool OPERANDS_BF16 = SPLIT_WEIGHT || BF16;
constexpr int WEIGHT_PARTS = SPLIT_WEIGHT ? 3 : 1, X_PARTS = SPLIT_WEIGHT && !BF16 ? 2 : 1;
constexpr int WEIGHT_VECTORS = SPLIT_WEIGHT ? 2 : 1;  // of 16 bytes that hold 8 weights

WEAVE_FN u32 router_rows4(const Launch& p) { return (p.router.rows + 3) & ~3u; }
WEAVE_FN u32 router_segments(const Launch& p) { return div_up(p.hidden, SEGMENT); }
// Row r of the router's weight, or the gate of the shared experts behind it.
WEAVE_FN const char* router_row(const Launch& p, u32 row) {
  constexpr u32 SIZE = SPLIT_WEIGHT ? 4 : 2;
  const Router& r = p.router;
  const bool gate = r.gate && row == r.rows - 1;
  return gate ? (const char*)r.gate : (const char*)r.weight + (u64)row * p.hidden * SIZE;
}

WEAVE_FN void split_pair(float first, float second, u32 (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    parts[i] = pack2<true>(first, second);
    first -= unpack<true>((u16)parts[i]);
    second -= unpack<true>((u16)(parts[i] >> 16));
  }
}
// The j-th word (two columns) of eight weights, or of eight elements of x, as its parts.
WEAVE_FN void weight_parts(const uint4 (&v)[WEIGHT_VECTORS], int j, u32 (&parts)[3]) {
  const u32* words = (const u32*)v;
  if (SPLIT_WEIGHT)
    split_pair(__uint_as_float(words[2 * j]), __uint_as_float(words[2 * j + 1]), parts);
  else
    parts[0] = words[j];
}
WEAVE_FN void x_parts(const uint4& v, int j, u32 (&parts)[3]) {
  const u32 word = ((const u32*)&v)[j];
  if (X_PARTS == 1)
    parts[0] = word;
  else
    split_pair(unpack<false>((u16)word), unpack<false>((u16)(word >> 16)), parts);
}

// 16 rows of logits for BLOCKS x 8 tokens, by one warp. Lane l holds, of block i, tokens 8 i + 2 (l % 4) and the next one,
// row l / 4 in sum[i][0], sum[i][1] and row l / 4 + 8 in the others.
template <int BLOCKS>
struct LogitTile {
  static constexpr int STEPS = SEGMENT / STEP;
  struct Operands {  // of STEP columns
    uint4 w[2][WEIGHT_VECTORS], x[BLOCKS];
  };
  float sum[BLOCKS][4];

  WEAVE_FN void clear() {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) sum[i][q] = 0.f;
  }
  WEAVE_FN void add(const LogitTile& other) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) sum[i][q] += other.sum[i][q];
  }
  WEAVE_FN void multiply(const Operands& o) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      u32 w00[3], w01[3], w10[3], w11[3];  // row, word
      weight_parts(o.w[0], j, w00), weight_parts(o.w[0], j + 1, w01);
      weight_parts(o.w[1], j, w10), weight_parts(o.w[1], j + 1, w11);
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) {
        u32 x0[3], x1[3];
        x_parts(o.x[i], j, x0), x_parts(o.x[i], j + 1, x1);
#pragma unroll
        for (int wp = 0; wp < WEIGHT_PARTS; ++wp)
#pragma unroll
          for (int xp = 0; xp < X_PARTS; ++xp)
            multiply_16x8x16<OPERANDS_BF16>(sum[i], w00[wp], w10[wp], w01[wp], w11[wp], x0[xp], x1[xp]);
      }
    }
  }

  // The sums of one segment. x(i, column): 8 elements of the lane's token of block i, zeros where there are none. X_NEAR: they
  // are in shared memory, and not asked for before they are needed.
  template <bool X_NEAR, class X>
  WEAVE_FN void run(const Launch& p, u32 first_row, u32 segment, const X& x) {
    const u32 lane = threadIdx.x & 31, g = lane / 4;
    const bool low = first_row + g < p.router.rows, high = first_row + g + 8 < p.router.rows;
    const char* rows[2] = {router_row(p, low ? first_row + g : 0), router_row(p, high ? first_row + g + 8 : 0)};
    // A lane's columns are 8 in a row, where the fragments want pairs: columns may come in any order that both sides share.
    const u32 first_column = segment * SEGMENT + lane % 4 * 8;
    const auto load_weights = [&](Operands& o, u32 column) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int v = 0; v < WEIGHT_VECTORS; ++v) {
          o.w[h][v] = make_uint4(0, 0, 0, 0);
          if (column < p.hidden && (h ? high : low)) o.w[h][v] = __ldg((const uint4*)(rows[h] + (u64)column * (SPLIT_WEIGHT ? 4 : 2)) + v);
        }
    };
    const auto load_x = [&](Operands& o, u32 column) {
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i) o.x[i] = x(i, column);
    };
    // Steps whose operands are on their way: as many as registers allow, and a divisor of a segment's.
    constexpr int MOST = BLOCKS == 1 ? 8 : 4, AHEAD = SPLIT_WEIGHT ? MOST / 2 : MOST;
    Operands ahead[AHEAD];
    clear();
#pragma unroll 1
    for (u32 s = 0; s < STEPS; s += AHEAD) {
      const u32 column = first_column + s * STEP;
#pragma unroll
      for (u32 a = 0; a < AHEAD; ++a) {
        load_weights(ahead[a], column + a * STEP);
        if (!X_NEAR) load_x(ahead[a], column + a * STEP);
      }
#pragma unroll
      for (u32 a = 0; a < AHEAD; ++a) {
        if (X_NEAR) load_x(ahead[a], column + a * STEP);
        multiply(ahead[a]);
      }
    }
  }

  // store(token, row, value) for what there is.
  template <class Store>
  WEAVE_FN void each(const Launch& p, u32 first_row, u32 first_token, u32 tokens, const Store& store) const {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const u32 token = first_token + 8 * i + lane % 4 * 2 + (q & 1), row = first_row + lane / 4 + (q & 2 ? 8 : 0);
        if (token < tokens && row < p.router.rows) store(token, row, sum[i][q]);
      }
  }
};

template <class Team>
WEAVE_FN void given_logits(const Team& team, const Launch& p, const Choice& c, u32 token) {
  const Router& r = p.router;
  for (u32 e = team.rank(); e < r.experts; e += team.size()) c.score[e] = read_float(r.logits, r.logits_kind, (u64)token * r.experts + e);
}
// One token, once its logits are in c.score: store(slot, expert, weight) for its slots, and the router's result where it is
// asked for. gate: the shared experts' logit, or null. MOST: at least the experts of a lane.
template <u32 MOST, class Team, class Store>
WEAVE_FN void finish_token(const Team& team, const Launch& p, const Choice& c, u32 token, const float* gate, bool result, const Store& store) {
  const Router& r = p.router;
  if (r.bias)
    for (u32 e = team.rank(); e < r.experts; e += team.size()) c.score[e] += read_float(r.bias, r.bias_kind, e);
  choose_experts<WEAVE_ROUTER_KEYS, MOST>(team, r.routing, r.experts, c, r.selection_bias != nullptr,
                                          [&](u32 e) { return read_float(r.selection_bias, r.selection_kind, e); });
  if (team.warp() != 0) return;
  weigh_choice(team, r.routing, c);
  const u32 lane = team.lane(), top_k = r.routing.top_k;
  if (lane < top_k) {
    const u32 e = c.chosen[lane];
    const float weight = chosen_weight(r.routing, c, lane);
    const u32 local = r.expert_map ? (u32)__ldg(r.expert_map + e) : e;
    store(lane, local < p.routed ? local : NONE, weight);
    if (result && r.chosen) {
      r.chosen[(u64)token * top_k + lane] = (int)e;
      r.chosen_weights[(u64)token * top_k + lane] = weight;
    }
  } else if (lane < p.top_k) {
    store(lane, p.routed + lane - top_k, gate ? score_of(SIGMOID, *gate) : 1.f);
  }
  team.sync_warp();
}

#if !WEAVE_MANY
// What is to be done, for `tokens` valid tokens.
struct RouterWork {
  u32 tokens, block_tokens, blocks, row_blocks, segments, units;
  u32 units_each;  // that a block does at a time
  WEAVE_FN RouterWork(const Launch& p, u32 tokens) : tokens(tokens) {
    block_tokens = tokens <= 64 ? 8 : 32;
    blocks = div_up(tokens, block_tokens);
    row_blocks = div_up(p.router.rows, ROUTER_ROWS);
    segments = router_segments(p);
    units = blocks * row_blocks * segments;
    const u32 fair = div_up(units, gridDim.x);  // spread over all SMs, and no more than there are warps
    units_each = fair < 1 ? 1 : fair < (u32)WARPS ? fair : (u32)WARPS;
  }
};

// Before the launch before this one has ended: rows that this block will probably be the one to read.
WEAVE_FN void prefetch_router(const Launch& p) {
  if (ROUTER < ROUTER_SAME) return;
  const RouterWork work(p, p.tokens);
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, unit = blockIdx.x * work.units_each + warp;
  if (warp >= work.units_each || unit >= work.row_blocks * work.segments) return;
  const u32 row = unit % work.row_blocks * ROUTER_ROWS + lane / 2, segment = unit / work.row_blocks;
  constexpr u32 SIZE = SPLIT_WEIGHT ? 4 : 2, BYTES = SEGMENT * SIZE / 2;
  if (row >= p.router.rows) return;
  for (u32 i = 0; i < BYTES; i += 128) {
    const u32 at = segment * SEGMENT * SIZE + lane % 2 * BYTES + i;
    if (at < p.hidden * SIZE) prefetch_l2(router_row(p, row) + at);
  }
}

// What a launch's words carry: its number, from 1 on.
WEAVE_FN u32 tag_of(u32 epoch) { return epoch + 1; }

template <int BLOCKS>
WEAVE_FN void run_unit(const Launch& p, const RouterWork& work, u32 first_row, u32 first_token, u32 segment, u32 epoch) {
  LogitTile<BLOCKS> tile;
  const u32 rows4 = router_rows4(p);
  tile.template run<false>(p, first_row, segment, [&](int i, u32 column) {
    const u32 token = first_token + 8 * i + (threadIdx.x & 31) / 4;
    if (token >= work.tokens || column >= p.hidden) return make_uint4(0, 0, 0, 0);
    return __ldg((const uint4*)((const u16*)p.x + (i64)token * p.x_pitch + column));
  });
  const u32 tag = tag_of(not_earlier(epoch));
  tile.each(p, first_row, first_token, work.tokens, [&](u32 token, u32 row, float v) {
    store_relaxed(p.router.partial + ((u64)token * work.segments + segment) * rows4 + row, tagged(bits_of(v), tag));
  });
}

// The units of a block, or of a ticket: one for each of its first warps.
WEAVE_FN void run_units(const Launch& p, const RouterWork& work, u32 part, u32 epoch) {
  const u32 warp = threadIdx.x >> 5, unit = part * work.units_each + warp;
  if (warp >= work.units_each || unit >= work.units) return;
  const u32 per_block = work.row_blocks * work.segments, block = unit / per_block, rest = unit - block * per_block;
  const u32 segment = rest / work.row_blocks, row = (rest - segment * work.row_blocks) * ROUTER_ROWS;
  if (work.block_tokens == 8)
    run_unit<1>(p, work, row, block * 8, segment, epoch);
  else
    run_unit<4>(p, work, row, block * 32, segment, epoch);
}

// The next ticket is asked for when the work of this one is nearly done: sooner, and a block that came early would hold two
// while another has none.
struct RouterTickets {
  TeamTickets units, tokens;
  WEAVE_FN RouterTickets(const Launch& p) : units{&p.router.state->units}, tokens{&p.router.state->tokens} { units.ask(), tokens.ask(); }
};

// The logits of a token into c.score and *gate, each by the thread that owns it in a team of the block; false: given up.
WEAVE_FN bool collect_logits(const BlockTeam& team, const Launch& p, const RouterWork& work, const Choice& c, u32 token, u32 tag, float* gate) {
  const Router& r = p.router;
  bool ok = true;
  if (ROUTER >= ROUTER_SAME) {
    const u32 rows4 = router_rows4(p);
    for (u32 row = team.rank(); row < r.rows; row += team.size()) {
      constexpr u32 AT_ONCE = 16;
      const u64* from = r.partial + (u64)token * work.segments * rows4 + row;
      float sum = 0;
      for (u32 first = 0; first < work.segments; first += AT_ONCE) {
        u64 v[AT_ONCE];
        bool there;
        for (u32 looks = 1;; ++looks) {
          there = true;
#pragma unroll
          for (u32 i = 0; i < AT_ONCE; ++i) {
            const bool in = first + i < work.segments;
            v[i] = in ? load_relaxed(from + (first + i) * rows4) : tagged(0, tag);
          }
#pragma unroll
          for (u32 i = 0; i < AT_ONCE; ++i) there = there && has_tag(v[i], tag);
          if (there || !ok) break;
          ok = may_look(p.shared, looks, PLAN_TIMEOUT);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) sum += float_of((u32)v[i]);
      }
      if (r.weight && row < r.experts)
        c.score[row] = sum;
      else
        *gate = sum;
    }
  }
  if (r.logits) given_logits(team, p, c, token);
  return ok;
}

// All threads of the block. Afterwards `table` knows every slot, or waits for it; false: given up. own: OWN_BYTES.
// `scratch`: memory of the ring.
// may_go_on(): whether the launch is not to be refused; asked by all threads while units are on their way.
template <class MayGoOn>
WEAVE_FN bool route(const Block& b, SlotTable& table, char* scratch, u64* own, RouterTickets& tickets, const MayGoOn& may_go_on) {
  const Launch& p = b.p;
  const Router& r = p.router;
  const RouterWork work(p, table.tokens);
  const BlockTeam team(0, WARPS, 1);
  const u32 epoch = load_relaxed(&p.shared.control->epoch);  // waited for when the first sums are there
  const bool alone = work.tokens <= 1;
  const Choice c = team_choice_at((u32*)scratch, r.experts);
  float* gate = (float*)scratch + team_choice_words(r.experts);
  if (ROUTER >= ROUTER_SAME)
    for (;;) {
      const u32 part = tickets.units.take(team, b.s.ticket);
      if (part * work.units_each >= work.units) break;
      run_units(p, work, part, epoch);
      tickets.units.ask();
    }
  if (!may_go_on()) return true;
  const u32 tag = tag_of(not_earlier(epoch));
  bool ok = true;
  for (;;) {
    const u32 token = alone ? 0 : tickets.tokens.take(team, b.s.ticket);
    if (token >= work.tokens) break;
    // What is given up is chosen from what there is: all threads meet, and the launch has failed anyway.
    ok = collect_logits(team, p, work, c, token, tag, gate) && ok;
    __syncthreads();
    tickets.tokens.ask();
    u64* slots = (alone ? own : r.slots) + 2 * (u64)token * p.top_k;
    constexpr u32 MOST = (WEAVE_ROUTER_KEYS + WARPS - 1) / WARPS;
    finish_token<MOST>(team, p, c, token, r.gate ? gate : nullptr, !alone || blockIdx.x == 0, [&](u32 slot, u32 e, float weight) {
      store_relaxed(slots + 2 * slot, tagged(e, tag));
      store_relaxed(slots + 2 * slot + 1, tagged(bits_of(weight), tag));
    });
    if (alone) break;
  }
  table.words = alone ? own : r.slots;
  table.tag = tag_of(epoch);
  table.refused = &b.s.refused;
  fence_async_proxy_shared();  // the scratch was written plainly, and TMA will write there
  return __syncthreads_and(ok);
}

// By the warp that leaves last.
WEAVE_FN void reset_router(const Launch& p) {
  u32* words = (u32*)p.router.state;
  for (u32 i = threadIdx.x & 31; i < sizeof(RouterState) / 4; i += 32) store_relaxed(words + i, 0u);
}
#endif

#if WEAVE_MANY
constexpr u32 ROUTE_WARPS = 8, ROUTE_TOKENS = 32, ROUTE_ROWS = ROUTE_WARPS * ROUTER_ROWS;  // of a block of weave_route

// Segments are cut into r.parts ranges. The first is summed as it comes; the others' segments, which are to be added after it
// and in order, are kept: [tokens][route_sums][rows rounded up to 4] r.sums.
WEAVE_FN u32 route_sums(const Launch& p) {
  const u32 segments = router_segments(p);
  return 1 + segments - segments / p.router.parts;
}

#if WEAVE_ROUTER > 1  // else nothing is multiplied
// The sums of ROUTE_TOKENS tokens, ROUTE_ROWS rows and a range of segments. What all warps read, x, comes through shared memory,
// a segment ahead; each warp's weights straight to its registers.
extern "C" __global__ void __launch_bounds__(ROUTE_WARPS * 32, 2) weave_route(const __grid_constant__ Launch p) {
  launch_dependents_may_start();
  wait_for_previous_launch();
  const Router& r = p.router;
  const SlotTable table(p);
  if (!table.here) return;
  const u32 range = blockIdx.x % r.parts, row_blocks = div_up(r.rows, ROUTE_ROWS), block = blockIdx.x / r.parts;
  const u32 token = block / row_blocks * ROUTE_TOKENS, row = block % row_blocks * ROUTE_ROWS + (threadIdx.x >> 5) * ROUTER_ROWS;
  if (threadIdx.x == 0) store_relaxed(&p.shared.control->call, p.call);  // so that another call's sort knows these sums are not its own
  if (token >= table.tokens) return;
  const u32 segments = router_segments(p), sums = route_sums(p), rows4 = router_rows4(p);
  const u32 begin = range * segments / r.parts, end = (range + 1) * segments / r.parts;
  constexpr u32 VECTORS = SEGMENT / 8, THREADS_HERE = ROUTE_WARPS * 32, EACH = ROUTE_TOKENS * VECTORS / THREADS_HERE;
  constexpr u32 PITCH = VECTORS + 4;  // of 16 bytes; two tokens that are read at once lie in different banks
  __shared__ uint4 near[2][ROUTE_TOKENS * PITCH];
  const auto fetch = [&](u32 segment) {
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
      const u32 at = threadIdx.x + i * THREADS_HERE, t = token + at / VECTORS, column = segment * SEGMENT + at % VECTORS * 8;
      const bool in = t < table.tokens && column < p.hidden;
      const u16* from = (const u16*)p.x + (in ? (i64)t * p.x_pitch + column : 0);
      copy_async_16(&near[segment & 1][at / VECTORS * PITCH + at % VECTORS], from, in ? 16 : 0);
    }
  };
  constexpr int BLOCKS = ROUTE_TOKENS / 8;
  LogitTile<BLOCKS> tile, part;
  const auto keep = [&](const LogitTile<BLOCKS>& of, u32 sum) {
    of.each(p, row, token, table.tokens, [&](u32 t, u32 at, float v) { r.sums[((u64)t * sums + sum) * rows4 + at] = v; });
  };
  tile.clear();
  fetch(begin);
#pragma unroll 1
  for (u32 segment = begin; segment < end; ++segment) {
    const uint4* x = near[segment & 1];
    copy_async_wait();
    __syncthreads();  // and all have read the other half
    if (segment + 1 < end) fetch(segment + 1);
    part.template run<true>(p, row, segment, [&](int i, u32 column) { return x[(8 * i + (threadIdx.x & 31) / 4) * PITCH + column % SEGMENT / 8]; });
    if (range == 0)
      tile.add(part);
    else
      keep(part, 1 + segment - segments / r.parts);
  }
  if (range == 0) keep(tile, 0);
}
#endif

// Words that a warp needs to choose, the shared experts' logit among them.
WEAVE_FN u32 chooser_words(u32 experts) { return choice_words(experts) + 1; }
// Tokens `first` to `end`, a warp each. memory: chooser_words for each of the block's warps. All threads call; afterwards r.ids
// and r.weights hold their slots.
WEAVE_FN void choose_tokens(const Launch& p, u32* memory, u32 warps, u32 first, u32 end) {
  const Router& r = p.router;
  const WarpLanes lanes;
  const u32 each = chooser_words(r.experts);
  const u32 sums = route_sums(p), rows4 = router_rows4(p), warp = threadIdx.x >> 5;
  const Choice c = choice_at(memory + warp * each + 1, r.experts);
  float* gate = (float*)(memory + warp * each);
  for (u32 token = first + warp; token < end; token += warps) {
    const float* from = r.sums + (u64)token * sums * rows4;
    for (u32 row = lanes.lane() * 4; row < r.rows; row += 32 * 4) {
      float logit[4] = {0, 0, 0, 0};
#pragma unroll 8
      for (u32 i = 0; i < sums; ++i) {
        const uint4 v = *(const uint4*)(from + i * rows4 + row);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 j = 0; j < 4; ++j) logit[j] += float_of(words[j]);
      }
#pragma unroll
      for (u32 j = 0; j < 4; ++j)
        if (row + j < r.rows) *(r.weight && row + j < r.experts ? &c.score[row + j] : gate) = logit[j];
    }
    if (r.logits) given_logits(lanes, p, c, token);
    __syncwarp();
    finish_token<WEAVE_ROUTER_KEYS>(lanes, p, c, token, r.gate ? gate : nullptr, true, [&](u32 slot, u32 e, float weight) {
      r.ids[(u64)token * p.top_k + slot] = e;
      r.weights[(u64)token * p.top_k + slot] = weight;
    });
  }
  __syncthreads();
}
#endif

}  // namespace weave
