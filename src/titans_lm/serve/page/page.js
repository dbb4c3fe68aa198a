"use strict";
// Chat, memories and surprise. What comes from the server or a file is shown as text and never as markup.

const $ = (id) => document.getElementById(id);
const state = { conversation: null, start: "", busy: null, talks: new Map() };
const LEVELS = 8;
const HINT = $("drop-text").textContent;
const LOST = "the server cannot be reached: see whether it still runs, and try again";

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function headers() {
  const key = sessionStorage.getItem("key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function request(path, options = {}) {
  const response = await reached(fetch(path, { ...options, headers: headers() }));
  if (response.ok) return response;
  if (response.status === 401) {
    await askForKey();
    return request(path, options);
  }
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status is all there is */ }
  throw new Error(message);
}

// Browsers have words of their own for a lost connection, which say little.
const reached = (promise) => promise.catch((error) => {
  throw error.name === "AbortError" ? error : new Error(LOST);
});
const get = async (path) => (await request(path)).json();
const post = (path, body, signal) => request(path, { method: "POST", body: JSON.stringify(body), signal });

function askForKey() {
  const dialog = $("key-dialog");
  return new Promise((resolve, reject) => {
    dialog.addEventListener("close", () => {
      const key = $("key").value.trim();
      if (dialog.returnValue !== "use" || !/^[\x20-\x7e]+$/.test(key)) {
        reject(new Error("this server asks for a key, which is made of ASCII characters; load the page again to give it"));
        return;
      }
      sessionStorage.setItem("key", key);
      resolve();
    }, { once: true });
    if (sessionStorage.getItem("key")) $("key-says").textContent = "The server does not take this key: it asks for another";
    dialog.returnValue = "";
    if (!dialog.open) dialog.showModal();
  });
}

function complain(error) {
  if (error && error.name === "AbortError") return;
  $("error").textContent = error ? error.message : "";
  $("error").hidden = !error;
  if (error) $("error").scrollIntoView({ block: "nearest" });
}

const many = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

// The lists on the left.

async function refresh() {
  const [conversations, memories] = await Promise.all([get("v1/conversations"), get("v1/memories")]);
  fill($("conversations"), conversations.data, "no conversation yet", (entry) => { open(entry.id); $("text").focus(); });
  fill($("memories"), memories.data, "no memory yet", null);
  const chosen = $("start").value;
  $("start").replaceChildren(
    element("option", { value: "", textContent: "nothing" }),
    ...memories.data.map((entry) => element("option", { value: entry.id, textContent: entry.id })),
  );
  $("start").value = memories.data.some((entry) => entry.id === chosen) ? chosen : "";
  const current = conversations.data.find((entry) => entry.id === state.conversation);
  $("size").textContent = current ? `${many(current.tokens, "token")} in a memory of ${size(current.bytes)}` : "";
}

function size(bytes) {
  return bytes < 1e6 ? `${Math.round(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function fill(list, entries, nothing, choose) {
  if (!entries.length) list.replaceChildren(element("li", { className: "empty", textContent: nothing }));
  else list.replaceChildren(...entries.map((entry) => item(entry, choose)));
}

function item(entry, choose) {
  const detail = element("small", { textContent: many(entry.tokens, "token") });
  const name = element(choose ? "button" : "span", { className: "name", title: entry.id }, entry.id, detail);
  if (choose) name.addEventListener("click", () => choose(entry));
  const label = `Delete ${entry.id}`;
  const remove = element("button", { className: "delete", title: label, ariaLabel: label, textContent: "×" });
  remove.addEventListener("click", () => discard(entry).catch(complain));
  const current = choose && entry.id === state.conversation;
  return element("li", { className: current ? "current" : "", ariaCurrent: current ? "true" : null }, name, remove);
}

async function discard(entry) {
  if (!confirm(`Delete ${entry.id} and its ${many(entry.tokens, "token")}? It cannot be brought back.`)) return;
  const kind = entry.object === "memory" ? "memories" : "conversations";
  await request(`v1/${kind}/${encodeURIComponent(entry.id)}`, { method: "DELETE" });
  if (entry.object === "conversation" && entry.id === state.conversation) begin("");
  await refresh();
}

// Conversations.

function begin(start) {
  open(`chat-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`, start);
}

function open(name, start = "") {
  if (state.busy) state.busy.abort();
  state.conversation = name;
  state.start = start;
  if (!state.talks.has(name)) state.talks.set(name, []);
  $("title").textContent = name;
  const talk = state.talks.get(name);
  const note = start ? `This conversation begins with the memory “${start}”.` : "";
  const kept = talk.length ? "" : note || "The server keeps the memory of a conversation, not its text.";
  $("talk").replaceChildren(...talk, ...(kept ? [element("p", { className: "note", textContent: kept })] : []));
  refresh().catch(complain);
}

function say(who, text) {
  const body = element("div", { className: "body", textContent: text });
  const message = element("article", { className: `message ${who}` },
    element("span", { className: "who", textContent: who === "user" ? "you" : "model" }), body);
  state.talks.get(state.conversation).push(message);
  $("talk").append(message);
  message.scrollIntoView({ block: "end" });
  return { message, body };
}

async function send(text) {
  const conversation = state.conversation;
  const from = state.start ? { memory: state.start } : {};
  state.busy = new AbortController();
  setBusy(true);
  complain(null);
  const mine = say("user", text);
  let last = mine;
  try {
    if ($("watch").checked) await colour(mine, text, { conversation, ...from });
    const answer = last = say("assistant", "");
    const response = await post("v1/chat/completions", {
      messages: [{ role: "user", content: text }], conversation, ...from, stream: true,
      temperature: Number($("temperature").value), max_tokens: Number($("most").value),
    }, state.busy.signal);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices.length ? event.choices[0].delta.content : null;
      if (delta) answer.body.textContent = (answer.body.textContent + delta).trimStart();
      const spelled = event.split_words || [];
      if (spelled.length) legend(answer.message, `the model was not taught the words ${spelled.join(", ")}, and spells them; its answer may be wrong`);
      answer.message.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    legend(last.message, "broken off; a turn without its whole answer is not remembered");
    if (error.name !== "AbortError" && !$("text").value) $("text").value = text;
    complain(error);
  } finally {
    state.busy = null;
    setBusy(false);
    await refresh().catch(complain);
  }
}

function legend(message, text) {
  message.append(element("div", { className: "legend", textContent: text }));
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").hidden = !busy;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reached(reader.read());
    if (done) throw new Error(LOST);
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Surprise: a look at what the text would do to the memory as it stands before it is sent.

const medians = ({ surprise }) => `${Number(surprise.toPrecision(4))} × the median`;

async function colour({ message, body }, text, where) {
  let pieces;
  try {
    ({ pieces } = await (await post("v1/surprise", { text, ...where }, state.busy.signal)).json());
  } catch (error) { // too short or too long to look at: it can be sent all the same
    if (error.name === "AbortError") throw error;
    legend(message, `no surprise to show: ${error.message}`);
    return;
  }
  const sorted = pieces.map((piece) => piece.surprise).sort((a, b) => a - b);
  const level = (value) => Math.min(LEVELS - 1, Math.floor((LEVELS * sorted.findIndex((x) => x >= value)) / sorted.length));
  body.classList.add("heat");
  body.replaceChildren(...pieces.map((piece) => element("span", {
    className: `h${level(piece.surprise)}`, textContent: piece.text,
    title: `surprise ${medians(piece)}, ${piece.bits === null ? "–" : piece.bits.toFixed(1)} bits`,
  })));
  const most = pieces.reduce((a, b) => (b.surprise > a.surprise ? b : a));
  legend(message, `darker is more surprising to the memory; most: “${most.text}”, ${medians(most)}`);
}

// Documents.

async function ingest(files) {
  const hint = $("drop-text"), [file] = files;
  if (!file) return;
  if (files.length > 1 || hint.textContent !== HINT) {
    complain(new Error("one document is read at a time: drop the next when it is done"));
    return;
  }
  complain(null);
  hint.textContent = `reading ${file.name} …`;
  const failed = await read(file).then(() => null, (error) => new Error(`${file.name}: ${error.message}`));
  hint.textContent = HINT;
  complain(failed);
}

async function read(file) {
  const text = decoded(await file.arrayBuffer());
  const made = await (await post("v1/memories", { text, name: await freeName(file.name), source: head(file.name, 200) })).json();
  await refresh();
  $("start").value = made.id;
  if (state.busy) return;
  begin(made.id);
  $("text").focus();
}

function head(text, length) {
  return [...text].slice(0, length).join("");
}

function decoded(bytes) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("this is not UTF-8 text; save it as that first");
  }
  if (!text.trim()) throw new Error("there is no text in it");
  return text;
}

async function freeName(name) {
  const taken = new Set((await get("v1/memories")).data.map((entry) => entry.id));
  const short = head(name, 190);
  let free = short;
  for (let i = 2; taken.has(free); i += 1) free = `${short} (${i})`;
  return free;
}

// Events.

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (!text.trim() || state.busy) return;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => state.busy && state.busy.abort());
$("new").addEventListener("submit", (event) => {
  event.preventDefault();
  begin($("start").value);
  $("text").focus();
});
$("file").addEventListener("change", () => {
  const files = [...$("file").files];
  $("file").value = "";
  ingest(files);
});
// Anywhere on the page: a browser leaves it for a file that is dropped beside the field.
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") ingest([...event.dataTransfer.files]);
  });
}
get("v1/models").then(({ data }) => {
  $("model").textContent = data[0].id;
  $("temperature").value = data[0].temperature;
  $("watch").checked = data[0].surprise;
  $("watch").parentElement.hidden = !data[0].surprise;
  if (data[0].temperature === 0) $("text").placeholder = "Ask about a document, in the form that the model was taught: Where is Mary?";
  begin("");
}).catch(complain);
