// The engine as it is: figures, KV blocks, requests. Asks only while somebody can see it.

import { json } from "./api.js";
import { line } from "./timing.js";

const BUSY_MS = 400; // between two looks while something runs, and while nothing does
const IDLE_MS = 1000;
const HISTORY_SECONDS = 60;
const MAX_ROWS = 12;
const STATES = ["free", "cached", "used", "shared"];

export class Live {
  // onState: called with true after each answer, with an error after each failure.
  constructor({ onState }) {
    this.onState = onState;
    this.isPaused = false;
    this.last = null;
    this.history = []; // [seconds, output tokens per second]
    this.blocks = new BlockMap(byId("blocks"), byId("block-tip"));
    document.addEventListener("visibilitychange", () => this.wake());
  }

  // Looks now, and from then on at intervals.
  wake() {
    clearTimeout(this.timer);
    if (this.isPaused || document.hidden || this.isLooking) return;
    this.look();
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.wake();
  }

  async look() {
    this.isLooking = true;
    let delay = IDLE_MS;
    try {
      const state = await json("engine/state");
      this.show(state);
      if (state.running + state.waiting) delay = BUSY_MS;
      this.onState(true);
    } catch (error) {
      this.onState(error);
      if (error.status === 401) return; // until there is a key
    } finally {
      this.isLooking = false;
    }
    if (!this.isPaused) this.timer = setTimeout(() => this.wake(), delay);
  }

  show(state) {
    const { totals, blocks } = state;
    this.showRates(state);
    put("running", state.running);
    put("waiting", state.waiting);
    put("preemptions", totals.preemptions);
    const { prefix_queries: queries, prefix_hits: hits } = totals;
    put("hit-rate", queries ? `${Math.round((100 * hits) / queries)}%` : "–");
    for (const name of STATES) put(`num-${name}`, blocks[name].toLocaleString("en"));
    const usage = blocks.total ? (100 * (blocks.used + blocks.shared)) / blocks.total : 0;
    const scale = blocks.blocks_per_cell > 1 ? `, ${blocks.blocks_per_cell} blocks a cell` : "";
    put("usage", `${usage.toFixed(usage < 10 ? 1 : 0)}% of ${blocks.total.toLocaleString("en")} blocks of ${blocks.block_size} tokens${scale}`);
    this.blocks.show(blocks);
    showRequests(state);
    this.last = state;
  }

  showRates(state) {
    const before = this.last;
    // A restarted server counts from 0 again.
    const isNext = before && state.time > before.time &&
      state.totals.generation_tokens >= before.totals.generation_tokens;
    if (before && !isNext && state.time !== before.time) this.history = [];
    if (!isNext) return;
    const seconds = state.time - before.time;
    const rate = (name) => (state.totals[name] - before.totals[name]) / seconds;
    this.history.push([state.time, rate("generation_tokens")]);
    this.history = this.history.filter(([time]) => time > state.time - HISTORY_SECONDS);
    put("output-rate", rate("generation_tokens").toFixed(0));
    put("prompt-rate", rate("prompt_tokens").toFixed(0));
    showHistory(this.history, state.time);
  }
}

function showHistory(history, now) {
  const svg = byId("history");
  const peak = Math.max(...history.map(([, rate]) => rate));
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const curve = line(history.map(([, rate]) => rate), width, height, peak);
  // Placed by time: the looks are not evenly spaced.
  const x = ([time]) => width * (1 - (now - time) / HISTORY_SECONDS);
  const ys = curve.getAttribute("points").split(" ").map((point) => point.split(",")[1]);
  const points = history.map((entry, i) => `${x(entry).toFixed(1)},${ys[i]}`);
  curve.setAttribute("points", points.join(" "));
  const area = document.createElementNS(svg.namespaceURI, "polygon");
  const left = x(history[0]).toFixed(1);
  area.setAttribute("points", `${left},${height} ${points.join(" ")} ${width},${height}`);
  svg.replaceChildren(area, curve);
  put("history-peak", peak > 0 ? `peak ${peak.toFixed(0)}` : "");
}

function showRequests(state) {
  const shown = state.requests.slice(0, MAX_ROWS);
  const total = state.running + state.waiting;
  const others = total - shown.length;
  const which = others > 0 && shown.length ? `first ${shown.length} of ${total}, ` : "";
  put("num-requests", shown.length ? `${which}prompt + output tokens` : "");
  const rows = shown.map(requestRow);
  if (!rows.length) {
    const text = total ? `${total} of other keys` : "None right now";
    rows.push(Object.assign(document.createElement("li"), { className: "nobody", textContent: text }));
  }
  byId("requests").replaceChildren(...rows);
}

function requestRow(request) {
  const isPrefill = request.computed < request.prompt;
  const state = request.state === "running" && isPrefill ? "prefill" : request.state;
  const output = request.total - request.prompt;
  const progress = isPrefill
    ? `${request.computed} of ${request.prompt}`
    : `${request.prompt} + ${output}`;
  const notes = [progress];
  if (request.cached) notes.push(`${request.cached} cached`);
  if (request.preemptions) notes.push(`preempted ${request.preemptions}×`);
  const row = document.createElement("li");
  row.dataset.state = state;
  row.title = `Limit ${request.limit} tokens, ${request.blocks} KV blocks`;
  const bar = document.createElement("span");
  bar.className = "progress";
  bar.append(
    part("prompt", Math.min(request.computed, request.prompt) / request.limit),
    part("output", Math.max(request.computed - request.prompt, 0) / request.limit),
  );
  row.append(span("id", request.id), span("chip", state), span("notes", notes.join(" · ")), bar);
  return row;
}

function part(name, share) {
  const node = span(name, "");
  node.style.width = `${(100 * Math.min(share, 1)).toFixed(2)}%`;
  return node;
}

// The blocks of the pool as squares in reading order.
class BlockMap {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.state = null;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => (tip.textContent = ""));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(state) {
    this.state = state;
    const counts = STATES.map((name) => `${state[name]} ${name}`).join(", ");
    this.canvas.setAttribute("aria-label", `KV blocks: ${counts}`);
    this.draw();
  }

  draw() {
    if (!this.state || !this.canvas.clientWidth) return;
    const { cells_held: held } = this.state;
    const { pitch, gap, columns } = this.layout(held.length);
    const scale = window.devicePixelRatio || 1;
    const height = Math.ceil(held.length / columns) * pitch - gap;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(this.canvas.clientWidth * scale);
    this.canvas.height = Math.round(height * scale);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const colours = palette();
    // Rounded one by one, edges are sharp and the columns fill the width.
    const edge = (index) => Math.round(index * pitch * scale) / scale;
    for (let i = 0; i < held.length; i++) {
      const column = i % columns;
      const row = Math.floor(i / columns);
      const [x, y] = [edge(column), edge(row)];
      const box = [x, y, edge(column + 1) - gap - x, edge(row + 1) - gap - y];
      this.cell(context, colours, box, i);
    }
  }

  cell(context, colours, box, index) {
    const count = this.blocksOf(index);
    const [held, cached] = [this.state.cells_held[index], this.state.cells_cached[index]];
    const paint = (colour, share) => {
      context.globalAlpha = share < 1 ? 0.25 + 0.75 * share : 1;
      context.fillStyle = colour;
      context.fillRect(...box);
    };
    paint(colours.free, 1);
    if (cached) paint(colours.cached, cached / count);
    if (held) paint(colours[ownership(this.state.cells_holders[index])], held / count);
  }

  // The largest squares that fit into the width and a fair height, gaps included.
  layout(count) {
    const width = this.canvas.clientWidth;
    for (let size = 18; ; size--) {
      const gap = size > 7 ? 2 : size > 3 ? 1 : 0;
      const columns = Math.max(1, Math.floor((width + gap) / (size + gap)));
      if (size <= 3 || Math.ceil(count / columns) * (size + gap) <= 260) {
        return (this.grid = { pitch: (width + gap) / columns, gap, columns });
      }
    }
  }

  // The last cell may have fewer blocks than the others.
  blocksOf(index) {
    const { blocks_per_cell: size, total } = this.state;
    return Math.min(size, total - index * size);
  }

  point(event) {
    if (!this.grid || !this.state) return;
    const { pitch, columns } = this.grid;
    const column = Math.floor(event.offsetX / pitch);
    const index = Math.floor(event.offsetY / pitch) * columns + column;
    const isThere = column < columns && index < this.state.cells_held.length;
    this.tip.textContent = isThere ? this.describe(index) : "";
  }

  describe(index) {
    const { cells_held: held, cells_cached: cached, cells_holders: holders } = this.state;
    const size = this.state.blocks_per_cell;
    const first = index * size + 1; // block 0 is the null block
    if (size > 1) {
      const last = first + this.blocksOf(index) - 1;
      return `Blocks ${first}–${last}: ${held[index]} in use, ${cached[index]} cached, at most ${holders[index]} holders`;
    }
    if (holders[index] > 1) return `Block ${first}: shared by ${holders[index]}`;
    if (holders[index]) return `Block ${first}: in use`;
    return `Block ${first}: ${cached[index] ? "cached, free to be reused" : "free"}`;
  }
}

function ownership(holders) {
  if (holders < 2) return "used";
  if (holders < 3) return "shared";
  return holders < 5 ? "three" : "many";
}

// The legend's colours, which the theme decides.
function palette() {
  const samples = document.querySelectorAll("[data-cell]");
  const colour = (sample) => getComputedStyle(sample).backgroundColor;
  return Object.fromEntries([...samples].map((sample) => [sample.dataset.cell, colour(sample)]));
}

function byId(id) {
  return document.getElementById(id);
}

function put(id, text) {
  byId(id).textContent = text;
}

function span(className, textContent) {
  return Object.assign(document.createElement("span"), { className, textContent });
}
