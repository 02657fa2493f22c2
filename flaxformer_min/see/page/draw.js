// Drawings on canvas and in SVG. Colours come from the style sheet, which knows light and dark.

/** Makes an element: attributes, then children, which are elements or text. */
function make(tag, attributes = {}, ...children) {
  const svg = ["path", "text", "g", "rect", "svg", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Returns the colours of the style sheet as [red, green, blue]. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).trim().match(/\w\w/g).map((hex) => parseInt(hex, 16));
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
  return stack(Array.from({ length: Math.ceil(row.length / columns) }, (_, r) => row.slice(r * columns, (r + 1) * columns)));
}

/** Paints cells of `size` pixels; those for which `hidden(row, column)` holds are hatched. */
function paintCells(canvas, { rows, columns, data }, size, hidden, lit = -1) {
  const [density, scale, pen] = [window.devicePixelRatio || 1, colours(), canvas.getContext("2d")];
  [canvas.width, canvas.height] = [columns * size * density, rows * size * density];
  [canvas.style.width, canvas.style.height] = [`${columns * size}px`, `${rows * size}px`];
  pen.scale(density, density);
  const gap = size > 5 ? 1 : 0;
  pen.strokeStyle = `rgba(${scale.ink}, 0.45)`;
  pen.beginPath();
  for (let i = 0; i < rows * columns; i++) {
    const [x, y] = [(i % columns) * size, Math.floor(i / columns) * size];
    pen.fillStyle = `rgb(${colour(hidden(Math.floor(i / columns), i % columns) ? 0 : data[i], 1, scale)})`;
    pen.fillRect(x, y, size - gap, size - gap);
    if (hidden(Math.floor(i / columns), i % columns)) {
      for (const shift of size > 11 ? [0.33, 0.66, 1] : [0.5, 1]) {
        pen.moveTo(x, y + shift * (size - gap));
        pen.lineTo(x + shift * (size - gap), y);
      }
    }
  }
  pen.stroke();
  if (lit < 0 || lit >= rows) return;
  pen.strokeStyle = `rgb(${scale.ink})`;
  pen.lineWidth = 1.5;
  pen.strokeRect(0.75, lit * size - 0.25, columns * size - 1.5, size);
}

/** Returns the curves from query words on the left to key words on the right. */
function curves({ rows, columns, data }, size, width, lit) {
  const group = make("g");
  const middle = (n) => (n + 0.5) * size;
  for (let i = 0; i < rows * columns; i++) {
    const [query, key] = [Math.floor(i / columns), i % columns];
    if (data[i] < 0.03 || (lit >= 0 && query !== lit)) continue;
    const d = `M0 ${middle(query)} C${width / 2} ${middle(query)} ${width / 2} ${middle(key)} ${width} ${middle(key)}`;
    group.append(make("path", { d, class: "arc", "stroke-width": 0.5 + 4 * data[i], "stroke-opacity": 0.15 + 0.85 * data[i] }));
  }
  return group;
}

/** Paints numbers as bars over a line of zero, with a mark below one of them. */
function paintBars(canvas, numbers, marked) {
  const [width, height, density] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  [canvas.width, canvas.height] = [width * density, height * density];
  const [pen, scale, step, most] = [canvas.getContext("2d"), colours(), width / numbers.length, largest(numbers) || 1];
  pen.scale(density, density);
  const lowest = Math.min(0, ...numbers);
  const zero = (height - 8) * (most / (most - lowest));
  numbers.forEach((value, n) => {
    const length = (value / (most - lowest)) * (height - 8);
    pen.fillStyle = `rgb(${value < 0 ? scale.minus : scale.plus})`;
    pen.fillRect(n * step, Math.min(zero, zero - length), Math.max(1, step - 1), Math.max(1, Math.abs(length)));
  });
  pen.fillStyle = `rgb(${scale.ink})`;
  pen.fillRect(marked * step, height - 4, Math.max(1, step - 1), 4);
}
