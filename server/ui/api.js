// The server: requests with the key, errors as people read them, events of a stream.

const KEY = "paged.key"; // in sessionStorage only: gone when the tab is closed

export class ApiError extends Error {
  // status 0: no answer at all.
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

// Returns the response of a success. Paths are relative to the page, which may lie behind a prefix.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    throw asApiError(error);
  }
  if (response.ok) return response;
  throw await errorOf(response);
}

export async function json(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    throw asApiError(error);
  }
}

// Yields the JSON of each event until [DONE]. An event that is an error is thrown.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isDone = false;
  try {
    while (!isDone) {
      const { value, done } = await reader.read().catch((error) => {
        throw asApiError(error);
      });
      if (done) throw new ApiError("The server ended the stream early.", 0);
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data === "[DONE]") isDone = true;
        else if (data) yield parsed(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Lines without "data:" are comments, which keep idle connections open.
function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

function parsed(data) {
  const event = JSON.parse(data);
  if (event.error) throw new ApiError(event.error.message, event.error.code);
  return event;
}

async function errorOf(response) {
  let message = response.statusText || "The request failed.";
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy's page, for example: the status has to do.
  }
  const seconds = Number.parseInt(response.headers.get("Retry-After"), 10);
  return new ApiError(message, response.status, Number.isNaN(seconds) ? null : seconds);
}

function asApiError(error) {
  if (error instanceof ApiError || error.name === "AbortError") return error;
  return new ApiError("The connection to the server was lost.", 0);
}
