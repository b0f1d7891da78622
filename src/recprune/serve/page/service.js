// What the page asks of the service, and what goes wrong on the way in words.

const PATIENCE = 60_000; // milliseconds

export class Problem extends Error {
  constructor(title, message, status = 0) {
    super(message);
    this.title = title;
    this.status = status;
  }
}

const TITLES = {
  400: "That cannot be asked",
  401: "This service asks for a key",
  403: "This key does not allow that",
  404: "Not found",
  409: "This service cannot do that",
  413: "That is too much at once",
  422: "That cannot be asked",
  429: "Too many questions at once",
  503: "The service is busy",
  504: "This took too long",
};

// An id may have more digits than a number keeps: then its text is taken, which means the same.
const exactIds = (name, value, context) =>
  name === "item" && typeof value === "number" && !Number.isSafeInteger(value)
    ? context?.source ?? value : value;

const sentence = (words) =>
  words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");

let key = "";
export function useKey(given) { key = given.trim(); }

async function ask(path, options = {}, signal = undefined) {
  const patience = new AbortController();
  const timer = setTimeout(() => patience.abort(), PATIENCE);
  const headers = { Accept: "application/json", ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const signals = signal ? [signal, patience.signal] : [patience.signal];
  try {
    const response = await fetch(path, { ...options, headers, signal: AbortSignal.any(signals) });
    if (!response.ok) throw await problemOf(response);
    return JSON.parse(await response.text(), exactIds);
  } catch (error) {
    if (signal?.aborted || error instanceof Problem) throw error;
    if (patience.signal.aborted)
      throw new Problem("This took too long", `No answer after ${PATIENCE / 1000} seconds.`);
    throw new Problem("The service cannot be reached", "Is it still running? Nothing was answered.");
  } finally {
    clearTimeout(timer);
  }
}

async function problemOf(response) {
  let message = `The service answered with status ${response.status}.`;
  try {
    message = sentence((await response.json()).error.message);
  } catch { /* a proxy in between may answer with anything */ }
  const wait = response.headers.get("Retry-After");
  if (response.status === 503 && wait) message += ` Waiting ${wait} s should be enough.`;
  const title = TITLES[response.status] ?? "Something went wrong";
  return new Problem(title, message, response.status);
}

export const describe = () => ask("openapi.json");

// Returns what is answered as it comes, errors too.
export async function send(method, path, body = undefined) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const signal = AbortSignal.timeout(PATIENCE);
  const response = await fetch(path, { method, headers, body, signal });
  return { status: `${response.status} ${response.statusText}`.trim(), text: await response.text() };
}

export const readiness = () => ask("readyz");

export const findItems = async (text, signal) =>
  (await ask(`items?query=${encodeURIComponent(text)}`, {}, signal)).items;

// Returns the item with this id, or null.
export async function lookUp(id) {
  try {
    return await ask(`items/${encodeURIComponent(id)}`);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

export async function recommend(question, explain) {
  const answers = await ask("recommend", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...question, explain }),
  });
  return answers.answers[0];
}
