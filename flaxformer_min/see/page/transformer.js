// The 2017 Transformer as flaxformer_min/model/ computes it: arrays in, arrays out, no document.
//
// A matrix is {rows, columns, data}, with data a Float32Array, row after row. Letters: S source
// length, T target length, D d_model, H heads, K d_k, U d_v, V vocabulary. One sentence is
// computed at a time, so that there is no batch. `taps` collect what the page shows: matrices by
// names such as "encoder/0/self_attention/weights". Sums are taken in float64.

/** @typedef {{rows: number, columns: number, data: Float32Array}} Matrix */

/** Returns a matrix of zeros. @returns {Matrix} */
export function matrix(rows, columns) {
  return { rows, columns, data: new Float32Array(rows * columns) };
}

/** Returns the float32 numbers of little-endian float16 bytes. */
export function fromFloat16(bytes) {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = (bits & 1023) / 1024;
    table[bits] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  }
  const numbers = new Float32Array(bytes.length / 2);
  for (let i = 0; i < numbers.length; i++) {
    numbers[i] = table[bytes[2 * i] | (bytes[2 * i + 1] << 8)];
  }
  return numbers;
}

/** Cuts the block of all weights into matrices by name; a vector has one row. */
export function unpack(bytes, table) {
  const numbers = fromFloat16(bytes);
  const weights = {};
  let start = 0;
  for (const [name, shape] of table) {
    const columns = shape[shape.length - 1];
    const rows = shape.length > 1 ? shape[0] : 1;
    weights[name] = { rows, columns, data: numbers.subarray(start, start + rows * columns) };
    start += rows * columns;
  }
  return weights;
}

/** Returns PE [length, D]: sines and cosines of one angle side by side (section 3.5). */
export function sinusoidalPositions(length, d) {
  const table = matrix(length, d);
  for (let position = 0; position < length; position++) {
    for (let i = 0; i < d; i++) {
      const angle = position / 10000 ** ((i - (i % 2)) / d);
      table.data[position * d + i] = i % 2 ? Math.cos(angle) : Math.sin(angle);
    }
  }
  return table;
}

/** Returns x W + b: [T, I] times [I, O]. The inner loop runs along memory. */
export function affine(x, kernel, bias) {
  const [inputs, outputs] = [kernel.rows, kernel.columns];
  const y = matrix(x.rows, outputs);
  const sums = new Float64Array(outputs);
  for (let row = 0; row < x.rows; row++) {
    sums.fill(0);
    for (let i = 0; i < inputs; i++) {
      const factor = x.data[row * inputs + i];
      const start = i * outputs;
      if (factor !== 0)
        for (let o = 0; o < outputs; o++) sums[o] += factor * kernel.data[start + o];
    }
    if (bias) for (let o = 0; o < outputs; o++) sums[o] += bias.data[o];
    y.data.set(sums, row * outputs);
  }
  return y;
}

/** Returns LayerNorm(x) of each row, with scale and bias. */
export function layerNorm(x, scale, bias, epsilon) {
  const y = matrix(x.rows, x.columns);
  for (let start = 0; start < x.data.length; start += x.columns) {
    let mean = 0;
    for (let i = 0; i < x.columns; i++) mean += x.data[start + i] / x.columns;
    let variance = 0;
    for (let i = 0; i < x.columns; i++) variance += (x.data[start + i] - mean) ** 2 / x.columns;
    const factor = 1 / Math.sqrt(variance + epsilon);
    for (let i = 0; i < x.columns; i++) {
      y.data[start + i] = (x.data[start + i] - mean) * factor * scale.data[i] + bias.data[i];
    }
  }
  return y;
}

/**
 * Returns softmax(Q K^T / sqrt(d_k)) V of all heads side by side, and the weights.
 *
 * Query is [T, H x K], keys are [S, H x K], values are [S, H x U]; the weights are [H x T, S]. A key
 * that is not `visible` has weight 0.
 */
export function attend(query, keys, values, heads, visible) {
  const [T, S, K, U] = [query.rows, keys.rows, query.columns / heads, values.columns / heads];
  const weights = matrix(heads * T, S); // scores first, in their place
  const context = matrix(T, values.columns);
  const sums = new Float64Array(U);
  for (let row = 0; row < heads * T; row++) {
    const [head, t] = [Math.floor(row / T), row % T];
    let largest = -Infinity;
    for (let s = 0; s < S; s++) {
      const [q, k] = [t * query.columns + head * K, s * keys.columns + head * K];
      let score = 0;
      for (let i = 0; i < K; i++) score += query.data[q + i] * keys.data[k + i];
      score = visible && !visible[s] ? -Infinity : score / Math.sqrt(K);
      weights.data[row * S + s] = score;
      if (score > largest) largest = score;
    }
    if (largest === -Infinity) {
      weights.data.fill(0, row * S, (row + 1) * S); // no key is visible: weights and output are 0
      continue;
    }
    let total = 0;
    for (let s = 0; s < S; s++) {
      total += weights.data[row * S + s] = Math.exp(weights.data[row * S + s] - largest);
    }
    sums.fill(0);
    for (let s = 0; s < S; s++) {
      const weight = (weights.data[row * S + s] /= total);
      const v = s * values.columns + head * U;
      for (let i = 0; i < U; i++) sums[i] += weight * values.data[v + i];
    }
    context.data.set(sums, t * context.columns + head * U);
  }
  return { weights, context };
}

function note(taps, path, found) {
  if (taps) for (const [name, value] of Object.entries(found)) taps[`${path}/${name}`] = value;
}

/** Returns LayerNorm(x + output), the residual connection of the sublayer at `path`. */
function residual(model, path, x, output, taps) {
  const sum = matrix(x.rows, x.columns);
  for (let i = 0; i < sum.data.length; i++) sum.data[i] = x.data[i] + output.data[i];
  const { [`${path}_residual/scale`]: scale, [`${path}_residual/bias`]: bias } = model.weights;
  const norm = layerNorm(sum, scale, bias, model.config.layer_norm_epsilon);
  note(taps, `${path}_residual`, { norm });
  return norm;
}

/** Projects x by the kernel of this name at `path`, with its bias if the model has one. */
function project(model, path, name, x) {
  return affine(x, model.weights[`${path}/${name}`], model.weights[`${path}/${name}_bias`]);
}

function keysValues(model, path, x) {
  return { keys: project(model, path, "key", x), values: project(model, path, "value", x) };
}

/** Multi-head attention of x to keys and values, in its residual connection. */
function attention(model, path, x, { keys, values }, visible, taps) {
  const query = project(model, path, "query", x);
  const { weights, context } = attend(query, keys, values, model.config.num_heads, visible);
  const output = project(model, path, "output", context);
  note(taps, path, { weights });
  return residual(model, path, x, output, taps);
}

/** The feed-forward network of each row, in its residual connection. */
function feedForward(model, path, x, taps) {
  const hidden = project(model, path, "up", x);
  const swish = model.config.activation === "swish";
  for (let i = 0; i < hidden.data.length; i++) {
    const h = hidden.data[i];
    hidden.data[i] = swish ? h / (1 + Math.exp(-h)) : Math.max(0, h);
  }
  const output = project(model, path, "down", hidden);
  note(taps, path, { hidden });
  return residual(model, path, x, output, taps);
}

/** Returns rows of the table times sqrt(D), plus positions from `first` on. */
function embed(model, side, ids, first, taps) {
  const { config, weights } = model;
  const ownTable = side === "encoder" && config.share_embeddings !== "all";
  const table = weights[ownTable ? "source_embedding" : "embedding"];
  const learned = weights[side === "encoder" ? "source_positions" : "target_positions"];
  const positions = learned || model.positions;
  const [embedding, sum] = [matrix(ids.length, table.columns), matrix(ids.length, table.columns)];
  const from = first * table.columns;
  ids.forEach((id, row) => {
    for (let i = 0; i < table.columns; i++) {
      const at = row * table.columns + i;
      embedding.data[at] = table.data[id * table.columns + i] * Math.sqrt(table.columns);
      sum.data[at] = embedding.data[at] + positions.data[from + at];
    }
  });
  note(taps, side, { embedding, sum });
  return sum;
}

/** Returns a model: config, weights by name, the id of padding, and the table of positions. */
export function makeModel(config, weights, padId) {
  const positions = sinusoidalPositions(config.max_length, config.d_model);
  return { config, weights, padId, positions };
}

/** Encodes ids as memory [S, D]; yields after each layer, so that a caller can stop. */
export function* encode(model, ids, taps) {
  const visible = ids.map((id) => id !== model.padId);
  let x = embed(model, "encoder", ids, 0, taps);
  for (let layer = 0; layer < model.config.num_layers; layer++) {
    const path = `encoder/${layer}`;
    const itself = keysValues(model, `${path}/self_attention`, x);
    x = attention(model, `${path}/self_attention`, x, itself, visible, taps);
    x = feedForward(model, `${path}/feed_forward`, x, taps);
    yield layer;
  }
  return { memory: x, visible };
}

/** Returns an empty cache of at most `length` positions, with the keys and values of the memory. */
export function startDecoding(model, { memory, visible }, length) {
  const { config } = model;
  const layers = [];
  for (let n = 0; n < (config.num_decoder_layers || config.num_layers); n++) {
    const keys = matrix(length, config.num_heads * config.d_k);
    const values = matrix(length, config.num_heads * config.d_v);
    const cross = keysValues(model, `decoder/${n}/cross_attention`, memory);
    layers.push({ past: { keys, values }, cross });
  }
  return { layers, visible, length: 0 };
}

/** Writes a row into a cache; returns the cache as far as it is filled. */
function withRow({ columns, data }, position, row) {
  data.set(row.data, position * columns);
  return { rows: position + 1, columns, data: data.subarray(0, (position + 1) * columns) };
}

/** Decodes one more token, whose keys and values join the cache; returns logits [1, V]. */
export function decodeStep(model, cache, token, taps) {
  const [position, { config, weights }] = [cache.length, model];
  let x = embed(model, "decoder", [token], position, taps);
  cache.layers.forEach(({ past, cross }, n) => {
    const path = `decoder/${n}`;
    const own = `${path}/self_attention`;
    const fresh = keysValues(model, own, x);
    const keys = withRow(past.keys, position, fresh.keys);
    const values = withRow(past.values, position, fresh.values);
    x = attention(model, own, x, { keys, values }, null, taps);
    x = attention(model, `${path}/cross_attention`, x, cross, cache.visible, taps);
    x = feedForward(model, `${path}/feed_forward`, x, taps);
  });
  cache.length++;
  return logits(
    x,
    weights[config.share_embeddings === "none" ? "output_embedding" : "embedding"],
    weights.logits_bias,
  );
}

/** Returns states times the transposed table: [T, D] -> [T, V]. */
export function logits(states, table, bias) {
  const found = matrix(states.rows, table.rows);
  for (let row = 0; row < states.rows; row++) {
    for (let id = 0; id < table.rows; id++) {
      let sum = bias ? bias.data[id] : 0;
      const [x, w] = [row * table.columns, id * table.columns];
      for (let i = 0; i < table.columns; i++) sum += states.data[x + i] * table.data[w + i];
      found.data[row * table.rows + id] = sum;
    }
  }
  return found;
}

/** Returns the log-probabilities of one row of logits. */
export function logSoftmax({ data }) {
  let [largest, total] = [-Infinity, 0];
  for (const logit of data) largest = Math.max(largest, logit);
  for (const logit of data) total += Math.exp(logit - largest);
  return data.map((logit) => logit - largest - Math.log(total));
}
