// The sampling controls: what is left empty is the server's default and is not sent.

const STORED = "paged.sampling";

const CONTROLS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, middle: 1, why: "0 takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.01, middle: 1, why: "From this share of the probability" },
  { name: "top_k", label: "Top k", min: 0, max: 200, step: 1, middle: 0, why: "From this many tokens; 0 is all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, middle: 0, why: "At least this share of the likeliest" },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 4096, step: 1, middle: 512, why: "Longest answer" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.05, middle: 0, why: "Against repeated tokens" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.05, middle: 0, why: "Against tokens that were there" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.01, middle: 1, why: "Above 1 against prompt and answer" },
];

export class Controls {
  constructor(container) {
    this.inputs = new Map();
    this.system = text("system", "System prompt", "textarea", "None");
    this.stop = text("stop", "Stop before", "textarea", "One text per line");
    this.seed = text("seed", "Seed", "input", "Random");
    this.seed.inputMode = "numeric";
    container.append(this.system.parentElement);
    for (const control of CONTROLS) {
      const [row, number] = slider(control);
      this.inputs.set(control.name, number);
      container.append(row);
    }
    container.append(this.seed.parentElement, this.stop.parentElement);
    this.load();
    container.addEventListener("input", () => this.save());
  }

  // Fields of a request.
  fields() {
    const fields = {};
    for (const [name, input] of this.inputs) {
      if (input.value !== "") fields[name] = Number(input.value);
    }
    const seed = this.seed.value.trim();
    // What is no number goes as it is: the server's error says what it should be.
    if (seed) fields.seed = /^-?\d{1,15}$/.test(seed) ? Number(seed) : seed;
    const stops = this.stop.value.split("\n").filter((line) => line !== "");
    if (stops.length) fields.stop = stops;
    return fields;
  }

  get systemPrompt() {
    return this.system.value.trim();
  }

  reset() {
    for (const input of this.everything()) {
      input.value = "";
      input.dispatchEvent(new Event("input", { bubbles: true }));
    }
  }

  save() {
    const values = this.everything().map((input) => [input.id, input.value]);
    try {
      localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(values)));
    } catch {
      // Full, or forbidden: then they last as long as the page.
    }
  }

  load() {
    let values = {};
    try {
      values = JSON.parse(localStorage.getItem(STORED)) ?? {};
    } catch {
      // Not ours, or forbidden.
    }
    for (const input of this.everything()) {
      if (typeof values[input.id] !== "string") continue;
      input.value = values[input.id];
      input.dispatchEvent(new Event("input"));
    }
  }

  everything() {
    return [...this.inputs.values(), this.system, this.stop, this.seed];
  }
}

function slider({ name, label, min, max, step, middle, why }) {
  const row = document.createElement("div");
  row.className = "control";
  const title = document.createElement("label");
  title.textContent = label;
  title.htmlFor = `sampling-${name}`;
  const number = Object.assign(document.createElement("input"), {
    type: "number", id: `sampling-${name}`, min, max, step, placeholder: "default", title: why,
  });
  const range = Object.assign(document.createElement("input"), {
    type: "range", min, max, step, value: middle, title: why, ariaLabel: `${label}: ${why}`,
  });
  const show = () => {
    range.value = number.value === "" ? middle : number.value;
    row.classList.toggle("is-set", number.value !== "");
    range.style.setProperty("--fill", `${(100 * (range.value - min)) / (max - min)}%`);
  };
  range.addEventListener("input", () => {
    number.value = range.value;
    show();
  });
  number.addEventListener("input", show);
  show();
  row.append(title, number, range);
  return [row, number];
}

function text(name, label, kind, placeholder) {
  const id = `sampling-${name}`;
  const row = document.createElement("div");
  row.className = "control text";
  const title = document.createElement("label");
  title.textContent = label;
  title.htmlFor = id;
  const input = Object.assign(document.createElement(kind), { id, placeholder });
  if (kind === "textarea") input.rows = 2;
  row.append(title, input);
  return input;
}
