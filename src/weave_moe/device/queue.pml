/* The queue protocol of queue.h and scheduler.h, for Spin. Keep in step with them: each step below is one atomic operation
 * of theirs (with the local work after it), named in its comment. Sequentially consistent, compare-and-swap as one step.
 *
 *   spin -a -DNW=2 -DNL=2 queue.pml && gcc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m20000
 *
 * Workers of NL launches run a stage of NU gate_up tasks and one of ND down tasks, in NG groups; a ticket is worth B
 * tasks. What the code decides by hints or chance is left open here: a thief takes any victim, sweeps any number of
 * times, and gives up at any time. A claim may be issued before the task in hand is run, and resolved after it (PREFETCH).
 * Asserted: each task runs once a launch; no down task before the gate_up tasks of its group; a window is only ever stored
 * over an empty word; at the end all queues are empty and the launch state is zero. A wait blocks, so a wait that nobody
 * ends is a deadlock, which Spin reports as an invalid end state.
 *
 * Options: PREFETCH; STEAL_ONE; RESIDENT=n (n workers run, the others start when those have left); NO_TAGS (tags are
 * always 0: they are not needed for safety while a launch does not overlap the next).
 * Planted bugs, each of which must fail: BUG_OWNER_STORES, BUG_EARLY_REFILL, BUG_PART_COMPARE, BUG_TICK_KEPT,
 * BUG_DONE_KEPT, BUG_LEAVES_WINDOW, BUG_NO_WAIT, BUG_PLAN_EARLY.
 */
#ifndef NW
#define NW 2 /* workers */
#endif
#ifndef NL
#define NL 2 /* launches in one workspace */
#endif
#ifndef NU
#define NU 5 /* gate_up tasks */
#endif
#ifndef ND
#define ND 3 /* down tasks */
#endif
#ifndef NG
#define NG 2 /* groups */
#endif
#ifndef B
#define B 4 /* tasks a ticket */
#endif
#define MOST 8 /* at least NU and ND */
#define NONE 255

#define group_of(s, task) ((task) * NG / tasks_of(s))
#define tasks_of(s) (s == 0 -> NU : ND)
#define Q (stage * NW + me)
#define V (stage * NW + victim)

/* Shared state, zero before the first launch. Words of the queues are three numbers, always accessed in one step. */
byte tag[2 * NW], lo[2 * NW], hi[2 * NW];
byte tickets[2], nonempty[2]; /* the two halves of a stage's tick */
byte up_done[NG];
byte entered, left, plan; /* plan: 0 none, 1 claimed, 2 ready */

/* What is observed, no part of the protocol. */
byte launch, built, gone;
bit ran[2 * MOST];
byte needed[NG]; /* gate_up tasks of each group */

inline publish(from, to) {
  d_step { /* store_relaxed(queue) */
#ifndef BUG_EARLY_REFILL /* there the loss itself shall show */
    assert(lo[Q] >= hi[Q]);
#endif
#ifdef NO_TAGS
    own_tag = 0;
#else
    own_tag = own_tag + 1;
#endif
    own_lo = from;
    own_hi = to;
    tag[Q] = own_tag;
    lo[Q] = own_lo;
    hi[Q] = own_hi
  };
  nonempty[stage] = nonempty[stage] + 1 /* add(tick, +1 high) */
}

inline run_task() {
  if
  :: task == NONE
  :: task != NONE && stage == 0 ->
     d_step { /* the task, then add_release(up_done) */
       assert(!ran[task]);
       ran[task] = 1;
       up_done[group_of(0, task)] = up_done[group_of(0, task)] + 1;
       task = NONE
     }
  :: task != NONE && stage == 1 ->
#ifndef BUG_NO_WAIT
     (up_done[group_of(1, task)] >= needed[group_of(1, task)]); /* load_acquire(up_done) */
#endif
     d_step {
       k = 0;
       do
       :: k < NU ->
          assert(group_of(0, k) != group_of(1, task) || ran[k]);
          k++
       :: else -> break
       od;
       k = 0;
       assert(!ran[MOST + task]);
       ran[MOST + task] = 1;
       task = NONE
     }
  fi
}

/* The task in hand is run before the next claim is issued, or between its issue and its use. */
#ifdef PREFETCH
#define BEFORE_ISSUE if :: run_task() :: task != NONE fi
#define AFTER_ISSUE run_task();
#else
#define BEFORE_ISSUE run_task()
#define AFTER_ISSUE
#endif

proctype worker(byte me) {
  byte stage, task = NONE, own_tag, own_lo, own_hi, k, victim, seen_tag, seen_lo, seen_hi, claimed = NONE;
  bit exhausted, hit;

#ifdef RESIDENT
  (me < RESIDENT || gone >= RESIDENT);
#endif
  d_step { assert(entered < NW); entered++ }; /* add(entered) */
  if
#ifdef BUG_PLAN_EARLY
  :: atomic { plan == 0 -> plan = 2 }; built = launch
#else
  :: atomic { plan == 0 -> plan = 1 }; /* cas(plan), then the plan itself */
     built = launch;
     plan = 2 /* store_release(plan) */
#endif
  :: atomic { plan != 0 -> skip }; /* cas(plan) failed */
     (plan == 2) /* load_acquire(plan) */
  fi;
  assert(built == launch);

next_stage:
  atomic { own_tag = 0; own_lo = 0; own_hi = 0; exhausted = 0; assert(lo[Q] >= hi[Q]) };
  do
#ifdef BUG_EARLY_REFILL
  :: own_lo + (exhausted -> 0 : 1) < own_hi ->
#else
  :: own_lo < own_hi ->
#endif
     BEFORE_ISSUE;
     d_step { /* cas(queue[me], own, own + 1) */
#ifdef BUG_OWNER_STORES
       tag[Q] = own_tag; lo[Q] = own_lo + 1; hi[Q] = own_hi;
       hit = 1;
#else
       hit = (tag[Q] == own_tag && lo[Q] == own_lo && hi[Q] == own_hi);
#endif
       if
       :: hit ->
          claimed = own_lo;
          own_lo++;
          lo[Q] = own_lo
       :: else ->
          own_tag = tag[Q];
          own_lo = lo[Q];
          own_hi = hi[Q]
       fi
     };
     AFTER_ISSUE
     if
     :: hit && own_lo >= own_hi -> nonempty[stage] = nonempty[stage] - 1 /* add(tick, -1 high) */
     :: else
     fi;
     d_step { hit = 0; task = claimed; claimed = NONE }
#ifdef BUG_LEAVES_WINDOW
  :: own_lo < own_hi -> run_task(); break
#endif
#ifdef BUG_EARLY_REFILL
  :: own_lo + 1 >= own_hi && !exhausted ->
#else
  :: own_lo >= own_hi && !exhausted ->
#endif
     BEFORE_ISSUE;
     d_step { /* add(tick, 1) */
       seen_lo = tickets[stage] * B;
       seen_hi = (seen_lo + B < tasks_of(stage) -> seen_lo + B : tasks_of(stage));
       tickets[stage] = tickets[stage] + 1
     };
     AFTER_ISSUE
     if
     :: seen_lo >= seen_hi -> exhausted = 1
     :: seen_lo + 1 == seen_hi -> task = seen_lo
     :: seen_lo + 1 < seen_hi ->
        publish(seen_lo + 1, seen_hi);
        task = seen_lo
     fi;
     atomic { seen_lo = 0; seen_hi = 0 }
  :: own_lo >= own_hi && exhausted ->
     run_task();
     if
     :: break /* the count says nothing is left, or enough tries */
     :: if
        :: me != 0 -> victim = 0
        :: me != 1 -> victim = 1
#if NW > 2
        :: me != 2 -> victim = 2
#endif
        fi;
        atomic { seen_tag = tag[V]; seen_lo = lo[V]; seen_hi = hi[V] }; /* load(queue[victim]) */
        do
        :: seen_lo >= seen_hi -> break
        :: seen_lo < seen_hi ->
#ifdef STEAL_ONE
           k = 1;
#else
           k = (seen_hi - seen_lo + 1) / 2;
#endif
           d_step { /* cas(queue[victim], seen, {tag, lo, hi - k}) */
#ifdef BUG_PART_COMPARE
             hit = (hi[V] == seen_hi && lo[V] < hi[V]);
#else
             hit = (tag[V] == seen_tag && lo[V] == seen_lo && hi[V] == seen_hi);
#endif
             if
             :: hit ->
                tag[V] = seen_tag;
                lo[V] = seen_lo;
                hi[V] = seen_hi - k
             :: else ->
                seen_tag = tag[V];
                seen_lo = lo[V];
                seen_hi = hi[V];
                k = 0
             fi
           };
           if
           :: hit ->
              if
              :: seen_hi - k == seen_lo -> nonempty[stage] = nonempty[stage] - 1 /* add(tick, -1 high) */
              :: else
              fi;
              if
              :: k > 1 -> publish(seen_hi - k + 1, seen_hi)
              :: else
              fi;
              task = seen_hi - k;
              break
           :: else
           fi
        od;
        atomic { hit = 0; k = 0; victim = 0; seen_tag = 0; seen_lo = 0; seen_hi = 0 }
     fi
  od;
  if
  :: stage == 0 -> stage = 1; goto next_stage
  :: else
  fi;

  d_step { left++; hit = (left == NW) }; /* add_acq_rel(left) */
  if
  :: hit -> /* everybody else has left: these stores meet nobody */
     d_step {
#ifndef BUG_TICK_KEPT
       assert(nonempty[0] == 0 && nonempty[1] == 0);
       tickets[0] = 0; tickets[1] = 0;
#endif
#ifndef BUG_DONE_KEPT
       k = 0;
       do
       :: k < NG -> up_done[k] = 0; k++
       :: else -> break
       od;
#endif
       plan = 0; entered = 0; left = 0
     }
  :: else
  fi;
  gone++
}

init {
  byte i;
  d_step {
    do
    :: i < NU -> needed[group_of(0, i)] = needed[group_of(0, i)] + 1; i++
    :: else -> break
    od
  };
  do
  :: launch < NL ->
     d_step {
       launch++;
       gone = 0;
       i = 0;
       do
       :: i < 2 * MOST -> ran[i] = 0; i++
       :: else -> break
       od;
       i = 0
     };
     atomic {
       do
       :: i < NW -> run worker(i); i++
       :: else -> break
       od
     };
     (gone == NW);
     d_step {
       i = 0;
       do
       :: i < MOST -> assert(ran[i] == (i < NU) && ran[MOST + i] == (i < ND)); i++
       :: else -> break
       od;
       i = 0;
       do
       :: i < 2 * NW -> assert(lo[i] >= hi[i]); i++
       :: else -> break
       od;
       assert(tickets[0] == 0 && tickets[1] == 0 && nonempty[0] == 0 && nonempty[1] == 0);
       assert(plan == 0 && entered == 0 && left == 0);
       i = 0;
       do
       :: i < NG -> assert(up_done[i] == 0); i++
       :: else -> break
       od;
       i = 0
     }
  :: else -> break
  od
}
