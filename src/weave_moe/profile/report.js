"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const GUTTER = 46, AXIS = 18;

  // ---- Records

  function column(values, count) {
    return typeof values === "number" ? new Float64Array(count).fill(values) : Float64Array.from(values);
  }

  const runs = data.runs.map((run) => {
    const c = {};
    for (const [name, values] of Object.entries(run.columns)) c[name] = column(values, run.tasks);
    c.end = c.compute.map((at, i) => at + c.length[i]);
    // Where tasks of a worker overlap, no moment of it counts as busy twice.
    c.begin = c.compute.slice();
    const first = new Int32Array(run.workers + 1).fill(run.tasks);
    for (let i = run.tasks - 1; i >= 0; i--) first[c.worker[i]] = i;
    for (let w = run.workers - 1; w >= 0; w--) first[w] = Math.min(first[w], first[w + 1]);
    for (let w = 0; w < run.workers; w++) {
      let reached = 0;
      for (let i = first[w]; i < first[w + 1]; i++) {
        c.begin[i] = Math.max(c.begin[i], Math.min(reached, c.end[i]));
        reached = Math.max(reached, c.end[i]);
      }
    }
    return { ...run, c, first };
  });
  const END = Math.max(1, ...runs.map((run) => run.makespan));

  const state = { policy: 0, beside: -1, colour: "stage", from: 0, to: END, hover: null, drag: null };

  // ---- Words and colours

  function time(ns, digits = 3) {
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]])
      if (Math.abs(ns) >= size) return `${Number((ns / size).toPrecision(digits))} ${unit}`;
    return `${Math.round(ns)} ns`;
  }
  const share = (value) => `${(100 * value).toFixed(1)} %`;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  let paint = {};
  function readColours() {
    for (const name of ["ink", "faint", "line", "panel", "wait", "plan", "idle", "stolen", "own", ...data.stages])
      paint[name] = style(name);
  }
  // Neighbouring experts get hues far apart.
  const expertColour = (expert) =>
    expert < 0 ? paint.combine : `hsl(${((expert * 137.508) % 360).toFixed(0)} 58% ${46 + 12 * (expert % 3)}%)`;

  function colourOf(run, i) {
    if (state.colour === "expert") return expertColour(run.c.expert[i]);
    if (state.colour === "stolen") return run.c.victim[i] >= 0 ? paint.stolen : paint.own;
    return paint[data.stages[run.c.stage[i]]];
  }

  // ---- Canvases

  function sheet(canvas, height) {
    const width = Math.max(120, canvas.clientWidth), scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    g.font = "11px system-ui, sans-serif";
    return { g, width, height };
  }

  function niceStep(span, most) {
    const raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= raw) || raw;
  }

  function timeAxis(g, left, right, top, bottom, from, to) {
    const step = niceStep(to - from, Math.max(2, (right - left) / 90));
    g.textAlign = "center";
    g.textBaseline = "top";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = left + ((at - from) / (to - from)) * (right - left);
      g.fillStyle = paint.line;
      g.fillRect(x, top, 1, bottom - top);
      g.fillStyle = paint.faint;
      if (x > left + 14 && x < right - 14) g.fillText(time(at, 4), x, bottom + 4);
    }
  }

  const rowHeight = (run) => Math.max(2, Math.min(22, Math.floor(460 / run.workers)));

  function drawTimeline(canvas, run) {
    const row = rowHeight(run), body = row * run.workers;
    const { g, width } = sheet(canvas, body + AXIS);
    const span = state.to - state.from, scale = (width - GUTTER) / span;
    const X = (at) => GUTTER + (at - state.from) * scale;
    g.fillStyle = paint.idle;
    g.fillRect(GUTTER, 0, width - GUTTER, body);
    timeAxis(g, GUTTER, width, 0, body, state.from, state.to);
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillStyle = paint.faint;
    const every = Math.ceil(14 / row);
    for (let w = 0; w < run.workers; w += every) g.fillText(String(w), GUTTER - 6, Math.max(7, (w + 0.5) * row));
    g.save();
    g.beginPath();
    g.rect(GUTTER, 0, width - GUTTER, body);
    g.clip();
    const c = run.c, inset = row > 6 ? 1 : 0;
    if (run.planned) {
      g.fillStyle = paint.plan;
      run.planned.forEach((until, w) => {
        if (run.came[w] < 0 || until <= run.came[w]) return;
        g.fillRect(X(run.came[w]), w * row + row * 0.2, X(until) - X(run.came[w]), Math.max(1, row * 0.6));
      });
    }
    const dots = window.devicePixelRatio || 1;
    let seen = 0, before = "";
    for (let i = 0; i < run.tasks; i++) {
      if (c.end[i] < state.from || c.compute[i] - Math.max(0, c.waited[i]) > state.to) continue;
      const y = c.worker[i] * row;
      if (c.waited[i] > 0) {
        const x = X(c.compute[i] - c.waited[i]);
        g.fillStyle = before = paint.wait;
        g.fillRect(x, y + row * 0.38, X(c.compute[i]) - x, Math.max(1, row * 0.24));
      }
      if (c.compute[i] > state.to) continue;
      seen++;
      const x = X(c.compute[i]), wide = X(c.end[i]) - x;
      const colour = colourOf(run, i);
      if (colour !== before) g.fillStyle = before = colour;
      // On whole pixels, or tasks narrower than one would look paler than they are; a line of
      // background between tasks where there is room for it.
      const left = Math.floor(x * dots) / dots, right = Math.max(left + 1 / dots, Math.round((x + wide) * dots) / dots);
      g.fillRect(left, y + inset, right - left - (wide > 4 ? 0.7 : 0), row - 2 * inset);
      if (c.stored[i] > 0 && wide > 6) {
        g.fillStyle = before = "#0003";
        const from = X(c.end[i] - c.stored[i]);
        g.fillRect(from, y + inset, X(c.end[i]) - from, row - 2 * inset);
      }
    }
    // Marks come last: a stolen task may be narrower than its neighbours' edges.
    if (state.colour === "stage") {
      g.fillStyle = paint.stolen;
      for (let i = 0; i < run.tasks; i++) {
        if (c.victim[i] < 0 || c.end[i] < state.from || c.compute[i] > state.to) continue;
        const x = X(c.compute[i]), high = Math.max(2, row * 0.28);
        g.fillRect(x, (c.worker[i] + 1) * row - high - inset, Math.max(1.5, X(c.end[i]) - x - 0.7), high);
      }
    }
    const over = X(run.makespan);
    g.strokeStyle = paint.faint;
    g.setLineDash([4, 3]);
    g.beginPath();
    g.moveTo(over, 0);
    g.lineTo(over, body);
    g.stroke();
    g.setLineDash([]);
    if (state.hover && state.hover.run === run && state.hover.i >= 0) outline(g, run, state.hover.i, row, X);
    if (state.drag && state.drag.canvas === canvas) {
      g.fillStyle = "#3f6fb533";
      g.fillRect(Math.min(state.drag.x0, state.drag.x1), 0, Math.abs(state.drag.x1 - state.drag.x0), body);
    }
    g.restore();
    return seen;
  }

  function outline(g, run, i, row, X) {
    const c = run.c, x = X(c.compute[i]);
    g.strokeStyle = paint.ink;
    g.lineWidth = 1.5;
    g.strokeRect(x, c.worker[i] * row, Math.max(2, X(c.end[i]) - x), row);
    if (c.victim[i] < 0) return;
    const at = c.claimed[i] >= 0 ? c.compute[i] - c.claimed[i] : c.compute[i];
    g.strokeStyle = paint.stolen;
    g.beginPath();
    g.arc(X(at), (c.victim[i] + 0.5) * row, 3, 0, 7);
    g.moveTo(X(at), (c.victim[i] + 0.5) * row);
    g.lineTo(x, (c.worker[i] + 0.5) * row);
    g.stroke();
  }

  // Busy workers, by stage, on average over each of `bins` parts of from .. to.
  function wave(run, from, to, bins) {
    const out = data.stages.map(() => new Float64Array(bins)), width = (to - from) / bins, c = run.c;
    for (let i = 0; i < run.tasks; i++) {
      const begin = Math.max(from, c.begin[i]), end = Math.min(to, c.end[i]);
      if (end <= begin) continue;
      const into = out[c.stage[i]], last = Math.min(bins - 1, Math.floor((end - from) / width));
      for (let b = Math.floor((begin - from) / width); b <= last; b++) {
        const low = Math.max(begin, from + b * width), high = Math.min(end, from + (b + 1) * width);
        if (high > low) into[b] += (high - low) / width;
      }
    }
    return out;
  }

  function drawWave(canvas, run, from, to, height, small) {
    const { g, width } = sheet(canvas, height);
    const left = small ? 0 : GUTTER, bottom = small ? height : height - AXIS;
    const bins = Math.max(20, Math.floor((width - left) / (small ? 2 : 1.5)));
    const stages = wave(run, from, to, bins), top = Math.max(1, run.seats);
    g.fillStyle = paint.idle;
    g.fillRect(left, 0, width - left, bottom);
    if (!small) timeAxis(g, left, width, 0, bottom, from, to);
    const X = (b) => left + (b / bins) * (width - left), Y = (n) => bottom - (n / top) * (bottom - 6);
    const base = new Float64Array(bins);
    stages.forEach((counts, s) => {
      g.fillStyle = paint[data.stages[s]];
      g.beginPath();
      for (let b = 0; b < bins; b++) { g.lineTo(X(b), Y(base[b] + counts[b])); g.lineTo(X(b + 1), Y(base[b] + counts[b])); }
      for (let b = bins - 1; b >= 0; b--) { g.lineTo(X(b + 1), Y(base[b])); g.lineTo(X(b), Y(base[b])); }
      g.fill();
      for (let b = 0; b < bins; b++) base[b] += counts[b];
    });
    g.strokeStyle = paint.faint;
    g.setLineDash([4, 3]);
    g.beginPath();
    g.moveTo(left, Y(top));
    g.lineTo(width, Y(top));
    g.stroke();
    if (small) return;
    g.fillStyle = paint.faint;
    g.textAlign = "right";
    g.textBaseline = "middle";
    const step = Math.max(1, niceStep(top, 4));
    for (let n = 0; n <= top; n += step) g.fillText(String(n), left - 6, Math.min(bottom - 5, Math.max(7, Y(n))));
  }

  function drawWorkers(run) {
    const { g, width, height } = sheet($("workers"), 190), bottom = height - AXIS;
    const step = (width - GUTTER) / run.workers, gap = step > 4 ? 1 : 0;
    g.fillStyle = paint.idle;
    g.fillRect(GUTTER, 0, width - GUTTER, bottom);
    for (let w = 0; w < run.workers; w++) {
      const x = GUTTER + w * step, busy = run.busy[w] * bottom, wait = run.wait ? run.wait[w] * bottom : 0;
      g.fillStyle = paint.gate_up;
      g.fillRect(x, bottom - busy, Math.max(0.6, step - gap), busy);
      g.fillStyle = paint.wait;
      g.fillRect(x, bottom - busy - wait, Math.max(0.6, step - gap), wait);
    }
    g.fillStyle = paint.faint;
    g.textBaseline = "middle";
    g.textAlign = "right";
    for (const level of [0, 0.5, 1])
      g.fillText(`${100 * level} %`, GUTTER - 6, Math.min(bottom - 5, Math.max(7, bottom * (1 - level))));
    numbers(g, run.workers, step, bottom);
    const all = Array.from(run.busy).filter((_, w) => run.ran[w] > 0);
    $("workers-caption").textContent = all.length
      ? `Least ${share(Math.min(...all))}, most ${share(Math.max(...all))} of ${all.length} workers that ran tasks.`
      : "No worker ran a task.";
  }

  function numbers(g, count, step, bottom) {
    g.textAlign = "center";
    g.textBaseline = "top";
    const every = Math.max(1, Math.ceil(26 / step));
    for (let n = 0; n < count; n += every) g.fillText(String(n), GUTTER + (n + 0.5) * step, bottom + 4);
  }

  function drawSteals(run) {
    const total = run.pairs.reduce((sum, pair) => sum + pair[2], 0), canvas = $("steals");
    const thieves = new Set(run.pairs.map((pair) => pair[0])).size;
    const victims = new Set(run.pairs.map((pair) => pair[1])).size;
    $("steals-caption").textContent = total
      ? `${total} thefts by ${thieves} workers from ${victims}. Down: thief; across: victim.`
      : `No thefts under ${run.policy}.`;
    canvas.hidden = !total;
    if (!total) return;
    const { g, width, height } = sheet(canvas, 250);
    const side = Math.min(width - GUTTER, height - AXIS), cell = side / run.workers;
    g.fillStyle = paint.idle;
    g.fillRect(GUTTER, 0, side, side);
    const most = Math.max(...run.pairs.map((pair) => pair[2]));
    g.fillStyle = paint.stolen;
    for (const [thief, victim, count] of run.pairs) {
      g.globalAlpha = 0.35 + (0.65 * count) / most;
      g.fillRect(GUTTER + victim * cell, thief * cell, Math.max(1.5, cell - 0.5), Math.max(1.5, cell - 0.5));
    }
    g.globalAlpha = 1;
    g.fillStyle = paint.faint;
    g.textAlign = "right";
    g.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(22 / cell));
    for (let n = 0; n < run.workers; n += every) g.fillText(String(n), GUTTER - 6, Math.max(7, (n + 0.5) * cell));
    numbers(g, run.workers, cell, side);
  }

  let expertOrder = [];
  function drawExperts() {
    expertOrder = data.experts.map((_, e) => e);
    if ($("sorted").checked) expertOrder.sort((a, b) => data.experts[b] - data.experts[a] || a - b);
    const { g, width, height } = sheet($("experts"), 170), bottom = height - AXIS;
    const step = (width - GUTTER) / expertOrder.length, most = Math.max(1, ...data.experts);
    g.fillStyle = paint.idle;
    g.fillRect(GUTTER, 0, width - GUTTER, bottom);
    expertOrder.forEach((expert, n) => {
      const high = (data.experts[expert] / most) * (bottom - 6);
      g.fillStyle = state.colour === "expert" ? expertColour(expert) : paint.gate_up;
      g.fillRect(GUTTER + n * step, bottom - high, Math.max(0.6, step - (step > 4 ? 1 : 0)), high);
    });
    const mean = data.experts.reduce((a, b) => a + b, 0) / data.experts.length;
    g.fillStyle = paint.stolen;
    g.fillRect(GUTTER, bottom - (mean / most) * (bottom - 6), width - GUTTER, 1);
    g.fillStyle = paint.faint;
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillText(String(most), GUTTER - 6, 8);
    g.fillText("0", GUTTER - 6, bottom - 5);
    if (!$("sorted").checked) numbers(g, expertOrder.length, step, bottom);
    document.body.dataset.first = expertOrder[0];
  }

  // ---- The page

  function legend() {
    const keys = {
      stage: [...data.stages.map((stage) => [paint[stage], stage]), [paint.stolen, "mark: stolen"]],
      expert: [["linear-gradient(90deg, #c55, #5b5, #55c)", "an expert, a colour"], [paint.combine, "combine"]],
      stolen: [[paint.own, "own"], [paint.stolen, "stolen"]],
    }[state.colour];
    const others = [[paint.wait, data.waits], ...(runs.some((run) => run.planned) ? [[paint.plan, "planning"]] : [])];
    $("legend").replaceChildren(...[...keys, ...others].map(([colour, text]) => {
      const item = document.createElement("span"), swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = colour;
      item.append(swatch, text);
      return item;
    }));
  }

  const caption = (run) =>
    `${run.policy}: ${run.took}, ${run.tasks.toLocaleString("en")} tasks, ` +
    `busy ${share(run.busy.reduce((a, b) => a + b, 0) / run.seats)}${data.predicted ? " (predicted)" : ""}` +
    (run.beside ? `; ${run.beside}` : "");

  function draw() {
    const run = runs[state.policy], other = runs[state.beside];
    let seen = drawTimeline($("timeline-a"), run);
    $("caption-a").textContent = caption(run);
    $("second").hidden = !other;
    if (other) {
      seen += drawTimeline($("timeline-b"), other);
      $("caption-b").textContent = caption(other);
    }
    drawWave($("wave"), run, state.from, state.to, 150, false);
    $("range").textContent = `${time(state.from, 4)} to ${time(state.to, 4)}`;
    Object.assign(document.body.dataset, {
      policy: run.policy, beside: other ? other.policy : "", colour: state.colour,
      from: state.from, to: state.to, seen,
    });
  }

  function drawAll() {
    const run = runs[state.policy];
    readColours();
    legend();
    draw();
    drawWorkers(run);
    drawSteals(run);
    drawExperts();
    document.querySelectorAll("#waves button").forEach((button, i) => {
      button.setAttribute("aria-pressed", String(i === state.policy));
      drawWave(button.querySelector("canvas"), runs[i], 0, END, 74, true);
    });
    document.querySelectorAll("#compare tr").forEach((row) => [...row.children].forEach((cell, i) =>
      cell.classList.toggle("chosen", i === state.policy + 1)));
    document.body.dataset.ready = "yes";
  }

  let waiting = false;
  function soon(what) {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; what(); });
  }

  function look(from, to) {
    const least = Math.min(END, 20), span = Math.min(END, Math.max(least, to - from));
    state.from = Math.min(Math.max(0, from), END - span);
    state.to = state.from + span;
    draw();
  }
  function zoom(factor, at = (state.from + state.to) / 2) {
    look(at - (at - state.from) * factor, at + (state.to - at) * factor);
  }
  const shift = (part) => { const d = (state.to - state.from) * part; look(state.from + d, state.to + d); };

  function choose(policy) {
    state.policy = policy;
    state.hover = null;
    $("policy").value = String(policy);
    drawAll();
  }

  runs.forEach((run, i) => {
    const button = document.createElement("button"), small = document.createElement("small");
    button.type = "button";
    small.textContent = run.took;
    button.append(run.policy, small, document.createElement("canvas"));
    button.addEventListener("click", () => choose(i));
    $("waves").append(button);
  });
  $("policy").value = "0";
  $("beside").value = "-1";
  $("policy").addEventListener("change", (event) => choose(Number(event.target.value)));
  $("beside").addEventListener("change", (event) => { state.beside = Number(event.target.value); draw(); });
  document.querySelectorAll("input[name=colour]").forEach((input) => {
    input.checked = input.value === "stage";  // browsers keep a form's state over a reload
    input.addEventListener("change", () => { state.colour = input.value; drawAll(); });
  });
  $("sorted").checked = false;
  $("sorted").addEventListener("change", drawExperts);
  $("in").addEventListener("click", () => zoom(0.5));
  $("out").addEventListener("click", () => zoom(2));
  $("earlier").addEventListener("click", () => shift(-0.5));
  $("later").addEventListener("click", () => shift(0.5));
  $("all").addEventListener("click", () => look(0, END));

  // ---- Pointing

  function say(event, text) {
    const tip = $("tip");
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4))}px`;
    tip.style.top = `${event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16}px`;
  }

  function describe(run, i) {
    const c = run.c, lines = [`${data.stages[c.stage[i]]}${c.expert[i] >= 0 ? ` of expert ${c.expert[i]}` : ""}`];
    const place = ["group", "chunk", "part"].filter((name) => c[name][i] >= 0 && (name !== "part" || c.part[i] > 0));
    lines.push(place.map((name) => `${name} ${c[name][i]}`).join(", "));
    lines.push(`worker ${c.worker[i]}${c.sm[i] >= 0 ? ` on SM ${c.sm[i]}` : ""}, ${c.victim[i] >= 0 ? `stolen from worker ${c.victim[i]}` : "own"}`);
    if (c.claimed[i] >= 0) lines.push(`claimed at ${time(c.compute[i] - c.claimed[i], 5)}`);
    if (c.load[i] >= 0) lines.push(`weights asked for at ${time(c.load[i], 5)}`);
    if (c.waited[i] > 0) lines.push(`waited ${time(c.waited[i])}`);
    lines.push(`began ${time(c.compute[i], 5)}, took ${time(c.length[i])}${c.stored[i] > 0 ? `, ${time(c.stored[i])} of it storing` : ""}`);
    return lines.join("\n");
  }

  function taskAt(run, worker, at) {
    if (worker < 0 || worker >= run.workers) return -1;
    let low = run.first[worker], high = run.first[worker + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (run.c.compute[middle] <= at) low = middle + 1; else high = middle;
    }
    const i = low - 1;
    return i >= run.first[worker] && at <= run.c.end[i] ? i : -1;
  }

  function timelineEvents(canvas, which) {
    const at = (x) => state.from + ((x - GUTTER) / (canvas.clientWidth - GUTTER)) * (state.to - state.from);
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.offsetX < GUTTER) return;
      canvas.setPointerCapture(event.pointerId);
      state.drag = { canvas, x0: event.offsetX, x1: event.offsetX };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (state.drag) {
        state.drag.x1 = Math.max(GUTTER, Math.min(canvas.clientWidth, event.offsetX));
        say(event, `${time(Math.abs(at(state.drag.x1) - at(state.drag.x0)))}`);
        soon(draw);
        return;
      }
      const run = which();
      if (!run) return;
      const i = taskAt(run, Math.floor(event.offsetY / rowHeight(run)), at(event.offsetX));
      say(event, i >= 0 ? describe(run, i) : "");
      if (!state.hover || state.hover.i !== i || state.hover.run !== run) {
        state.hover = { run, i };
        soon(draw);
      }
    });
    canvas.addEventListener("pointerup", () => {
      const drag = state.drag;
      state.drag = null;
      if (drag && Math.abs(drag.x1 - drag.x0) > 4)
        look(at(Math.min(drag.x0, drag.x1)), at(Math.max(drag.x0, drag.x1)));
      else draw();
    });
    canvas.addEventListener("pointercancel", () => { state.drag = null; draw(); });
    canvas.addEventListener("pointerleave", () => {
      if (!state.drag) { state.hover = null; say(null, ""); draw(); }
    });
    canvas.addEventListener("dblclick", () => look(0, END));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(state.to, Math.max(state.from, at(event.offsetX))));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const keys = {
        ArrowLeft: () => shift(-0.25), ArrowRight: () => shift(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5),
        "-": () => zoom(2), 0: () => look(0, END),
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
  timelineEvents($("timeline-a"), () => runs[state.policy]);
  timelineEvents($("timeline-b"), () => runs[state.beside]);

  function pointing(canvas, text) {
    canvas.addEventListener("pointermove", (event) => say(event, text(event.offsetX - GUTTER, event.offsetY, canvas)));
    canvas.addEventListener("pointerleave", () => say(null, ""));
  }
  pointing($("workers"), (x, _, canvas) => {
    const run = runs[state.policy], w = Math.floor((x / (canvas.clientWidth - GUTTER)) * run.workers);
    if (w < 0 || w >= run.workers) return "";
    const wait = run.wait ? `, waiting ${share(run.wait[w])}` : "";
    return `worker ${w}: busy ${share(run.busy[w])}${wait}\n${run.ran[w]} tasks; stole ${run.stolen[w]} times, was robbed ${run.robbed[w]} times`;
  });
  pointing($("experts"), (x, _, canvas) => {
    const n = Math.floor((x / (canvas.clientWidth - GUTTER)) * expertOrder.length);
    return n < 0 || n >= expertOrder.length ? "" : `expert ${expertOrder[n]}: ${data.experts[expertOrder[n]]} slots`;
  });
  pointing($("steals"), (x, y, canvas) => {
    const run = runs[state.policy], side = Math.min(canvas.clientWidth - GUTTER, 250 - AXIS);
    const victim = Math.floor((x / side) * run.workers), thief = Math.floor((y / side) * run.workers);
    const pair = run.pairs.find((p) => p[0] === thief && p[1] === victim);
    return pair ? `worker ${thief} stole from worker ${victim}, ${pair[2]} times` : "";
  });

  window.addEventListener("resize", () => soon(drawAll));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
