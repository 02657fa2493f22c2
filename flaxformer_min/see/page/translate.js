// Greedy search, told step by step.

import { isBlank } from "./pieces.js";
import { decodeStep, encode, logSoftmax, startDecoding } from "./transformer.js";

const CANDIDATES = 5;

/** Returns the likeliest ids that may be generated, best first: [[id, log-probability], ...]. */
export function likeliest(logProbs, never, count = CANDIDATES) {
  const best = [];
  for (let id = 0; id < logProbs.length; id++) {
    if (never.has(id) || (best.length === count && logProbs[id] <= best[count - 1][1])) continue;
    let place = best.length;
    while (place > 0 && best[place - 1][1] < logProbs[id]) place--;
    best.splice(place, 0, [id, logProbs[id]]);
    best.length = Math.min(best.length, count);
  }
  return best;
}

/** Returns the ids of a line, cut to what the model takes; the last id is EOS. */
export function encodeLine(model, pieces, text) {
  const ids = pieces.encode(text);
  const longest = model.config.max_length;
  return ids.length > longest ? [...ids.slice(0, longest - 1), pieces.model.eos] : ids;
}

/**
 * Translates a line; yields {source, taps}, then for each token what it was read from, `input`,
 * and {token, text, candidates, taps}.
 *
 * It also yields null whenever the caller may want to stop. A blank line yields nothing.
 */
export function* translate(model, pieces, offset, never, text) {
  if (isBlank(text)) return;
  const source = encodeLine(model, pieces, text);
  const taps = {};
  const steps = encode(model, source, taps);
  let encoded = steps.next();
  for (; !encoded.done; encoded = steps.next()) yield null;
  yield { source, taps };
  const written = [];
  const limit = Math.min(source.length + offset, model.config.max_length);
  const cache = startDecoding(model, encoded.value, limit);
  for (let token = pieces.model.bos; token !== pieces.model.eos && cache.length < limit;) {
    const seen = {};
    seen.logits = decodeStep(model, cache, token, seen);
    const logProbs = logSoftmax(seen.logits);
    seen.probabilities = { ...seen.logits, data: logProbs.map(Math.exp) };
    const candidates = likeliest(logProbs, never);
    const input = token;
    [[token]] = candidates;
    written.push(token);
    yield { input, token, text: pieces.decode(written), candidates, taps: seen };
  }
}
