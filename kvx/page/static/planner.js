// planner.js: two caches in, boxes out; the twin of kvx/layout/plan.py, match.py, box.py and shards.py for caches of K and V, held to
// them by the plans of `kvx layouts --vectors`, the text of explain() included. A box is a rectangle of elements through which both
// sides step evenly. Caches are those of place.js, one for each shard, with headStart.
import { makeCache } from "./place.js"
import { pythonRepr, withCommas } from "./language.js"

export class PlanMistake extends Error {}

// One cache for each tensor parallel rank; `ranks` names those that there are, null all.
export function shardCaches(spec, tp, formats, ranks = null) {
  const heads = spec.num_kv_heads;
  if (!Number.isInteger(tp) || tp < 1 || tp > 1024) throw new PlanMistake(`tp is ${tp}; it takes a whole number of 1 to 1024.`);
  if (heads % tp && tp % heads) throw new PlanMistake(`shard(): ${heads} KV heads over ${tp} ranks: neither divides the other. Give each rank's spec its own num_kv_heads and head_start.`);
  if (spec.block_bytes && tp > 1) throw new PlanMistake(`shard(): block_bytes is ${spec.block_bytes} for ${heads} heads; what a rank's blocks are padded to is the engine's to say.`);
  const mine = Math.max(1, Math.floor(heads / tp));
  return (ranks ?? Array.from({ length: tp }, (_, i) => i)).map((rank) => {
    if (!(rank >= 0 && rank < tp)) throw new PlanMistake(`shard(): tp_rank is ${rank} of tp_size ${tp}.`);
    const cache = makeCache({ ...spec, num_kv_heads: mine }, formats);
    return Object.assign(cache, { headStart: Math.floor(rank * heads / tp), rank, layerStart: spec.layer_start ?? 0 });
  });
}

// ---- rectangles of layers and heads

const heldBy = (cache) => ({ layer: cache.layerStart, layerEnd: cache.layerStart + cache.numLayers, first: cache.headStart, end: cache.headStart + cache.spec.num_kv_heads });
export const rectangleText = (r) => `layers ${r.layer}..${r.layerEnd - 1}, heads ${r.first}..${r.end - 1}`;

function cutRectangle(r, other) {
  const both = { layer: Math.max(r.layer, other.layer), layerEnd: Math.min(r.layerEnd, other.layerEnd), first: Math.max(r.first, other.first), end: Math.min(r.end, other.end) };
  if (both.layer >= both.layerEnd || both.first >= both.end) return [null, [r]];
  const rest = [{ ...r, layerEnd: both.layer }, { ...r, layer: both.layerEnd }, { ...both, first: r.first, end: both.first }, { ...both, first: both.end, end: r.end }];
  return [both, rest.filter((x) => x.layer < x.layerEnd && x.first < x.end)];
}

function withoutRectangles(these, others) {
  let left = [...these];
  for (const other of others) left = left.flatMap((r) => cutRectangle(r, other)[1]);
  return left;
}

function unionOf(these) {
  const out = [];
  for (const r of these) out.push(...withoutRectangles([r], out));
  return out;
}

const severalOf = (these) => unionOf(these.flatMap((r, i) => these.slice(0, i).map((other) => cutRectangle(r, other)[0])).filter((r) => r !== null));

// ---- how a plane of one cache becomes that of another

const digitsOf = (place, axis) => place.digits.filter((d) => d.axis === axis).sort((a, b) => b.divisor - a.divisor);
const sameRows = (a, b) => ["element", "granularity", "scale", "group_size", "has_tensor_scale"].every((name) => a[name] === b[name]);
const gcdOf = (a, b) => { while (b) [a, b] = [b, a % b]; return a; };

function planeMatches(src, dst, i) {
  const mine = src.planes[i], theirs = dst.planes[i], base = { src, dst, plane: i, cell: null };
  if (!sameRows(mine.format, theirs.format)) {
    const moved = [mine, theirs].find((p) => p.format.element_bits > 32);
    if (moved) throw new PlanMistake(`plan(): ${mine.name} is ${mine.format.name} at the source and ${theirs.format.name} at the destination; ${moved.format.name} converts bit for bit only. Give both sides that format.`);
    return [{ ...base, a: mine.place, b: theirs.place, units: 1, cell: { rowBytes: Math.floor(mine.rowElements * theirs.format.element_bits / 8), srcBytes: Math.floor(mine.rowElements * mine.format.element_bits / 8) } }];
  }
  if (mine.format.name === theirs.format.name && mine.format.is_inline) return [{ ...base, a: mine.place, b: theirs.place, units: mine.rowUnits }];
  const found = [{ ...base, a: mine.place, b: theirs.place, units: Math.floor(mine.rowElements * mine.format.element_bits / (8 * mine.place.unitBytes)) }];
  if (mine.scalePlace && theirs.scalePlace) found.push({ ...base, a: mine.scalePlace, b: theirs.scalePlace, units: digitsOf(mine.scalePlace, mine.rowAxis).length ? mine.numGroups : 1 });
  if (mine.format.has_tensor_scale) {
    const layers = Math.max(src.numLayers, dst.numLayers);
    const at = (plane) => ({ digits: [{ axis: "layer", divisor: 1, size: layers, stride: 4, step: 0 }], buffer: plane.tensorScaleBuffer, offset: 0, unitBytes: 4 });
    found.push({ ...base, a: at(mine), b: at(theirs), units: 1 });
  }
  return found;
}

// [bytes, buffers] from index 0 of an axis to another.
function reachOf(place, axis, index) {
  let byte = 0, step = 0;
  for (const d of digitsOf(place, axis)) {
    const i = Math.floor(index / d.divisor) % d.size;
    byte += i * d.stride;
    step += i * d.step;
  }
  return [byte, step];
}

// Cuts [0, count) into pieces on which both sides step evenly: [first, [[divisor, size], ...]], outer first.
function evenPieces(count, a, splitA, b, splitB) {
  const out = [], splits = [[splitA, a], [splitB, b]];
  let begin = 0;
  while (begin < count) {
    const left = count - begin;
    const active = [...new Set(splits.filter(([s, at]) => s > 1 && (at + begin) % s + left > s).map(([s]) => s))].sort((x, y) => x - y);
    if (!active.length) { out.push([begin, [[1, left]]]); return out; }
    const isAligned = splits.every(([s, at]) => !active.includes(s) || (at + begin) % s === 0);
    const isNested = active.length < 2 || active[1] % active[0] === 0, most = active[active.length - 1];
    let size;
    if (isAligned && isNested && left >= most) {
      size = Math.floor(left / most) * most;
      let outer = size;
      const parts = [...active].reverse().concat(1).map((divisor) => { const part = [divisor, Math.floor(outer / divisor)]; outer = divisor; return part; });
      out.push([begin, parts]);
    } else {
      size = Math.min(left, ...splits.filter(([s]) => s > 1).map(([s, at]) => s - (at + begin) % s));
      out.push([begin, [[1, size]]]);
    }
    begin += size;
  }
  return out;
}

function sideOf(place, cache, buffer) {
  const block = digitsOf(place, "block")[0], token = digitsOf(place, "token");
  return {
    offset: place.offset, block: block?.stride ?? 0, split: token.length > 1 ? token[0].divisor : cache.blockSize, outer: token.length > 1 ? token[0].stride : 0,
    inner: token.length ? token[token.length - 1].stride : 0, buffer: place.buffer + buffer, blockStep: block?.step ?? 0,
  };
}

function boxesOf(matched, r, unit, srcBuffer, dstBuffer) {
  const { src, dst, a, b, cell } = matched, mine = src.planes[matched.plane];
  const ranges = [["layer", r.layerEnd - r.layer, r.layer - src.layerStart, r.layer - dst.layerStart], ["head", r.end - r.first, r.first - src.headStart, r.first - dst.headStart], ["token", unit, 0, 0], [mine.rowAxis, matched.units, 0, 0]];
  let partial = [{ src: sideOf(a, src, srcBuffer), dst: sideOf(b, dst, dstBuffer), digits: [] }];
  for (const [axis, count, firstA, firstB] of ranges) {
    const inA = digitsOf(a, axis), inB = digitsOf(b, axis);
    if (!inA.length || !inB.length) continue; // one scale for all of them
    partial = partial.flatMap((at) => evenPieces(count, firstA, inA[0].divisor, firstB, inB[0].divisor).map(([begin, parts]) => {
      const [byteA, stepA] = reachOf(a, axis, firstA + begin), [byteB, stepB] = reachOf(b, axis, firstB + begin);
      const digits = parts.map(([divisor, size]) => {
        const [s, sStep] = size > 1 ? reachOf(a, axis, divisor) : [0, 0], [d, dStep] = size > 1 ? reachOf(b, axis, divisor) : [0, 0];
        return { size, src: s, dst: d, srcStep: sStep, dstStep: dStep };
      });
      return { src: { ...at.src, offset: at.src.offset + byteA, buffer: at.src.buffer + stepA }, dst: { ...at.dst, offset: at.dst.offset + byteB, buffer: at.dst.buffer + stepB }, digits: [...at.digits, ...digits] };
    }));
  }
  return partial.map((at) => ({ ...at, run: a.unitBytes, cell, plane: mine.name }));
}

const sameSide = (a, b) => ["block", "split", "outer", "inner", "blockStep"].every((name) => a[name] === b[name]);
const sameDigits = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// All planes' boxes; where the second's is the first's moved on by an even step, the two as one.
function joinPlanes(planes) {
  if (planes.length !== 2) return planes.flat();
  const [ks, vs] = planes, out = [];
  for (let i = 0; i < Math.min(ks.length, vs.length); i += 1) {
    const k = ks[i], v = vs[i];
    const src = [v.src.offset - k.src.offset, v.src.buffer - k.src.buffer], dst = [v.dst.offset - k.dst.offset, v.dst.buffer - k.dst.buffer];
    if (sameSide(k.src, v.src) && sameSide(k.dst, v.dst) && !k.cell && !v.cell && k.run === v.run && sameDigits(k.digits, v.digits) && Math.min(...src, ...dst) >= 0) {
      out.push({ ...k, plane: "k and v", digits: [{ size: 2, src: src[0], dst: dst[0], srcStep: src[1], dstStep: dst[1] }, ...k.digits] });
    } else out.push(k, v);
  }
  return [...out, ...ks.slice(vs.length), ...vs.slice(ks.length)];
}

// Digits that continue each other on both sides joined, and what is adjacent on both made part of the run; innermost first.
function foldBox(box) {
  if (box.cell) return box;
  let run = box.run;
  const digits = box.digits.filter((d) => d.size > 1).map((d) => ({ ...d }));
  const order = (a, b) => Number(Boolean(a.srcStep || a.dstStep)) - Number(Boolean(b.srcStep || b.dstStep)) || a.dst - b.dst || a.src - b.src;
  const take = (d) => digits.splice(digits.indexOf(d), 1);
  digits.sort(order);
  for (let joined = true; joined;) {
    joined = false;
    for (const a of digits) {
      if (a.src === run && a.dst === run && !a.srcStep && !a.dstStep) {
        run *= a.size;
        take(a);
        joined = true;
        break;
      }
      const after = digits.find((b) => b !== a && ["src", "dst", "srcStep", "dstStep"].every((name) => b[name] === a[name] * a.size));
      if (after) {
        digits[digits.indexOf(after)] = { ...a, size: a.size * after.size };
        take(a);
        joined = true;
        break;
      }
    }
  }
  digits.sort(order);
  return { ...box, run, digits };
}

// Which kernel moves a folded box.
export function kernelOf(box) {
  if (box.cell) return "cells";
  if (!box.digits.length) return "flat copy";
  if (box.run >= 16) return "row copy";
  return box.digits.some((d) => d.src === box.run) && box.digits.some((d) => d.dst === box.run) ? "transpose" : "row copy";
}

const boxBytes = (box) => box.digits.reduce((n, d) => n * d.size, box.cell ? box.cell.rowBytes : box.run);

// { src, dst, unit, boxes (folded), leftOut, twice, unitBytes } of two lists of caches.
export function makePlan(src, dst, { partial = false } = {}) {
  const a = src[0], b = dst[0], names = (cache) => cache.planes.map((p) => p.name);
  if (names(a).join() !== names(b).join()) throw new PlanMistake(`plan(): layout ${pythonRepr(a.layout.text)} has ${a.planes.length} planes (${names(a).join(", ")}), ${pythonRepr(b.layout.text)} has ${b.planes.length} (${names(b).join(", ")}). Planes go to those of their name; a latent (MLA) cache converts to another latent one.`);
  a.planes.forEach((mine, i) => {
    const theirs = b.planes[i];
    if (mine.rowElements !== theirs.rowElements) throw new PlanMistake(`plan(): ${mine.name} head_dim is ${mine.rowElements} at the source and ${theirs.rowElements} at the destination; they must be equal.`);
    if (mine.format.name === theirs.format.name && ["block", "block_head"].includes(mine.format.granularity) && a.blockSize !== b.blockSize) {
      throw new PlanMistake(`plan(): ${mine.name} is ${mine.format.name}, whose scales belong to blocks, and blocks change from ${a.blockSize} to ${b.blockSize} tokens. Convert to a format with scales per token-head, or through bf16.`);
    }
  });
  let unit = gcdOf(a.blockSize, b.blockSize);
  for (const place of [...a.planes, ...b.planes].map((plane) => plane.place)) {
    const token = digitsOf(place, "token"), split = token.length ? token[0].divisor : 1;
    if (unit % split && split % unit) unit = gcdOf(unit, split);
  }
  const have = src.map(heldBy), wanted = dst.map(heldBy), leftOut = unionOf(withoutRectangles(have, wanted));
  if (leftOut.length && !partial) throw new PlanMistake(`plan(): ${rectangleText(leftOut[0])} of src are in no dst and would be lost. Destinations hold ${wanted.map(rectangleText).join(", ")}. Give the shards that hold them, or say partial=True to leave them out.`);
  const boxes = [];
  let dstBuffer = 0;
  dst.forEach((target, to) => {
    let missing = [heldBy(target)], srcBuffer = 0;
    src.forEach((source, from) => {
      const left = [];
      for (const r of missing) {
        const [both, rest] = cutRectangle(r, heldBy(source));
        left.push(...rest);
        if (both) boxes.push(...joinPlanes(source.planes.map((_, i) => planeMatches(source, target, i).flatMap((m) => boxesOf(m, both, unit, srcBuffer, dstBuffer)))).map((box) => ({ ...box, from, to })));
      }
      missing = left;
      srcBuffer += source.buffers.length;
    });
    if (missing.length) throw new PlanMistake(`plan(): ${rectangleText(missing[0])} of dst are in no src. Sources hold ${have.map(rectangleText).join(", ")}.`);
    dstBuffer += target.buffers.length;
  });
  return { src, dst, unit, boxes: boxes.map(foldBox), leftOut, twice: severalOf(wanted), unitBytes: boxes.reduce((n, box) => n + boxBytes(box), 0) };
}

export const runsOf = (box) => boxBytes(box) / (box.cell ? box.cell.rowBytes : box.run);
export const loopsText = (box) => [...box.digits].reverse().map((d) => `${d.size}: ${d.src || `${d.srcStep} buf`}/${d.dst || `${d.dstStep} buf`}`).join(", ") || "none";

// The plan in words and a table, as plan.explain() writes it.
export function explainPlan(plan, numUnits = 1) {
  const { src, dst, unit } = plan, a = src[0], b = dst[0];
  const lines = [
    `${src.length} -> ${dst.length} shards, ${pythonRepr(a.layout.text)} -> ${pythonRepr(b.layout.text)}`,
    `blocks of ${a.blockSize} -> ${b.blockSize} tokens, moved ${unit} at a time; ${withCommas(plan.unitBytes * numUnits)} bytes for ${numUnits} x ${unit} tokens`,
    ` box  family             run       runs  loops (size: source stride / destination stride, bytes)`,
  ];
  plan.boxes.forEach((box, n) => lines.push(`${String(n).padStart(4)}  ${kernelOf(box).padEnd(12)} ${String(box.run).padStart(7)} B  ${String(runsOf(box)).padStart(9)}  ${loopsText(box)}`));
  for (const r of plan.leftOut) lines.push(`left out: ${rectangleText(r)}, which the source holds and the destination does not`);
  for (const r of plan.twice) lines.push(`written twice: ${rectangleText(r)}, which several shards of the destination hold`);
  return lines.join("\n");
}

// Bytes from a block's first token to the one that a unit begins with.
const tokenOffset = (side, token) => Math.floor(token / side.split) * side.outer + token % side.split * side.inner;

// Every run of one unit of tokens (the first is 0), box by box: { box, srcBuffer, srcByte, srcBytes, dstBuffer, dstByte, dstBytes }.
export function* planRuns(plan, unitIndex = 0) {
  const first = unitIndex * plan.unit, a = plan.src[0].blockSize, b = plan.dst[0].blockSize;
  for (const [n, box] of plan.boxes.entries()) {
    const at = (side, size) => [side.buffer + Math.floor(first / size) * side.blockStep, side.offset + Math.floor(first / size) * side.block + tokenOffset(side, first % size)];
    const [srcBuffer, srcByte] = at(box.src, a), [dstBuffer, dstByte] = at(box.dst, b);
    const sizes = box.digits.map((d) => d.size), index = sizes.map(() => 0), total = sizes.reduce((x, y) => x * y, 1);
    for (let i = 0; i < total; i += 1) {
      const sum = (name) => index.reduce((x, at2, k) => x + at2 * box.digits[k][name], 0);
      yield {
        box: n, srcBuffer: srcBuffer + sum("srcStep"), srcByte: srcByte + sum("src"), srcBytes: box.cell ? box.cell.srcBytes : box.run,
        dstBuffer: dstBuffer + sum("dstStep"), dstByte: dstByte + sum("dst"), dstBytes: box.cell ? box.cell.rowBytes : box.run,
      };
      for (let k = 0; k < index.length; k += 1) { // innermost first
        index[k] += 1;
        if (index[k] < sizes[k]) break;
        index[k] = 0;
      }
    }
  }
}
