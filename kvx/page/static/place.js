// Where every element of a cache lies: the twin of kvx/layout/place.py and of the rules of a CacheSpec (kvx/spec/validate.py), held to
// them by the vectors. A cache is { layout, planes, buffers, numLayers, numBlocks }; a plane is { name, axes, format, place, ... }.
import { parseLayout, splitOf, isPlaneAxis, pythonRepr, withCommas } from "./language.js"

const MOST_SIZE = 2 ** 30;
const MOST_ALLOCATIONS = 2 ** 22;
const SCALE_AXES = {
  tensor: [], block: ["block"], head: ["head"], block_head: ["block", "head"],
  token_head: ["block", "token", "head"], group: ["block", "token", "head", "dim"],
};
const STATE_ORDER = ["head", "channel", "row", "column", "tap"]; // the last of those a plane has is its row

// Sizes, a format or padding that a layout cannot have.
export class SpecMistake extends Error {}

// spec: { layout, num_layers, num_blocks, block_size, num_kv_heads, head_dim, v_head_dim, format, v_format, block_bytes };
// formats: by name, the rows of the registry.
export function makeCache(spec, formats) {
  const layout = parseLayout(spec.layout);
  for (const name of ["num_blocks", "block_size", "num_kv_heads", "head_dim", "num_layers"]) {
    const value = spec[name];
    if (!Number.isInteger(value) || value < 1 || (name !== "num_blocks" && value >= MOST_SIZE)) {
      throw new SpecMistake(`CacheSpec: ${name} is ${value}; it must be 1 or more${name === "num_blocks" ? "" : ` and under ${MOST_SIZE}`}.`);
    }
  }
  if ([...layout.planes.keys()].some((name) => name !== "k" && name !== "v")) {
    throw new SpecMistake(`CacheSpec: layout ${pythonRepr(layout.text)} names the planes ${[...layout.planes.keys()].join(", ")}; a CacheSpec has K and V. Write \`kv\`.`);
  }
  const k = formatNamed(spec.format, formats);
  const v = spec.v_format ? formatNamed(spec.v_format, formats) : k;
  const planes = [...layout.planes.keys()].map((name) => {
    const dim = name === "v" && spec.v_head_dim ? spec.v_head_dim : spec.head_dim;
    return makePlane(name, [["token", spec.block_size], ["head", spec.num_kv_heads], ["dim", dim]], name === "v" ? v : k);
  });
  const cache = { spec, layout, planes, numLayers: spec.num_layers, numBlocks: spec.num_blocks, blockSize: spec.block_size, blockBytes: spec.block_bytes ?? 0 };
  for (const rule of CACHE_RULES) {
    const sentence = rule(cache);
    if (sentence) throw new SpecMistake(`CacheSpec: ${sentence}`);
  }
  return withPlaces(cache);
}

function formatNamed(name, formats) {
  const found = formats.get(name);
  if (!found) throw new SpecMistake(`CacheSpec: format "${name}" does not exist. Known: ${[...formats.keys()].join(", ")}.`);
  return found;
}

// States: planes are [{ name, axes, format }], or made from `sizes` of the axes that the layout names.
export function makeStates({ layout: text, planes, sizes, format, numLayers, numBlocks, blockBytes = 0 }, formats) {
  const layout = parseLayout(text);
  const given = planes ?? [...layout.planes].map(([name, where]) => ({ name, format, axes: stateAxes(name, where, sizes) }));
  const found = given.map((plane) => makePlane(plane.name, plane.axes, formatNamed(plane.format, formats)));
  found.sort((a, b) => (a.name < b.name ? -1 : 1));
  const cache = { layout, planes: found, numLayers, numBlocks, blockSize: 1, blockBytes, isState: true };
  const sentence = stateRule(cache);
  if (sentence) throw new SpecMistake(`StateSpec: ${sentence}`);
  return withPlaces(cache);
}

function stateAxes(name, where, sizes) {
  const named = new Set([...where.left, ...where.order].map((axis) => axis.name));
  const wrong = [...named].find((axis) => !["layer", "block", "plane", ...STATE_ORDER].includes(axis));
  if (wrong) throw new SpecMistake(`StateSpec: plane ${name} has the axis ${wrong}; a state has two or more of ${STATE_ORDER.join(", ")}.`);
  const axes = STATE_ORDER.filter((axis) => named.has(axis)).map((axis) => [axis, sizes[axis]]);
  if (axes.length < 2) throw new SpecMistake(`StateSpec: plane ${name} has ${axes.length} axis; a state has two or more of ${STATE_ORDER.join(", ")}.`);
  return axes;
}

function makePlane(name, axes, format) {
  const rowElements = axes[axes.length - 1][1];
  const isInBytes = format.is_inline || format.element_bits < 8;
  const unitBytes = isInBytes ? 1 : format.element_bits / 8;
  const isStoredPerToken = format.granularity === "token_head" || format.granularity === "group";
  const numGroups = format.group_size ? Math.floor(rowElements / format.group_size) : 1;
  const scaleBytes = format.scale && isStoredPerToken ? (numGroups * format.scale_bits) / 8 : 0;
  const rowBytes = Math.floor((rowElements * format.element_bits) / 8) + (format.is_inline ? scaleBytes : 0);
  return {
    name, axes, format, rowElements, isInBytes, unitBytes, numGroups, scaleBytes, rowBytes,
    sizes: Object.fromEntries(axes),
    rowAxis: axes[axes.length - 1][0],
    rowUnits: rowBytes / unitBytes,
    numRows: axes.slice(0, -1).reduce((n, [, size]) => n * size, 1),
    pack: (factor) => (factor === "x" ? 128 / format.element_bits : Number(factor)),
  };
}

// ---- rules, each a sentence when it is broken; in the order of validate.py

const CACHE_RULES = [
  layersHaveAnAxis, splitsDivide, rowsAreWholeBytes, groupsDivideDim, packsDivideDim, bytesOfARowAreAdjacent,
  sharedTensorsShareAType, sharedTensorsHaveOneRowSize, inlineScalesAreAligned, paddingHoldsABlock, allocationsAreFew,
];

function shown(cache) {
  return pythonRepr(cache.layout.text);
}

function whereOf(cache, plane) {
  return cache.layout.planes.get(plane.name);
}

function isShared(cache) {
  return cache.layout.numBuffers === 1 && cache.layout.hasKv;
}

// Bytes of one unit of dim in tensors that ops take: bytes for both where one tensor holds rows kept in bytes.
function tensorUnits(cache) {
  const inBytes = isShared(cache) && cache.planes.some((plane) => plane.isInBytes);
  return cache.planes.map((plane) => (inBytes ? 1 : plane.unitBytes));
}

function layersHaveAnAxis(cache) {
  if (cache.numLayers > 1 && !cache.layout.hasLayer) {
    return `num_layers is ${cache.numLayers} and layout ${shown(cache)} has no layer axis. Write \`layer\` where it stands.`;
  }
}

function splitsDivide(cache) {
  for (const plane of cache.planes) {
    for (const [name, field] of [["token", "block_size"], ["head", "num_kv_heads"]]) {
      const factor = splitOf(whereOf(cache, plane), name);
      if (factor && plane.sizes[name] % plane.pack(factor)) {
        return `${field} ${plane.sizes[name]} is not a multiple of the ${plane.pack(factor)} that layout ${shown(cache)} splits ${name} by.`;
      }
    }
  }
  const [k, v] = [cache.planes[0], cache.planes[cache.planes.length - 1]];
  for (const name of ["token", "head"]) {
    if (cache.layout.numBuffers === 1 && splitOf(cache.layout.first, name) === "x" && k.format.element_bits !== v.format.element_bits) {
      return `layout ${shown(cache)} splits ${name} by x, which is ${k.pack("x")} for K and ${v.pack("x")} for V. Write a number.`;
    }
  }
}

function rowsAreWholeBytes(cache) {
  for (const plane of cache.planes) {
    if ((plane.rowElements * plane.format.element_bits) % 8) return `${plane.name} head_dim ${plane.rowElements} is odd, and ${plane.format.name} stores two elements a byte.`;
  }
}

function groupsDivideDim(cache) {
  for (const plane of cache.planes) {
    const group = plane.format.group_size;
    if (group && plane.rowElements % group) return `${plane.name} head_dim ${plane.rowElements} is not a multiple of ${plane.format.name}'s group of ${group}.`;
  }
}

function packsDivideDim(cache) {
  for (const plane of cache.planes) {
    for (const axis of whereOf(cache, plane).order.filter((one) => one.part && one.name === "dim")) {
      const pack = plane.pack(axis.factor);
      if (plane.rowElements % pack) return `${plane.name} head_dim ${plane.rowElements} is not a multiple of the layout's pack of ${pack}.`;
      if ((plane.format.element_bits * pack) % 8) return `the layout's pack of ${pack} cuts a byte of ${plane.format.name} in two.`;
      if (plane.format.is_inline) return `${plane.format.name} keeps its scales behind whole rows; layout ${shown(cache)} splits them.`;
    }
  }
}

function bytesOfARowAreAdjacent(cache) {
  for (const plane of cache.planes) {
    const { order } = whereOf(cache, plane);
    if (plane.isInBytes && order[order.length - 1].name !== "dim") {
      const why = plane.format.is_inline ? "keeps its scales behind the row" : "stores two elements a byte";
      return `${plane.name} format ${plane.format.name} ${why}, so dim must be the last axis; layout ${shown(cache)} ends otherwise.`;
    }
  }
}

// What tensors of torch are of: two elements of four bits are one byte of it.
function tensorType(format) {
  return { int4: "uint8", e2m1: "uint8", e8m0: "uint8" }[format.element] ?? format.element;
}

function sharedTensorsShareAType(cache) {
  const [k, v] = [cache.planes[0], cache.planes[cache.planes.length - 1]];
  if (!isShared(cache) || tensorType(k.format) === tensorType(v.format)) return;
  if (tensorUnits(cache).some((unit) => unit !== 1)) {
    return `layout ${shown(cache)} puts K and V in one tensor; format ${k.format.name} and v_format ${v.format.name} differ in type.`;
  }
  for (const plane of cache.planes) {
    const where = whereOf(cache, plane);
    if (plane.unitBytes > 1 && (where.order[where.order.length - 1].name !== "dim" || splitOf(where, "dim"))) {
      return `layout ${shown(cache)} puts K and V in one tensor of bytes, since ${k.format.name} and ${v.format.name} differ; dim must be whole and the last axis there.`;
    }
  }
}

function sharedTensorsHaveOneRowSize(cache) {
  if (!isShared(cache)) return;
  const { first } = cache.layout;
  const names = first.order.map((axis) => axis.name);
  const at = names.indexOf("kv");
  const isDimInside = first.isArea && names.slice(at).includes("dim") && !names.slice(0, at).includes("dim");
  const units = tensorUnits(cache);
  const sizes = cache.planes.map((plane, i) => Math.floor(plane.rowBytes / units[i]));
  if (isDimInside || sizes[0] === sizes[1]) return;
  if (first.dims.some((dim) => dim.slice(-2).map((axis) => axis.name).join() === "kv,dim")) return;
  return `layout ${shown(cache)} gives K and V rows of one size; K's has ${sizes[0]} units and V's ${sizes[1]}. Fuse them, \`(kv dim)\`, or keep them apart, \`kv | ...\`.`;
}

function inlineScalesAreAligned(cache) {
  for (const plane of cache.planes) {
    const { format } = plane;
    if (format.is_inline && Math.floor((plane.rowElements * format.element_bits) / 8) % (format.scale_bits / 8)) {
      return `${plane.name} rows of ${plane.rowElements} ${format.element} leave ${format.name}'s inline scale unaligned.`;
    }
  }
  if (!isShared(cache)) return;
  const before = cache.planes[0].rowBytes;
  const cell = cache.planes.reduce((n, plane) => n + plane.rowBytes, 0);
  for (const [i, plane] of cache.planes.entries()) {
    const size = plane.format.is_inline ? plane.format.scale_bits / 8 : plane.unitBytes;
    if (cell % size || (i > 0 && before % size)) {
      const what = plane.format.is_inline ? `${plane.format.name}'s inline scale` : `${plane.format.name} of ${plane.name}`;
      return `K rows of ${before} bytes in cells of ${cell} leave ${what} unaligned.`;
    }
  }
}

function paddingHoldsABlock(cache) {
  const bytes = cache.blockBytes;
  if (!bytes) return;
  for (const where of cache.layout.planes.values()) {
    const at = where.dims.findIndex((dim) => dim.length === 1 && dim[0].name === "block");
    if (at < 0 || where.dims.slice(0, at).flat().some((axis) => axis.name !== "layer")) {
      return `block_bytes is ${bytes} and layout ${shown(cache)} has no blocks to pad: right of \`|\`, block stands alone with nothing but layer outside it. Set 0.`;
    }
  }
  for (const [i, plane] of cache.planes.entries()) {
    const content = contentBytes(cache, i);
    if (bytes < content) return `block_bytes is ${bytes}; a block of this cache has ${content}. Set 0 where blocks are not padded.`;
    const unit = Math.max(plane.unitBytes, plane.format.is_inline ? plane.format.scale_bits / 8 : 1);
    if (bytes % unit) return `block_bytes is ${bytes}; it must be a multiple of the ${unit} bytes of ${plane.format.name}.`;
  }
}

// Bytes of one block in a plane's buffer, or in the one all share.
export function contentBytes(cache, index = 0) {
  const names = cache.layout.first.order.map((axis) => axis.name);
  const isInside = names.includes("layer") && (!names.includes("block") || names.indexOf("layer") > names.indexOf("block"));
  const planes = cache.layout.numBuffers > 1 ? cache.planes.slice(index, index + 1) : cache.planes;
  return (isInside ? cache.numLayers : 1) * planes.reduce((n, plane) => n + plane.numRows * plane.rowBytes, 0);
}

function allocationsAreFew(cache) {
  const sizes = { layer: cache.numLayers, kv: 2, block: cache.numBlocks };
  const count = cache.layout.left.reduce((n, axis) => n * sizes[axis.name], 1);
  if (count > MOST_ALLOCATIONS) {
    return `layout ${shown(cache)} makes ${withCommas(count)} allocations; at most ${withCommas(MOST_ALLOCATIONS)}. Fewer axes left of \`|\` make fewer.`;
  }
}

function stateRule(cache) {
  for (const [name, size] of [["num_blocks", cache.numBlocks], ["num_layers", cache.numLayers], ...cache.planes.flatMap((p) => p.axes.map(([axis, n]) => [`${axis} of ${p.name}`, n]))]) {
    if (!Number.isInteger(size) || size < 1 || size >= MOST_SIZE) return `${name} is ${size}; it must be an int of 1 or more.`;
  }
  if (cache.numLayers > 1 && !cache.layout.hasLayer) {
    return `num_layers is ${cache.numLayers} and layout ${shown(cache)} has no layer axis. Write \`layer\` where it stands.`;
  }
  for (const plane of cache.planes) {
    const { format } = plane;
    if (format.element_bits > 32 || !(format.granularity === "none" || format.is_inline)) {
      return `plane ${plane.name} is ${format.name}; states are bf16, f16 or f32, or a format with inline scales.`;
    }
    if (format.is_inline && plane.rowBytes % (format.scale_bits / 8)) {
      return `plane ${plane.name} is ${format.name}, scales of ${format.scale_bits / 8} bytes behind rows of ${plane.rowElements} elements, where they are not aligned. Rows have a multiple of 4 elements; give such a plane bf16, f16 or f32.`;
    }
    if (format.group_size && plane.rowElements % format.group_size) {
      return `plane ${plane.name} is ${format.name}, a scale for ${format.group_size} elements; its rows have ${plane.rowElements}, which is no multiple. int8_per_token_head_inline has one scale a row.`;
    }
    const where = whereOf(cache, plane);
    for (const [axis, size] of plane.axes) {
      const factor = splitOf(where, axis);
      if (factor && size % plane.pack(factor)) return `layout ${shown(cache)} splits ${axis} of ${plane.name} by ${plane.pack(factor)}, which does not divide ${size}.`;
    }
    if (plane.isInBytes && where.order[where.order.length - 1].name !== plane.rowAxis) {
      return `plane ${plane.name} is ${format.name}, whose rows are one piece, so ${plane.rowAxis} must be the last axis; layout ${shown(cache)} ends otherwise.`;
    }
  }
  if (cache.blockBytes && cache.blockBytes < contentBytes(cache)) {
    return `block_bytes is ${cache.blockBytes}; a block of these states has ${contentBytes(cache)}. Set 0 where blocks are not padded.`;
  }
}

// ---- places

function withPlaces(cache) {
  const names = cache.planes.map((plane) => plane.name);
  cache.inMemory = [...cache.layout.planes.keys()].map((name) => names.indexOf(name));
  cache.numCacheBuffers = sizeProduct(cache, cache.layout.left);
  for (const [i, plane] of cache.planes.entries()) plane.place = placeOf(cache, i);
  let next = cache.numCacheBuffers;
  const apart = [];
  for (const plane of cache.planes) {
    plane.scalePlace = null;
    const { format } = plane;
    if (!format.scale) continue;
    if (format.is_inline) plane.scalePlace = inlineScalePlace(plane);
    else {
      plane.scalePlace = scalePlaceApart(cache, plane, next);
      const outer = plane.scalePlace.digits[0];
      apart.push([1, outer.size * outer.stride]);
      next += 1;
    }
  }
  for (const plane of cache.planes) {
    plane.tensorScaleBuffer = -1;
    if (!plane.format.has_tensor_scale) continue;
    plane.tensorScaleBuffer = next;
    apart.push([1, 4 * cache.numLayers]);
    next += 1;
  }
  cache.bufferSizes = [...cacheSizes(cache), ...apart]; // [count, bytes], as place.py's buffer_sizes
  cache.buffers = cache.bufferSizes.flatMap(([count, bytes]) => Array(count).fill(bytes));
  return cache;
}

function axisSize(cache, plane, axis) {
  if (isPlaneAxis(axis)) return cache.planes.length;
  const outside = { layer: cache.numLayers, block: cache.numBlocks }[axis.name];
  const whole = axis.name === plane.rowAxis ? plane.rowUnits : outside ?? plane.sizes[axis.name];
  if (!axis.part) return whole;
  const factor = unitFactor(plane, axis);
  return axis.part === "%" ? factor : Math.floor(whole / factor);
}

// What an axis is split by; of a row, in units.
function unitFactor(plane, axis) {
  const pack = plane.pack(axis.factor);
  return axis.name === plane.rowAxis ? (pack * plane.format.element_bits) / (8 * plane.unitBytes) : pack;
}

function sizeProduct(cache, axes) {
  return axes.reduce((n, axis) => n * axisSize(cache, cache.planes[0], axis), 1);
}

function innerBytes(cache, index, isInsidePlanes = false) {
  const plane = cache.planes[index];
  let size = plane.unitBytes;
  let padding = 0;
  for (const axis of [...whereOf(cache, plane).order].reverse()) {
    if (isPlaneAxis(axis)) {
      if (isInsidePlanes) return size;
      size = areaBytes(cache).reduce((a, b) => a + b, 0);
    } else if (axis.name === "block" && cache.blockBytes) {
      padding = cache.blockBytes - size;
      size = cache.blockBytes * cache.numBlocks;
    } else size *= axisSize(cache, plane, axis) + axis.unused;
  }
  return size - padding;
}

function areaBytes(cache) {
  return cache.inMemory.map((i) => innerBytes(cache, i, true));
}

function cacheSizes(cache) {
  const { left } = cache.layout;
  const sizes = cache.inMemory.map((i) => innerBytes(cache, i));
  const at = left.findIndex(isPlaneAxis);
  if (at < 0 || new Set(sizes).size === 1) return [[cache.numCacheBuffers, sizes[0]]];
  const inside = sizeProduct(cache, left.slice(at + 1));
  const times = Math.floor(cache.numCacheBuffers / (sizes.length * inside));
  return Array(times).fill(sizes.map((size) => [inside, size])).flat();
}

// Of every axis right of the bar, innermost first: { axis, size, stride, span } in bytes.
export function axisSpans(cache, index) {
  const plane = cache.planes[index];
  let inside = plane.unitBytes;
  return [...whereOf(cache, plane).order].reverse().map((axis) => {
    if (isPlaneAxis(axis)) {
      const areas = areaBytes(cache);
      const stride = areas.slice(0, cache.inMemory.indexOf(index)).reduce((a, b) => a + b, 0);
      inside = areas.reduce((a, b) => a + b, 0);
      return { axis, size: areas.length, stride, span: inside };
    }
    const size = axisSize(cache, plane, axis);
    const stride = axis.name === "block" && cache.blockBytes ? cache.blockBytes : inside;
    inside = stride * (size + axis.unused);
    return { axis, size, stride, span: inside };
  });
}

function placeOf(cache, index) {
  const plane = cache.planes[index];
  const digits = [];
  let offset = 0;
  for (const { axis, size, stride } of axisSpans(cache, index)) {
    if (isPlaneAxis(axis)) {
      offset += stride;
      continue;
    }
    digits.push({ axis: axis.name, divisor: axis.part === "/" ? unitFactor(plane, axis) : 1, size, stride, step: 0 });
    offset += axis.unused * stride;
  }
  let buffer = 0;
  let step = 1;
  for (const axis of [...whereOf(cache, plane).left].reverse()) {
    const size = axisSize(cache, plane, axis);
    if (isPlaneAxis(axis)) buffer += cache.inMemory.indexOf(index) * step;
    else digits.push({ axis: axis.name, divisor: 1, size, stride: 0, step });
    step *= size;
  }
  if (digits.every((digit) => digit.axis !== "layer")) digits.push({ axis: "layer", divisor: 1, size: 1, stride: 0, step: 0 });
  return { digits: digits.reverse(), buffer, offset, unitBytes: plane.unitBytes };
}

function inlineScalePlace(plane) {
  const size = plane.format.scale_bits / 8;
  const digits = plane.place.digits.filter((digit) => digit.axis !== plane.rowAxis);
  digits.push({ axis: plane.rowAxis, divisor: 1, size: plane.numGroups, stride: size, step: 0 });
  const behind = Math.floor((plane.rowElements * plane.format.element_bits) / 8);
  return { digits, buffer: plane.place.buffer, offset: plane.place.offset + behind, unitBytes: size };
}

function scalePlaceApart(cache, plane, buffer) {
  const sizes = { layer: cache.numLayers, block: cache.numBlocks, token: cache.blockSize, head: plane.sizes.head, dim: plane.numGroups };
  const digits = [];
  let stride = plane.format.scale_bits / 8;
  for (const axis of ["layer", ...SCALE_AXES[plane.format.granularity]].reverse()) {
    digits.push({ axis, divisor: 1, size: sizes[axis], stride, step: 0 });
    stride *= sizes[axis];
  }
  return { digits: digits.reverse(), buffer, offset: 0, unitBytes: plane.format.scale_bits / 8 };
}

// [buffer, byte] of one unit; `index` by names of axes, those not named are 0.
export function locateUnit(place, index) {
  let { buffer, offset: byte } = place;
  for (const digit of place.digits) {
    const i = Math.floor((index[digit.axis] ?? 0) / digit.divisor) % digit.size;
    buffer += i * digit.step;
    byte += i * digit.stride;
  }
  return [buffer, byte];
}

// The axes of a plane's elements, outermost first: [name, size], layer and block before its own.
export function elementAxes(cache, plane) {
  return [["layer", cache.numLayers], ["block", cache.numBlocks], ...plane.axes];
}

// { buffer, byte, bit } of an element; `index` by names of axes, in elements.
export function locateElement(plane, index) {
  const row = index[plane.rowAxis] ?? 0;
  const bits = plane.format.element_bits;
  const [buffer, byte] = locateUnit(plane.place, { ...index, [plane.rowAxis]: Math.floor((row * bits) / (8 * plane.unitBytes)) });
  return { buffer, byte, bit: bits === 4 ? (row % 2) * 4 : 0 };
}

// Axes of a plane's scales, and how large: those that share a scale are left out.
export function scaleAxes(cache, plane) {
  const axes = elementAxes(cache, plane);
  axes[axes.length - 1] = [plane.rowAxis, plane.numGroups];
  return axes.filter(([name]) => name === "layer" || plane.scalePlace.digits.some((digit) => digit.axis === name));
}
