// Puts the page together: model, key, theme, views, and the parts in the other files.

import { json, key } from "./api.js";
import { Chat } from "./chat.js";
import { Controls } from "./controls.js";
import { Live } from "./live.js";

const byId = (id) => document.getElementById(id);
const SUGGESTIONS = [
  "Explain paged attention in three sentences.",
  "Write a haiku about memory.",
  "Write a Python function that merges two sorted lists.",
];

const controls = new Controls(byId("controls"));
const live = new Live({ onState: showConnection });
const chat = new Chat({
  transcript: byId("transcript"),
  fields: () => ({ model: byId("model").value, system: controls.systemPrompt, ...controls.fields() }),
  announce: (text) => (byId("announcement").textContent = text),
  onChange: showChat,
});

// -- Chat

const prompt = byId("prompt");

function showChat() {
  byId("stop").hidden = !chat.isBusy;
  byId("send").hidden = chat.isBusy;
  byId("send").disabled = !prompt.value.trim();
  byId("clear").disabled = !chat.messages.length;
  byId("empty").hidden = chat.messages.length > 0;
  live.wake();
}

function submit() {
  const text = prompt.value.trim();
  if (!text || chat.isBusy) return;
  prompt.value = "";
  fitPrompt();
  chat.send(text);
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 200)}px`;
  byId("send").disabled = !prompt.value.trim();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  // Not the Enter that ends the choice of a character.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
byId("clear").addEventListener("click", () => {
  chat.clear();
  prompt.focus();
});
byId("reset").addEventListener("click", () => controls.reset());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open) chat.stop();
});
for (const text of SUGGESTIONS) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  button.addEventListener("click", () => chat.send(text));
  byId("suggestions").append(button);
}

// -- Connection, key and model

function showConnection(state) {
  const pill = byId("connection");
  if (state === true) {
    if (pill.dataset.state !== "live") loadModels();
    pill.dataset.state = "live";
    pill.textContent = "Connected";
  } else if (state.status === 401) {
    pill.dataset.state = "locked";
    pill.textContent = "Key needed";
    askForKey(key.get() ? "The server does not accept this key." : "This server asks for a key.");
  } else {
    pill.dataset.state = "lost";
    pill.textContent = state.status ? `Engine error ${state.status}` : "Connection lost, retrying";
    pill.title = state.message;
  }
}

function describe({ id, parent, max_model_len: most }) {
  return parent ? `${id}: an adapter of ${parent}` : `${id}: up to ${most} tokens`;
}

async function loadModels() {
  const select = byId("model");
  try {
    const { data } = await json("v1/models");
    select.replaceChildren(...data.map(({ id }) => new Option(id.split("/").at(-1), id)));
    select.disabled = data.length < 2;
    select.title = data.map(describe).join("\n");
  } catch (error) {
    showConnection(error);
  }
}

function askForKey(why) {
  const dialog = byId("key-dialog");
  byId("key").hidden = false;
  byId("key-why").textContent = why;
  byId("key-forget").hidden = !key.get();
  byId("key-input").value = "";
  if (!dialog.open) dialog.showModal();
}

byId("key").addEventListener("click", () =>
  askForKey(key.get() ? "A key is in use." : "This server asks for a key."),
);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const value = byId("key-input").value.trim();
  if (!value) return byId("key-input").focus();
  key.set(value);
  byId("key-dialog").close();
  live.wake();
});
byId("key-forget").addEventListener("click", () => {
  key.forget();
  byId("key-dialog").close();
  live.wake();
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key").hidden = !key.get();

// -- Views and theme

byId("pause").addEventListener("click", (event) => {
  live.pause(!live.isPaused);
  event.target.setAttribute("aria-pressed", live.isPaused);
  event.target.textContent = live.isPaused ? "Resume" : "Pause";
});

for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const other of document.querySelectorAll(".views button")) {
      other.setAttribute("aria-pressed", other === button);
    }
  });
}

const THEMES = ["auto", "light", "dark"];

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  byId("theme").setAttribute("aria-label", `Colour theme: ${theme}`);
  live.blocks.draw();
}

function storedTheme() {
  try {
    return localStorage.getItem("paged.theme") ?? "auto";
  } catch {
    return "auto"; // storage is forbidden
  }
}

let theme = THEMES.includes(storedTheme()) ? storedTheme() : "auto";
byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("paged.theme", theme);
  } catch {
    // Then it lasts as long as the page.
  }
  showTheme(theme);
});

showTheme(theme);
showChat();
fitPrompt();
