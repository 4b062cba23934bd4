// Reads vectors of sizes and the page's facts, and prints where config_reader.js and size_count.js say another number.
// node check_sizes.mjs STATIC FACTS VECTORS: a line of JSON, { answered, refused, unanswered: { model: why }, wrong: [...] }.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, factsPath, vectorsPath] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(`${folder}/${name}`));
const { readConfig, parseConfig, sizeFacts, ConfigError } = await load("config_reader.js");
const { countSize } = await load("size_count.js");
const told = JSON.parse(readFileSync(factsPath)), facts = sizeFacts(told.size, told.formats), vectors = parseConfig(readFileSync(vectorsPath, "utf8"));
const result = { answered: 0, refused: 0, unanswered: {}, wrong: [] };

// Known models are those that the page has embedded.
function numbers(v) {
  const model = readConfig(v.model, v.is_known ? facts.models[v.model] : v.config, facts, v.is_known);
  const o = v.options;
  const s = countSize(model, { format: o.format, tp: o.tp, blockSize: o.block_size, indexFormat: o.index_format, state: o.state, stateFormat: o.state_format }, facts.formats);
  const asked = (v.size?.asked ?? []).map((a) => ({
    ...a, total_bytes: s.totalBytes(a.context, a.requests, a.shared_prefix), requests_fit: s.fitRequests(a.memory_bytes, a.context, a.shared_prefix),
    longest_context: s.fitContext(a.memory_bytes, a.requests, a.shared_prefix),
  }));
  return {
    token_bytes: s.tokenBytes, block_bytes: s.blockBytes, fixed_bytes: s.fixedBytes, block_size: s.blockSize, index_format: s.indexFormat,
    state_format: s.stateFormat, notes: model.notes, is_checked: model.isChecked,
    groups: s.groups.map((g) => ({
      name: g.name, num_layers: g.numLayers, stores: g.stores, ratio: g.ratio, window: g.window, is_chunked: g.isChunked, ring_tokens: g.ringTokens,
      block_size: g.blockSize, block_bytes: g.blockBytes, state_bytes: g.stateBytes, resume_bytes: g.resumeBytes,
      planes: g.planes.map((p) => ({ name: p.name, shape: p.shape, format: p.format, num_bytes: p.bytes })),
      token_bytes: g.tokenBytes, max_blocks: g.maxBlocks, fixed_bytes: g.fixedBytes,
    })),
    asked,
  };
}

for (const vector of vectors.flatMap(({ cases, ...of }) => cases.map((one) => ({ ...of, ...one })))) {
  let got;
  try { got = numbers(vector); } catch (error) {
    if (!(error instanceof ConfigError)) throw error;
    if (vector.size) result.unanswered[vector.model] = error.message;
    else result.refused += 1;
    continue;
  }
  if (!vector.size) { result.wrong.push({ model: vector.model, options: vector.options, got: got.token_bytes, want: "a refusal" }); continue; }
  // A class may list layers where a rule stood in the config; that the rule is not understood is then said here alone, and is true.
  if (!vector.is_known && vector.size.notes.every((note) => got.notes.includes(note))) got.notes = vector.size.notes;
  for (const key of Object.keys(vector.size)) {
    if (JSON.stringify(got[key]) !== JSON.stringify(vector.size[key])) result.wrong.push({ model: vector.model, options: vector.options, key, got: got[key], want: vector.size[key] });
  }
  result.answered += 1;
}
console.log(JSON.stringify(result));
