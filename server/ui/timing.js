// When the tokens of one answer came, and a line that draws it.

const SVG = "http://www.w3.org/2000/svg";

export class TokenTiming {
  constructor(now = performance.now()) {
    this.started = now;
    this.first = null;
    this.last = null;
    this.numTokens = 0;
    this.gaps = []; // milliseconds, one per event that brought tokens, after the first
  }

  // numTokens: of the answer so far.
  record(numTokens, now = performance.now()) {
    if (numTokens <= this.numTokens) return;
    if (this.first === null) this.first = now;
    else this.gaps.push(now - this.last);
    this.firstTokens ??= numTokens;
    this.last = now;
    this.numTokens = numTokens;
  }

  get ttft() {
    return this.first === null ? null : this.first - this.started;
  }

  // Tokens per second behind the first.
  get rate() {
    const milliseconds = this.last - this.first;
    return milliseconds > 0 ? ((this.numTokens - this.firstTokens) / milliseconds) * 1000 : null;
  }
}

export function milliseconds(value) {
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`;
}

// Returns a small picture of gaps; the highest of many that share a pixel is drawn.
export function sparkline(gaps, width = 120, height = 22) {
  const svg = document.createElementNS(SVG, "svg");
  const highest = Math.max(...gaps);
  const middle = [...gaps].sort((a, b) => a - b)[gaps.length >> 1];
  const label = `Time between tokens: median ${milliseconds(middle)}, longest ${milliseconds(highest)}`;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "sparkline");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const title = document.createElementNS(SVG, "title");
  title.textContent = label;
  svg.append(title, line(thinned(gaps, width), width, height, highest));
  return svg;
}

// Returns a polyline of values from left to right, 0 at the bottom.
export function line(values, width, height, highest) {
  const node = document.createElementNS(SVG, "polyline");
  const step = width / Math.max(values.length - 1, 1);
  const y = (value) => height - 1 - (value / (highest || 1)) * (height - 3);
  const points = values.map((value, i) => `${(i * step).toFixed(1)},${y(value).toFixed(1)}`);
  node.setAttribute("points", points.join(" "));
  return node;
}

function thinned(values, count) {
  if (values.length <= count) return values;
  const size = values.length / count;
  return Array.from({ length: count }, (_, i) =>
    Math.max(...values.slice(Math.floor(i * size), Math.ceil((i + 1) * size))),
  );
}
