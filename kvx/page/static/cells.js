// From a cache to cells: every element and every scale, in the order of memory, buffer by buffer. Pure data, which bytemap.js draws.
import { axisSpans, elementAxes, locateElement, scaleAxes, SpecMistake } from "./place.js"
import { isPlaneAxis, withCommas } from "./language.js"

export const ELEMENT = 0;
export const SCALE = 1;
export const TENSOR_SCALE = 2;
const MOST_CELLS = 400_000;

// Cells are columns of one table: section, start (bytes from the section's first), size (bytes), kind, plane and index, where index
// numbers the coordinates of its kind in the order of `axes`.
export class CellTable {
  constructor(cache, count) {
    this.cache = cache;
    this.count = count;
    this.section = new Int32Array(count);
    this.start = new Float64Array(count);
    this.size = new Float32Array(count);
    this.kind = new Uint8Array(count);
    this.plane = new Uint8Array(count);
    this.index = new Uint32Array(count);
    this.sections = []; // { title, bytes, first, last, spans, buffer }
    this.axes = cache.planes.map((plane) => [elementAxes(cache, plane), plane.scalePlace ? scaleAxes(cache, plane) : [], [["layer", cache.numLayers]]]);
  }

  axesOf(cell) {
    return this.axes[this.plane[cell]][this.kind[cell]];
  }

  // { layer, block, token, head, dim }, as far as the cell has them.
  coordinates(cell) {
    const axes = this.axesOf(cell);
    const found = Object.fromEntries(axes); // in this order
    let rest = this.index[cell];
    for (let i = axes.length - 1; i >= 0; i--) {
      found[axes[i][0]] = rest % axes[i][1];
      rest = Math.floor(rest / axes[i][1]);
    }
    return found;
  }

  // Of one axis: its index, -1 where the cell has no such axis. "position" is the token in the sequence, "kv" the plane.
  value(cell, axis) {
    if (axis === "kv") return this.plane[cell];
    const axes = this.axesOf(cell);
    let rest = this.index[cell];
    let found = -1;
    let block = 0;
    for (let i = axes.length - 1; i >= 0; i--) {
      const [name, size] = axes[i];
      const here = rest % size;
      if (name === axis || (axis === "position" && name === "token")) found = here;
      if (name === "block") block = here;
      rest = Math.floor(rest / size);
    }
    return axis === "position" && found >= 0 ? block * this.cache.blockSize + found : found;
  }

  // `value` of every cell, at once.
  values(axis) {
    return Int32Array.from({ length: this.count }, (_, cell) => this.value(cell, axis));
  }

  // What an element is, whatever the layout: block and token as a position.
  identity(cell) {
    if (this.kind[cell] !== ELEMENT) return null;
    const { block, token, ...rest } = this.coordinates(cell);
    const where = this.cache.isState ? { block } : { position: block * this.cache.blockSize + token };
    return { plane: this.cache.planes[this.plane[cell]].name, ...where, ...rest };
  }

  // The cell at a byte of a section; -1 where there is padding.
  at(section, byte) {
    const { first, last } = this.sections[section];
    let low = first;
    let high = last;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle] <= byte) low = middle + 1;
      else high = middle;
    }
    const cell = low - 1;
    return cell >= first && byte < this.start[cell] + this.size[cell] ? cell : -1;
  }
}

// Where an element of that identity lies in a cache: { buffer, byte, bit, size } or null where the cache has none.
export function placeOfIdentity(cache, identity) {
  const plane = identity && cache.planes.find((one) => one.name === identity.plane);
  if (!plane) return null;
  const { plane: _, position, ...index } = identity;
  if (position !== undefined) {
    index.block = Math.floor(position / cache.blockSize);
    index.token = position % cache.blockSize;
  }
  for (const [name, size] of elementAxes(cache, plane)) {
    if (!Number.isInteger(index[name]) || index[name] >= size || index[name] < 0) return null;
  }
  return { ...locateElement(plane, index), size: plane.format.element_bits / 8 };
}

export function numCells(cache) {
  const product = (axes) => axes.reduce((n, [, size]) => n * size, 1);
  return cache.planes.reduce((n, plane) => {
    const scales = plane.scalePlace ? product(scaleAxes(cache, plane)) : 0;
    return n + product(elementAxes(cache, plane)) + scales + (plane.tensorScaleBuffer >= 0 ? cache.numLayers : 0);
  }, 0);
}

// Every cell of a cache in the order of memory.
export function memoryCells(cache) {
  const count = numCells(cache);
  if (count > MOST_CELLS) {
    throw new SpecMistake(`This cache has ${withCommas(count)} elements; the page draws up to ${withCommas(MOST_CELLS)}. Make a size smaller: what repeats looks the same.`);
  }
  const table = new CellTable(cache, count);
  const starts = bufferStarts(cache);
  const raw = { buffer: new Int32Array(count), start: new Float64Array(count), size: new Float32Array(count), kind: new Uint8Array(count), plane: new Uint8Array(count), index: new Uint32Array(count) };
  let next = 0;
  for (const [p, plane] of cache.planes.entries()) {
    const bits = plane.format.element_bits;
    const units = (i) => Math.floor((i * bits) / (8 * plane.unitBytes));
    next = addCells(raw, next, { place: plane.place, axes: table.axes[p][ELEMENT], kind: ELEMENT, plane: p, size: bits / 8, units });
    if (plane.scalePlace) next = addCells(raw, next, { place: plane.scalePlace, axes: table.axes[p][SCALE], kind: SCALE, plane: p, size: plane.format.scale_bits / 8 });
    if (plane.tensorScaleBuffer >= 0) {
      const digits = [{ axis: "layer", divisor: 1, size: cache.numLayers, stride: 4, step: 0 }];
      next = addCells(raw, next, { place: { digits, buffer: plane.tensorScaleBuffer, offset: 0 }, axes: table.axes[p][TENSOR_SCALE], kind: TENSOR_SCALE, plane: p, size: 4 });
    }
  }
  const key = new Float64Array(count);
  for (let i = 0; i < count; i++) key[i] = starts[raw.buffer[i]] + raw.start[i];
  const order = Uint32Array.from({ length: count }, (_, i) => i).sort((a, b) => key[a] - key[b]);
  order.forEach((from, to) => {
    table.section[to] = raw.buffer[from];
    for (const name of ["start", "size", "kind", "plane", "index"]) table[name][to] = raw[name][from];
  });
  addSections(table);
  return table;
}

// Of every buffer, where it begins if all stand one after the other.
function bufferStarts(cache) {
  const starts = [0];
  for (const bytes of cache.buffers) starts.push(starts[starts.length - 1] + bytes);
  return starts;
}

// An element's byte is a sum over its axes: a table for each, and one addition a cell and axis.
function addCells(raw, next, { place, axes, kind, plane, size, units }) {
  const bytes = [];
  const buffers = [];
  for (const [i, [name, count]] of axes.entries()) {
    const isRow = units && i === axes.length - 1;
    const byte = new Float64Array(count);
    const buffer = new Int32Array(count);
    for (let n = 0; n < count; n++) {
      const at = isRow ? units(n) : n;
      for (const digit of place.digits) {
        if (digit.axis !== name) continue;
        const value = Math.floor(at / digit.divisor) % digit.size;
        byte[n] += value * digit.stride;
        buffer[n] += value * digit.step;
      }
      if (isRow && size < 1) byte[n] += (n % 2) * size; // two elements of four bits: the even one first
    }
    bytes.push(byte);
    buffers.push(buffer);
  }
  const walk = (depth, byte, buffer, index) => {
    if (depth === axes.length) {
      raw.buffer[next] = buffer;
      raw.start[next] = byte;
      raw.size[next] = size;
      raw.kind[next] = kind;
      raw.plane[next] = plane;
      raw.index[next] = index;
      next += 1;
      return;
    }
    const count = axes[depth][1];
    for (let n = 0; n < count; n++) walk(depth + 1, byte + bytes[depth][n], buffer + buffers[depth][n], index * count + n);
  };
  walk(0, place.offset, place.buffer, 0);
  return next;
}

function addSections(table) {
  const { cache } = table;
  const names = bufferNames(cache);
  let first = 0;
  for (const [buffer, bytes] of cache.buffers.entries()) {
    let last = first;
    while (last < table.count && table.section[last] === buffer) last += 1;
    const isCache = buffer < cache.numCacheBuffers;
    const whole = isCache && cache.blockBytes ? Math.ceil(bytes / cache.blockBytes) * cache.blockBytes : bytes;
    table.sections.push({ buffer, title: names[buffer], bytes: whole, first, last, spans: isCache ? lineSpans(cache, first < last ? table.plane[first] : 0) : [16, 64] });
    first = last;
  }
}

// Bytes that a line may have: whole runs of the layout's own axes, or equal parts of one.
function lineSpans(cache, plane) {
  const found = new Set();
  let inside = cache.planes[plane].unitBytes;
  for (const { span } of axisSpans(cache, plane)) {
    for (let parts = 1; parts <= 64; parts++) if (span % (parts * inside) === 0) found.add(span / parts);
    inside = span;
  }
  return [...found].sort((a, b) => a - b);
}

// What each buffer holds: the axes left of the bar, then scales.
function bufferNames(cache) {
  const sizes = { layer: cache.numLayers, block: cache.numBlocks };
  const planeNames = [...cache.layout.planes.keys()].map(planeTitle);
  const names = [];
  for (let i = 0; i < cache.numCacheBuffers; i++) {
    let rest = i;
    const words = [];
    for (const axis of [...cache.layout.left].reverse()) {
      const size = isPlaneAxis(axis) ? planeNames.length : sizes[axis.name];
      words.unshift(isPlaneAxis(axis) ? planeNames[rest % size] : `${axis.name} ${rest % size}`);
      rest = Math.floor(rest / size);
    }
    names.push(words.join(", "));
  }
  for (const plane of cache.planes) if (plane.format.scale && !plane.format.is_inline) names.push(`scales of ${planeTitle(plane.name)}`);
  for (const plane of cache.planes) if (plane.tensorScaleBuffer >= 0) names.push(`tensor scales of ${planeTitle(plane.name)}`);
  return names;
}

export function planeTitle(name) {
  return name === "k" || name === "v" ? name.toUpperCase() : name;
}

// "K, layer 0, block 1, token 3, head 0, dim 5", or what else a cell is.
export function cellWords(table, cell) {
  const plane = planeTitle(table.cache.planes[table.plane[cell]].name);
  const coordinates = Object.entries(table.coordinates(cell)).map(([name, value]) => `${name} ${value}`);
  if (table.kind[cell] === TENSOR_SCALE) return `tensor scale of ${plane}, ${coordinates.join(", ")}`;
  if (table.kind[cell] === SCALE) {
    const groups = table.cache.planes[table.plane[cell]].numGroups;
    return `scale of ${plane}, ${coordinates.map((text) => text.replace(/^dim/, groups > 1 ? "group" : "dim")).filter((text) => groups > 1 || text !== "dim 0").join(", ")}`;
  }
  return `${plane}, ${coordinates.join(", ")}`;
}

// ---- one cache's bytes, read with another's layout

// For every element of `reader`, the cell of `memory` that stands where the reader looks, -1 where none begins there with that size:
// padding, or the middle of something else. Buffers are one memory, one after the other.
export function misread(memory, reader) {
  const [there, here] = [bufferStarts(memory.cache), bufferStarts(reader.cache)];
  const cells = new Map();
  for (let cell = 0; cell < memory.count; cell++) cells.set(2 * (there[memory.section[cell]] + memory.start[cell]), cell);
  const truth = new Int32Array(reader.count).fill(-1);
  for (let cell = 0; cell < reader.count; cell++) {
    if (reader.kind[cell] !== ELEMENT) continue;
    const found = cells.get(2 * (here[reader.section[cell]] + reader.start[cell]));
    if (found !== undefined && memory.size[found] === reader.size[cell]) truth[cell] = found;
  }
  return truth;
}

// How much of it is right: { count, right, other, axes: { head: share, ... }, matrix } for the axis that is asked.
export function misreadFacts(memory, reader, truth, axis) {
  const axes = ["kv", ...new Set(reader.axes.flatMap((kinds) => kinds[ELEMENT].map(([name]) => name)))].map((name) => (name === "token" ? "position" : name)).filter((name) => name !== "block" || reader.cache.isState);
  const equal = Object.fromEntries(axes.map((name) => [name, 0]));
  const matrix = new Map();
  let count = 0;
  let right = 0;
  let other = 0;
  for (let cell = 0; cell < reader.count; cell++) {
    if (reader.kind[cell] !== ELEMENT) continue;
    count += 1;
    const found = truth[cell];
    const taken = reader.value(cell, axis);
    const isElement = found >= 0 && memory.kind[found] === ELEMENT;
    const really = isElement ? memory.value(found, axis) : -1;
    if (!matrix.has(taken)) matrix.set(taken, new Map());
    matrix.get(taken).set(really, (matrix.get(taken).get(really) ?? 0) + 1);
    if (!isElement) {
      other += 1;
      continue;
    }
    let isAll = true;
    for (const name of axes) {
      const isSame = name === "kv" ? memory.cache.planes[memory.plane[found]].name === reader.cache.planes[reader.plane[cell]].name : memory.value(found, name) === reader.value(cell, name);
      if (isSame) equal[name] += 1;
      else isAll = false;
    }
    if (isAll) right += 1;
  }
  return { count, right, other, axes: Object.fromEntries(axes.map((name) => [name, equal[name] / count])), matrix };
}

function lineAxis(cache, axes) {
  return cache.isState ? axes[axes.length - 2][0] : "token";
}

// The reader's elements as it sees them: a section for each plane, layer, block and head, a line for each token, dim across.
export function logicalCells(reader) {
  const { cache } = reader;
  const elements = [];
  const outer = new Float64Array(reader.count); // which section, planes one after the other
  const lineOf = new Float64Array(reader.count);
  for (let cell = 0; cell < reader.count; cell++) {
    if (reader.kind[cell] !== ELEMENT) continue;
    elements.push(cell);
    const axes = reader.axesOf(cell);
    const at = reader.coordinates(cell);
    const line = lineAxis(cache, axes);
    outer[cell] = axes.slice(0, -1).reduce((n, [name, size]) => (name === line ? n : n * size + at[name]), reader.plane[cell]);
    lineOf[cell] = at[line];
  }
  const column = (cell) => reader.index[cell] % reader.axesOf(cell)[reader.axesOf(cell).length - 1][1];
  elements.sort((a, b) => outer[a] - outer[b] || lineOf[a] - lineOf[b] || column(a) - column(b));
  const table = new CellTable(cache, elements.length);
  table.source = new Int32Array(elements.length); // the reader's cell in memory
  let section = -1;
  for (const [to, cell] of elements.entries()) {
    const axes = reader.axesOf(cell);
    const width = axes[axes.length - 1][1];
    if (to === 0 || outer[cell] !== outer[elements[to - 1]]) {
      section += 1;
      const at = reader.coordinates(cell);
      const line = lineAxis(cache, axes);
      const words = axes.slice(0, -1).filter(([name]) => name !== line).map(([name]) => `${name} ${at[name]}`);
      const plane = planeTitle(cache.planes[reader.plane[cell]].name);
      table.sections.push({ buffer: -1, title: `taken for ${plane}, ${words.join(", ")}`, bytes: 0, first: to, last: to, spans: [width], line });
    }
    const here = table.sections[section];
    here.last = to + 1;
    here.bytes = Math.max(here.bytes, (lineOf[cell] + 1) * width);
    table.section[to] = section;
    table.start[to] = lineOf[cell] * width + (reader.index[cell] % width);
    table.size[to] = 1;
    table.plane[to] = reader.plane[cell];
    table.index[to] = reader.index[cell];
    table.source[to] = cell;
  }
  return table;
}
