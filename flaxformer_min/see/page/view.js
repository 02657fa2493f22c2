// The page: what is shown of the steps that the worker has sent. It never computes the model.

const PACES = [Infinity, 1000, 500, 200, 80, 0]; // milliseconds a token, slowest first
const WAIT = 60; // milliseconds without a keystroke before a line is translated
const SHOWN = { rows: 50, columns: 64 }; // positions and dimensions of the heat map
const LAST = 5; // the pace at which everything is shown at once

const $ = (id) => document.getElementById(id);
const read = (id) => JSON.parse($(id).textContent);
const BLANKS = /[\u00a0\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]/g; // seen only if drawn
const plain = (piece) => piece.replaceAll("\u2581", "\u00b7").replace(BLANKS, "\u237d");
const count = (n) => n.toLocaleString("en-US");
const fixed = (x, digits = 2) => x.toFixed(digits).replace("-", "\u2212");
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const clamp = (x, least, most) => Math.max(least, Math.min(most, x));
const square = (size, least) => Array(2).fill(Math.max(least, Math.floor(size)));

/** What is seen follows from this. `at` is the number of the step shown, from 0; -1 is none. */
const state = {
  ...{ id: 0, text: "", source: [], taps: {}, steps: [], done: false, at: -1, playing: true },
  ...{ part: "cross-attention", layer: 0, head: 0 },
  ...{ site: "decoder/*/cross_attention", siteLayer: 0, siteHead: 0, query: -1 },
};
let checkpoint, parts, worker, positions, due, timer, typing;

function start() {
  [checkpoint, parts] = [read("checkpoint-data"), read("parts-data")];
  const code = new Blob([$("worker-code").textContent], { type: "text/javascript" });
  worker = new Worker(URL.createObjectURL(code));
  worker.onmessage = ({ data }) => receive(data);
  worker.postMessage({ checkpoint, weights: $("weights-data").textContent });
  state.layer = state.siteLayer = layersOf("decoder") - 1;
  describe();
  listen();
  $("source").value = checkpoint.examples[0];
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) $("pace").value = LAST;
  ask();
}

function layersOf(path) {
  const { num_layers, num_decoder_layers } = checkpoint.config;
  return path.startsWith("encoder") ? num_layers : (num_decoder_layers ?? num_layers);
}

const nameOf = (id) => plain(checkpoint.tokenizer.pieces[id]);
const shown = () => state.steps.slice(0, state.at + 1);
const ended = () => state.done && state.at === state.steps.length - 1;
const moving = () => state.playing && PACES[$("pace").value] !== Infinity;

function change(values) {
  Object.assign(state, values);
  draw();
}

/** Writes texts into elements: {id: text}. What is there already is not said aloud again. */
function say(texts) {
  for (const [id, text] of Object.entries(texts)) {
    if ($(id).textContent !== String(text)) $(id).textContent = text;
  }
}

/** Sends the line to the worker; what it says about an older line no longer counts. */
function ask() {
  const text = $("source").value.replace(/[\r\n]+/g, " ");
  const afresh = { steps: [], done: false, at: -1, playing: true, query: -1 };
  Object.assign(state, afresh, { id: state.id + 1, text, source: [], taps: {} });
  worker.postMessage({ id: state.id, text });
}

function receive(data) {
  if (data.ready) positions = data.positions;
  else if (data.id !== state.id) return;
  else if (data.source) Object.assign(state, { source: data.source, taps: data.taps });
  else if (data.done) state.done = true;
  else state.steps.push(data);
  play();
  draw();
}

/** Shows the next step when its time has come. */
function play() {
  const pace = PACES[$("pace").value];
  if (state.at < 0 && state.steps.length) state.at = 0;
  if (timer || !moving() || state.at + 1 >= state.steps.length) return;
  timer = setTimeout(() => {
    timer = 0;
    if (moving())
      state.at = pace ? Math.min(state.at + 1, state.steps.length - 1) : state.steps.length - 1;
    draw();
    play();
  }, pace);
}

function go(by) {
  if (state.steps.length === 0) return;
  change({ playing: false, at: clamp(state.at + by, 0, state.steps.length - 1) });
}

function toggle() {
  if (state.steps.length === 0) return;
  if (!ended() && moving()) return change({ playing: false });
  if (!moving()) $("pace").value = Math.max($("pace").value, 1);
  change({ playing: true, at: ended() ? 0 : state.at });
  play();
}

function draw() {
  due ??= requestAnimationFrame(() => {
    due = undefined;
    if (!state.done && state.steps.length === 0) return; // what is there stays until more is known
    for (const part of [drawTalk, drawStep, drawFigure, drawPanel]) part();
    if (isNear("attention")) drawAttention();
    if (isNear("order") && positions) drawOrder();
  });
}

function isNear(id) {
  const { top, bottom } = $(id).getBoundingClientRect();
  return top < innerHeight + 200 && bottom > -200;
}

function drawTalk() {
  const [step, total] = [state.steps[state.at], state.done ? ` of ${state.steps.length}` : ""];
  const action = step && ended() ? "Again" : step && moving() ? "Pause" : "Play";
  const place = step ? `token ${state.at + 1}${total}` : "";
  say({ target: step ? step.text : "", play: action, place });
  $("target").classList.toggle("writing", !ended());
  for (const id of ["back", "play", "forward"]) $(id).disabled = !step;
  for (const chip of $("examples").children) {
    chip.setAttribute("aria-pressed", chip.textContent === state.text);
  }
}

function drawStep() {
  const [step, layer] = [state.steps[state.at], layersOf("decoder") - 1];
  const writing = step
    ? `Writing token ${state.at + 1}: ${nameOf(step.token)}`
    : "Nothing to write";
  say({ writing, "looks-label": `Looks at (layer ${layer + 1}, mean of its heads)` });
  const heads = checkpoint.config.num_heads;
  const weights = step && step.taps[`decoder/${layer}/cross_attention/weights`];
  const mean = (s) =>
    sum(Array.from({ length: heads }, (_, h) => weights.data[h * weights.columns + s])) / heads;
  const looks = step ? state.source.map((id, s) => word(nameOf(id), mean(s))) : [];
  $("looks").replaceChildren(...looks);
  const inputs = shown().map(({ input }, n) => word(nameOf(input), 0, n === state.at));
  $("read").replaceChildren(...inputs);
  $("candidates").replaceChildren(...(step ? step.candidates.map(candidate) : []));
}

function word(text, weight, current = false) {
  const style = `--weight: ${weight.toFixed(3)}`;
  return make("span", { class: current ? "word current" : "word", style }, text);
}

function candidate([id, logProb], rank) {
  const p = Math.exp(logProb);
  const bar = make("span", { class: "bar", style: `--share: ${p}` });
  const number = p < 0.0005 ? "<0.1 %" : `${fixed(100 * p, 1)} %`;
  const name = make("b", {}, nameOf(id));
  return make("li", { class: rank ? "" : "chosen" }, name, bar, make("span", {}, number));
}

/** Returns what a part shows: a matrix, its axes in words, and for weights the causal mask. */
function valuesOf(part, layer, head) {
  const path = parts[part].tap.replace("*", layer);
  const [encoder, causal] = [path.startsWith("encoder"), part === "decoder-attention"];
  const down = encoder ? "S" : "T";
  if (!path.includes("/")) {
    const row = state.steps[state.at]?.taps[path].data ?? [];
    return { matrix: grid(row), axes: "every id of the vocabulary, row after row" };
  }
  if (path.endsWith("/weights")) {
    const axes = `queries ${down} down, keys ${causal ? "T" : "S"} across`;
    return { matrix: weightsOf(path, head), axes, limit: 1, causal };
  }
  const all = encoder ? state.taps[path] : stack(shown().map(({ taps }) => taps[path].data));
  const across = path.endsWith("hidden") ? "F" : "D";
  return { matrix: all ?? stack([]), axes: `positions ${down} down, ${across} across` };
}

/** Returns the weights of one head, [queries, keys]. */
function weightsOf(path, head) {
  const row = ({ data, columns }, n) => data.subarray(n * columns, (n + 1) * columns);
  if (!path.startsWith("encoder")) return stack(shown().map(({ taps }) => row(taps[path], head)));
  const [all, size] = [state.taps[path], state.source.length];
  return stack(Array.from({ length: size }, (_, query) => row(all, head * size + query)));
}

function drawFigure() {
  const scratch = document.createElement("canvas");
  for (const box of document.querySelectorAll("#figure1 .box")) {
    const { part } = box.dataset;
    box.setAttribute("aria-pressed", part === state.part);
    const layer = Math.min(state.layer, layersOf(parts[part].tap) - 1);
    const { matrix, limit } = part === "softmax" ? bestFive() : valuesOf(part, layer, state.head);
    paint(scratch, matrix, limit);
    const drawn = matrix.data.length ? scratch.toDataURL() : "data:,";
    box.querySelector("image").setAttribute("href", drawn);
  }
}

/** The five likeliest as a row: all probabilities would not be seen in a box. */
function bestFive() {
  const candidates = state.steps[state.at]?.candidates ?? [];
  return { matrix: stack([candidates.map(([, logProb]) => Math.exp(logProb))]), limit: 1 };
}

function drawPanel() {
  const [about, { config, tokenizer }] = [parts[state.part], checkpoint];
  const layer = Math.min(state.layer, layersOf(about.tap) - 1);
  const { matrix, axes, limit, causal } = valuesOf(state.part, layer, state.head);
  const learned = config.positions === "learned" && about.learned;
  const swish = config.activation === "swish" && about.swish;
  $("formula").innerHTML = learned || swish || about.formula;
  $("layer-choice").hidden = !about.tap.includes("*");
  $("head-choice").hidden = causal === undefined;
  [$("layer").value, $("head").value] = [layer, state.head];
  const letters = { D: config.d_model, H: config.num_heads, K: config.d_k, U: config.d_v };
  const lengths = { S: state.source.length, T: state.at + 1, V: tokenizer.pieces.length };
  const size = { ...letters, ...lengths, F: config.d_ff };
  const shape = ([name, axes]) => {
    const numbers = axes.split(" ").map((letter) => `${letter} = ${count(size[letter])}`);
    return make("li", {}, make("b", {}, name), ` [${numbers.join(", ")}]`);
  };
  $("shapes").replaceChildren(...about.shapes.map(shape));
  const most = paint($("heat"), matrix, limit);
  $("heat").style = "";
  if (limit && matrix.rows) {
    const { clientWidth: width, clientHeight: height } = $("heat").parentElement;
    const cell = [width / matrix.columns, height / matrix.rows].map((x) => Math.floor(x) || 1);
    paintCells($("heat"), matrix, cell, (q, k) => causal && k > q);
  }
  $("heat").setAttribute("aria-label", `${about.name}: ${axes}`);
  const lowest = matrix.data.some((x) => x < 0) ? -1 : 0;
  say({ name: about.name, does: about.does, code: about.code, later: about.later });
  say({ low: lowest ? fixed(-most) : "0", high: fixed(most), axes });
  const ramp = Float32Array.from({ length: 64 }, (_, i) => lowest + (i / 63) * (1 - lowest));
  paint($("legend"), { rows: 1, columns: 64, data: ramp }, 1);
}

function drawAttention() {
  const { site, siteHead } = state;
  const path = `${site.replace("*", Math.min(state.siteLayer, layersOf(site) - 1))}/weights`;
  const causal = site === "decoder/*/self_attention";
  const hidden = (q, k) => causal && k > q;
  const weights = weightsOf(path, siteHead);
  const written = shown().map((step) => nameOf(step.input));
  const source = state.source.map(nameOf);
  const queries = site.startsWith("encoder") ? source : written;
  const keys = causal ? written : source;
  const most = Math.max(keys.length, queries.length, 1);
  const lit = Math.min(state.query, queries.length - 1);
  const cell = square(Math.min(26, Math.min(innerWidth - 230, 560) / most), 12);
  $("large").classList.toggle("long", most > 46);
  const small = square(Math.min(78, innerWidth / 4 - 30) / most, 1);
  [...$("heads").children].forEach((button, head) => {
    button.setAttribute("aria-pressed", head === siteHead);
    paintCells(button.firstChild, weightsOf(path, head), small, hidden);
  });
  $("matrix").style.setProperty("--cell", `${cell[0]}px`);
  paintCells($("cells"), weights, cell, hidden, lit);
  const about = `${queries.length} queries, ${keys.length} keys`;
  $("cells").setAttribute("aria-label", `Weights of head ${siteHead + 1}: ${about}`);
  const option = (name, n) =>
    make("div", { role: "option", id: `query-${n}`, "aria-selected": n === lit }, name);
  const isRead = (k) => lit >= 0 && weights.data[lit * weights.columns + k] > 0.1;
  const target = (name, k) => make("span", { class: isRead(k) ? "lit" : "" }, name);
  $("queries").replaceChildren(...queries.map(option));
  $("queries").setAttribute("aria-activedescendant", lit < 0 ? "" : `query-${lit}`);
  $("keys").replaceChildren(...keys.map((name) => make("span", {}, name)));
  $("targets").replaceChildren(...keys.map(target));
  $("arcs").replaceChildren(curves(weights, cell[1], $("arcs").clientWidth, most, lit));
  say({ told: inWords(weights, queries, keys, lit) });
}

function inWords({ columns, data }, queries, keys, lit) {
  if (lit < 0) return "Point at a row, or go through the rows with the arrow keys.";
  const row = keys.map((key, k) => [key, data[lit * columns + k] ?? 0]);
  const best = row.sort((a, b) => b[1] - a[1]).filter(([, weight]) => weight >= 0.005);
  const read = best.slice(0, 3).map(([key, weight]) => `“${key}” ${fixed(weight)}`);
  return `“${queries[lit]}” looks at ${read.join(", ")}`;
}

function drawOrder() {
  const { data, columns } = positions;
  const rows = Math.min(SHOWN.rows, positions.rows);
  const row = (n) => data.subarray(n * columns, (n + 1) * columns);
  const all = Array.from({ length: rows }, (_, n) => row(n));
  paint($("waves"), stack(all.map((x) => x.slice(0, SHOWN.columns))));
  const [a, b] = [$("a").value, $("b").value];
  const products = all.map((x) => sum(x.map((value, i) => value * row(a)[i])));
  paintBars($("products"), products, b);
  const [S, T] = [state.source.length, state.at + 1];
  const width = 8 * Math.ceil((S + 1) / 8);
  const cell = square(Math.min(12, 190 / Math.max(width, T)), 3);
  const mask = (id, rows, columns, hidden) => {
    const data = new Float32Array(rows * columns).fill(0.35);
    paintCells($(id), { rows, columns, data }, cell, hidden);
  };
  mask("mask-padding", 1, width, (_, k) => k >= S);
  mask("mask-causal", T, T, (q, k) => k > q);
  mask("mask-cross", T, width, (_, k) => k >= S);
  const filled = `in a batch this line of ${S} pieces might be filled up to ${width}.`;
  say({
    dot: `PE(${a}) · PE(${b}) = ${fixed(products[b])}`,
    "about-padding": `Padding, [1, 1, 1, ${width}]: ${filled}`,
    "about-causal": `Causal, [1, 1, ${T}, ${T}]: a query reads itself and what came before.`,
    "about-cross": `Cross, [1, 1, ${T}, ${width}]: the source's padding, for every query.`,
  });
}

/** Fills in what never changes. */
function describe() {
  const { config, step, examples, table, error, measured, languages } = checkpoint;
  const language = new Intl.DisplayNames(["en"], { type: "language" });
  const [from, to] = languages.map((c) => (/^[a-z]{2,3}(-\w+)*$/i.test(c) ? language.of(c) : c));
  const total = count(sum(table.map(([, shape]) => shape.reduce((a, b) => a * b))));
  const learned = config.positions === "learned";
  const rounded = `moved no token's log-probability by more than ${Math.ceil(error * 1e5) / 1e5} nats`;
  const bfloat16 =
    config.compute_dtype === "bfloat16" ? "float32, the package in bfloat16" : "float32";
  say({
    facts: `${from} to ${to} · ${total} parameters · step ${count(step)} · runs in this page alone`,
    ...{ "source-label": from, "target-label": to },
    ...{ "times-encoder": `${layersOf("encoder")} ×`, "times-decoder": `${layersOf("decoder")} ×` },
    "last-dimension": Math.min(SHOWN.columns, config.d_model) - 1,
    "last-position": Math.min(SHOWN.rows, config.max_length) - 1,
    "positions-lead": $(learned ? "learned" : "sinusoidal").textContent,
    rounding: `on ${count(measured)} lines that ${rounded}. The page computes in ${bfloat16}.`,
  });
  const range = (n, item) => Array.from({ length: n }, (_, i) => item(i));
  const option = (i) => make("option", { value: i }, i + 1);
  const head = (i) => make("button", { "aria-label": `Head ${i + 1}` }, make("canvas"), i + 1);
  $("examples").append(...examples.slice(1).map((text) => make("button", { title: text }, text)));
  $("layer").append(...range(Math.max(layersOf("encoder"), layersOf("decoder")), option));
  $("site-layer").append(...[...$("layer").children].map((each) => each.cloneNode(true)));
  $("site-layer").value = state.siteLayer;
  $("head").append(...range(config.num_heads, option));
  $("heads").append(...range(config.num_heads, head));
  for (const id of ["a", "b"]) $(id).max = Math.min(SHOWN.rows, config.max_length) - 1;
  drawBar(table);
}

/** Parameters of this checkpoint by part, as one bar; those of base and big are in page.html. */
function drawBar(table) {
  const { num_heads, d_k, d_v } = checkpoint.config;
  const of = { embedding: 0, attention: 0, "feed-forward": 0, norms: 0 };
  for (const [name, shape] of table) {
    const [, norm, attention, ffn] = name.match(/(_residual)|(attention\/)|(feed_forward\/)|$/);
    of[norm ? "norms" : attention ? "attention" : ffn ? "feed-forward" : "embedding"] +=
      shape.reduce((a, b) => a * b);
  }
  const total = sum(Object.values(of));
  const piece = ([part, n], i) => {
    const text = n / total > 0.1 ? `${part} ${fixed((100 * n) / total, 0)} %` : "";
    return make("span", { class: `tone-${i}`, style: `flex-grow: ${n / total}` }, text);
  };
  const cache = count(4 * layersOf("decoder") * num_heads * (d_k + d_v));
  $("own-bar").append(...Object.entries(of).map(piece));
  say({
    "own-total": `${count(total)} parameters; ${cache} bytes of cache per token written, in float32`,
    "own-parts": Object.entries(of)
      .map(([part, n]) => `${part} ${count(n)}`)
      .join(", "),
  });
}

function listen() {
  const on = (id, event, act) => $(id).addEventListener(event, act);
  const choose = (id, key) => on(id, "change", () => change({ [key]: Number($(id).value) }));
  for (const key of ["layer", "head"]) choose(key, key);
  choose("site-layer", "siteLayer");
  on("site", "change", () => change({ site: $("site").value, query: -1 }));
  on("source", "input", () => {
    clearTimeout(typing);
    typing = setTimeout(ask, WAIT);
  });
  on("source", "keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    ask();
  });
  on("examples", "click", ({ target }) => {
    if (target === $("examples")) return;
    $("source").value = target.textContent;
    ask();
  });
  on("back", "click", () => go(-1));
  on("forward", "click", () => go(1));
  on("play", "click", toggle);
  on("pace", "input", () => {
    timer = clearTimeout(timer);
    change({ playing: true });
    play();
  });
  const pick = ({ target }) => {
    const box = target.closest(".box");
    if (box) change({ part: box.dataset.part });
  };
  on("figure1", "click", pick);
  on("figure1", "keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    pick(event);
  });
  on("heads", "click", ({ target }) => {
    const head = [...$("heads").children].indexOf(target.closest("button"));
    if (head >= 0) change({ siteHead: head });
  });
  for (const id of ["a", "b"]) on(id, "input", draw);
  listenToRows(on);
  document.addEventListener("keydown", pressed);
  for (const event of ["scroll", "resize"]) addEventListener(event, draw, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

/** Lights the row of the attention matrix that is pointed at, or that the keys have come to. */
function listenToRows(on) {
  const light = (query) => query !== state.query && change({ query });
  for (const id of ["cells", "queries"]) {
    on(id, "pointermove", ({ clientY }) => {
      const { top, height } = $("queries").getBoundingClientRect();
      light(Math.floor(((clientY - top) / height) * $("queries").children.length));
    });
    on(id, "pointerleave", () => light(-1));
  }
  on("queries", "blur", () => light(-1));
  on("queries", "focus", () => light(Math.max(0, state.query)));
  on("queries", "keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    light(clamp(state.query + by, 0, $("queries").children.length - 1));
  });
}

/** Space pauses and arrows step, unless the key belongs to the control that has the focus. */
function pressed(event) {
  const control = event.target.closest("input, textarea, select, [role=listbox]");
  if (event.defaultPrevented || control) return;
  if (event.key === "ArrowLeft") go(-1);
  if (event.key === "ArrowRight") go(1);
  if (event.key !== " " || event.target.closest("button")) return;
  event.preventDefault();
  toggle();
}
