// A conversation: sends it, shows the answer as it comes, with its timing; stops, retries.

import { ApiError, events, request } from "./api.js";
import { render } from "./markdown.js";
import { TokenTiming, milliseconds, sparkline } from "./timing.js";

export class Chat {
  // transcript: element that messages go into. fields: returns the request's other fields.
  // onChange: called when it begins or ends to answer, or its messages change.
  constructor({ transcript, fields, announce, onChange }) {
    this.transcript = transcript;
    this.fields = fields;
    this.announce = announce;
    this.onChange = onChange;
    this.messages = [];
    this.controller = null;
  }

  get isBusy() {
    return this.controller !== null;
  }

  stop() {
    this.controller?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    for (const node of this.transcript.querySelectorAll(".message")) node.remove();
    this.onChange();
  }

  async send(content) {
    // What has become history cannot be tried again.
    for (const button of this.transcript.querySelectorAll(".error button")) button.remove();
    const last = this.messages.at(-1);
    // An unanswered message and this one are sent as one: templates want the roles to alternate.
    if (last?.role === "user") last.content += `\n\n${content}`;
    else this.messages.push({ role: "user", content });
    this.transcript.append(userMessage(content));
    await this.answer();
  }

  async answer() {
    const { messages } = this;
    const controller = (this.controller = new AbortController());
    const view = new AnswerView(this.transcript);
    this.announce("Generating");
    this.onChange();
    try {
      await this.receive(view, messages, controller.signal);
      this.announce(`Answer complete: ${view.timing.numTokens} tokens`);
    } catch (error) {
      if (controller.signal.aborted) {
        view.note("Stopped");
        this.announce("Stopped");
      } else {
        this.fail(view, error instanceof ApiError ? error : new ApiError(String(error), 0));
      }
    }
    view.finish();
    if (view.content && messages === this.messages) {
      messages.push({ role: "assistant", content: view.content });
    }
    if (this.controller === controller) this.controller = null;
    this.onChange();
  }

  async receive(view, messages, signal) {
    const { system, ...fields } = this.fields();
    const body = {
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      ...fields,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const response = await request("v1/chat/completions", { body, signal });
    for await (const event of events(response)) view.take(event);
  }

  // Retrying asks again for the answer to the last message; a part that has come is dropped.
  fail(view, error) {
    view.fail(error, () => {
      if (this.isBusy) return;
      if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
      view.node.remove();
      this.answer();
    });
    this.announce(`Error: ${error.message}`);
  }
}

class AnswerView {
  constructor(transcript) {
    this.transcript = transcript;
    this.content = "";
    this.reasoning = "";
    this.usage = null;
    this.timing = new TokenTiming();
    this.node = element("article", "message assistant is-streaming");
    this.thoughts = element("details", "thoughts");
    this.thoughts.append(element("summary", "", "Reasoning"), element("div", "body"));
    this.thoughts.hidden = true;
    this.body = element("div", "body");
    this.footer = element("footer", "timing");
    this.node.append(this.thoughts, this.body, this.footer);
    transcript.append(this.node);
    this.scroll(true);
  }

  take(event) {
    const [choice] = event.choices;
    if (event.usage) {
      this.usage = event.usage;
      this.timing.record(event.usage.completion_tokens);
    }
    if (choice) {
      this.content += choice.delta.content ?? "";
      this.reasoning += choice.delta.reasoning ?? "";
      if (choice.finish_reason === "length") this.note("Cut at the limit of tokens");
    }
    // Many events may come between two pictures of the screen.
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  show() {
    this.frame = undefined;
    const isAtEnd = this.isAtEnd();
    this.body.replaceChildren(render(this.content));
    if (this.reasoning) {
      this.thoughts.hidden = false;
      this.thoughts.lastChild.textContent = this.reasoning;
    }
    this.showTiming();
    this.scroll(isAtEnd);
  }

  showTiming() {
    const { timing, usage } = this;
    const parts = [];
    if (timing.ttft !== null) parts.push(figure(milliseconds(timing.ttft), "to first token", "ttft"));
    if (timing.rate !== null) parts.push(figure(timing.rate.toFixed(1), "tokens/s", "rate"));
    if (timing.numTokens) parts.push(figure(timing.numTokens, "tokens", "tokens"));
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) {
      const note = cached ? `prompt tokens, ${cached} cached` : "prompt tokens";
      parts.push(figure(usage.prompt_tokens, note, "prompt"));
    }
    if (timing.gaps.length > 1) parts.push(sparkline(timing.gaps));
    this.footer.replaceChildren(...parts);
  }

  note(text) {
    this.remark ??= element("p", "remark");
    this.remark.textContent = text;
    this.footer.before(this.remark);
  }

  fail(error, retry) {
    const box = element("div", "error");
    box.setAttribute("role", "alert");
    const title = error.status ? `Error ${error.status}` : "Connection lost";
    const button = element("button", "quiet", "Retry");
    button.type = "button";
    button.addEventListener("click", retry);
    box.append(element("strong", "", title), element("p", "", error.message), button);
    this.footer.before(box);
    if (error.retryAfter) wait(button, error.retryAfter);
    this.scroll(true);
  }

  finish() {
    if (this.frame !== undefined) cancelAnimationFrame(this.frame);
    this.show();
    this.node.classList.remove("is-streaming");
    if (this.content) this.footer.append(copyButton(() => this.content));
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.transcript;
    return scrollHeight - scrollTop - clientHeight < 60;
  }

  scroll(really) {
    if (really) this.transcript.scrollTop = this.transcript.scrollHeight;
  }
}

// Counts down on a button that would only be refused again.
function wait(button, seconds) {
  const tick = () => {
    button.disabled = seconds > 0;
    button.textContent = seconds > 0 ? `Retry in ${seconds} s` : "Retry";
    if (seconds-- > 0 && button.isConnected) setTimeout(tick, 1000);
  };
  tick();
}

function copyButton(text) {
  const button = element("button", "quiet copy", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    // Absent where the page came over plain HTTP from another machine.
    const isDone = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    button.textContent = isDone ? "Copied" : "Cannot copy here";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

function userMessage(content) {
  const node = element("article", "message user");
  node.append(element("div", "body", content));
  return node;
}

function figure(value, unit, name) {
  const node = element("span", "figure");
  node.dataset.figure = name;
  node.append(element("b", "", value), ` ${unit}`);
  return node;
}

function element(name, className, text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}
