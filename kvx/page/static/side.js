// One side of the tab "Layouts": which cache is meant, by an engine's row or a layout that was typed, and its controls.
import { make, fill, labelled } from "./dom.js"
import { parseLayout, splitOf, withCommas } from "./language.js"
import { makeCache, makeStates, contentBytes } from "./place.js"
import { memoryCells, numCells } from "./cells.js"

const TYPED = "";

function commonMultiple(a, b) {
  const divisor = (x, y) => (y ? divisor(y, x % y) : x);
  return (a / divisor(a, b)) * b;
}

// The rows of the registry as a reader chooses them: K and V by engine, then states.
export function layoutChoices(data) {
  const rows = data.engines.map((row) => ({ ...row, key: row.name, heads: row.constraints.num_kv_heads, isState: false }));
  const kinds = { delta: "delta rule", ssm: "Mamba2" };
  for (const row of data.states ?? []) {
    for (const [kind, layout] of Object.entries(row.layouts)) {
      rows.push({ ...row, key: `state.${row.name}.${kind}`, name: `${row.name}, ${kinds[kind]}`, layout, isState: true, other_names: [], types: null });
    }
  }
  return rows;
}

// The cache of one side. `wanted` is { layout (a row's key or text), block, format, vFormat, blockBytes }, `sizes` are both sides'.
export function cacheOfSide(wanted, sizes, choices, formats) {
  const row = choices.find((one) => one.key === wanted.layout) ?? null;
  const text = row ? row.layout : wanted.layout;
  const layout = parseLayout(text);
  const isState = ![...layout.planes.keys()].every((name) => name === "k" || name === "v");
  const numLayers = layout.hasLayer ? sizes.layers : 1;
  if (isState) {
    const numBlocks = sizes.blocks;
    const axes = { head: sizes.heads, channel: sizes.channels, row: sizes.rows, column: sizes.columns, tap: sizes.taps };
    return { row, cache: makeStates({ layout: text, sizes: axes, format: wanted.format, numLayers, numBlocks, blockBytes: wanted.blockBytes }, formats) };
  }
  const spec = {
    layout: text,
    num_layers: numLayers,
    num_blocks: Math.ceil(sizes.tokens / wanted.block),
    block_size: wanted.block,
    num_kv_heads: row?.heads || sizes.heads,
    head_dim: sizes.dim,
    v_head_dim: sizes.vDim,
    format: wanted.format,
    v_format: wanted.vFormat,
    block_bytes: wanted.blockBytes,
  };
  return { row, cache: makeCache(spec, formats) };
}

// Sizes that a layout can have, as near to the given ones as its splits and its formats' groups allow.
export function fittingSizes(text, wanted, sizes, formats) {
  const layout = parseLayout(text);
  const plans = [...layout.planes];
  const bitsOf = (name) => formats.get((name === "v" && wanted.vFormat) || wanted.format)?.element_bits ?? 16;
  const multiple = (axis) =>
    plans.reduce((n, [name, plane]) => {
      const factor = splitOf(plane, axis);
      return factor ? commonMultiple(n, factor === "x" ? 128 / bitsOf(name) : Number(factor)) : n;
    }, 1);
  const groups = [wanted.format, wanted.vFormat].map((name) => formats.get(name)?.group_size || 1).reduce(commonMultiple, 1);
  const inline = [wanted.format, wanted.vFormat].some((name) => formats.get(name)?.is_inline || formats.get(name)?.element_bits === 4) ? 8 : 1;
  const up = (value, n) => Math.max(n, Math.ceil(value / n) * n);
  const dim = [multiple("dim"), groups, inline].reduce(commonMultiple, 1);
  return {
    block: up(wanted.block, multiple("token")),
    heads: up(sizes.heads, multiple("head")),
    dim: up(sizes.dim, dim),
    vDim: sizes.vDim ? up(sizes.vDim, dim) : 0,
  };
}

// A number into its input, unless it says so already: whoever types keeps the caret, and may have it empty meanwhile.
export function putNumber(input, value, isZeroEmpty = false) {
  const isTyping = document.activeElement === input;
  if (Number(input.value) === value && (isTyping || input.value !== "" || isZeroEmpty)) return;
  input.value = isZeroEmpty && value === 0 ? "" : Number.isNaN(value) ? "" : value;
}

// The controls of a side. `changed(wanted, isRow)` is called with what is wanted now; isRow where a row was chosen.
export class SideControls {
  constructor(name, title, choices, formats, changed) {
    this.name = name;
    this.choices = choices;
    this.changed = changed;
    const send = (changes, isRow = false) => this.changed({ ...this.wanted, ...changes }, isRow);
    const groups = new Map();
    for (const row of choices) {
      const group = row.isState ? `Recurrent states, ${row.engine}` : row.engine;
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(make("option", { value: row.key }, `${row.name}  (${row.versions})`));
    }
    this.row = make("select", { class: "side-row", onchange: () => (this.row.value === TYPED ? this.text.focus() : send({ layout: this.row.value }, true)) },
      make("option", { value: TYPED }, "A layout of your own"), [...groups].map(([group, options]) => make("optgroup", { label: group }, options)));
    this.text = make("input", { class: "side-text mono", type: "text", spellcheck: "false", autocomplete: "off", autocapitalize: "off", maxlength: "1200", oninput: () => send({ layout: this.text.value }) });
    const formatOptions = () => [...formats.keys()].map((format) => make("option", { value: format }, format));
    this.format = make("select", { onchange: () => send({ format: this.format.value }, true) }, formatOptions());
    this.vFormat = make("select", { onchange: () => send({ vFormat: this.vFormat.value }, true) }, make("option", { value: "" }, "as K"), formatOptions());
    this.block = make("input", { type: "number", min: "1", inputmode: "numeric", oninput: () => send({ block: Number(this.block.value) }) });
    this.blockBytes = make("input", { type: "number", min: "0", step: "8", placeholder: "content", inputmode: "numeric", oninput: () => send({ blockBytes: Number(this.blockBytes.value) }) });
    this.about = make("p", { class: "side-about note" });
    this.error = make("div", { class: "side-error error", role: "alert", hidden: true });
    this.fit = make("button", { class: "side-fit", hidden: true, type: "button" }, "Use sizes that fit");
    this.element = make("fieldset", { class: "side-controls" },
      make("legend", { class: "sr-only" }, `${title} cache`),
      make("div", { class: "side-line" }, labelled(`${title}: engine and version`, this.row, { class: "side-main" }), this.blockField = labelled("Tokens per block", this.block, { class: "side-small" }), labelled("Bytes per block", this.blockBytes, { class: "side-small" })),
      make("div", { class: "side-line" }, labelled("Layout", this.text, { class: "side-main" }), labelled("Format", this.format, { class: "side-small" }), this.vFormatField = labelled("Format of V", this.vFormat, { class: "side-small" })),
      this.error, this.fit, this.about);
    this.blockBytes.title = "From one block to the next, where an engine pads its blocks; 0: they are not padded";
  }

  show(wanted) {
    this.wanted = wanted;
    const row = this.choices.find((one) => one.key === wanted.layout);
    this.row.value = row ? row.key : TYPED;
    const text = row ? row.layout : wanted.layout;
    if (this.text.value !== text && !(text === " " && !this.text.value)) this.text.value = text; // else the caret stays where it is
    this.format.value = this.format.title = wanted.format;
    this.vFormat.value = this.vFormat.title = wanted.vFormat;
    putNumber(this.block, wanted.block);
    putNumber(this.blockBytes, wanted.blockBytes, true);
  }

  // The sentence that is wrong, with a button where other sizes would do; "" takes it away.
  showError(text, fit) {
    this.error.hidden = !text;
    const [what, shown, marks, ...help] = text.split("\n");
    fill(this.error, make("p", {}, sentence(what)), shown === undefined ? null : make("pre", {}, `${shown}\n${marks ?? ""}`), help.length ? make("p", { class: "side-help" }, help.join(" ")) : null);
    this.text.setAttribute("aria-invalid", String(Boolean(text)));
    this.fit.hidden = !fit;
    this.fit.onclick = fit;
  }

  showAbout(row, cache) {
    const bytes = cache.buffers.reduce((n, size) => n + size, 0);
    const count = cache.buffers.length;
    const padding = cache.blockBytes && cache.blockBytes > contentBytes(cache) ? `, ${withCommas(cache.blockBytes - contentBytes(cache))} bytes of padding a block` : "";
    const names = (row?.other_names ?? []).map((one) => `${one.project}: ${one.name}`).join(", ");
    const isState = Boolean(cache.isState);
    this.vFormatField.hidden = isState || cache.planes.length < 2;
    this.blockField.hidden = isState;
    fill(this.about,
      make("span", { class: "side-size" }, `${withCommas(numCells(cache))} cells, ${withCommas(bytes)} bytes in ${count} ${count === 1 ? "buffer" : "buffers"}${padding}.`),
      row ? ` ${row.engine} ${row.versions}. ${row.notes}` : "",
      names ? make("span", { class: "side-names" }, ` Also called ${names}.`) : null);
  }
}

// A capital and a full stop, unless it begins with the name of a field.
function sentence(text) {
  const begins = /^[a-z]{2,} /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return begins && !/[.?!]$/.test(begins) ? `${begins}.` : begins;
}

// What a side shows: { row, cache, table } or { error, canFit }.
export function readSide(wanted, sizes, choices, formats) {
  try {
    const { row, cache } = cacheOfSide(wanted, sizes, choices, formats);
    return { row, cache, table: memoryCells(cache) };
  } catch (error) {
    if (error.name === "TypeError" || error.name === "ReferenceError") throw error; // ours, not the reader's
    return { error: error.message.replace(/^(layout|CacheSpec|StateSpec): /, ""), canFit: /multiple|divide|odd|aligned|unaligned|cuts a byte/.test(error.message) };
  }
}
