// What runs beside the page: it answers the newest line and forgets the one before.

import { Pieces } from "./pieces.js";
import { makeModel, unpack } from "./transformer.js";
import { translate } from "./translate.js";

const PATIENCE = 8; // milliseconds of work between two looks at the mailbox

let [ready, newest] = [null, 0];

/** Builds the model from the checkpoint's description and its weights in base64. */
function open({ checkpoint, weights }) {
  const bytes = Uint8Array.from(atob(weights), (c) => c.charCodeAt(0));
  const pieces = new Pieces(checkpoint.tokenizer);
  const model = makeModel(checkpoint.config, unpack(bytes, checkpoint.table), pieces.model.pad);
  ready = { model, pieces, offset: checkpoint.offset, never: new Set(checkpoint.never) };
  const positions = model.weights.target_positions || model.positions;
  self.postMessage({ ready: true, positions });
}

/** Sends what `translate` yields, unless a newer line has come. */
async function answer({ id, text }) {
  newest = id;
  let since = performance.now();
  for (const step of translate(ready.model, ready.pieces, ready.offset, ready.never, text)) {
    if (step) self.postMessage({ id, ...step });
    if (performance.now() - since < PATIENCE) continue;
    await new Promise((resolve) => setTimeout(resolve));
    if (newest !== id) return;
    since = performance.now();
  }
  self.postMessage({ id, done: true });
}

self.onmessage = ({ data }) => (data.weights ? open(data) : answer(data));
