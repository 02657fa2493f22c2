// The page: what is shown of the steps that the worker has sent. It never computes the model.

const PACES = [Infinity, 1000, 500, 200, 80, 0]; // milliseconds a token, slowest first
const WAIT = 60; // milliseconds without a keystroke before a line is translated
const SHOWN = [50, 64]; // positions and dimensions of the heat map
const NAMED = new Set(["encoder-attention", "decoder-attention", "cross-attention"]);

const $ = (id) => document.getElementById(id);
const read = (id) => JSON.parse($(id).textContent);
const plain = (piece) => piece.replaceAll("\u2581", "\u00b7");
const count = (n) => n.toLocaleString("en-US");
const fixed = (x, digits = 2) => x.toFixed(digits).replace("-", "\u2212");

/** Everything that the page shows follows from this. `at` is the last step shown, from 0. */
const state = {
  id: 0, text: "", source: [], taps: {}, steps: [], done: false, at: -1, playing: true,
  part: "cross-attention", layer: 0, head: 0, site: "decoder/*/cross_attention", siteLayer: 0, siteHead: 0, query: -1,
};
let [checkpoint, parts, worker, positions, due, timer, typing] = [];

function start() {
  [checkpoint, parts] = [read("checkpoint-data"), read("parts-data")];
  const code = new Blob([$("worker-code").textContent], { type: "text/javascript" });
  worker = new Worker(URL.createObjectURL(code));
  worker.onmessage = ({ data }) => receive(data);
  worker.postMessage({ checkpoint, weights: $("weights-data").textContent });
  state.layer = state.siteLayer = decoderLayers() - 1;
  describe();
  listen();
  $("source").value = checkpoint.examples[0];
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) $("pace").value = PACES.length - 1;
  ask();
}

const decoderLayers = () => checkpoint.config.num_decoder_layers ?? checkpoint.config.num_layers;
const nameOf = (id) => plain(checkpoint.tokenizer.pieces[id]);
const shownSteps = () => state.steps.slice(0, state.at + 1);
const sizes = () => {
  const { d_model: D, num_heads: H, d_k: K, d_v: U, d_ff: F } = checkpoint.config;
  return { D, H, K, U, F, S: state.source.length, T: state.at + 1, V: checkpoint.tokenizer.pieces.length };
};

/** Sends the line to the worker; what it said about an older line no longer counts. */
function ask() {
  state.text = $("source").value.replace(/[\r\n]+/g, " ");
  Object.assign(state, { id: state.id + 1, steps: [], done: false, at: -1, playing: true, query: -1, fresh: true });
  worker.postMessage({ id: state.id, text: state.text });
}

function receive(data) {
  if (data.ready) positions = data.positions;
  else if (data.id !== state.id) return;
  else if (data.source) [state.source, state.taps] = [data.source, data.taps];
  else if (data.done) state.done = true;
  else state.steps.push(data);
  if (data.done && state.steps.length === 0) [state.source, state.taps] = [[], {}];
  play();
  draw();
}

/** Shows the next step when its time has come. */
function play() {
  if (timer || !state.playing || state.at + 1 >= state.steps.length) return;
  const pace = PACES[$("pace").value];
  if (state.at >= 0 && pace === Infinity) return;
  const next = () => {
    timer = 0;
    if (!state.playing || state.at + 1 >= state.steps.length) return;
    state.at = PACES[$("pace").value] === 0 ? state.steps.length - 1 : state.at + 1;
    draw();
    play();
  };
  timer = setTimeout(next, state.at < 0 || pace === 0 ? 0 : pace);
}

function go(by) {
  state.playing = false;
  state.at = Math.max(0, Math.min(state.steps.length - 1, state.at + by));
  draw();
}

function toggle() {
  const ended = state.done && state.at === state.steps.length - 1;
  if (ended) state.at = -1;
  state.playing = ended || !state.playing;
  if (state.playing && PACES[$("pace").value] === Infinity) $("pace").value = 3;
  play();
  draw();
}

function draw() {
  due ??= requestAnimationFrame(() => {
    due = undefined;
    if (state.source.length === 0 && state.text.trim() && !state.done) return; // nothing to show yet
    for (const part of [drawTalk, drawStep, drawFigure, drawPanel]) part();
    for (const [id, part] of [["attention", drawAttention], ["order", drawOrder]]) {
      const { top, bottom } = $(id).getBoundingClientRect();
      if (top < innerHeight + 200 && bottom > -200) part();
    }
  });
}

function drawTalk() {
  const tokens = shownSteps().map((step) => step.token);
  $("target").textContent = textOf(tokens);
  $("target").classList.toggle("writing", !state.done || state.at < state.steps.length - 1);
  const ended = state.done && state.at === state.steps.length - 1;
  $("play").textContent = state.steps.length && ended ? "Again" : state.playing ? "Pause" : "Play";
  const total = state.done ? ` of ${state.steps.length}` : "";
  $("place").textContent = state.steps.length ? `token ${state.at + 1}${total}` : "";
  for (const id of ["back", "play", "forward"]) $(id).disabled = state.steps.length === 0;
  for (const chip of $("examples").children) chip.setAttribute("aria-pressed", chip.textContent === state.text);
}

/** The text of the tokens so far. The worker decodes; its text comes with each step. */
const textOf = (tokens) => (tokens.length ? state.steps[tokens.length - 1].text : "");

function drawStep() {
  const step = state.steps[state.at];
  $("writing").textContent = step ? `Writing token ${state.at + 1}: ${nameOf(step.token)}` : "Nothing to write";
  const layer = decoderLayers() - 1;
  const cross = step && step.taps[`decoder/${layer}/cross_attention/weights`];
  $("looks-label").textContent = `Looks at (layer ${layer + 1}, mean of its heads)`;
  const mean = state.source.map((_, s) => {
    let sum = 0;
    for (let head = 0; cross && head < cross.rows; head++) sum += cross.data[head * cross.columns + s];
    return cross ? sum / cross.rows : 0;
  });
  $("looks").replaceChildren(...state.source.map((id, s) => word(nameOf(id), mean[s])));
  $("read").replaceChildren(...shownSteps().map(({ input }, n) => word(nameOf(input), 0, n === state.at)));
  const rows = (step ? step.candidates : []).map(([id, logProb], n) => {
    const p = Math.exp(logProb);
    const bar = make("span", { class: "bar", style: `--share: ${p}` });
    return make("li", n ? {} : { class: "chosen" }, make("b", {}, nameOf(id)), bar, make("span", { class: "number" }, p < 0.0005 ? "<0.1 %" : `${fixed(100 * p, 1)} %`));
  });
  $("candidates").replaceChildren(...rows);
}

function word(text, weight, current = false) {
  const style = `--weight: ${weight.toFixed(3)}`;
  return make("span", { class: current ? "word current" : "word", style, title: weight ? fixed(weight) : "" }, text);
}

/** Returns the numbers that a part shows: a matrix, what its axes are, and which cells are hidden. */
function valuesOf(part, layer, head) {
  const about = parts[part];
  const path = about.tap.replace("*", layer);
  const steps = shownSteps();
  const last = steps.length ? steps[steps.length - 1] : null;
  if (part === "linear" || part === "softmax") {
    const row = last ? last.taps[path].data : new Float32Array(1);
    return { matrix: grid(row), axes: "every id of the vocabulary, row after row" };
  }
  const encoder = path.startsWith("encoder");
  const [down, rowsOf] = encoder ? ["S", (x) => x] : ["T", (x) => x];
  if (path.endsWith("/weights")) return { matrix: weightsOf(path, head), axes: `queries ${down} down, keys ${part === "decoder-attention" ? "T" : "S"} across`, limit: 1, causal: part === "decoder-attention" };
  const found = encoder ? state.taps[path] : stack(steps.map((step) => rowsOf(step.taps[path].data)));
  return { matrix: found || stack([]), axes: `positions ${down} down, ${path.endsWith("hidden") ? "F" : "D"} across` };
}

/** Returns the weights of one head, [queries, keys]. */
function weightsOf(path, head) {
  if (!path.startsWith("encoder")) {
    return stack(shownSteps().map(({ taps }) => taps[path].data.subarray(head * taps[path].columns, (head + 1) * taps[path].columns)));
  }
  const all = state.taps[path];
  if (!all) return stack([]);
  const size = all.columns * all.columns;
  return { rows: all.columns, columns: all.columns, data: all.data.subarray(head * size, (head + 1) * size) };
}

function drawFigure() {
  const scratch = document.createElement("canvas");
  for (const box of document.querySelectorAll("#figure1 .box")) {
    const { part } = box.dataset;
    box.setAttribute("aria-pressed", part === state.part);
    const layer = Math.min(state.layer, layersOf(part) - 1);
    const { matrix, limit } = valuesOf(part, layer, state.head);
    paint(scratch, matrix, limit);
    box.querySelector("image").setAttribute("href", matrix.data.length ? scratch.toDataURL() : "data:,");
  }
}

const layersOf = (part) => (parts[part].tap.startsWith("encoder") ? checkpoint.config.num_layers : decoderLayers());

function drawPanel() {
  const about = parts[state.part];
  const { config } = checkpoint;
  const layer = Math.min(state.layer, layersOf(state.part) - 1);
  const instead = config.positions === "learned" ? about.learned : config.activation === "swish" && about.swish;
  [$("name").textContent, $("does").textContent, $("later").textContent] = [about.name, about.does, about.later];
  [$("formula").innerHTML, $("code").textContent] = [instead || about.formula, about.code];
  $("layer-choice").hidden = !about.tap.includes("*");
  $("head-choice").hidden = !NAMED.has(state.part);
  [$("layer").value, $("head").value] = [layer, state.head];
  const all = sizes();
  $("shapes").replaceChildren(...about.shapes.map(([name, letters]) => {
    const numbers = letters.split(" ").map((letter) => `${letter} = ${count(all[letter])}`);
    return make("li", {}, make("b", {}, name), ` [${numbers.join(", ")}]`);
  }));
  const { matrix, axes, limit, causal } = valuesOf(state.part, layer, state.head);
  const most = paint($("heat"), matrix, limit);
  if (causal) paintCells($("heat"), matrix, Math.max(4, Math.floor(150 / matrix.rows)), (q, k) => k > q);
  $("heat").classList.toggle("square", NAMED.has(state.part));
  $("heat").setAttribute("aria-label", `${about.name}: ${axes}`);
  const negative = matrix.data.some((x) => x < 0);
  $("low").textContent = negative ? fixed(-most) : "0";
  [$("high").textContent, $("axes").textContent] = [fixed(most), axes];
  const ramp = Float32Array.from({ length: 64 }, (_, i) => (negative ? (i / 63) * 2 - 1 : i / 63));
  paint($("legend"), { rows: 1, columns: 64, data: ramp }, 1);
}

function drawAttention() {
  const path = `${state.site.replace("*", Math.min(state.siteLayer, siteLayers() - 1))}/weights`;
  const causal = state.site === "decoder/*/self_attention";
  const hidden = (q, k) => causal && k > q;
  const weights = weightsOf(path, state.siteHead);
  const written = shownSteps().map((step) => nameOf(step.input));
  const source = state.source.map(nameOf);
  const queries = state.site.startsWith("encoder") ? source : written;
  const keys = causal ? written : source;
  const size = Math.max(9, Math.min(26, Math.floor(Math.min(innerWidth - 200, 560) / Math.max(keys.length, queries.length, 1))));
  for (const [head, button] of [...$("heads").children].entries()) {
    button.setAttribute("aria-pressed", head === state.siteHead);
    paintCells(button.firstChild, weightsOf(path, head), Math.max(1, Math.floor(64 / Math.max(keys.length, queries.length, 1))), hidden);
  }
  const lit = Math.min(state.query, queries.length - 1);
  $("matrix").style.setProperty("--cell", `${size}px`);
  paintCells($("cells"), weights, size, hidden, lit);
  $("cells").setAttribute("aria-label", `Weights of head ${state.siteHead + 1}: ${queries.length} queries, ${keys.length} keys`);
  const option = (name, n) => make("div", { role: "option", id: `query-${n}`, "aria-selected": n === lit }, name);
  $("queries").replaceChildren(...queries.map(option));
  $("queries").setAttribute("aria-activedescendant", lit < 0 ? "" : `query-${lit}`);
  $("keys").replaceChildren(...keys.map((name) => make("span", {}, name)));
  $("targets").replaceChildren(...keys.map((name, k) => make("span", { class: lit >= 0 && weights.data[lit * weights.columns + k] > 0.1 ? "lit" : "" }, name)));
  const height = size * Math.max(queries.length, keys.length);
  const svg = make("svg", { width: 190, height, viewBox: `0 0 190 ${height}`, role: "img", "aria-label": "Arcs from queries to keys" });
  svg.append(curves(weights, size, 190, lit));
  $("arcs").replaceChildren(svg);
  $("told").textContent = tell(weights, queries, keys, lit);
}

const siteLayers = () => (state.site.startsWith("encoder") ? checkpoint.config.num_layers : decoderLayers());

/** Says in words what the lit row shows. */
function tell({ columns, data }, queries, keys, lit) {
  if (lit < 0) return "Point at a row, or go through the rows with the arrow keys.";
  const row = keys.map((key, k) => [key, data[lit * columns + k]]).sort((a, b) => b[1] - a[1]);
  const best = row.slice(0, 3).filter(([, weight]) => weight >= 0.005);
  return `${queries[lit]} looks at ${best.map(([key, weight]) => `${key} ${fixed(weight)}`).join(", ")}`;
}

function drawOrder() {
  if (!positions) return;
  const [rows, columns] = [Math.min(SHOWN[0], positions.rows), Math.min(SHOWN[1], positions.columns)];
  const row = (n) => positions.data.subarray(n * positions.columns, (n + 1) * positions.columns);
  const some = stack(Array.from({ length: rows }, (_, n) => row(n).slice(0, columns)));
  paint($("waves"), some);
  const [a, b] = [Math.min($("a").value, rows - 1), Math.min($("b").value, rows - 1)];
  const products = Float32Array.from({ length: rows }, (_, n) => row(a).reduce((sum, x, i) => sum + x * row(n)[i], 0));
  $("dot").textContent = `PE(${a}) · PE(${b}) = ${fixed(products[b])}`;
  paintBars($("products"), products, b);
  const { S, T } = sizes();
  const width = 8 * Math.ceil(Math.max(1, S) / 8);
  const ones = (rows, columns) => ({ rows, columns, data: new Float32Array(rows * columns).fill(0.35) });
  const size = (n) => Math.max(3, Math.min(12, Math.floor(190 / Math.max(1, n))));
  paintCells($("mask-padding"), ones(1, width), size(width), (_, k) => k >= S);
  paintCells($("mask-causal"), ones(T, T), size(T), (q, k) => k > q);
  paintCells($("mask-cross"), ones(T, width), size(width), (_, k) => k >= S);
  $("about-padding").textContent = `Padding, [1, 1, 1, ${width}]: in a batch this line of ${S} pieces might be filled up to ${width}.`;
  $("about-causal").textContent = `Causal, [1, 1, ${T}, ${T}]: a query reads itself and what came before.`;
  $("about-cross").textContent = `Cross, [1, 1, ${T}, ${width}]: the padding mask of the source, for every query.`;
}

/** Fills what never changes: facts, choices, bars. */
function describe() {
  const { config, languages, step, examples, table, error } = checkpoint;
  const named = (code) => new Intl.DisplayNames(["en"], { type: "language", fallback: "code" }).of(code);
  const total = table.reduce((sum, [, shape]) => sum + shape.reduce((a, b) => a * b), 0);
  const [from, to] = languages.map((code) => { try { return named(code); } catch { return code; } });
  $("facts").textContent = `${from} to ${to} · ${count(total)} parameters · step ${count(step)} · all of it runs in this page`;
  [$("source-label").textContent, $("target-label").textContent] = [from, to];
  $("examples").append(...examples.slice(1).map((text) => make("button", {}, text)));
  const options = (n, word = (i) => i + 1) => Array.from({ length: n }, (_, i) => make("option", { value: i }, word(i)));
  $("layer").append(...options(Math.max(config.num_layers, decoderLayers())));
  $("site-layer").append(...options(decoderLayers()));
  $("site-layer").value = state.siteLayer;
  $("head").append(...options(config.num_heads));
  $("times-encoder").textContent = `${config.num_layers} ×`;
  $("times-decoder").textContent = `${decoderLayers()} ×`;
  $("heads").append(...options(config.num_heads, (i) => `${i + 1}`).map((_, i) => make("button", { "aria-label": `Head ${i + 1}` }, make("canvas", {}), `${i + 1}`)));
  $("dimensions").textContent = Math.min(SHOWN[1], config.d_model) - 1;
  $("positions-lead").textContent = config.positions === "learned" ? "This checkpoint has learned a vector for each position; each row is one." : "Each row is the pattern of one position: fast waves on the left, slow ones on the right. Computed here, from the formula.";
  const half = `Weights are stored as float16: on ${examples.length} lines that moved no token's log-probability by more than ${error.toPrecision(2)}.`;
  const bfloat = config.compute_dtype === "bfloat16" ? " The package computes this checkpoint in bfloat16, the page in float32." : "";
  $("honest").textContent = `${half} The search is greedy: always the likeliest piece.${bfloat} Heat maps mix their colours by |x|^0.7, so that small numbers are seen.`;
  drawBars(table);
}

/** Parameters by part: of this checkpoint, and of the paper's base and big models. */
function drawBars(table) {
  const { num_heads: heads, d_k, d_v } = checkpoint.config;
  const own = { embedding: 0, attention: 0, "feed-forward": 0, norms: 0 };
  for (const [name, shape] of table) {
    const part = /_residual/.test(name) ? "norms" : /attention/.test(name) ? "attention" : /feed_forward/.test(name) ? "feed-forward" : "embedding";
    own[part] += shape.reduce((a, b) => a * b);
  }
  const paper = (d, f) => ({ embedding: 37000 * d, attention: 18 * 4 * d * d, "feed-forward": 12 * (2 * d * f + d + f), norms: 30 * 2 * d });
  const models = [["this checkpoint", own, 4 * decoderLayers() * heads * (d_k + d_v)], ["base", paper(512, 2048), 4 * 6 * 1024], ["big", paper(1024, 4096), 4 * 6 * 2048]];
  for (const [name, counts, cache] of models) {
    const total = Object.values(counts).reduce((a, b) => a + b);
    const bar = Object.entries(counts).map(([part, n], i) => {
      const text = `${part} ${(100 * n / total).toFixed(n / total < 0.1 ? 1 : 0)} %`;
      return make("span", { class: `tone-${i}`, style: `flex-grow: ${n / total}`, title: `${part}: ${count(n)}` }, n / total > 0.1 ? text : "");
    });
    const about = `${count(total)} parameters; ${count(cache)} bytes of cache per token written, in float32`;
    const said = Object.entries(counts).map(([part, n]) => `${part} ${count(n)}`).join(", ");
    $("bars").append(make("h3", {}, name), make("p", { class: "small" }, about), make("div", { class: "parts", role: "img", "aria-label": said }, ...bar), make("p", { class: "small" }, said));
  }
}

function listen() {
  const on = (id, event, act) => $(id).addEventListener(event, act);
  const set = (key) => ({ target }) => (Object.assign(state, { [key]: Number(target.value) }), draw());
  on("source", "input", () => (clearTimeout(typing), (typing = setTimeout(ask, WAIT))));
  on("source", "keydown", (event) => event.key === "Enter" && (event.preventDefault(), ask()));
  on("examples", "click", ({ target }) => target.matches("button") && (($("source").value = target.textContent), ask()));
  on("back", "click", () => go(-1));
  on("forward", "click", () => go(1));
  on("play", "click", toggle);
  on("pace", "input", () => (clearTimeout(timer), (timer = 0), (state.playing = true), play()));
  on("layer", "change", set("layer"));
  on("head", "change", set("head"));
  on("site-layer", "change", set("siteLayer"));
  on("site", "change", ({ target }) => (Object.assign(state, { site: target.value, query: -1 }), draw()));
  on("heads", "click", ({ target }) => {
    const button = target.closest("button");
    if (button) Object.assign(state, { siteHead: [...$("heads").children].indexOf(button) }), draw();
  });
  const pick = ({ target }) => target.closest(".box") && ((state.part = target.closest(".box").dataset.part), draw());
  on("figure1", "click", pick);
  on("figure1", "keydown", (event) => ["Enter", " "].includes(event.key) && (event.preventDefault(), pick(event)));
  const light = (query) => query !== state.query && ((state.query = query), draw());
  const rowAt = (event) => Math.floor((event.clientY - $("cells").getBoundingClientRect().top) / parseFloat($("matrix").style.getPropertyValue("--cell")));
  for (const id of ["cells", "queries"]) {
    on(id, "pointermove", (event) => light(rowAt(event)));
    on(id, "pointerleave", () => light(-1));
  }
  on("queries", "blur", () => light(-1));
  on("queries", "focus", () => light(Math.max(0, state.query)));
  on("queries", "keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) event.preventDefault(), light(Math.max(0, Math.min($("queries").children.length - 1, state.query + by)));
  });
  for (const id of ["a", "b"]) on(id, "input", draw);
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.target.closest("input, textarea, select, [role=listbox]")) return;
    if (event.key === "ArrowLeft") go(-1);
    else if (event.key === "ArrowRight") go(1);
    else if (event.key === " " && !event.target.closest("button")) event.preventDefault(), toggle();
  });
  for (const event of ["scroll", "resize"]) addEventListener(event, draw, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
