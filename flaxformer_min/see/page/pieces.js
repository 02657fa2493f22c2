// Text to piece ids and back, as SentencePiece does it for a BPE model without rules of its own.

const [NORMAL, UNKNOWN, CONTROL, BYTE] = [1, 2, 3, 6]; // types of pieces in a model file
const SPACE = "\u2581";
const BLANK = /^[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*$/;

/** Whether a line is empty or white space only, as Python's str.isspace sees it. */
export function isBlank(text) {
  return BLANK.test(text);
}

export class Pieces {
  /** @param {Record<string, any>} model what flaxformer_min/see/pieces.py describes */
  constructor(model) {
    this.model = model;
    this.ids = new Map();
    this.bytes = new Map();
    model.pieces.forEach((piece, id) => {
      if (model.types[id] === NORMAL) this.ids.set(piece, id);
      if (model.types[id] === BYTE) this.bytes.set(parseInt(piece.slice(3, 5), 16), id);
    });
  }

  /** Returns the ids of one line, EOS last. */
  encode(text) {
    const { model } = this;
    if (text === "") return [model.eos];
    const composed = model.nfc ? text.normalize("NFC") : text;
    const marked = (model.dummyPrefix ? SPACE : "") + composed.replaceAll(" ", SPACE);
    const ids = [];
    let afterUnknown = false;
    for (const symbol of this.merge(marked)) {
      const id = this.ids.get(symbol);
      if (id !== undefined) ids.push(id);
      else if (model.byteFallback) ids.push(...this.asBytes(symbol));
      else if (!afterUnknown) ids.push(model.unk); // unknown characters in a row are one piece
      afterUnknown = id === undefined;
    }
    return [...ids, model.eos];
  }

  /** Merges neighbours while they make a piece: the best score first, of equal ones the leftmost. */
  merge(text) {
    const symbols = Array.from(text, (c) => (/[\ud800-\udfff]/u.test(c) ? "\ufffd" : c));
    const score = (n) => {
      const id =
        n < 0 || n + 1 >= symbols.length ? undefined : this.ids.get(symbols[n] + symbols[n + 1]);
      return id === undefined ? -Infinity : this.model.scores[id];
    };
    const scores = symbols.map((_, n) => score(n));
    for (;;) {
      let best = 0;
      for (let n = 1; n < scores.length; n++) if (scores[n] > scores[best]) best = n;
      if (!scores.length || scores[best] === -Infinity) return symbols;
      symbols.splice(best, 2, symbols[best] + symbols[best + 1]);
      scores.splice(best, 1);
      scores[best] = score(best);
      if (best > 0) scores[best - 1] = score(best - 1);
    }
  }

  asBytes(symbol) {
    return Array.from(new TextEncoder().encode(symbol), (byte) => this.bytes.get(byte));
  }

  /** Returns the text of the ids before the first EOS; bytes that are no UTF-8 become U+FFFD. */
  decode(ids) {
    const { model } = this;
    const end = ids.indexOf(model.eos);
    let [text, bytes, start] = ["", [], true];
    for (const id of end < 0 ? ids : ids.slice(0, end)) {
      if (model.types[id] === BYTE) {
        bytes.push(parseInt(model.pieces[id].slice(3, 5), 16));
      } else {
        [text, bytes] = [text + decodeBytes(bytes), []];
        if (model.types[id] === UNKNOWN) text += " \u2047 ";
        if (model.types[id] !== NORMAL) continue;
        start = start && text === "";
        const drop = start && model.dummyPrefix && model.pieces[id].startsWith(SPACE);
        text += model.pieces[id].slice(drop ? 1 : 0).replaceAll(SPACE, " ");
        start = start && !drop;
      }
    }
    return (text + decodeBytes(bytes)).replace(/[\n\r]/g, " ");
  }

  /** Returns the name of an id as the page writes it. */
  name(id) {
    return this.model.pieces[id];
  }

  /** Whether an id stands for no text of its own: padding, BOS, EOS. */
  isControl(id) {
    return this.model.types[id] === CONTROL;
  }
}

/** Decodes UTF-8; each byte that begins no whole character becomes U+FFFD. */
export function decodeBytes(bytes) {
  const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  let text = "";
  for (let at = 0; at < bytes.length;) {
    const lead = bytes[at];
    const size = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    try {
      text += strict.decode(new Uint8Array(bytes.slice(at, at + size)));
      at += size;
    } catch {
      text += "\ufffd";
      at += 1;
    }
  }
  return text;
}
