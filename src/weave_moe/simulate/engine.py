"""The event loop: one launch, task by task, on a machine's SMs.

An SM has a loader and a consumer. The loader claims tasks and streams their weights into a ring;
the consumer multiplies as they arrive, after a task's dependencies are met, and stores the result.
Three things bound a task:

* its weights. All SMs that read from device memory share its rate (processor sharing); no SM takes
  in more than its port does. Groups of one expert share a weight tile: the first to ask reads it
  from device memory, the others get it from L2, no sooner than the first one does. A group's rows
  are read again where so much has been read since their last use that they have left L2.
* the matrix unit: stages of the ring, each as long as its width takes; shorter while other SMs have
  nothing to do, since all of them share the power. None is shorter than waiting for a stage,
  multiplying and freeing it take, one after the other.
* what it depends on: down tasks on their group's gate_up tasks, combine tasks on their experts'.
  Meanwhile weights stream on, up to what the ring holds.

Ends of tasks are computed when their weights are there; an event is only the end of a transfer, or
a moment known before. So a task costs one or two events. Times are microseconds from the moment the
blocks run; sizes are bytes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..schedule import NONE, Dispenser, Knobs, StageShape, tile_at
from ..schedule.granularity import GATHER_WIDTH, KernelPlan
from .claims import StageClaims
from .machine import Machine
from .workload import ELEMENT, Workload

__all__ = ["Launch", "Worker"]

GATE_UP, DOWN, COMBINE, OVER = 0, 1, 2, 3
TASK_RING = 4
"""Tasks that a block holds at once (device/config.h)."""
GATHER_ROWS = 4
"""Rows of x that a ticket of the gather stands for (device/consumer.h)."""
NEVER = float("inf")


class SharedRate:
    """Transfers that share a rate evenly, none faster than `cap`.

    With n transfers a transfer gets 1 / (n / total + delay), at most cap: `delay` is latency that
    the bytes in flight do not hide. All get the same, so one clock of bytes received tells which
    is the next to end.
    """

    def __init__(self, total: float, cap: float, delay: float) -> None:
        self.total, self.cap, self.delay = total, cap, delay
        self.now = self.clock = self.rate = 0.0
        self.heap: list[tuple[float, int, Transfer]] = []
        self.count = 0

    def start(self, now: float, size: float, transfer: Transfer) -> None:
        """`transfer` asks for `size` bytes at time `now`, which is not before the last event."""
        self.clock += (now - self.now) * self.rate
        self.now = now
        self.count += 1
        heapq.heappush(self.heap, (self.clock + size, self.count, transfer))
        rate = 1 / (len(self.heap) / self.total + self.delay)
        self.rate = rate if rate < self.cap else self.cap

    def next(self) -> float:
        """When the next transfer ends; infinity if there is none."""
        if not self.heap:
            return NEVER
        left = self.heap[0][0] - self.clock
        return self.now + left / self.rate if left > 0 else self.now

    def finish(self, now: float) -> Transfer:
        """The transfer that ends at `now`, which is `next()`."""
        self.clock, _, transfer = heapq.heappop(self.heap)
        self.now = now
        n = len(self.heap)
        if n:
            rate = 1 / (n / self.total + self.delay)
            self.rate = rate if rate < self.cap else self.cap
        else:
            self.rate = 0.0
        return transfer


class Transfer:
    """A task in a worker's hands, from its claim on."""

    __slots__ = (
        "again",
        "chunk",
        "claim",
        "cold",
        "copies",
        "due",
        "group",
        "index",
        "intake",
        "left",
        "ready",
        "size",
        "stage",
        "step",
        "steps",
        "tile",
        "victim",
        "worker",
    )

    worker: Worker
    stage: int
    index: int
    victim: int
    claim: float
    due: float  # when the port is done with what was asked for; then, when all weights were there
    group: int
    chunk: int
    steps: int  # ring stages
    step: float  # time of one in the matrix unit
    size: float  # weights
    intake: float  # bytes through the SM's port, weights and activations
    copies: float  # time of the copies of x, where rows are read by token
    left: float  # share of the task that has not been asked for
    cold: bool  # from device memory
    again: float  # bytes of activations that come from there once more
    tile: SharedTile | None
    ready: float  # when what it depends on is there; NEVER while that is unknown


class StageCosts:
    """What the tasks of gate_up or down have in common; sizes in bytes.

    steps: ring stages.  tile, last_tile: weights of a chunk, and of the last one.  column:
    activations of one column.  turns, copy: microseconds of the copies, where rows are read by
    token: of stages, and of each row besides.
    """

    __slots__ = ("chunks", "column", "copy", "last_tile", "parts", "steps", "tile", "turns")

    def __init__(
        self, stage: StageShape, kernel: KernelPlan, halves: int, turn: float, copy: float
    ) -> None:
        self.chunks, self.parts = stage.chunks, stage.parts
        self.steps = max(1, -(-stage.reduction // kernel.tile_k) // stage.parts)
        self.column = stage.reduction * ELEMENT / stage.parts
        row = halves * self.column
        self.tile = stage.chunk_outputs * row
        self.last_tile = (stage.outputs - (stage.chunks - 1) * stage.chunk_outputs) * row
        self.turns, self.copy = turn * self.steps, copy * self.steps


class SharedTile:
    """A weight tile of several groups: when it reached L2, and who waits for it."""

    __slots__ = ("arrived", "mark", "waiting")

    def __init__(self) -> None:
        self.arrived = NEVER
        self.mark = 0.0  # bytes that had come from device memory until then
        self.waiting: list[tuple[float, Transfer]] = []


class Worker:
    """An SM's block. Times in microseconds; see `host.stats.WorkerStats` for what they mean."""

    __slots__ = (
        "blocked",
        "busy",
        "consumer",
        "first",
        "flight",
        "index",
        "last",
        "leaving",
        "left",
        "pending",
        "share",
        "slow",
        "stage",
        "tasks",
        "then",
        "wait",
    )

    def __init__(self, index: int, share: float, slow: float) -> None:
        self.index, self.share, self.slow = index, share, slow
        self.stage = GATE_UP
        self.consumer = 0.0  # when it has finished all it can start
        self.pending: deque[Transfer] = deque()  # loaded, dependencies unknown
        self.flight: deque[tuple[float, int, float]] = deque()  # loaded: (end, steps, step)
        self.blocked: Transfer | None = None  # the loader waits for this task's dependencies
        self.then: Transfer | None = None  # a combine task that waits for those pending
        self.tasks = 0
        self.busy = self.wait = self.first = self.last = 0.0
        self.left = self.leaving = False


class Launch:
    """One launch. `run` does it; the attributes then hold what happened."""

    def __init__(
        self,
        work: Workload,
        machine: Machine,
        knobs: Knobs,
        *,
        held: int = 0,
        slow: Mapping[int, float] | None = None,
        trace: bool = False,
    ) -> None:
        self.work, self.machine = work, machine
        sms = machine.sms
        running = sms - held
        plan, kernel = work.plan, work.kernel
        widest = max((g.width for g in plan.groups), default=8)
        self.ring = max(2, kernel.stages(widest))
        weight_stage = kernel.tile_m * kernel.tile_k * ELEMENT
        self.port, self.l2 = machine.sm_gbs * 1e3, machine.l2_tbs * 1e6
        self.l2_bytes = machine.l2_mb * 1e6
        self.loading = 0  # transfers that are under way
        # All but the stage that the consumer multiplies.
        in_flight = max(1, self.ring - 1) * weight_stage
        self.memory = SharedRate(machine.hbm_tbs * 1e6, self.port, machine.latency_us / in_flight)
        self.timed: list[tuple[float, int, Any, Any]] = []
        self.counter = 0
        self.now = self.over = 0.0
        self.read_bytes = 0.0  # weights
        self.through = 0.0  # all that came from device memory through L2
        self.trace: list[tuple[int, ...]] | None = [] if trace else None
        self.trace_times: list[tuple[float, float, float]] = []
        self.stage_first = [NEVER] * 3
        self.stage_last = [0.0] * 3

        groups = plan.groups
        self.claims = []
        for number, tasks in enumerate(work.tasks):
            its = knobs
            first: list[int] = []
            if number == COMBINE and knobs.policy == "static_expert":
                its = replace(knobs, policy="static_strided")  # no expert to map by
            elif number != COMBINE:
                first = [g * work.stages[number].tasks_per_group for g in plan.expert_group]
            self.claims.append(StageClaims(Dispenser(its, tasks, sms, first)))
        self.tiles: tuple[dict[int, SharedTile], ...] = ({}, {})
        self.up_left = [work.stages[0].tasks_per_group] * len(groups)
        self.up_ready = [0.0] * len(groups)
        self.up_waiting: dict[int, list[Worker]] = {}
        down = work.stages[1].tasks_per_group
        self.down_left = [
            (plan.expert_group[e + 1] - plan.expert_group[e]) * down for e in range(plan.experts)
        ]
        self.down_ready = [0.0] * plan.experts
        self.block_left: list[int] = work.block_experts.tolist()
        self.block_slots: list[int] = work.block_slots.tolist()
        self.block_ready = [0.0] * work.token_blocks
        self.block_waiting: dict[int, list[Transfer]] = {}

        planned = machine.plan_us + machine.plan_slot_ns * work.tokens * work.shape.top_k / 1e3
        self.late_plan, self.combined = planned, 0.0
        # Every consumer takes tickets for rows before its first task, where any group is wide, so
        # narrow groups wait, too.
        rounds = -(-(plan.rows // GATHER_ROWS) // running)
        gather = machine.gather_us + machine.gather_ticket_us * rounds
        self.gathered = planned + gather if widest > GATHER_WIDTH else 0.0
        turn, copy = machine.stage_us, machine.copy_row_ns / 1e3 * kernel.tile_k / 128
        if kernel.many:
            # Launches of their own sort and gather before, and combine after; both at the rate of
            # device memory, where the rows do not stay in L2.
            moved = (work.slots + work.tokens) * work.shape.hidden * ELEMENT / self.memory.total
            planned = machine.sort_us + moved
            self.late_plan, self.gathered, turn, copy = machine.plan_us, 0.0, 0.0, 0.0
            self.combined = machine.combine_launch_us + moved
        self.planned = planned
        self.stages = (
            StageCosts(work.stages[0], kernel, 2 if work.shape.gated else 1, turn, copy),
            StageCosts(work.stages[1], kernel, 1, 0.0, 0.0),
        )
        self.expert = [g.expert for g in groups]
        self.width = [g.width for g in groups]
        flops = 2 * kernel.tile_m * kernel.tile_k * sms / (machine.matrix_tflops * 1e6)
        self.step_time = [flops * max(w, machine.narrow_width) for w in self.width]
        self.active = running  # blocks that have something to do
        # Of all SMs: the share that is at work with fewer does not make them faster.
        self.least = sms / machine.boost
        # `through` when a group's rows were last used, in each stage.
        self.used: tuple[list[float], ...] = ([NEVER] * len(groups), [NEVER] * len(groups))
        # Activations stay in L2 until there are too many of them.
        written = work.written_bytes()
        spilled = written if written > self.l2_bytes else 0
        self.traffic = 1 + spilled / max(1, work.weight_bytes)

        slow = slow or {}
        self.workers = [
            Worker(i, 1 + machine.spread * (2 * ((i * 37) % sms + 0.5) / sms - 1), slow.get(i, 0.0))
            for i in range(sms)
        ]
        self.late = list(range(running, sms))  # blocks that find no free SM at first
        for worker in self.workers[:running]:
            worker.consumer = planned
            self._at(planned, self._advance, worker)

    def _at(self, time: float, what: Any, whom: Any) -> None:
        self.counter += 1
        heapq.heappush(self.timed, (time, self.counter, what, whom))

    def run(self) -> float:
        """Until every block has left; returns when."""
        timed, memory = self.timed, self.memory
        while timed or memory.heap:
            transfer_end = memory.next()
            if timed and timed[0][0] <= transfer_end:
                self.now, _, what, whom = heapq.heappop(timed)
                what(whom)
                continue
            self.now = transfer_end
            self._arrived(memory.finish(transfer_end))
        self.over = max(w.last for w in self.workers)
        if self.work.kernel.many:
            self.stage_first[COMBINE] = self.over
            self.stage_last[COMBINE] = self.over + self.combined
        return self.over + self.combined

    # Loading

    def _advance(self, worker: Worker) -> None:
        """The loader claims its next task and asks for its weights."""
        while worker.stage != OVER:
            claims = self.claims[worker.stage]
            found = claims.next(worker.index)
            if found is not None:
                break
            worker.stage += 1
            # The first claim of a stage is not prefetched.
            if worker.stage != OVER and self.work.tasks[worker.stage]:
                self._at(self.now + self.machine.claim_us, self._advance, worker)
                return
        else:
            self._leave(worker)
            return
        task = Transfer()
        task.worker, task.stage = worker, worker.stage
        task.index, task.victim = found
        task.claim = self.now
        worker.tasks += 1
        if task.stage == COMBINE:
            self._combine(task)
            return
        self._describe(task)
        if task.victim != NONE:
            self._at(self.now + self.machine.steal_us, self._begin, task)
        else:
            self._begin(task)

    def _describe(self, task: Transfer) -> None:
        number = task.stage
        stage = self.stages[number]
        groups = self.work.plan.groups
        tile = tile_at(groups, stage.chunks, stage.parts, task.index)
        group = task.group = tile.group
        task.chunk = tile.chunk
        task.steps = stage.steps
        active = self.active if self.active > self.least else self.least
        step, turn = self.step_time[group] * active / self.machine.sms, self.machine.stage_us
        task.step = (step if step > turn else turn) + task.worker.slow
        size = stage.last_tile if tile.chunk == stage.chunks - 1 else stage.tile
        rows = self.width[group] * stage.column
        task.intake = size + rows
        used = self.used[number]
        # At their first use they are where they were written, which `traffic` counts.
        task.again = rows if self.through - used[group] > self.l2_bytes else 0.0
        used[group] = self.through
        tokens = groups[group].tokens
        task.copies = stage.turns + stage.copy * tokens if tokens <= GATHER_WIDTH else 0.0
        task.left = 1.0
        task.cold, task.tile = True, None
        siblings = groups[group].siblings
        if siblings > 1:
            key = (groups[group].first * stage.chunks + tile.chunk) * stage.parts + tile.part
            shared = self.tiles[number].get(key)
            if shared is None or (
                shared.arrived < NEVER and self.through - shared.mark > self.l2_bytes
            ):
                shared = self.tiles[number][key] = SharedTile()
            else:
                task.cold = False
            task.tile = shared
        task.size = size

    def _dependency(self, task: Transfer) -> float:
        """When the task's activations are there; NEVER while nobody knows."""
        if task.stage == GATE_UP:
            return self.gathered
        return self.up_ready[task.group] if not self.up_left[task.group] else NEVER

    def _begin(self, task: Transfer) -> None:
        worker = task.worker
        task.ready = self._dependency(task)
        if self.work.kernel.hold_down and task.stage == DOWN and task.ready > self.now:
            self._block(task)
            return
        if task.ready <= self.now:
            self._ask(task, task.left)
            return
        room = self.ring - sum(p.steps for p in worker.pending)
        self._ask(task, min(task.left, max(1, room) / task.steps))

    def _ask(self, task: Transfer, share: float) -> None:
        """Ask for this share of the task's weights."""
        self.loading += 1
        l2 = self.l2 / self.loading
        time = task.intake / (l2 if l2 < self.port else self.port)
        if task.copies > time:
            time = task.copies
        task.due = self.now + time * share
        task.left = task.left - share if share < task.left else 0.0
        shared = task.tile
        if task.cold or (task.again and shared is not None and shared.arrived < NEVER):
            size = task.size if task.cold else 0.0
            self.read_bytes += size * share
            self.through += (size + task.again) * share
            size = size * self.traffic + task.again
            self.memory.start(self.now, size * share / task.worker.share, task)
            return
        assert shared is not None
        if shared.arrived == NEVER:
            shared.waiting.append((task.due, task))
        else:
            self._at(max(task.due, shared.arrived), self._loaded, task)

    def _arrived(self, task: Transfer) -> None:
        """A transfer from device memory is over; the port may need longer."""
        if task.due > self.now:
            self._at(task.due, self._loaded, task)
        else:
            self._loaded(task)

    def _loaded(self, task: Transfer) -> None:
        worker = task.worker
        self.loading -= 1
        if task.left > 0:  # what the ring holds is there
            task.ready = self._dependency(task)
            if task.ready <= self.now:
                self._ask(task, task.left)
            else:
                self._block(task)
            return
        shared = task.tile
        if task.cold and shared is not None:
            shared.arrived, shared.mark = self.now, self.through
            for end, sibling in shared.waiting:
                self._at(max(end, self.now), self._loaded, sibling)
            shared.waiting.clear()
        task.due = self.now
        worker.pending.append(task)
        self._drain(worker)
        if not worker.pending:
            self._next_load(worker)
            return
        if self._dependency(task) == NEVER:
            self.up_waiting.setdefault(task.group, []).append(worker)
        if len(worker.pending) < TASK_RING - 1 and (
            sum(p.steps for p in worker.pending) < self.ring
        ):
            self._advance(worker)
        else:
            self._block(worker.pending[0])

    def _next_load(self, worker: Worker) -> None:
        """Claim the next task as soon as the ring has room for its first stage."""
        flight, room, time = worker.flight, self.ring - 1, self.now
        while flight and flight[0][0] <= time:
            flight.popleft()
        if not flight:
            self._advance(worker)
            return
        held = 0
        for entry in flight:
            held += entry[1]
        while flight and held > room:
            end, steps, step = flight[0]
            others = held - steps
            if others <= room:
                time = max(time, end - (room - others) * step)
                break
            time = max(time, end)
            held = others
            flight.popleft()
        if time > self.now:
            self._at(time, self._advance, worker)
        else:
            self._advance(worker)

    def _block(self, task: Transfer) -> None:
        """The loader waits for the dependencies of `task`."""
        if task.ready < NEVER:
            self._at(max(task.ready, self.now), self._unblocked, task)
            return
        task.worker.blocked = task
        self.active -= 1
        self.up_waiting.setdefault(task.group, []).append(task.worker)

    def _unblocked(self, task: Transfer) -> None:
        worker = task.worker
        if task.left > 0:
            task.ready = self._dependency(task)
            self._ask(task, task.left)
        else:
            self._next_load(worker)

    # Consuming

    def _drain(self, worker: Worker) -> None:
        """Loaded tasks whose dependencies have a time: when they end."""
        pending = worker.pending
        while pending:
            task = pending[0]
            ready = self._dependency(task)
            if ready == NEVER:
                return
            pending.popleft()
            start = worker.consumer if worker.consumer > task.claim else task.claim
            if ready > start:
                worker.wait += ready - start
                start = ready
            multiplied = start + task.steps * task.step
            if task.due + task.step > multiplied:
                multiplied = task.due + task.step
            end = multiplied + self.machine.epilogue_us
            worker.consumer = end
            worker.flight.append((multiplied, task.steps, task.step))
            self._finished(task, start, end)
        if worker.then is not None:
            task, worker.then = worker.then, None
            self._add_rows(task)
        elif worker.leaving:
            worker.leaving = False
            self._leave(worker)

    def _finished(self, task: Transfer, start: float, end: float) -> None:
        worker, stage = task.worker, task.stage
        worker.busy += end - start
        if start < self.stage_first[stage]:
            self.stage_first[stage] = start
        if end > self.stage_last[stage]:
            self.stage_last[stage] = end
        group = task.group
        expert = self.expert[group] if group != NONE else NONE
        if self.trace is not None:
            parts = self.work.stages[stage].parts if stage != COMBINE else 1
            part = task.index % parts
            self.trace.append((worker.index, stage, expert, group, task.chunk, part, task.victim))
            self.trace_times.append((task.claim, start, end))
        seen = end + self.machine.publish_us
        if stage == GATE_UP:
            if seen > self.up_ready[group]:
                self.up_ready[group] = seen
            self.up_left[group] -= 1
            if not self.up_left[group]:
                for waiting in self.up_waiting.pop(group, ()):
                    self._at(self.now, self._woken, waiting)
        elif stage == DOWN:
            if seen > self.down_ready[expert]:
                self.down_ready[expert] = seen
            self.down_left[expert] -= 1
            if not self.down_left[expert]:
                self._expert_done(expert)

    def _woken(self, worker: Worker) -> None:
        """Dependencies of a task of this worker have a time now."""
        self._drain(worker)
        blocked = worker.blocked
        if blocked is None:
            return
        blocked.ready = self._dependency(blocked)
        if blocked.ready == NEVER:
            return
        worker.blocked = None
        self.active += 1
        self._at(max(blocked.ready, self.now), self._unblocked, blocked)

    # Combining

    def _combine(self, task: Transfer) -> None:
        """Combine tasks have no weights; the loader claims one when the one before is done."""
        block = task.index // self.work.slices
        task.group, task.chunk = NONE, block
        if self.block_left[block]:
            self.block_waiting.setdefault(block, []).append(task)
            self.active -= 1
        else:
            self._add_rows(task)

    def _expert_done(self, expert: int) -> None:
        seen, ready, left = self.down_ready[expert], self.block_ready, self.block_left
        for block in self.work.expert_blocks[expert].tolist():
            if seen > ready[block]:
                ready[block] = seen
            left[block] -= 1
            if not left[block]:
                for task in self.block_waiting.pop(block, ()):
                    self.active += 1
                    self._add_rows(task)

    def _add_rows(self, task: Transfer) -> None:
        worker, work = task.worker, self.work
        if worker.pending:  # consumers take tasks in order
            worker.then = task
            return
        block = task.index // work.slices
        start = max(worker.consumer, task.claim)
        ready = self.block_ready[block]
        if ready > start:
            worker.wait += ready - start
            start = ready
        size = self.block_slots[block] * work.shape.hidden * ELEMENT / work.slices
        end = start + self.machine.combine_us + size / self.port + worker.slow
        worker.consumer = end
        self._finished(task, start, end)
        self._at(max(end, self.now), self._advance, worker)

    def _leave(self, worker: Worker) -> None:
        """The loader is through; the block leaves when its last loaded task has ended."""
        if worker.pending:
            worker.leaving = True
            return
        worker.last = max(worker.consumer, self.now)
        worker.left = True
        if not self.late:
            self.active -= 1
        else:
            late = self.workers[self.late.pop(0)]
            late.first = worker.last
            late.consumer = worker.last + self.late_plan
            self._at(late.consumer, self._advance, late)
