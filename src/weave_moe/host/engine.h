/* The CPU engine's C interface: plain C, so that ctypes, a C++ test and a sanitizer build use the same one.
 *
 * A workspace owns every buffer that a launch needs, and runs one launch at a time. A launch starts one thread a worker;
 * each of them runs the scheduler core of ../device (enter, plan, gate_up, down, combine, leave) and computes its tasks
 * with plain loops. Nothing outlives the launch but the workspace, so a process may fork between launches.
 *
 * Stages and their chunks:
 *   gate_up  one chunk is 128 rows of W13: outputs [64 c, 64 c + 64) of a gated activation (a gate and an up row each),
 *            [128 c, 128 c + 128) of one that is not; the last chunk may hold fewer
 *   down     one chunk is 128 rows of W2: outputs [128 c, 128 c + 128)
 *   combine  one task is a block of `combine_tokens` tokens
 * K ranges: part p of n covers the columns [16 floor(p u / n), 16 floor((p + 1) u / n)), u = ceil(K / 16), cut at K.
 */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum WeaveDtype { WEAVE_BF16 = 0, WEAVE_FP16 = 1, WEAVE_FP32 = 2 };
enum WeaveActivation { WEAVE_SILU = 0, WEAVE_GELU = 1, WEAVE_GELU_TANH = 2, WEAVE_RELU2 = 3 }; /* RELU2: not gated */

/* Result of a launch: 0, or why it gave up (1 .. 4 are the errors of scheduler.h). After any of them the workspace is
 * in its initial state again, except WEAVE_BUSY, which leaves the launch in progress alone. */
enum WeaveStatus {
  WEAVE_OK = 0,
  WEAVE_OVERLAP = 1,      /* more workers entered than the launch has */
  WEAVE_PLAN_TIMEOUT = 2, /* the plan was not published within spin_limit */
  WEAVE_TASK_TIMEOUT = 3, /* a task that another one needs was not finished within spin_limit */
  WEAVE_BUSY = 16,        /* another launch is running in this workspace */
  WEAVE_NO_MEMORY = 17,   /* a buffer could not be allocated */
  WEAVE_TOO_LARGE = 18,   /* a stage could have 2^24 tasks or more: cut the tokens into slabs */
  WEAVE_BAD_ARGUMENT = 19 /* sizes or options outside their range */
};

/* One call. Strides are in elements; the last dimension of every tensor is contiguous. */
typedef struct WeaveCall {
  const void* x;            /* [tokens, hidden] dtype */
  const void* w13;          /* [experts, 2 * intermediate or intermediate, hidden] dtype */
  const void* w2;           /* [experts, hidden, intermediate] dtype */
  const void* b13;          /* [experts, 2 * intermediate or intermediate] dtype, or null */
  const void* b2;           /* [experts, hidden] dtype, or null */
  const void* topk_weights; /* [tokens, top_k] weights_dtype */
  const void* topk_ids;     /* [tokens, top_k] int32, or int64 where ids_int64 */
  const int32_t* expert_map; /* [experts_global] local expert of a global one, or null */
  const void* num_valid;    /* one int32, or int64 where num_valid_int64: tokens of the whole batch that are real; or null */
  const void* residual;     /* [tokens, hidden] dtype, added to each token's sum before it is rounded; or null */
  void* out;                /* [tokens, hidden] dtype; may be x or residual itself */
  int64_t x_row, w13_expert, w13_row, w2_expert, w2_row, b13_expert, b2_expert, weights_row, ids_row;
  int64_t residual_row, out_row;
  int64_t tokens, hidden, intermediate, experts, experts_global, top_k;
  int64_t first_token;      /* position of token 0 in the batch that num_valid counts */
  int32_t dtype, weights_dtype, ids_int64, num_valid_int64;
  int32_t activation, interleaved, weight_on_input;
  float alpha, limit, up_offset; /* limit: +infinity for none */
} WeaveCall;

/* How to run it. No field but parts_up and parts_down changes a bit of the result. */
typedef struct WeaveOptions {
  int32_t workers;        /* 1 .. 2^20 */
  int32_t policy;         /* weave::Policy of queue.h */
  int32_t victim;         /* weave::Victim of queue.h */
  int32_t steal_one;      /* 0: half of the victim's window; 1: one task */
  int32_t min_steal;      /* at least 1 */
  int32_t static_share;   /* 0 .. 100, percent */
  int32_t batch;          /* 1, 2 or 4 */
  int32_t width_cap;      /* 8 .. 256, a multiple of 8, of 16 from 64 up */
  int32_t parts_up, parts_down; /* K ranges of a tile, 1 .. 64 */
  int32_t combine_tokens; /* tokens of a combine task, at least 1 */
  int32_t trace;          /* 1: record an event for each task */
  uint32_t spin_limit;    /* iterations of any wait; beyond a few hundred each is a sleep of 50 us */
} WeaveOptions;

typedef struct WeaveWorkerStats {
  int64_t tasks, tickets, steals, steal_attempts, lost; /* lost: swaps that another worker beat */
  int64_t busy_ns, wait_ns, first_ns, last_ns; /* in tasks; in dependency waits; arrival and departure since launch */
} WeaveWorkerStats;

typedef struct WeaveRunStats {
  int64_t tasks[3];     /* tasks of each stage, as the plan counts them */
  int64_t groups, rows; /* rows: with padding */
  int64_t makespan_ns;  /* from the call to the last worker's departure */
  int64_t events;       /* recorded */
  int64_t events_dropped; /* not recorded: no memory for them */
} WeaveRunStats;

typedef struct WeaveEvent {
  uint16_t worker;  /* modulo 65,536 */
  uint8_t stage;    /* 0 gate_up, 1 down, 2 combine */
  uint8_t pad;
  int32_t expert;   /* -1: combine */
  int32_t group;    /* -1: combine */
  int32_t chunk;    /* combine: block of tokens */
  int32_t part;
  int32_t victim;   /* worker it was stolen from, -1: not stolen */
  int64_t claim_ns, start_ns, end_ns; /* since launch; start: after the dependency wait */
} WeaveEvent;

typedef struct WeaveWorkspace WeaveWorkspace;

WeaveWorkspace* weave_workspace_create(void); /* null: no memory */
void weave_workspace_destroy(WeaveWorkspace*);
/* Bytes that the workspace holds now, without the trace. */
int64_t weave_workspace_bytes(const WeaveWorkspace*);
/* Fill with 0xff (NaN in every dtype) every byte whose value a launch must not depend on. */
void weave_workspace_poison(WeaveWorkspace*);

/* Run one call; blocks until every worker has left. A status of WeaveStatus. `stats` may be null. */
int32_t weave_run(WeaveWorkspace*, const WeaveCall*, const WeaveOptions*, WeaveRunStats* stats);
/* Of the last launch: copies at most `capacity` entries, returns how many there are. */
int64_t weave_worker_stats(const WeaveWorkspace*, WeaveWorkerStats* out, int64_t capacity);
int64_t weave_events(const WeaveWorkspace*, WeaveEvent* out, int64_t capacity);

/* sizeof of the structs above, in the order Call, Options, WorkerStats, RunStats, Event; 0 beyond. */
int64_t weave_sizeof(int32_t which);

/* Benchmarks. Nanoseconds of one plan of `slots` ids over `experts`, the best of `repeats`; negative: no memory. */
double weave_bench_plan(const int32_t* ids, int64_t slots, int64_t experts, int32_t width_cap, int32_t repeats);
/* Nanoseconds of one claim by the only running worker of `workers`, over a stage of `tasks`; best of `repeats`. */
double weave_bench_claims(int32_t policy, int32_t batch, int64_t tasks, int32_t workers, int32_t repeats, int64_t* tickets);

#ifdef __cplusplus
}
#endif
