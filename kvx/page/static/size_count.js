// size_count.js: bytes of the layers that config_reader.js found, as kvx/spec/size.py counts them: whole blocks of whole layers on one
// rank, exactly. Numbers past 2**53, where a browser rounds, are refused.
import { ConfigError, shownValue } from "./config_reader.js"

export const RECORD_FORMATS = ["fp8_ds_mla", "nvfp4_ds_mla"];
export const STATE_FORMATS = ["bf16", "f16", "f32"];
export const FIRST_FORMATS = ["bf16", "fp8_e4m3", "int8_per_token_head", "fp8_ds_mla", "nvfp4"];
const MOST_AXIS = 2 ** 30;

// A product or sum that is still exact.
function exact(number, what) {
  if (!Number.isSafeInteger(number)) throw new ConfigError(`${what} comes to more than 2**53 bytes, past what this page counts exactly. Take smaller numbers, or kvx size.`);
  return number;
}

function wholeNumber(name, value, least) {
  if (!Number.isSafeInteger(value) || value < least) throw new ConfigError(`${name} is ${shownValue(value)}; it takes a whole number of ${least} or more.`);
}

const rowText = (row) => `${row.name} ${row.heads} x ${row.dims.join("+")}`;
const planeText = (plane) => `${plane.name} ${plane.axes.filter(([axis, size]) => !(axis === "column" && size === 1)).map(([, size]) => size).join(" x ")}`;
const plainFormat = (format) => STATE_FORMATS.includes(format) ? format : "bf16";

function rowFormat(row, format, indexFormat, formats) {
  if (!row.indexFormat) return format;
  const isPlain = Object.hasOwn(formats, format) && !formats[format].quantised;
  return indexFormat || (isPlain ? format : row.indexFormat);
}

// Bytes of so many entries of a block in one layer, with their scales and the block's.
function rowBytes(row, format, entries, tp, formats) {
  if (Object.hasOwn(row.records, format)) return entries * row.records[format];
  if (RECORD_FORMATS.includes(format)) throw new ConfigError(`${rowText(row)} has no record of that name.`);
  if (!Object.hasOwn(formats, format)) throw new ConfigError(`format ${shownValue(format)} does not exist.`);
  let total = 0;
  row.dims.forEach((dim, part) => {
    const f = part && formats[format].group > dim ? formats.bf16 : formats[format]; // a latent's rotary part stays bf16 where it is shorter than a group
    const name = f === formats.bf16 ? "bf16" : format;
    if (dim < 1 || dim >= MOST_AXIS || row.heads < 1 || row.heads >= MOST_AXIS || entries < 1 || entries >= MOST_AXIS) throw new ConfigError(`a block of ${entries} entries of ${rowText(row)} is out of range; axes have 1 to ${MOST_AXIS - 1}.`);
    if (dim * f.bits % 8) throw new ConfigError(`head_dim ${dim} is odd, and ${name} stores two elements a byte.`);
    if (f.group && dim % f.group) throw new ConfigError(`head_dim ${dim} is not a multiple of ${name}'s group of ${f.group}.`);
    if (f.inline && (dim * f.bits / 8) % (f.scale / 8)) throw new ConfigError(`rows of ${dim} leave ${name}'s inline scale unaligned.`);
    if (row.heads % tp && tp % row.heads) throw new ConfigError(`${row.heads} KV heads over ${tp} ranks: neither divides the other.`);
    const heads = Math.max(1, Math.floor(row.heads / tp));
    const scales = f.perToken ? (f.group ? dim / f.group : 1) * f.scale / 8 : 0;
    total += entries * heads * (dim * f.bits / 8 + scales);
    if (f.perBlock) total += (f.perBlock === "head" ? heads : 1) * f.scale / 8;
    if (total >= 2 ** 60) throw new ConfigError("the cache would pass 2**60 bytes, where addresses end.");
  });
  return exact(total, `A block of ${rowText(row)}`);
}

// Formats that the model's rows can take: those most used, or every one.
export function sizeFormats(model, formats, every = false) {
  const takes = (format) => model.kinds.every((kind) => [...kind.rows, ...kind.ring].filter((row) => !row.indexFormat).every((row) => {
    try { rowBytes(row, format, 1, 1, formats); return true; } catch (error) { if (error instanceof ConfigError) return false; throw error; }
  }));
  return (every ? [...Object.keys(formats), ...RECORD_FORMATS] : FIRST_FORMATS).filter(takes);
}

// Of one layer's state on the first rank.
function planeSizes(kind, format, stateFormat, tp, formats) {
  return kind.planes.map((plane) => {
    const chosen = (plane.isConv ? "" : stateFormat) || (plane.isF32 ? "f32" : format);
    let axes = plane.axes.filter(([axis, size]) => !(axis === "column" && size === 1));
    if (axes.length === 1) axes = [...axes, ["column", 1]]; // a vector: one row a channel
    for (const [axis, size] of axes) if (!Number.isSafeInteger(size) || size < 1 || size >= MOST_AXIS) throw new ConfigError(`${axis} of ${plane.name} is ${shownValue(size)}; it is 1 to ${MOST_AXIS - 1}.`);
    const shares = plane.shares.length ? plane.shares : [[axes[0][1], 1]];
    if (shares.reduce((sum, [size]) => sum + size, 0) !== axes[0][1]) throw new ConfigError(`The parts of ${plane.name} do not make up its ${axes[0][1]} ${axes[0][0]}s.`);
    let mine = 0;
    for (const [size, unit] of shares) {
      if (unit < 1 || size % unit) throw new ConfigError(`${plane.name} has a part of ${size} ${axes[0][0]}s, which is no whole number of units of ${unit}.`);
      const units = size / unit;
      if (units % tp && tp % units) throw new ConfigError(`${plane.name} has ${units} units of ${unit} ${axes[0][0]}s over ${tp} ranks: neither divides the other.`);
      mine += Math.max(1, Math.floor(units / tp)) * unit;
    }
    axes = axes.map(([axis, size], i) => [axis, i ? size : mine]);
    const bytes = exact(axes.reduce((product, [, size]) => product * size, 1) * formats[chosen].bits / 8, plane.name);
    return { name: plane.name, shape: axes.map(([axis, size]) => `${axis} ${size}`).join(" x "), format: chosen, bytes };
  });
}

const blocksOf = (tokens, blockSize) => Math.ceil(tokens / blockSize);

class GroupCount {
  constructor(values) { Object.assign(this, values); }

  get tokenBytes() { return this.blockBytes / this.blockSize; }

  // A request's most; 0: no end.
  get maxBlocks() {
    if (!this.window) return 0;
    if (this.isChunked && this.window % this.blockSize === 0) return this.window / this.blockSize;
    return blocksOf(this.window - 1, this.blockSize) + 1; // tokens in a row touch one block more than they fill
  }

  // What a long request costs whatever its length.
  get fixedBytes() { return exact(this.stateBytes + this.maxBlocks * this.blockBytes, this.name); }

  privateBytes(numBlocks) { return exact(this.stateBytes + Math.min(numBlocks, this.maxBlocks || numBlocks) * this.blockBytes, "A request"); }

  sharedBytes(numBlocks) {
    if (!numBlocks) return 0;
    let kept = numBlocks;
    if (this.maxBlocks) {
      const read = this.isChunked ? numBlocks * this.blockSize % this.window : this.window - 1;
      kept = Math.min(numBlocks, blocksOf(read, this.blockSize));
    }
    return exact(this.resumeBytes + kept * this.blockBytes, "A shared prefix");
  }
}

class SizeCount {
  constructor(values) { Object.assign(this, values); }

  get blockBytes() { return this.groups.filter((g) => !g.maxBlocks).reduce((sum, g) => sum + g.blockBytes, 0); }

  get tokenBytes() { return this.blockBytes / this.blockSize; }

  get fixedBytes() { return this.groups.reduce((sum, g) => sum + g.fixedBytes, 0); }

  parts(context, sharedPrefix) {
    wholeNumber("context", context, 1);
    wholeNumber("shared prefix", sharedPrefix, 0);
    if (sharedPrefix >= context) throw new ConfigError(`The shared prefix is ${sharedPrefix} tokens and the context ${context}, which counts the prefix too. A context has one token more, at least.`);
    const shared = Math.floor(sharedPrefix / this.blockSize), mine = blocksOf(context, this.blockSize) - shared;
    return [this.groups.reduce((sum, g) => sum + g.sharedBytes(shared), 0), this.groups.reduce((sum, g) => sum + g.privateBytes(mine), 0)];
  }

  totalBytes(context, requests = 1, sharedPrefix = 0) {
    wholeNumber("requests", requests, 0);
    const [shared, mine] = this.parts(context, sharedPrefix);
    return exact(shared + requests * mine, "All requests together");
  }

  fitRequests(memory, context, sharedPrefix = 0) {
    const [shared, mine] = this.parts(context, sharedPrefix);
    return Math.floor(Math.max(0, memory - shared) / mine);
  }

  // The longest context with which so many requests fit; 0: none does; null: any does, since no layer keeps all tokens.
  fitContext(memory, requests = 1, sharedPrefix = 0) {
    wholeNumber("requests", requests, 1);
    wholeNumber("shared prefix", sharedPrefix, 0);
    const sharedBlocks = Math.floor(sharedPrefix / this.blockSize);
    const fits = (mine) => {
      const shared = this.groups.reduce((sum, g) => sum + g.sharedBytes(sharedBlocks), 0);
      return shared + requests * this.groups.reduce((sum, g) => sum + g.stateBytes + Math.min(mine, g.maxBlocks || mine) * g.blockBytes, 0) <= memory;
    };
    let low = 1;
    if (!fits(low)) return 0;
    let high = low + this.groups.reduce((sum, g) => sum + g.maxBlocks, 0) + (this.blockBytes ? Math.floor(memory / this.blockBytes) : 0) + 1;
    if (fits(high)) return null;
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (fits(middle)) low = middle; else high = middle;
    }
    return (sharedBlocks + low) * this.blockSize;
  }
}

// What the model's cache costs on each of `tp` ranks; `model` is what readConfig gives.
export function countSize(model, options, formats) {
  const { format = "bf16", tp = 1, indexFormat = "", state = "ring", stateFormat = "" } = options;
  const { kinds, name } = model;
  wholeNumber("tp", tp, 1);
  wholeNumber("block size", options.blockSize ?? 0, 0);
  const unit = Math.max(...kinds.map((kind) => kind.ratio)), blockSize = options.blockSize || Math.max(16, unit);
  if (blockSize % unit) throw new ConfigError(`The block size is ${blockSize}; ${name} compresses ${unit} tokens into one, so it takes a multiple of ${unit}.`);
  const matrices = kinds.flatMap((kind) => kind.planes).filter((plane) => !plane.isConv);
  if (stateFormat && !STATE_FORMATS.includes(stateFormat)) throw new ConfigError(`The format of states is ${shownValue(stateFormat)}; it takes ${STATE_FORMATS.join(", ")}.`);
  if (stateFormat && !matrices.length) throw new ConfigError(`The format of states is ${stateFormat}, and ${name} keeps no recurrent matrices. Leave it out.`);
  for (const row of kinds.flatMap((kind) => kind.rows)) {
    if (row.heads % tp && tp % row.heads) throw new ConfigError(`Tensor parallel size is ${tp} and ${name} has ${row.heads} KV heads: neither divides the other. Take a size that does.`);
  }
  const indexes = kinds.flatMap((kind) => kind.rows).filter((row) => row.indexFormat);
  if (indexFormat && !indexes.length) throw new ConfigError(`The index format is ${indexFormat}, and ${name} has no indexer. Leave it out.`);
  const groups = kinds.map((kind) => {
    const held = (rows, entries) => rows.reduce((sum, row) => sum + rowBytes(row, rowFormat(row, format, indexFormat, formats), entries, tp, formats), 0);
    const ring = held(kind.ring, 1) * kind.ringTokens, floats = state === "ring" ? kind.stateFloats : kind.tightFloats;
    const planes = planeSizes(kind, plainFormat(format), stateFormat, tp, formats), recurrent = planes.reduce((sum, plane) => sum + plane.bytes, 0);
    const shown = [...(kind.rows.length ? kind.rows : kind.ring).map(rowText), ...kind.planes.map(planeText)];
    return new GroupCount({
      name: kind.name, numLayers: kind.count, stores: shown.join(", "), ratio: kind.ratio, window: kind.window, isChunked: kind.isChunked,
      ringTokens: kind.ringTokens, blockSize, planes,
      blockBytes: exact(kind.count * held(kind.rows, blockSize / kind.ratio), "A block"),
      stateBytes: exact(kind.count * (ring + 4 * floats + recurrent), "A state"),
      resumeBytes: exact(kind.count * (ring + 4 * kind.resumeFloats + recurrent), "A state"),
    });
  });
  const index = indexes.length ? rowFormat(indexes[0], format, indexFormat, formats) : "";
  const matrix = matrices.length ? (stateFormat || (matrices[0].isF32 ? "f32" : plainFormat(format))) : "";
  return new SizeCount({ model: name, format, indexFormat: index, tp, blockSize, groups, stateFormat: matrix });
}
