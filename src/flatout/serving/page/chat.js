// The chat page. Text of the model and of errors reaches the page through textContent only.
"use strict";
const at = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let chat = false;
let turns = []; // {role, content}, the last one a user's while an answer is made
let running = null; // the AbortController of an answer

async function ask(path, body) {
  const key = at("key").value;
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  running = new AbortController();
  const how = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...how, headers, signal: running.signal });
  if (!response.ok) {
    if (response.status === 401) at("key-field").hidden = false;
    const { error } = await response.json();
    throw new Error(error.message);
  }
  return response;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the server ended the answer too early");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((one) => one.startsWith("data: "))) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function show(kind, text) {
  const main = document.querySelector("main");
  const [card, said, facts] = ["article", "p", "div"].map((name) => document.createElement(name));
  card.className = kind;
  said.className = "text";
  said.textContent = text;
  facts.className = "facts";
  card.append(said, ...(kind === "user" ? [] : [facts]));
  if (kind === "error") card.setAttribute("role", "alert");
  at("log").append(card);
  at("hint").hidden = true;
  main.scrollTop = main.scrollHeight;
  return { card, said, facts };
}

function button(name, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = name;
  made.addEventListener("click", act);
  return made;
}

function request() {
  const body = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const name of NUMBERS) if (at(name).value !== "") body[name] = Number(at(name).value);
  if (!chat) return { ...body, prompt: turns.at(-1).content };
  const system = at("system").value;
  return { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...turns] };
}

async function answer() {
  for (const one of document.querySelectorAll(".facts button")) one.remove();
  const main = document.querySelector("main");
  const { card, said, facts } = show("model busy", "");
  const mine = turns;
  const began = performance.now();
  let first = 0, text = "", reason = "", tokens = 0, failure = "";
  at("send").hidden = true;
  at("stop").hidden = false;
  try {
    for await (const event of events(await ask(chat ? "v1/chat/completions" : "v1/completions", request()))) {
      const [choice] = event.choices;
      const low = main.scrollHeight - main.scrollTop - main.clientHeight < 80;
      first ||= performance.now();
      tokens = event.usage?.completion_tokens ?? tokens;
      text += (chat ? choice?.delta.content : choice?.text) ?? "";
      reason = choice?.finish_reason ?? reason;
      said.textContent = text;
      const now = performance.now(), since = now - first > 50 ? first : began; // all at once: with the wait before
      const rate = tokens > 1 ? ` · ${((1000 * (tokens - 1)) / (now - since)).toFixed(1)} tokens/s` : "";
      facts.textContent = `${tokens} tokens${rate} · first after ${((first - began) / 1000).toFixed(2)} s`;
      if (low) main.scrollTop = main.scrollHeight;
    }
  } catch (error) {
    failure = error.name === "AbortError" ? "" : error.message;
    reason = "stopped";
  }
  running = null;
  card.classList.remove("busy");
  at("send").hidden = false;
  at("stop").hidden = true;
  if (turns !== mine) return; // a new conversation
  if (failure) {
    if (!text) card.remove();
    facts.append(" · failed");
    show("error", failure).facts.append(button("Retry", retry));
  } else {
    if (reason && reason !== "stop") facts.append(reason === "length" ? " · length limit" : ` · ${reason}`);
    facts.append(button("Retry", retry));
  }
  if (!failure || text) turns.push({ role: "assistant", content: text });
  main.scrollTop = main.scrollHeight;
}

function retry() {
  if (running) return;
  while (turns.at(-1)?.role === "assistant") turns.pop();
  while (at("log").lastChild && !at("log").lastChild.classList.contains("user")) at("log").lastChild.remove();
  answer();
}

function submit(event) {
  event?.preventDefault();
  const text = at("text").value;
  if (running || !(chat ? text.trim() : text)) return;
  at("text").value = "";
  grow();
  while (turns.at(-1)?.role === "user") turns.pop(); // one whose answer has failed
  turns.push({ role: "user", content: text });
  show("user", text);
  answer();
}

function grow() {
  at("text").style.height = "auto";
  at("text").style.height = `${at("text").scrollHeight + 2}px`;
}

function restart() {
  running?.abort();
  turns = [];
  at("log").replaceChildren();
  at("hint").hidden = false;
  at("text").focus();
}

async function begin() {
  try {
    const [model] = (await (await ask("v1/models")).json()).data;
    chat = model.chat;
    at("model").textContent = document.title = model.id;
    at("about").textContent = `context ${model.context.toLocaleString("en")}`;
    at("system-field").hidden = !chat;
    at("hint").textContent = chat
      ? "Ask something. Enter sends, Shift+Enter begins a line, Escape stops."
      : "This model continues text: write a beginning. Enter sends, Shift+Enter begins a line, Escape stops.";
  } catch (error) {
    at("hint").textContent = error.message;
  }
  running = null;
}

at("ask").addEventListener("submit", submit);
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", restart);
at("key").addEventListener("change", begin);
at("text").addEventListener("input", grow);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
begin();
