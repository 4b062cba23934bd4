// content_digest.js: the digest of a cache's content, block by block, equal in every layout: the definition in kvx/ops/move/digest.py,
// row by row. And where two caches differ. A cache is place.js's, its bytes one Uint8Array for each buffer.
import { locateUnit } from "./place.js"
import { hashOfText } from "./blake2b.js"

const DIGEST_GOLDEN = 0x9E3779B97F4A7C15n;
const DIGEST_ROW_SCALE = 1 << 23, DIGEST_ROW_TENSOR = 1 << 22;
const mask64 = (x) => BigInt.asUintN(64, x);
const GRANULARITIES = ["none", "tensor", "block", "head", "block_head", "token_head", "group"];

function mix64(x) {
  x = mask64((x ^ x >> 30n) * 0xBF58476D1CE4E5B9n);
  x = mask64((x ^ x >> 27n) * 0x94D049BB133111EBn);
  return x ^ x >> 31n;
}

// Axes of a state's plane whose rows stand one behind the other under one key.
const numberedAxes = (plane) => plane.axes.slice(0, -1).filter(([axis]) => axis !== plane.shardAxis);

// Rows of a plane in a layer of a block: where each lies, what ranks share out (a head), and which of those behind one another it is.
function planeRows(cache, plane) {
  if (!cache.isState) return Array.from({ length: cache.spec.num_kv_heads }, (_, head) => [{ head }, head + cache.headStart, 0]);
  const numbered = numberedAxes(plane).reverse(), count = numbered.reduce((n, [, size]) => n * size, 1), out = [];
  let local = 0;
  for (const [first, size] of plane.shares) for (let s = 0; s < size; s += 1, local += 1) for (let n = 0; n < count; n += 1) {
    const index = { [plane.shardAxis]: local };
    let rest = n;
    for (const [axis, many] of numbered) {
      index[axis] = rest % many;
      rest = Math.floor(rest / many);
    }
    out.push([index, first + s, n]);
  }
  return out;
}

// 32 bits of what rows hold: head size and format of each plane, whatever the layout.
function contentNumber(cache) {
  const text = cache.planes.map((p) => `${p.name},${p.rowElements},${p.format.element},${GRANULARITIES.indexOf(p.format.granularity)},${p.format.scale || "-"},${p.format.group_size}${cache.isState ? numberedAxes(p).map(([axis, size]) => `,${axis} ${size}`).join("") : ""}`).join(";");
  return BigInt(new DataView(hashOfText(text, 4).buffer, 0, 4).getUint32(0, true));
}

// Six keys of 32 bits for a row: layer, plane and head, and the token's position.
function rowKeys(where, position, content) {
  const first = mix64(mask64(where + (position << 33n) + DIGEST_GOLDEN + content * 0xD1342543DE82EF95n)), pairs = [first];
  for (const [flip, factor] of [[0xA0761D6478BD642Fn, 0xD6E8FEB86659FD93n], [0xE7037ED1A0B428DBn, 0x8EBC6AF09C88C6E3n]]) {
    const product = mask64((first ^ flip) * factor);
    pairs.push(product ^ product >> 32n);
  }
  return pairs.flatMap((pair) => [Number(pair & 0xFFFFFFFFn), Number(pair >> 32n)]);
}

// Sums of products of 32-bit numbers, modulo 2**64.
class DigestSum {
  constructor() { this.first = 0n; this.second = 0n; }

  add(other) {
    this.first = mask64(this.first + other.first);
    this.second = mask64(this.second + other.second);
  }

  // Words of 16 bytes of a row, the first of them number `index`.
  addWords(words, index, keys) {
    const low = [0, 0], high = [0, 0];
    for (let n = 0; n < words.length; n += 4, index += 1) {
      const step = 2 * index + 1;
      for (let side = 0; side < 2; side += 1) {
        const k = 2 * side;
        for (let half = 0; half < 4; half += 2) {
          const a = words[n + half] + Math.imul(step, keys[k + half]) >>> 0, b = words[n + half + 1] + Math.imul(step, keys[k + half + 1]) >>> 0;
          const al = a & 0xFFFF, ah = a >>> 16, bl = b & 0xFFFF, bh = b >>> 16, ll = al * bl, mid = al * bh + ah * bl + (ll >>> 16);
          low[side] += (mid % 65536) * 65536 + (ll & 0xFFFF);
          high[side] += ah * bh + Math.floor(mid / 65536);
        }
      }
    }
    this.first = mask64(this.first + (BigInt(high[0]) << 32n) + BigInt(low[0]));
    this.second = mask64(this.second + (BigInt(high[1]) << 32n) + BigInt(low[1]));
  }

  toString() { return this.first.toString(16).padStart(16, "0") + this.second.toString(16).padStart(16, "0"); }
}

// The bytes of a row's elements, without its inline scales, wherever they lie.
export function contentRow(cache, buffers, plane, index) {
  const count = Math.floor(plane.rowElements * plane.format.element_bits / 8), units = count / plane.unitBytes, digits = plane.place.digits.filter((d) => d.axis === plane.rowAxis);
  if (digits.length === 1 && digits[0].stride === plane.unitBytes) {
    const [buffer, byte] = locateUnit(plane.place, index);
    return buffers[buffer].subarray(byte, byte + count);
  }
  const out = new Uint8Array(count);
  for (let u = 0; u < units; u += 1) {
    const [buffer, byte] = locateUnit(plane.place, { ...index, [plane.rowAxis]: u });
    out.set(buffers[buffer].subarray(byte, byte + plane.unitBytes), u * plane.unitBytes);
  }
  return out;
}

// The scales of a row, group by group, and its tensor scale: [number of its word, bytes].
export function rowScales(cache, buffers, plane, index) {
  const out = [];
  if (plane.scalePlace) {
    for (let g = 0; g < plane.numGroups; g += 1) {
      const [buffer, byte] = locateUnit(plane.scalePlace, { ...index, [plane.rowAxis]: g });
      out.push([(DIGEST_ROW_SCALE + 16 * g) / 16, buffers[buffer].subarray(byte, byte + plane.scalePlace.unitBytes)]);
    }
  }
  if (plane.tensorScaleBuffer >= 0) out.push([(DIGEST_ROW_SCALE + DIGEST_ROW_TENSOR) / 16, buffers[plane.tensorScaleBuffer].subarray(4 * index.layer, 4 * index.layer + 4)]);
  return out;
}

function asWords(bytes) {
  const padded = new Uint8Array(Math.ceil(bytes.length / 16) * 16);
  padded.set(bytes);
  return new Uint32Array(padded.buffer); // little-endian, as every browser's machine is
}

// What one block adds to the digest of all. `firstBlock`: of a handover, blocks that stand before; `from` and `end`: positions that count.
export function blockDigest(cache, buffers, block, { firstBlock = 0, from = 0, end = Infinity } = {}) {
  const sum = new DigestSum(), content = contentNumber(cache);
  for (const [p, plane] of cache.planes.entries()) {
    for (let layer = 0; layer < cache.numLayers; layer += 1) {
      for (const [row, shard, n] of planeRows(cache, plane)) {
        const where = (BigInt(layer + cache.layerStart) << 17n) + (BigInt(p & 1) << 16n) + (BigInt(p >> 1) << 29n) + BigInt(shard);
        for (let token = 0; token < cache.blockSize; token += 1) {
          const position = (firstBlock + block) * cache.blockSize + token;
          if (position < from || position >= end) continue;
          const index = { layer, block, token, ...row }, keys = rowKeys(where, BigInt(position), content), words = asWords(contentRow(cache, buffers, plane, index));
          sum.addWords(words, n * words.length / 4, keys);
          for (const [word, bytes] of rowScales(cache, buffers, plane, index)) sum.addWords(asWords(bytes), word + n * plane.numGroups, keys);
        }
      }
    }
  }
  return sum;
}

export const newDigest = () => new DigestSum();

// The first field of format and geometry that differs; "" where none does. As `kvx verify` says it.
export function fieldDifference(a, b) {
  const facts = (m) => ({ model: m.fields.model, num_layers: m.cache.numLayers, layer_start: m.fields.layer_start, num_kv_heads: m.fields.num_kv_heads, head_start: m.fields.head_start, "number of planes (2: K and V, 1: a latent)": m.cache.planes.length, planes: m.fields.planes, "number of tokens": m.cache.numBlocks * m.cache.blockSize });
  const x = facts(a), y = facts(b);
  for (const name of Object.keys(x)) if (x[name] !== y[name] && (name !== "model" || (x[name] && y[name]))) return `${name} is ${JSON.stringify(x[name] ?? "none")} in one and ${JSON.stringify(y[name] ?? "none")} in the other`;
  for (const [i, p] of a.cache.planes.entries()) {
    const q = b.cache.planes[i], v = i ? "v_" : "";
    if (["element", "granularity", "scale", "group_size", "has_tensor_scale"].some((n) => p.format[n] !== q.format[n])) return `${v}format is ${p.format.name} in one and ${q.format.name} in the other`;
    if (p.rowElements !== q.rowElements) return `${v}head_dim is ${p.rowElements} in one and ${q.rowElements} in the other`;
  }
  return "";
}

const sameBytes = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);

// Rows of a token that differ: [{ plane, layer, head }]. Caches of one geometry, whatever their layouts and block sizes.
export function tokenDifferences(a, aBuffers, b, bBuffers, slot) {
  const out = [], at = (cache) => ({ block: Math.floor(slot / cache.blockSize), token: slot % cache.blockSize });
  for (const [p, plane] of a.planes.entries()) {
    for (let layer = 0; layer < a.numLayers; layer += 1) {
      for (const [row, head] of planeRows(a, plane)) {
        const x = { layer, ...row, ...at(a) }, y = { layer, ...row, ...at(b) }, other = b.planes[p];
        const xs = rowScales(a, aBuffers, plane, x), ys = rowScales(b, bBuffers, other, y);
        if (!sameBytes(contentRow(a, aBuffers, plane, x), contentRow(b, bBuffers, other, y)) || xs.some(([, bytes], i) => !sameBytes(bytes, ys[i][1]))) out.push({ plane: plane.name, layer: layer + a.layerStart, head });
      }
    }
  }
  return out;
}
