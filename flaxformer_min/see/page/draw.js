// Drawings on canvas and in SVG. Colours come from the style sheet, which knows light and dark.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element: attributes, then children, which are elements or text. */
function make(tag, attributes = {}, ...children) {
  const drawn = tag === "path" || tag === "svg";
  const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Returns the colours of the style sheet as [red, green, blue]. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const hex = (name) => style.getPropertyValue(name).match(/[0-9a-f]{2}/g);
  const rgb = (name) => hex(name).map((part) => parseInt(part, 16));
  return { plus: rgb("--plus"), minus: rgb("--minus"), bed: rgb("--bed"), ink: rgb("--ink") };
}

/** Mixes the colour of a number: 0 is the bed, +limit is blue, -limit is copper. */
function colour(value, limit, { plus, minus, bed }) {
  const share = Math.min(1, Math.abs(value) / (limit || 1)) ** 0.7;
  const end = value < 0 ? minus : plus;
  return bed.map((from, i) => Math.round(from + (end[i] - from) * share));
}

function largest(data) {
  let most = 0;
  for (const value of data) most = Math.max(most, Math.abs(value));
  return most;
}

/** Paints a matrix, one pixel a cell; the style sheet stretches the canvas. Returns the limit. */
function paint(canvas, { rows, columns, data }, limit = largest(data)) {
  [canvas.width, canvas.height] = [columns || 1, rows || 1];
  const [pen, scale] = [canvas.getContext("2d"), colours()];
  const image = pen.createImageData(columns || 1, rows || 1);
  data.forEach((value, i) => image.data.set([...colour(value, limit, scale), 255], 4 * i));
  pen.putImageData(image, 0, 0);
  return limit;
}

/** Returns a matrix of rows that may be of different lengths; the rest of a row is 0. */
function stack(rows) {
  const columns = Math.max(0, ...rows.map((row) => row.length));
  const data = new Float32Array(rows.length * columns);
  rows.forEach((row, r) => data.set(row, r * columns));
  return { rows: rows.length, columns, data };
}

/** Returns a long row as a grid about twice as wide as it is high. */
function grid(row) {
  const columns = Math.ceil(Math.sqrt(2 * row.length));
  const rows = [];
  for (let n = 0; n < row.length; n += columns) rows.push(row.slice(n, n + columns));
  return stack(rows);
}

/** Paints cells of some pixels; those for which `hidden(row, column)` holds are hatched. */
function paintCells(canvas, { rows, columns, data }, [width, height], hidden, lit = -1) {
  const [density, scale] = [window.devicePixelRatio || 1, colours()];
  [canvas.width, canvas.height] = [columns * width * density, rows * height * density];
  [canvas.style.width, canvas.style.height] = [`${columns * width}px`, `${rows * height}px`];
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  const gap = Math.min(width, height) > 5 ? 1 : 0;
  pen.strokeStyle = `rgba(${scale.ink}, 0.4)`;
  for (let i = 0; i < rows * columns; i++) {
    const [row, column] = [Math.floor(i / columns), i % columns];
    const cell = [column * width, row * height, width - gap, height - gap];
    pen.fillStyle = `rgb(${colour(hidden(row, column) ? 0 : data[i], 1, scale)})`;
    pen.fillRect(...cell);
    if (hidden(row, column)) hatch(pen, ...cell);
  }
  if (lit < 0 || lit >= rows) return;
  pen.strokeStyle = `rgb(${scale.ink})`;
  pen.lineWidth = 1.5;
  pen.strokeRect(0.75, lit * height + 0.25, columns * width - 2.5, height - 1.5);
}

/** Draws lines that rise at 45 degrees through one cell, and nowhere else. */
function hatch(pen, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.beginPath();
  const space = Math.max(4, Math.min(6, height / 2));
  for (let start = space / 2; start < width + height; start += space) {
    pen.moveTo(x + start, y);
    pen.lineTo(x + start - height, y + height);
  }
  pen.stroke();
  pen.restore();
}

/** Draws the curves from query words on the left to key words on the right; `lit` is one query. */
function curves({ rows, columns, data }, size, width, words, lit) {
  const svg = make("svg", { width, height: size * words, role: "img" });
  svg.setAttribute("aria-label", "Arcs from queries to keys, as strong as the weight");
  for (let i = 0; i < rows * columns; i++) {
    const [query, key] = [Math.floor(i / columns), i % columns];
    if (data[i] < 0.03 || (lit >= 0 && query !== lit)) continue;
    const [from, to, half] = [(query + 0.5) * size, (key + 0.5) * size, width / 2];
    const d = `M0 ${from} C${half} ${from} ${half} ${to} ${width} ${to}`;
    const strength = { "stroke-width": 0.5 + 4 * data[i], "stroke-opacity": 0.15 + 0.85 * data[i] };
    svg.append(make("path", { d, class: "arc", ...strength }));
  }
  return svg;
}

/** Paints numbers as bars over a line of zero, with a mark below one of them. */
function paintBars(canvas, numbers, marked) {
  const density = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  [canvas.width, canvas.height] = [width * density, height * density];
  const [pen, { plus, minus, ink }] = [canvas.getContext("2d"), colours()];
  pen.scale(density, density);
  const [lowest, highest] = [Math.min(0, ...numbers), Math.max(1e-9, ...numbers)];
  const y = (value) => ((highest - value) / (highest - lowest)) * (height - 8);
  const step = width / numbers.length;
  numbers.forEach((value, n) => {
    pen.fillStyle = `rgb(${value < 0 ? minus : plus})`;
    pen.fillRect(n * step, Math.min(y(0), y(value)), step - 1, Math.abs(y(value) - y(0)));
  });
  pen.fillStyle = `rgb(${ink})`;
  pen.fillRect(marked * step, height - 4, step - 1, 4);
}
