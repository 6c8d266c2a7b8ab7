// Asks the server, shows the attempt while it is written, renders the answer.
// Everything that a model, a program or a user wrote reaches the page as text nodes, or through
// KaTeX with `trust` off; nothing is ever parsed as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const NESTED = new Set(["code", "output"]);
const MATH = /\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\d)/g;
let running = null;  // the AbortController of the attempt under way
let model = "";

function element(tag, classes, text, parent) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function say(text, isAlarm) {
  $("status").textContent = text;
  $("status").className = isAlarm ? "alarm" : "";
}

// --- mathematics --------------------------------------------------------------------------------

function renderMath(source, node, displayMode) {
  try {
    katex.render(source, node, {
      displayMode, throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200,
    });
  } catch (error) {
    node.textContent = source;  // what KaTeX cannot read is shown as it was written
  }
}

function showText(node, text) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(MATH)) {
    parts.push(document.createTextNode(text.slice(at, match.index)));
    const isDisplay = match[1] !== undefined || match[2] !== undefined;
    const math = element("span", "math");
    renderMath(match[1] ?? match[2] ?? match[3] ?? match[4], math, isDisplay);
    parts.push(math);
    at = match.index + match[0].length;
  }
  parts.push(document.createTextNode(text.slice(at)));
  node.replaceChildren(...parts);
}

// --- one attempt --------------------------------------------------------------------------------

class Attempt {
  constructor(problem) {
    this.node = element("article");
    this.node.setAttribute("aria-label", "Attempt");
    showText(element("div", "problem text", "", this.node), problem);
    this.trace = element("div", "trace", "", this.node);
    this.block = null;  // what is being written
    this.reply = null;  // the reply around it
    this.tokens = 0;
    this.started = performance.now();
    $("attempts").prepend(this.node);
  }

  add(piece) {
    if (piece.kind === "format" && !piece.text.trim() && this.block?.kind === "reasoning") {
      this.block.text += piece.text;  // white space between words that stand outside every tag
      return;
    }
    if (piece.kind === "format") this.close();
    if (piece.kind === "format" || piece.kind === "route" || piece.kind === "answer") return;
    const b = this.block;
    const isSame = b && b.kind === piece.kind && b.author === piece.author && b.expert === piece.expert;
    if (!isSame) this.open(piece);
    this.block.text += piece.text;
    this.block.node.textContent = this.block.text.replace(/^\n+|\n+$/g, "");
  }

  open(piece) {
    this.close();
    const isInReply = piece.expert !== null && (NESTED.has(piece.kind) || piece.kind === "reply");
    if (!isInReply) this.reply = null;
    if (isInReply && !this.reply) {
      this.reply = this.box(this.trace, "reply expert", `Reply as ${piece.expert}, written by ${
        piece.author === "expert" ? "the expert" : "the model itself"}`);
    }
    let node;
    if (piece.kind === "reply") {
      node = element("div", "text", "", this.reply);
    } else {
      const parent = isInReply ? this.reply : this.trace;
      const writer = isInReply && piece.author === "controller" ? "expert" : piece.author;
      const box = this.box(parent, `${piece.kind} ${writer}`, title(piece));
      node = element(NESTED.has(piece.kind) ? "pre" : "div", "text", "", box);
      if (NESTED.has(piece.kind)) node.tabIndex = 0;  // scrolls sideways by keyboard
    }
    this.block = { ...piece, text: "", node };
  }

  close() {
    if (!this.block) return;
    const { kind, node } = this.block;
    if (!NESTED.has(kind)) showText(node, node.textContent);
    if (kind === "code") say("running Python …");
    this.block = null;
  }

  box(parent, classes, heading) {
    const box = element("section", `block ${classes}`, "", parent);
    element("h3", "", heading, box);
    return box;
  }

  finish(outcome, tokens) {
    this.close();
    const answer = element("div", "answer", "", this.node);
    element("h2", "", "Answer", answer);
    const value = element("div", "value", "", answer);
    if (outcome.answer === null) {
      answer.classList.add("none");
      value.textContent = `none: ${outcome.malformed_reason || outcome.finish}`;
    } else if (/[\\^_{}=+\-*/\d]/.test(outcome.answer)) {
      renderMath(outcome.answer, value, true);
    } else {
      value.textContent = outcome.answer;  // words are no formula
    }
    const seconds = ((performance.now() - this.started) / 1000).toFixed(1);
    const programs = outcome.code_runs.length;
    element("p", "facts",
      `${seconds} s, ${tokens} tokens, ${programs} program${programs === 1 ? "" : "s"}` +
      (outcome.well_formed ? "" : `, not well formed: ${outcome.malformed_reason}`), this.node);
    say(outcome.answer === null ? "no answer" : `answer: ${outcome.answer}`);
  }

  fail(message) {
    this.close();
    element("p", "facts", message, this.node);
    say(message, true);
  }
}

function title(piece) {
  if (piece.kind === "request") return `Request to ${piece.expert}`;
  if (piece.kind === "code") return "Python";
  if (piece.kind === "output") return "Output of the sandbox";
  return "Reasoning";
}

// --- the API ------------------------------------------------------------------------------------

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function post(problem, signal) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers, signal,
    body: JSON.stringify({
      model, messages: [{ role: "user", content: problem }], stream: true,
      stream_options: { include_usage: true }, temperature: Number($("temperature").value),
    }),
  });
  if (response.ok) return response.body;
  const failure = await response.json().catch(() => null);
  if (response.status === 401) document.querySelector("details").open = true;
  throw new Error(failure?.error?.message ?? `the server says ${response.status}`);
}

async function ask(problem) {
  const attempt = new Attempt(problem);
  let outcome = null, tokens = 0;
  running = new AbortController();
  $("stop").disabled = false;
  $("send").disabled = true;
  say("thinking …");
  try {
    for await (const chunk of events(await post(problem, running.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      tokens = chunk.usage?.completion_tokens ?? tokens;
      const extension = chunk.choices[0]?.rivet;
      for (const piece of extension?.segments ?? []) attempt.add(piece);
      if (extension && "finish" in extension) outcome = extension;
    }
    if (outcome === null) throw new Error("the connection was cut");
    attempt.finish(outcome, tokens);
  } catch (error) {
    attempt.fail(error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    running = null;
    $("stop").disabled = true;
    $("send").disabled = false;
  }
}

function submit(event) {
  event?.preventDefault();
  const problem = $("problem").value.trim();
  if (!problem || running) return;
  $("problem").select();
  ask(problem);
}

$("ask").addEventListener("submit", submit);
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.target === $("problem") && event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    submit(event);
  }
});
fetch("health").then((response) => response.json()).then((health) => {
  model = health.model;
  $("model").textContent = model;
  document.title = `rivet: ${model}`;
}).catch(() => say("the server does not answer", true));
