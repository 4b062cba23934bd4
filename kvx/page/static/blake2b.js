// blake2b.js: BLAKE2b (RFC 7693), which manifests, seals and handovers of KVX are held together by. For texts of headers, not for caches.

const BLAKE_START = [0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n, 0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n];
const BLAKE_ORDER = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3], [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8], [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13], [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11], [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10], [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const blakeWord = (x) => BigInt.asUintN(64, x);
const blakeTurn = (x, n) => blakeWord((x >> n) | (x << (64n - n)));

// The hash of bytes, `size` bytes of it.
export function blake2b(bytes, size) {
  const state = [...BLAKE_START], view = new Uint8Array(Math.max(128, Math.ceil(bytes.length / 128) * 128)), data = new DataView(view.buffer);
  view.set(bytes);
  state[0] ^= 0x01010000n ^ BigInt(size);
  for (let at = 0; at < view.length; at += 128) {
    const isLast = at + 128 >= view.length, words = Array.from({ length: 16 }, (_, i) => data.getBigUint64(at + 8 * i, true)), v = [...state, ...BLAKE_START];
    v[12] ^= BigInt(isLast ? bytes.length : at + 128);
    if (isLast) v[14] = blakeWord(~v[14]);
    const mix = (a, b, c, d, x, y) => {
      v[a] = blakeWord(v[a] + v[b] + x);
      v[d] = blakeTurn(v[d] ^ v[a], 32n);
      v[c] = blakeWord(v[c] + v[d]);
      v[b] = blakeTurn(v[b] ^ v[c], 24n);
      v[a] = blakeWord(v[a] + v[b] + y);
      v[d] = blakeTurn(v[d] ^ v[a], 16n);
      v[c] = blakeWord(v[c] + v[d]);
      v[b] = blakeTurn(v[b] ^ v[c], 63n);
    };
    for (let round = 0; round < 12; round += 1) {
      const s = BLAKE_ORDER[round % 10];
      for (let i = 0; i < 4; i += 1) mix(i, 4 + i, 8 + i, 12 + i, words[s[2 * i]], words[s[2 * i + 1]]);
      for (let i = 0; i < 4; i += 1) mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, words[s[8 + 2 * i]], words[s[9 + 2 * i]]);
    }
    for (let i = 0; i < 8; i += 1) state[i] ^= v[i] ^ v[i + 8];
  }
  const out = new DataView(new ArrayBuffer(64));
  state.forEach((word, i) => out.setBigUint64(8 * i, word, true));
  return new Uint8Array(out.buffer, 0, size);
}

export const hexText = (bytes) => [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");

// JSON as Python's json.dumps writes it: ASCII, keys sorted where asked, these separators.
export function pythonJson(value, { isSorted = false, comma = ",", colon = ":" } = {}) {
  const inner = (x) => pythonJson(x, { isSorted, comma, colon });
  if (Array.isArray(value)) return `[${value.map(inner).join(comma)}]`;
  if (typeof value === "object" && value !== null) {
    const names = Object.keys(value);
    return `{${(isSorted ? names.sort() : names).map((name) => `${inner(name)}${colon}${inner(value[name])}`).join(comma)}}`;
  }
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => c === "\u007f" ? c : `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export const hashOfText = (text, size) => blake2b(new TextEncoder().encode(text), size);
