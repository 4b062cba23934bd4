// cache_file.js: a KVX file or a handover's folder, read in the browser: manifest, layout, tensors, digests. The reading of kvx/files
// and kvx/handover/manifest.py; what is wrong with a file is a sentence, and nothing of it is believed before it is checked.
import { makeCache, makeStates, SpecMistake } from "./place.js"
import { LayoutMistake } from "./language.js"
import { blake2b, hashOfText, hexText, pythonJson } from "./blake2b.js"

export class FileMistake extends Error {}

const MOST_HEADER = 8 << 20; // bytes of a header that this page reads
const MOST_MANIFEST = 1 << 20; // characters
const MOST_PARTS = 64;
const SCALE_TYPES = { f32: "F32", f16: "F16", bf16: "BF16" };
const OF_CACHES = ["num_blocks", "block_size", "num_kv_heads", "head_dim", "layout", "format", "v_head_dim", "v_format", "num_layers", "layer_start", "head_start", "model", "block_bytes"];
const OF_STATES = ["num_blocks", "planes", "layout", "num_layers", "layer_start", "model", "block_bytes", "positions"];
const CACHE_DEFAULTS = { layout: "kv | block token head dim", format: "bf16", v_head_dim: 0, v_format: "", num_layers: 1, layer_start: 0, head_start: 0, model: "", block_bytes: 0 };
const brief = (value) => { const text = JSON.stringify(value) ?? String(value); return text.length > 100 ? `${text.slice(0, 100)}…` : text; };

function parseObject(text, what) {
  let found;
  try { found = JSON.parse(text); } catch (error) { throw new FileMistake(`${what} is not JSON: ${String(error.message).slice(0, 120)}.`); }
  if (typeof found !== "object" || found === null || Array.isArray(found)) throw new FileMistake(`${what} is no object.`);
  return found;
}

// { fields, cache, isState, digest }: what a manifest says, held against its own digest.
export function readManifest(text, formats) {
  if (typeof text !== "string" || text.length > MOST_MANIFEST) throw new FileMistake(`The manifest is ${typeof text === "string" ? `${text.length} characters long` : typeof text}; it must be text of at most ${MOST_MANIFEST} characters.`);
  const told = parseObject(text, "The manifest");
  if (told.kvx_manifest !== 1) throw new FileMistake(`The manifest's version is ${brief(told.kvx_manifest)}; this page reads 1.`);
  const isState = Object.hasOwn(told, "planes"), names = isState ? OF_STATES : OF_CACHES;
  const unknown = Object.keys(told).find((name) => !["kvx_manifest", "digest", ...names].includes(name));
  if (unknown !== undefined) throw new FileMistake(`The manifest has an unknown field ${brief(unknown)}; fields are ${names.join(", ")}.`);
  const { digest: stated, ...fields } = told;
  const whole = isState ? { layer_start: 0, num_layers: 1, model: "", block_bytes: 0, ...fields } : { ...CACHE_DEFAULTS, ...fields };
  for (const [name, value] of Object.entries(whole)) {
    const isText = ["layout", "format", "v_format", "model", "planes", "positions"].includes(name);
    if (isText ? typeof value !== "string" || value.length > MOST_MANIFEST : !Number.isSafeInteger(value) || value < 0) throw new FileMistake(`${name} of the manifest is ${brief(value)}; it must be ${isText ? "text" : "a whole number"}.`);
  }
  const cache = withMistakes(() => isState ? statesOf(whole, formats) : makeCache(whole, formats));
  cache.layerStart = whole.layer_start;
  cache.headStart = whole.head_start ?? 0;
  if (!isState && !whole.block_bytes) delete whole.block_bytes; // younger than manifests that travel
  if (isState && !Object.hasOwn(fields, "positions")) delete whole.positions;
  const digest = hexText(hashOfText(pythonJson(whole, { isSorted: true }), 16));
  if (stated !== undefined && stated !== digest) throw new FileMistake(`The manifest's digest is ${brief(stated)} and its fields make "${digest}". A field was changed after it was written.`);
  return { fields: whole, cache, isState, digest };
}

function withMistakes(make) {
  try { return make(); } catch (error) {
    if (error instanceof SpecMistake || error instanceof LayoutMistake) throw new FileMistake(error.message.split("\n")[0]);
    throw error;
  }
}

function statesOf(whole, formats) {
  let planes;
  try { planes = JSON.parse(whole.planes); } catch { planes = null; }
  const isShare = (s) => Array.isArray(s) && s.length === 3 && s.every(Number.isSafeInteger);
  const isPlane = (p) => typeof p === "object" && p !== null && typeof p.name === "string" && formats.has(p.format) && Array.isArray(p.axes) && p.axes.length > 1 && p.axes.every((a) => Array.isArray(a) && a.length === 2 && typeof a[0] === "string" && Number.isSafeInteger(a[1])) && Array.isArray(p.shares) && p.shares.every(isShare) && p.shares.reduce((n, s) => n + s[1], 0) === p.axes.find(([axis]) => axis === p.shard_axis)?.[1];
  if (!Array.isArray(planes) || !planes.length || planes.length > 64 || !planes.every(isPlane)) throw new FileMistake(`planes of the manifest are ${brief(whole.planes)}; they must be a list of planes with axes, as text.`);
  const cache = makeStates({ layout: whole.layout, planes, numLayers: whole.num_layers, numBlocks: whole.num_blocks, blockBytes: whole.block_bytes }, formats);
  if (cache.planes.some((p) => !cache.layout.planes.has(p.name))) throw new FileMistake("planes of the manifest are not those that its layout names.");
  for (const plane of cache.planes) ({ shares: plane.shares, shard_axis: plane.shardAxis } = planes.find((p) => p.name === plane.name));
  return cache;
}

// Names, types and shapes of the tensors that a manifest makes.
function tensorEntries({ cache }) {
  const sizes = cache.buffers, entries = sizes.slice(0, cache.numCacheBuffers).map((size, n) => ({ name: `cache.${String(n).padStart(5, "0")}`, type: "U8", shape: [size], size }));
  const more = [], { numLayers: l, numBlocks: b, blockSize: n } = cache;
  for (const plane of cache.planes) {
    if (!plane.format.scale || plane.format.is_inline) continue;
    const h = plane.sizes.head, shape = { tensor: [], block: [b], head: [h], block_head: [b, h], token_head: [b, n, h], group: [b, n, h, plane.numGroups] }[plane.format.granularity];
    more.push([`${plane.name}_scale`, SCALE_TYPES[plane.format.scale] ?? "U8", [l, ...shape]]);
  }
  for (const plane of cache.planes) if (plane.format.has_tensor_scale) more.push([`${plane.name}_tensor_scale`, "F32", [l]]);
  return [...entries, ...more.map(([name, type, shape], i) => ({ name, type, shape, size: sizes[cache.numCacheBuffers + i] }))];
}

export function partRanges(numBlocks) {
  const step = Math.ceil(numBlocks / MOST_PARTS), out = [];
  for (let first = 0; first < numBlocks; first += step) out.push([first, Math.min(first + step, numBlocks)]);
  return out;
}

// Of a File or Blob: { name, size, manifest, content, parts, isSealed, spans, blob, heading }. Reads the header only.
export async function readCacheFile(blob, name, formats) {
  const size = blob.size, first = new DataView(await blob.slice(0, 8).arrayBuffer());
  if (first.byteLength < 8) throw new FileMistake(`${name} has ${size} bytes; it is no safetensors file.`);
  const length = Number(first.getBigUint64(0, true));
  if (length > size - 8) throw new FileMistake(`${name} says its header has ${length.toLocaleString("en-US")} bytes; the file has ${size.toLocaleString("en-US")}. It is cut short or no safetensors file.`);
  if (length > MOST_HEADER) throw new FileMistake(`${name} has a header of ${length.toLocaleString("en-US")} bytes; this page reads ${MOST_HEADER.toLocaleString("en-US")}. kvx inspect reads it.`);
  const heading = new Uint8Array(await blob.slice(0, 8 + length).arrayBuffer()), bytes = heading.subarray(8);
  let text;
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { throw new FileMistake(`${name} has no readable header; it is no safetensors file.`); }
  const header = parseObject(text, `The header of ${name}`), { __metadata__: metadata, ...tensors } = header;
  if (typeof metadata !== "object" || metadata === null || typeof metadata.kvx_manifest !== "string") throw new FileMistake(`${name} has no "kvx_manifest" in its metadata; kvx.save() and kvx convert write it. It is another's safetensors file.`);
  const manifest = readManifest(metadata.kvx_manifest, formats), ranges = partRanges(manifest.cache.numBlocks);
  const kept = ["kvx_content_digest", "kvx_content_parts", "kvx_seal"].filter((field) => typeof metadata[field] === "string");
  let content = "", parts = [];
  if (kept.length && kept.length < 3) throw new FileMistake(`${name} has "${kept[0]}" and not all of its seal. It was changed after it was written.`);
  if (kept.length) {
    content = metadata.kvx_content_digest;
    parts = metadata.kvx_content_parts.split(" ");
    if (parts.length !== ranges.length) throw new FileMistake(`${name} keeps digests of ${parts.length} parts; its manifest makes ${ranges.length}.`);
    const seal = hexText(hashOfText(pythonJson(["kvx seal 1", manifest.digest, content, ...parts], { comma: ", " }), 16));
    if (seal !== metadata.kvx_seal) throw new FileMistake(`${name}: its seal is ${brief(metadata.kvx_seal)}; its manifest and digests make "${seal}". It was changed after it was written, or written by another version of KVX.`);
  }
  const entries = tensorEntries(manifest), total = entries.reduce((sum, e) => sum + e.size, 0), wanted = 8 + length + total;
  if (size !== wanted) throw new FileMistake(`${name} has ${size.toLocaleString("en-US")} bytes; its manifest and header make ${wanted.toLocaleString("en-US")}. ${size < wanted ? "It is cut short" : "Something was added behind it"}.`);
  const spans = entries.map((e) => {
    const at = Object.hasOwn(tensors, e.name) ? tensors[e.name] : null, begin = at?.data_offsets?.[0];
    if (!Number.isSafeInteger(begin) || begin < 0 || at.data_offsets[1] !== begin + e.size || at.dtype !== e.type || JSON.stringify(at.shape) !== JSON.stringify(e.shape)) throw new FileMistake(`${name}: tensor ${e.name} is ${brief(at)}; its manifest makes ${e.type} [${e.shape.join(", ")}] in ${e.size} bytes.`);
    return [8 + length + begin, e.size];
  });
  const strange = Object.keys(tensors).find((n) => !entries.some((e) => e.name === n));
  if (strange !== undefined) throw new FileMistake(`${name} has a tensor its manifest does not describe: ${brief(strange)}.`);
  let end = 8 + length;
  for (const [begin, bytes2] of [...spans].sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (begin !== end) throw new FileMistake(`${name} has gaps or overlaps between its tensors. It was changed after it was written.`);
    end += bytes2;
  }
  return { name, size, manifest, content, parts, isSealed: kept.length === 3, entries, spans, blob, heading };
}

// A handover's folder: files by their names. { told, parts: [{ file, fields, content }], tokens }.
export async function readHandover(files, formats) {
  const text = await files.get("handover.json").text();
  if (text.length > 1 << 24) throw new FileMistake(`handover.json has ${text.length.toLocaleString("en-US")} characters; a manifest has at most ${(1 << 24).toLocaleString("en-US")}.`);
  const body = parseObject(text, "handover.json");
  if (body.kvx_handover !== 1) throw new FileMistake(`handover.json: the manifest's version is ${brief(body.kvx_handover)}; this page reads 1.`);
  const { digest: stated, ...rest } = body, hashOf = (x) => hashOfText(pythonJson(x, { isSorted: true }), 16);
  if (stated !== hexText(hashOf(rest))) throw new FileMistake(`handover.json: the manifest's digest is ${brief(stated)} and its fields make "${hexText(hashOf(rest))}". It was changed on the way.`);
  const { seals, ...sealed } = rest;
  if (!Array.isArray(body.parts) || !Array.isArray(seals) || !Array.isArray(body.tokens) || seals.length !== body.parts.length || !body.parts.length || body.parts.length > 4096) throw new FileMistake("handover.json: the manifest has not one seal for each part.");
  const base = hashOf(sealed), listed = files.has("files.json") ? JSON.parse(await files.get("files.json").text()) : null;
  const parts = [];
  for (const [n, fields] of body.parts.entries()) {
    const name = `part${n}.safetensors`, blob = files.get(name);
    if (!/^[0-9a-f]{32}$/.test(String(seals[n]))) throw new FileMistake(`handover.json: a digest of the manifest is ${brief(seals[n])}; it has 32 digits of 0 to f.`);
    const hash = new DataView(blake2b(new Uint8Array([...base, n & 255, n >> 8 & 255, n >> 16 & 255, n >> 24 & 255]), 16).buffer);
    const minus = (at, half) => BigInt.asUintN(64, BigInt(`0x${String(seals[n]).slice(half, half + 16)}`) - hash.getBigUint64(at, true)).toString(16).padStart(16, "0");
    const part = { fields, content: minus(0, 0) + minus(8, 16), file: null, problem: "", manifest: readManifest(fields.manifest, formats), numTokens: body.tokens.length };
    if (!blob) part.problem = `There is no ${name} among what was dropped.`;
    else {
      try {
        part.file = await readCacheFile(blob, name, formats);
        if (part.file.manifest.digest !== part.manifest.digest) part.problem = `${name} has another manifest than handover.json says. It is of another handover.`;
        const said = Array.isArray(listed) ? listed[n] : null;
        if (said && (said.bytes !== blob.size || said.heading !== hexText(blake2b(part.file.heading.subarray(0, part.file.spans[0] ? Math.min(...part.file.spans.map(([begin]) => begin)) : 0), 16)))) part.problem = `${name} is not as it was saved: files.json has ${brief(said)}. It is cut short, changed, or another handover's.`;
      } catch (error) {
        if (!(error instanceof FileMistake)) throw error;
        part.problem = error.message;
      }
    }
    parts.push(part);
  }
  return { body, parts };
}
