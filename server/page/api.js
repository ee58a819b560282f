// The server, as the page calls it: where it is, the key, JSON, and server-sent events.

export const root = new URL("../", import.meta.url); // the server may be behind a path prefix

const KEY = "jaxpaged-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

// A response whose status is good. `body`, if any, is sent as JSON.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, root), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const { status } = response;
  try {
    return errorFrom((await response.json()).error, status);
  } catch {
    return new ApiError(`The server answered with status ${status}.`, { status });
  }
}

// Of a proxy the error may be a text, or there may be none.
function errorFrom(error, status) {
  const { message, code, param } = typeof error === "string" ? { message: error } : error;
  return new ApiError(message || `The server answered with status ${status}.`, { status, code, param });
}

// The JSON objects of an event stream. An error that comes as an event is thrown.
export async function* events(response) {
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const object = JSON.parse(data);
    if (object.error) throw errorFrom(object.error, response.status);
    yield object;
  }
  throw new ApiError("The answer broke off.");
}

async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke off.");
    }
    if (part.done) return;
    const blocks = (text + part.value).split(/\r?\n\r?\n/);
    text = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}
