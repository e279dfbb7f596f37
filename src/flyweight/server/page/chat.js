"use strict";
const $ = (id) => document.getElementById(id);
const log = $("log"), prompt = $("prompt");
const FIELDS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let messages = [];  // {role, content, reasoning, timings, usage, model, time}
let running = null;  // AbortController of the answer that is coming

// -- Markdown: every node is made here, text goes in as text, and nothing of an answer is ever parsed as HTML.

function make(tag, children = [], attributes = {}) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...[].concat(children));
  return node;
}

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([\s\S]+?)\*\*|\*(?!\s)([^*\n]+?)\*|~~([^~\n]+)~~|\[([^\]\n]*)\]\(([^()\s]+)\)/;

function inline(text) {
  const nodes = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    nodes.push(text.slice(0, found.index));
    if (found[1]) nodes.push(make("code", found[2].trim()));
    else if (found[3]) nodes.push(make("strong", inline(found[3])));
    else if (found[4]) nodes.push(make("em", inline(found[4])));
    else if (found[5]) nodes.push(make("del", inline(found[5])));
    else nodes.push(link(found[6], found[7]));
  }
  nodes.push(text);
  return nodes;
}

function link(text, target) {
  const label = inline(text || target);
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return make("span", label);  // javascript:, data: and the like lead nowhere
  return make("a", label, { href: target, rel: "noopener noreferrer nofollow", target: "_blank" });
}

const STARTS = /^(#{1,6}\s|```|~~~|\s*([-*+]|\d{1,9}[.)])\s|>|\|.*\||([-*_])(\s*\3){2,}\s*$)/;

const DEEPEST = 16;  // quotes and lists within each other; deeper ones are text, as each level takes a part of the stack

function markdown(text, depth = 0) {
  if (depth > DEEPEST) return make("p", text);
  const lines = text.split("\n"), blocks = document.createDocumentFragment();
  let at = 0;
  const take = (test) => { const from = at; while (at < lines.length && test(lines[at], at - from)) at++; return lines.slice(from, at); };
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) at++;
    else if ((found = /^(```|~~~)\s*([\w+-]*)/.exec(line))) {
      at++;
      const code = take((one) => !one.startsWith(found[1]));
      at++;
      blocks.append(make("pre", make("code", code.join("\n"))));
    } else if ((found = /^(#{1,6})\s+(.*)/.exec(line))) {
      at++;
      blocks.append(make("h" + Math.min(6, found[1].length + 1), inline(found[2])));
    } else if (/^([-*_])(\s*\1){2,}\s*$/.test(line)) { at++; blocks.append(make("hr")); }
    else if (line.startsWith(">")) blocks.append(make("blockquote", markdown(take((one) => one.startsWith(">")).map((one) => one.slice(1).trimStart()).join("\n"), depth + 1)));
    else if (/^\|.*\|/.test(line)) blocks.append(table(take((one) => /^\|.*\|/.test(one))));
    else if (/^\s*([-*+]|\d{1,9}[.)])\s/.test(line)) blocks.append(list(take((one, index) => !index || /^\s+\S/.test(one) || /^\s*([-*+]|\d{1,9}[.)])\s/.test(one)), depth));
    else blocks.append(make("p", inline(take((one, index) => one.trim() && (!index || !STARTS.test(one))).join("\n"))));
  }
  return blocks;
}

function list(lines, depth) {
  const indent = /^\s*/.exec(lines[0])[0].length, items = [];
  for (const line of lines) {
    const found = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)/.exec(line);
    if (found && found[1].length <= indent) items.push([found[3]]);
    else items[items.length - 1].push(line.slice(Math.min(indent + 2, /^\s*/.exec(line)[0].length)));
  }
  const ordered = /^\s*(\d{1,9})/.exec(lines[0]);
  const node = make(ordered ? "ol" : "ul", items.map(([first, ...rest]) => make("li", [...inline(first), ...(rest.length ? [markdown(rest.join("\n"), depth + 1)] : [])])));
  if (ordered) node.start = Number(ordered[1]);
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const rows = lines.filter((line) => !/^\|[\s:|-]+\|?\s*$/.test(line)).map(cells);
  return make("table", rows.map((row, index) => make("tr", row.map((cell) => make(index ? "td" : "th", inline(cell))))));
}

// -- the conversation on the screen

function show(message) {
  $("empty").hidden = true;
  const text = make("div", [], { class: "text" }), facts = make("p", [], { class: "facts soft" });
  const article = make("article", [make("h2", message.role === "user" ? "You" : "Answer"), text, facts], { class: message.role });
  log.append(article);
  return { article, text, facts };
}

function draw(parts, message) {
  const bottom = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  parts.text.replaceChildren();
  if (message.role === "user") parts.text.append(message.content);
  else {
    if (message.reasoning) parts.text.append(make("details", [make("summary", "Thinking"), message.reasoning], { class: "thinking", ...(message.content ? {} : { open: "" }) }));
    parts.text.append(markdown(message.content));
  }
  if (bottom) log.scrollTop = log.scrollHeight;
}

function redraw() {
  log.querySelectorAll("article").forEach((article) => article.remove());
  $("empty").hidden = messages.length > 0;
  messages.forEach((message) => { const parts = show(message); draw(parts, message); finish(parts, message); });
}

function finish(parts, message) {
  if (message.role === "user") return;
  const { timings = {}, finish_reason: reason } = message;
  parts.facts.replaceChildren(...[message.tokens + " tokens", timings.predicted_per_second && timings.predicted_per_second.toFixed(1) + " tok/s",
    timings.ttft_ms && "TTFT " + timings.ttft_ms.toFixed(0) + " ms", reason && reason !== "stop" && reason].filter(Boolean).map((fact) => make("span", fact)));
  if (message === messages[messages.length - 1]) {
    const again = make("button", "Regenerate", { type: "button", class: "again", title: "Alt+R" });
    again.addEventListener("click", regenerate);
    parts.facts.append(again);
  }
  const copy = make("button", "Copy", { type: "button" });
  copy.addEventListener("click", () => navigator.clipboard.writeText(message.content));
  parts.facts.append(copy);
}

function fail(text) { $("error").textContent = text; $("error").hidden = !text; }

// -- the conversation kept over a reload: of this browser alone, until "Clear"; the API key is never kept

const KEPT = "flyweight conversation";

function keep() {
  const kept = { messages, system: $("system").value, settings: Object.fromEntries(FIELDS.map((name) => [name, $(name).value])) };
  try {
    if (messages.length || kept.system) localStorage.setItem(KEPT, JSON.stringify(kept));
    else localStorage.removeItem(KEPT);
  } catch { /* private windows and full stores keep nothing */ }
}

function restore() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT)) || {};
    const known = (one) => one && ["user", "assistant"].includes(one.role) && typeof one.content === "string";
    messages = Array.isArray(kept.messages) ? kept.messages.filter(known) : [];
    $("system").value = typeof kept.system === "string" ? kept.system : "";
    for (const name of FIELDS) $(name).value = (kept.settings || {})[name] || "";
  } catch { messages = []; }
  redraw();
  log.scrollTop = log.scrollHeight;
}

// -- talking to the server

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: "Bearer " + key } : {}) };
}

function body() {
  const asked = messages.map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  const options = Object.fromEntries(FIELDS.filter((name) => $(name).value !== "").map((name) => [name, Number($(name).value)]));
  return { messages: system ? [{ role: "system", content: system }, ...asked] : asked, stream: true, stream_options: { include_usage: true }, ...options };
}

async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done; ) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
  }
}

async function answer() {
  fail("");
  log.querySelectorAll("button.again").forEach((button) => button.remove());
  const request = body();
  const message = { role: "assistant", content: "", reasoning: "", tokens: 0, time: new Date().toISOString(), request: { ...request, messages: undefined } };
  const parts = show(message);
  running = new AbortController();
  busy(true);
  const begin = performance.now();
  let first = 0, drawn = 0;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(request), signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of chunks(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.timings) message.timings = chunk.timings;
      if (chunk.usage) message.usage = chunk.usage;
      message.model = chunk.model;
      for (const choice of chunk.choices) {
        message.content += choice.delta.content || "";
        message.reasoning += choice.delta.reasoning_content || "";
        message.finish_reason = choice.finish_reason || message.finish_reason;
        message.tokens++;
      }
      const now = performance.now();
      first = first || now;
      $("ttft").textContent = "TTFT " + (first - begin).toFixed(0) + " ms";
      $("count").textContent = message.tokens + " tokens";
      if (now > first) $("rate").textContent = ((message.tokens - 1) / (now - first) * 1000).toFixed(1) + " tok/s";
      if (now - drawn > 40) { draw(parts, message); drawn = now; }
    }
  } catch (error) {
    message.finish_reason = running.signal.aborted ? "stopped" : "failed";
    if (!running.signal.aborted) fail(error.message);
  }
  running = null;
  busy(false);
  if (message.timings && message.timings.predicted_per_second) $("rate").textContent = message.timings.predicted_per_second.toFixed(1) + " tok/s";
  if (message.tokens) {
    messages.push(message);
    draw(parts, message);
    finish(parts, message);
  } else parts.article.remove();
  keep();
  prompt.focus();
}

function busy(now) {
  $("send").hidden = now;
  $("stop").hidden = !now;
  document.body.dataset.busy = now;
}

function send() {
  const content = prompt.value.trim();
  if (running || !content) return;
  const message = { role: "user", content, time: new Date().toISOString() };
  messages.push(message);
  keep();
  draw(show(message), message);
  log.scrollTop = log.scrollHeight;
  prompt.value = "";
  answer();
}

function regenerate() {
  if (running || !messages.length) return;
  if (messages[messages.length - 1].role === "assistant") messages.pop();
  redraw();
  if (messages.length) answer();
}

function stop() { if (running) running.abort(); }
function reset() { stop(); messages = []; keep(); fail(""); redraw(); prompt.focus(); }

function save() {
  const file = { exported: new Date().toISOString(), system: $("system").value, messages };
  const target = make("a", [], { download: "conversation.json", href: URL.createObjectURL(new Blob([JSON.stringify(file, null, 2)], { type: "application/json" })) });
  target.click();
  setTimeout(() => URL.revokeObjectURL(target.href), 1000);
}

function toggle() {
  $("controls").hidden = !$("controls").hidden;
  $("settings").setAttribute("aria-expanded", String(!$("controls").hidden));
  ($("controls").hidden ? prompt : $("system")).focus();
}

async function watch() {
  try {
    const state = await (await fetch("ready")).json();
    $("kv").textContent = "KV " + (100 * state.kv_blocks_used / Math.max(1, state.kv_blocks)).toFixed(1) + " %";
    $("state").textContent = state.status === "ready" ? state.in_flight + " in flight" : "engine " + state.status;
  } catch { $("state").textContent = "server unreachable"; }
  setTimeout(watch, running ? 500 : 2000);
}

async function hello() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.ok) $("model").textContent = (await response.json()).data[0].id;
    else if (response.status === 401) { fail("This server needs an API key: Settings."); }
  } catch { /* `watch` says it */ }
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("controls").addEventListener("change", keep);
$("key").addEventListener("change", () => { fail(""); hello(); });
prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } });
for (const [id, action] of Object.entries({ stop, new: reset, export: save, settings: toggle })) $(id).addEventListener("click", action);
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const KEYS = { KeyR: regenerate, KeyN: reset, KeyS: save, KeyO: toggle };
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  else if (event.altKey && KEYS[event.code]) { event.preventDefault(); KEYS[event.code](); }
});
restore();
hello();
watch();
