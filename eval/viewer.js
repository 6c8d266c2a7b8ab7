// The trajectory viewer. Model text only ever becomes text nodes (textContent); nothing here
// builds markup from data. Rows are drawn when they scroll into view, texts are unpacked in chunks.
(async () => {
  "use strict";
  const ROW_HEIGHT = 30;
  const byId = (id) => document.getElementById(id);
  const note = byId("viewer-note");
  if (typeof DecompressionStream === "undefined") {
    note.textContent = "This browser cannot unpack the trajectories (it has no DecompressionStream).";
    return;
  }

  async function unpack(id) {
    const packed = atob(byId(id).textContent);
    const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  const index = await unpack("viewer-index");
  const chunks = new Map();
  function chunkOf(row) {
    const n = Math.floor(row / index.chunk);
    if (!chunks.has(n)) chunks.set(n, unpack("viewer-chunk-" + n));
    return chunks.get(n);
  }
  const textOf = async (row) => (await chunkOf(row))[row % index.chunk];
  let tokenChunk = { n: -1, rows: null };  // of the open trajectory only: they are large
  async function tokensOf(row) {
    const n = Math.floor(row / index.chunk);
    if (tokenChunk.n !== n) tokenChunk = { n, rows: unpack("viewer-tokens-" + n) };
    return (await tokenChunk.rows)[row % index.chunk];
  }

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // --- filters ---------------------------------------------------------------------------------
  const filters = {};
  function select(name, label, options) {
    const box = make("label", "", label);
    const node = make("select");
    node.append(new Option("all", ""));
    for (const [value, text] of options) node.append(new Option(text, value));
    node.addEventListener("change", applyFilters);
    box.append(node);
    byId("filters").append(box);
    filters[name] = node;
  }
  const distinct = (column) => [...new Set(index.rows.map((r) => r[column]))].sort();
  select("run", "run", index.runs.map((r, n) => [
    String(n), r.label + (r.shown < r.total ? ` (${r.shown} of ${r.total})` : ` (${r.total})`)]));
  select("result", "outcome", index.results.map((r, n) => [String(n), r.replace("_", " ")]));
  select("route", "route", distinct(3).map((r) => ["=" + r, r || "nobody"]));
  select("group", "benchmark or family", distinct(4).map((g) => ["=" + g, g || "none"]));
  select("mode", "condition", distinct(6).map((m) => ["=" + m, m]));
  const searchLabel = make("label", "", "search in all text");
  const search = make("input");
  search.type = "search";
  search.placeholder = "text, gold, id";
  searchLabel.append(search);
  byId("filters").append(searchLabel);
  const count = make("span", "note");
  count.id = "count";
  byId("filters").append(count);

  let shown = [];
  let searchRun = 0;
  async function applyFilters() {
    const run = ++searchRun;
    const wanted = search.value.trim().toLowerCase();
    const matches = (row, n) =>
      (!filters.run.value || row[0] === Number(filters.run.value)) &&
      (!filters.result.value || row[2] === Number(filters.result.value)) &&
      (!filters.route.value || "=" + row[3] === filters.route.value) &&
      (!filters.group.value || "=" + row[4] === filters.group.value) &&
      (!filters.mode.value || "=" + row[6] === filters.mode.value);
    let rows = index.rows.map((row, n) => n).filter((n) => matches(index.rows[n], n));
    if (wanted) {
      const found = [];
      for (const n of rows) {
        const chunk = await chunkOf(n);
        if (run !== searchRun) return;
        if (haystack(n, chunk[n % index.chunk]).includes(wanted)) found.push(n);
      }
      rows = found;
    }
    shown = rows;
    count.textContent = `${shown.length} of ${index.rows.length} trajectories`;
    byId("rows").style.height = shown.length * ROW_HEIGHT + "px";
    byId("list").scrollTop = 0;
    drawRows();
    if (shown.length && !shown.includes(current)) await open(shown[0]);
    if (!shown.length) close();
  }
  function haystack(n, text) {
    if (text.haystack === undefined) {
      const facts = text.facts.map((fact) => fact[1]).join("\n");
      const spans = text.spans.map((s) => s[2]).join("");
      text.haystack = (index.rows[n][1] + "\n" + text.prompt + "\n" + spans + "\n" + facts).toLowerCase();
    }
    return text.haystack;
  }
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(applyFilters, 200);
  });

  // --- the list --------------------------------------------------------------------------------
  function chip(result) {
    const name = index.results[result];
    return make("span", "chip o-" + name, name.replace("_", " "));
  }
  function drawRows() {
    const list = byId("list");
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 5);
    const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 10);
    const rows = [];
    for (let at = first; at < last; at++) {
      const n = shown[at];
      const [, id, result, route] = index.rows[n];
      const row = make("div", "row");
      row.style.top = at * ROW_HEIGHT + "px";
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(n === current));
      row.title = id;
      row.append(chip(result), make("span", "id", id), make("span", "route", route));
      row.addEventListener("click", () => open(n));
      rows.push(row);
    }
    byId("rows").replaceChildren(...rows);
  }
  byId("list").addEventListener("scroll", () => requestAnimationFrame(drawRows));

  // --- one trajectory --------------------------------------------------------------------------
  let current = -1;
  let spanNodes = [];
  let step = 0;
  async function open(n) {
    current = n;
    const [text, tokens] = await Promise.all([textOf(n), tokensOf(n)]);
    if (current !== n) return;
    const [run, id, result] = index.rows[n];
    const head = make("h3");
    head.append(chip(result), " ", make("span", "mono", id), make("span", "note", "  " + index.runs[run].label));
    const facts = make("dl");
    facts.id = "facts";
    for (const [name, value] of text.facts) {
      facts.append(make("dt", "", name), make("dd", "", value));
    }
    const { nodes, turns } = transcript(text, tokens);
    spanNodes = nodes;
    byId("open").replaceChildren(head, ...turns, facts);
    byId("tip").hidden = true;
    shade();
    showStep(spanNodes.length);
    history.replaceState(null, "", "#t=" + encodeURIComponent(run + "/" + id));
    drawRows();
  }
  function close() {
    current = -1;
    spanNodes = [];
    byId("open").replaceChildren(make("p", "note", "No trajectory matches."));
    showStep(0);
  }
  function turn(author, label) {
    const node = make("div", "turn " + author);
    const what = make("div", "what");
    node.append(make("div", "who", label), what);
    return { node, what };
  }
  let tokenFacts = new Map();  // node of a token -> what is known of it
  function transcript(text, tokens) {
    const wanted = search.value.trim();
    const prompt = turn("prompt", "prompt");
    put(prompt.what, text.prompt, wanted);
    const turns = [prompt.node];
    const nodes = [];
    tokenFacts = new Map();
    let open = null;
    text.spans.forEach(([author, kind, content], at) => {
      if (!open || open.author !== author) {
        open = { author, ...turn(author, author) };
        turns.push(open.node);
      }
      const span = make("span", "k-" + kind);
      const [lengths, logprobs, weights] = tokens[at];
      const marks = matches(content, wanted);
      let from = 0;
      lengths.forEach((length, n) => {
        const token = make("span", "t");
        putRange(token, content, from, from + length, marks);
        const logprob = logprobs ? logprobs[n] / 100 : null;
        tokenFacts.set(token, { text: content.slice(from, from + length), author, kind, logprob, weights });
        span.append(token);
        from += length;
      });
      open.what.append(span);
      nodes.push(span);
    });
    return { nodes, turns };
  }
  // Text with the search's matches marked: text nodes and <mark> elements, never markup.
  function matches(text, wanted) {
    const lower = text.toLowerCase();
    const found = [];
    if (!wanted || lower.length !== text.length) return found;  // few letters change their length
    const needle = wanted.toLowerCase();
    for (let at = lower.indexOf(needle); at >= 0; at = lower.indexOf(needle, at + needle.length)) {
      found.push([at, at + needle.length]);
    }
    return found;
  }
  function putRange(node, text, from, to, marks) {
    for (const [start, end] of marks) {
      if (end <= from || start >= to) continue;
      if (start > from) node.append(text.slice(from, start));
      from = Math.max(from, start);
      node.append(make("mark", "", text.slice(from, Math.min(end, to))));
      from = Math.min(end, to);
    }
    if (from < to) node.append(text.slice(from, to));
  }
  function put(node, text, wanted) {
    putRange(node, text, 0, text.length, matches(text, wanted));
  }

  // --- one token -------------------------------------------------------------------------------
  const visible = (text) => text.replaceAll(" ", "\u2423").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  const number = (value) => Number(value).toPrecision(3);
  function showTip(token, event) {
    const facts = tokenFacts.get(token);
    const lines = [
      make("div", "mono", facts.text ? visible(facts.text) : "(part of a character)"),
      make("div", "", `${facts.author}, ${facts.kind}`),
      make("div", "", facts.logprob === null ? "not sampled by the controller" :
        `log-probability ${facts.logprob.toFixed(2)} (p = ${number(Math.exp(facts.logprob))})`),
    ];
    for (const [name, weight] of Object.entries(facts.weights || {})) {
      lines.push(make("div", "", `${name} weight ${number(weight)}`));
    }
    if (!facts.weights) lines.push(make("div", "", "no training weight is known"));
    const tip = byId("tip");
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18;
    const top = below + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : below;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, top) + "px";
  }
  byId("open").addEventListener("mouseover", (event) => {
    const token = event.target.closest(".t");
    if (token) showTip(token, event);
  });
  byId("open").addEventListener("mouseout", () => { byId("tip").hidden = true; });
  // Darker is less likely, or heavier; what was pushed away from has the other colour.
  function shade() {
    const by = byId("shade").value;
    const weightOf = (facts) => Object.values(facts.weights || {})[0] ?? 0;
    const largest = Math.max(...[...tokenFacts.values()].map((f) => Math.abs(weightOf(f))), 1e-9);
    for (const [node, facts] of tokenFacts) {
      let amount = 0;
      if (by === "logprob" && facts.logprob !== null) amount = Math.min(1, -facts.logprob / 4);
      if (by === "weight") amount = weightOf(facts) / largest;
      node.style.backgroundColor = amount === 0 ? "" :
        `rgb(${amount > 0 ? "0 114 178" : "213 94 0"} / ${(0.55 * Math.abs(amount)).toFixed(2)})`;
    }
  }
  byId("shade").addEventListener("change", shade);

  // --- stepping --------------------------------------------------------------------------------
  function showStep(n) {
    step = Math.max(0, Math.min(spanNodes.length, n));
    spanNodes.forEach((node, at) => {
      node.classList.toggle("later", at >= step);
      node.classList.toggle("current", at === step - 1 && step < spanNodes.length);
    });
    byId("step").textContent = `span ${step} of ${spanNodes.length}`;
    byId("back").disabled = step === 0;
    byId("forth").disabled = step === spanNodes.length;
    const at = shown.indexOf(current);
    byId("previous").disabled = at <= 0;
    byId("next").disabled = at < 0 || at === shown.length - 1;
  }
  async function move(by) {
    const at = shown.indexOf(current) + by;
    if (at < 0 || at >= shown.length) return;
    await open(shown[at]);
    const list = byId("list");
    if (at * ROW_HEIGHT < list.scrollTop) list.scrollTop = at * ROW_HEIGHT;
    if ((at + 1) * ROW_HEIGHT > list.scrollTop + list.clientHeight) {
      list.scrollTop = (at + 1) * ROW_HEIGHT - list.clientHeight;
    }
  }
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));
  byId("back").addEventListener("click", () => showStep(step - 1));
  byId("forth").addEventListener("click", () => showStep(step + 1));
  byId("whole").addEventListener("click", () => showStep(spanNodes.length));
  document.addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    const inViewer = event.target === document.body || byId("viewer").contains(event.target);
    const action = { j: () => move(1), k: () => move(-1), l: () => showStep(step + 1), h: () => showStep(step - 1) }[event.key];
    if (inViewer && action) {
      event.preventDefault();
      action();
    }
  });

  await applyFilters();
  const asked = decodeURIComponent((location.hash.match(/^#t=(.+)$/) || [])[1] || "");
  const found = index.rows.findIndex((row) => row[0] + "/" + row[1] === asked);
  if (found >= 0) await open(found);
  document.documentElement.dataset.viewer = "ready";
})();
