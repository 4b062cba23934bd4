// Tab 1: two caches side by side, byte by byte. Hovering an element lights the same one on the other side; "Read it wrong" shows what
// the right layout makes of the left one's bytes.
import { make, fill, labelled, onThemeChange } from "./dom.js"
import { withCommas } from "./language.js"
import { axisColours } from "./colours.js"
import { cellWords, logicalCells, misread, misreadFacts, placeOfIdentity, planeTitle, ELEMENT } from "./cells.js"
import { ByteMap } from "./bytemap.js"
import { mapsSvg, saveFile, svgToPng } from "./picture.js"
import { fittingSizes, layoutChoices, putNumber, readSide, SideControls } from "./side.js"

const SIZES = { layers: 2, tokens: 8, heads: 2, dim: 8, vDim: 0, blocks: 3, channels: 8, rows: 4, columns: 4, taps: 3 };
const SIZE_WORDS = {
  layers: "Layers", tokens: "Tokens", heads: "KV heads", dim: "Head dim", vDim: "V dim",
  blocks: "States", channels: "Channels", rows: "Rows", columns: "Columns", taps: "Taps",
};
const KV_SIZES = ["layers", "tokens", "heads", "dim", "vDim"];
const STATE_SIZES = ["layers", "blocks", "heads", "channels", "rows", "columns", "taps"];
const SIDE = { layout: "", block: 4, format: "bf16", vFormat: "", blockBytes: 0 };
const SIDE_LINK = { block: "block", format: "format", vFormat: "vformat", blockBytes: "bytes" };
const FIRST = { left: "vllm.lbnhc", right: "tensorrt_llm" };
const NEUTRAL = "#9a9a9a";
const COLOUR_WORDS = { kv: "K or V", layer: "layer", position: "token", block: "block", head: "head", dim: "dim", channel: "channel", tap: "tap", row: "row", column: "column" };

class LayoutsView {
  constructor(root, page) {
    this.page = page;
    this.choices = layoutChoices(page.data);
    this.formats = new Map(page.data.formats.map((row) => [row.name, row]));
    this.sides = {};
    this.lit = null; // the identity that both sides show
    this.pinned = null;
    for (const name of ["left", "right"]) {
      const controls = new SideControls(name, name === "left" ? "Left" : "Right", this.choices, this.formats, (wanted, isRow) => this.change(name, wanted, isRow));
      const on = { hover: (cell) => this.hover(name, cell), pick: (cell) => this.pick(name, cell), cursor: (cell) => this.hover(name, cell, true) };
      const map = new ByteMap(name, on);
      const where = make("p", { class: "side-where mono" });
      const card = make("section", { class: `card side side-${name}`, "aria-label": name === "left" ? "Left cache" : "Right cache" }, controls.element, where, map.element);
      this.sides[name] = { controls, map, where, card, wanted: null, shown: null };
    }
    this.makeTop();
    this.wrong = make("section", { class: "card wrong", hidden: true, "aria-label": "Read it wrong" });
    root.append(this.top, this.wrong, make("div", { class: "sides" }, this.sides.left.card, this.sides.right.card));
    this.stops = [page.link.changed(() => this.read()), onThemeChange(() => this.paint())];
    this.read();
  }

  close() {
    for (const stop of this.stops) stop();
    for (const side of Object.values(this.sides)) side.map.close();
  }

  makeTop() {
    this.inputs = Object.fromEntries(Object.keys(SIZES).map((name) => [name, make("input", { type: "number", min: name === "vDim" ? "0" : "1", placeholder: name === "vDim" ? "as K" : null, inputmode: "numeric", class: "size-input", oninput: () => this.resize(name) })]));
    this.sizeFields = Object.fromEntries(Object.keys(SIZES).map((name) => [name, labelled(SIZE_WORDS[name], this.inputs[name], { class: "size-field" })]));
    this.by = make("select", { onchange: () => this.set({ by: this.by.value }) });
    this.wrongButton = make("button", { type: "button", "aria-pressed": "false", title: "Read the left bytes with the right layout", onclick: () => this.set({ wrong: this.isWrong ? null : "1" }) }, "Read it wrong");
    const button = (words, title, go) => make("button", { type: "button", title, onclick: go }, words);
    this.legend = make("div", { class: "legend", role: "group", "aria-label": "Colours" });
    this.top = make("section", { class: "card controls", "aria-label": "Sizes and colours" },
      make("div", { class: "row" },
        make("div", { class: "row sizes" }, Object.values(this.sizeFields), labelled("Colour by", this.by)),
        make("span", { class: "spring" }),
        this.wrongButton, button("Swap", "Left becomes right", () => this.swap()),
        button("SVG", "Save both maps as SVG", () => this.save("svg")), button("PNG", "Save both maps as PNG", () => this.save("png")), button("Copy link", "Copy the address of what is shown", () => this.copy())),
      this.legend);
  }

  // ---- the address: what is not as usual stands there

  set(changes) {
    this.page.link.set(changes);
    this.read();
  }

  read() {
    const { link } = this.page;
    const number = (name, usual) => (link.get(name) === null ? usual : Number(link.get(name)));
    this.sizes = Object.fromEntries(Object.entries(SIZES).map(([name, usual]) => [name, number(name, usual)]));
    for (const [name, side] of Object.entries(this.sides)) {
      side.wanted = { ...SIDE, layout: link.get(name) ?? FIRST[name] };
      for (const [field, word] of Object.entries(SIDE_LINK)) {
        const text = link.get(`${name}-${word}`);
        if (text !== null) side.wanted[field] = typeof SIDE[field] === "number" ? Number(text) : text;
      }
    }
    this.axis = link.get("by") ?? "head";
    this.isWrong = link.get("wrong") === "1";
    this.pinned = readIdentity(link.get("at"));
    this.lit = this.pinned;
    this.show();
  }

  writeSizes(sizes) {
    return Object.fromEntries(Object.entries(SIZES).map(([name, usual]) => [name, sizes[name] === usual ? null : sizes[name]]));
  }

  writeSide(name, wanted) {
    const changes = { [name]: wanted.layout === FIRST[name] ? null : wanted.layout || " " };
    for (const [field, word] of Object.entries(SIDE_LINK)) changes[`${name}-${word}`] = wanted[field] === SIDE[field] ? null : wanted[field];
    return changes;
  }

  change(name, wanted, isRow) {
    this.set({ ...this.writeSide(name, wanted), at: null });
    if (isRow && this.sides[name].shown.canFit) this.useFitting(name); // whoever chooses a row means one that can be drawn
  }

  resize(name) {
    const value = Number(this.inputs[name].value);
    this.set({ ...this.writeSizes({ ...this.sizes, [name]: value }), at: null });
  }

  useFitting(name) {
    const { wanted } = this.sides[name];
    const row = this.choices.find((one) => one.key === wanted.layout);
    const { block, ...sizes } = fittingSizes(row ? row.layout : wanted.layout, wanted, this.sizes, this.formats);
    const tokens = Math.max(this.sizes.tokens, block);
    this.set({ ...this.writeSide(name, { ...wanted, block }), ...this.writeSizes({ ...this.sizes, ...sizes, tokens }), at: null });
    this.page.say(`Sizes now fit this layout: ${block} tokens per block, ${sizes.heads} heads of ${sizes.dim}.`);
  }

  swap() {
    const { left, right } = this.sides;
    this.set({ ...this.writeSide("left", right.wanted), ...this.writeSide("right", left.wanted), at: null });
  }

  // ---- what is shown

  show() {
    for (const [name, input] of Object.entries(this.inputs)) putNumber(input, this.sizes[name], name === "vDim");
    for (const [name, side] of Object.entries(this.sides)) {
      const key = JSON.stringify([side.wanted, this.sizes]);
      if (side.key !== key) side.shown = readSide(side.wanted, this.sizes, this.choices, this.formats);
      side.key = key;
      side.controls.show(side.wanted);
      side.controls.showError(side.shown.error ?? "", side.shown.canFit ? () => this.useFitting(name) : null);
      side.card.classList.toggle("is-wrong", Boolean(side.shown.error));
      if (side.shown.cache) side.controls.showAbout(side.shown.row, side.shown.cache);
    }
    const caches = Object.values(this.sides).map((side) => side.shown.cache).filter(Boolean);
    const isState = (cache) => Boolean(cache.isState);
    const wantedSizes = new Set([...(caches.every(isState) && caches.length ? [] : KV_SIZES), ...(caches.some(isState) ? STATE_SIZES : [])]);
    for (const [name, field] of Object.entries(this.sizeFields)) field.hidden = !wantedSizes.has(name);
    this.showAxes(caches);
    this.wrongButton.setAttribute("aria-pressed", String(this.isWrong));
    this.paint();
  }

  showAxes(caches) {
    const axes = ["kv"];
    for (const cache of caches) {
      for (const plane of cache.planes) {
        for (const name of ["layer", ...plane.axes.map(([axis]) => axis).flatMap((axis) => (axis === "token" ? ["position", "block"] : [axis]))]) if (!axes.includes(name)) axes.push(name);
      }
      if (cache.isState && !axes.includes("block")) axes.push("block");
    }
    if (!axes.includes(this.axis)) this.axis = axes.includes("head") ? "head" : "kv";
    const isState = caches.length > 0 && caches.every((cache) => cache.isState);
    fill(this.by, axes.map((axis) => make("option", { value: axis }, isState && axis === "kv" ? "plane" : COLOUR_WORDS[axis] ?? axis)));
    this.by.value = this.axis;
  }

  // How many values the axis of colours has, on either side.
  numColours() {
    let count = 1;
    for (const { shown } of Object.values(this.sides)) {
      if (!shown.cache) continue;
      const { cache } = shown;
      const sizes = { kv: cache.planes.length, position: cache.numBlocks * cache.blockSize, layer: cache.numLayers, block: cache.numBlocks };
      count = Math.max(count, sizes[this.axis] ?? Math.max(...cache.planes.map((plane) => plane.sizes[this.axis] ?? 1)));
    }
    return count;
  }

  paint() {
    const count = this.numColours();
    const colours = axisColours(count);
    this.colours = colours;
    for (const [name, side] of Object.entries(this.sides)) {
      const { table } = side.shown;
      if (!table) {
        side.map.show(null, null, `${name}: nothing is drawn, since the layout or a size is wrong.`);
        continue;
      }
      side.map.show(table, this.lookOf(table, colours), this.mapLabel(name, side));
    }
    this.paintWrong(colours);
    this.showLegend(colours, count);
    this.relight(Boolean(this.pinned));
  }

  lookOf(table, colours) {
    const values = table.values(this.axis);
    return {
      colour: (cell) => (values[cell] < 0 ? NEUTRAL : colours(values[cell])),
      label: (cell) => this.valueWord(table, values[cell]),
      title: (section) => `${section.title ? `${section.title}  ·  ` : ""}buffer ${section.buffer}, ${withCommas(section.bytes)} bytes`,
    };
  }

  valueWord(table, value) {
    if (value < 0) return "";
    return this.axis === "kv" ? shortPlane(table.cache.planes[value].name) : String(value);
  }

  mapLabel(name, { shown, wanted }) {
    const { cache } = shown;
    const bytes = cache.buffers.reduce((n, size) => n + size, 0);
    return `${name === "left" ? "Left" : "Right"} map, ${shown.row?.name ?? wanted.layout}: ${withCommas(shown.table.count)} cells in ${cache.buffers.length} buffers of together ${withCommas(bytes)} bytes, in the order of memory, coloured by ${COLOUR_WORDS[this.axis] ?? this.axis}. Arrow keys walk through the cells.`;
  }

  showLegend(colours, count) {
    const table = this.sides.left.shown.table ?? this.sides.right.shown.table;
    const chip = (colour, words, className = "") => make("span", { class: `chip ${className}`.trim() }, make("span", { class: "chip-colour", style: colour ? { background: colour } : {} }), words);
    const name = COLOUR_WORDS[this.axis] ?? this.axis;
    const parts = [];
    if (count <= 10) for (let i = 0; i < count; i++) parts.push(chip(colours(i), this.axis === "kv" && table ? planeTitle(table.cache.planes[i]?.name ?? "v") : `${name} ${i}`));
    else {
      const stops = [0, 0.2, 0.4, 0.6, 0.8, 1].map((share) => colours(Math.round(share * (count - 1))));
      parts.push(`${name} 0`, make("span", { class: "legend-band", style: { background: `linear-gradient(to right, ${stops.join(", ")})` } }), String(count - 1));
    }
    const tables = Object.values(this.sides).map((side) => side.shown.table).filter(Boolean);
    if (tables.some((one) => one.kind.some((kind) => kind !== ELEMENT))) parts.push(chip(null, "scale", "chip-scale"));
    if (tables.some((one) => one.cache.blockBytes || one.cache.layout.text.includes("+"))) parts.push(chip(null, "padding, or never read", "chip-padding"));
    if (this.isWrong) parts.push(chip(null, "not what it is taken for", "chip-mark"));
    fill(this.legend, parts);
  }

  // ---- the same element on both sides

  hover(name, cell, isCursor = false) {
    const side = this.sides[name];
    const { table } = side.map;
    const lit = table && cell >= 0 ? this.identityOf(name, cell) : null;
    this.lit = lit ?? this.pinned;
    side.hovered = cell;
    this.relight(isCursor, name);
    const text = table && cell >= 0 ? this.words(name, cell) : "";
    fill(side.where, text);
    if (isCursor && text) this.page.say(text);
  }

  pick(name, cell) {
    const { table } = this.sides[name].map;
    this.pinned = table && cell >= 0 ? this.identityOf(name, cell) : null;
    this.lit = this.pinned;
    this.page.link.set({ at: this.pinned ? writeIdentity(this.pinned) : null });
    this.relight(true, name);
    this.page.say(table && cell >= 0 ? this.words(name, cell) : "");
  }

  // What stands under a cell. On the right of "Read it wrong", what really stands there.
  identityOf(name, cell) {
    if (name === "right" && this.truth) {
      const really = this.truth[this.sides.right.map.table.source[cell]];
      return really >= 0 ? this.sides.left.shown.table.identity(really) : null;
    }
    return this.sides[name].map.table.identity(cell);
  }

  words(name, cell) {
    const { table } = this.sides[name].map;
    if (name === "right" && this.truth) {
      const memory = this.sides.left.shown.table;
      const really = this.truth[table.source[cell]];
      return `Taken for ${cellWords(table, cell)}. Really ${really >= 0 ? cellWords(memory, really) : "padding, or the middle of other elements"}.`;
    }
    return placeWords(table, cell);
  }

  relight(isRevealed, except = "") {
    for (const [name, side] of Object.entries(this.sides)) {
      const { map } = side;
      const lights = [];
      if (map.table && this.lit) {
        if (name === "right" && this.truth) {
          lights.push(...this.misreadLights(map.table));
          const cell = lights.length ? map.table.at(lights[0].section, lights[0].start) : -1;
          if (name !== except) fill(side.where, cell >= 0 ? this.words(name, cell) : "The reader does not look there.");
        } else {
          const place = placeOfIdentity(map.table.cache, this.lit);
          if (place) lights.push({ section: place.buffer, start: place.byte + place.bit / 8, size: place.size, isStrong: Boolean(this.pinned), isOwn: name === except });
          if (name !== except) fill(side.where, place ? placeWords(map.table, map.table.at(place.buffer, place.byte + place.bit / 8)) : "This side has no such element.");
        }
      } else if (name !== except) fill(side.where);
      map.light(lights);
      if (isRevealed && lights.length && name !== except) map.reveal(lights[0].section, lights[0].start, lights[0].size);
    }
  }

  misreadLights(table) {
    const memory = this.sides.left.shown.table;
    const place = placeOfIdentity(memory.cache, this.lit);
    const wanted = place ? memory.at(place.buffer, place.byte + place.bit / 8) : -1;
    const cell = this.takenFor.get(wanted) ?? -1;
    return cell < 0 ? [] : [{ section: table.section[cell], start: table.start[cell], size: 1, isStrong: true }];
  }

  // ---- read it wrong

  paintWrong(colours) {
    const { left, right } = this.sides;
    this.truth = null;
    this.wrong.hidden = !this.isWrong;
    right.card.classList.toggle("is-misread", this.isWrong);
    if (!this.isWrong) return;
    if (!left.shown.table || !right.shown.table) {
      fill(this.wrong, make("p", {}, "Both sides need a layout that can be drawn."));
      return;
    }
    const memory = left.shown.table;
    const reader = right.shown.table;
    this.truth = misread(memory, reader);
    const table = logicalCells(reader);
    const { axis, truth } = this;
    const values = memory.values(axis);
    const really = (cell) => truth[table.source[cell]];
    const isWrong = Uint8Array.from({ length: table.count }, (_, cell) => {
      const found = really(cell);
      return found < 0 || memory.kind[found] !== ELEMENT || !sameIdentity(memory.identity(found), table.identity(cell)) ? 1 : 0;
    });
    this.takenFor = new Map(); // from a cell of memory to where the reader sees it
    for (let cell = 0; cell < table.count; cell++) if (really(cell) >= 0) this.takenFor.set(really(cell), cell);
    right.map.show(table, {
      colour: (cell) => (really(cell) < 0 || values[really(cell)] < 0 ? NEUTRAL : colours(values[really(cell)])),
      label: (cell) => (really(cell) >= 0 ? this.valueWord(memory, values[really(cell)]) : "?"),
      title: (section) => section.title,
      isMarked: (cell) => isWrong[cell] === 1,
    }, `Right map: what ${right.shown.row?.name ?? "the right layout"} takes the left bytes for, coloured by the ${COLOUR_WORDS[axis] ?? axis} that really stands there. Arrow keys walk through the elements.`);
    this.showFacts(misreadFacts(memory, reader, truth, axis), memory, reader);
  }

  showFacts(facts, memory, reader) {
    const percent = (share) => (share === 1 ? "all" : share === 0 ? "none" : share < 0.01 ? "under 1 %" : share > 0.99 ? "over 99 %" : `${Math.round(100 * share)} %`);
    const names = { left: this.sides.left.shown.row?.name ?? "the left layout", right: this.sides.right.shown.row?.name ?? "the right layout" };
    const bytes = (table) => table.cache.buffers.reduce((n, size) => n + size, 0);
    const isRight = facts.right === facts.count;
    const sizes = bytes(memory) === bytes(reader) ? "" : ` The left has ${withCommas(bytes(memory))} bytes and the right reads ${withCommas(bytes(reader))}.`;
    const sum = isRight
      ? "Every element is what the reader takes it for: with these sizes both layouts are the same bytes."
      : `${withCommas(facts.right)} of ${withCommas(facts.count)} elements are what the reader takes them for (${percent(facts.right / facts.count)}).${facts.other ? ` ${withCommas(facts.other)} are no whole element: padding, scales, or the middle of others.` : ""}${sizes} The right map shows the reader's view, coloured by what really stands there.`;
    const bars = Object.entries(facts.axes).map(([axis, share]) =>
      make("div", { class: "share" }, make("dt", {}, COLOUR_WORDS[axis] ?? axis), make("dd", {}, make("span", { class: "bar" }, make("span", { class: "bar-fill", style: { width: `${100 * share}%` } })), percent(share))));
    fill(this.wrong,
      make("div", { class: "wrong-text" },
        make("h2", {}, `The bytes of ${names.left}, read as ${names.right}`), make("p", { class: "wrong-sum" }, sum),
        make("h3", {}, "Share that is right, by axis"), make("dl", { class: "shares" }, bars)),
      this.makeMatrix(facts, memory, reader));
  }

  // Rows: what the reader takes for head 0, 1, ...; columns: which heads really stand there.
  makeMatrix(facts, memory, reader) {
    const taken = [...facts.matrix.keys()].filter((n) => n >= 0).sort((a, b) => a - b);
    const there = [...new Set([...facts.matrix.values()].flatMap((row) => [...row.keys()]))].sort((a, b) => (a < 0) - (b < 0) || a - b);
    const most = 12;
    const name = COLOUR_WORDS[this.axis] ?? this.axis;
    const word = (table, n) => (n < 0 ? "none" : this.axis === "kv" ? planeTitle(table.cache.planes[n]?.name ?? "") : String(n));
    const rows = taken.slice(0, most).map((row) => {
      const counts = facts.matrix.get(row);
      const sum = [...counts.values()].reduce((a, b) => a + b, 0);
      return make("tr", {}, make("th", { scope: "row" }, word(reader, row)), there.slice(0, most).map((column) => {
        const share = (counts.get(column) ?? 0) / sum;
        return make("td", { class: `matrix-cell${row === column ? " is-right" : ""}`, style: share ? { background: `color-mix(in srgb, ${column < 0 ? NEUTRAL : this.colours(column)} ${Math.round(20 + 70 * share)}%, transparent)` } : {} }, share ? `${Math.max(1, Math.round(100 * share))}` : "");
      }));
    });
    const isCut = taken.length > most || there.length > most;
    return make("div", { class: "wrong-matrix" },
      make("h3", {}, `Taken for which ${name} (rows), really which (columns), in percent${isCut ? "; the first 12" : ""}`),
      make("div", { class: "matrix-scroll" }, make("table", { class: "matrix" },
        make("thead", {}, make("tr", {}, make("td", {}), there.slice(0, most).map((n) => make("th", { scope: "col" }, word(memory, n))))), make("tbody", {}, rows))));
  }

  // ---- to keep and to share

  picture() {
    return mapsSvg(Object.values(this.sides).filter((side) => side.map.table).map((side) => ({
      table: side.map.table,
      look: side.map.look,
      title: side.shown.row ? `${side.shown.row.engine}: ${side.shown.row.name}` : "A layout",
      subtitle: side.shown.cache.layout.text,
    })));
  }

  async save(kind) {
    if (!Object.values(this.sides).some((side) => side.map.table)) {
      this.page.say("There is nothing to save: neither side can be drawn.", "error");
      return;
    }
    const svg = this.picture();
    const blob = kind === "svg" ? new Blob([svg], { type: "image/svg+xml" }) : await svgToPng(svg);
    const name = Object.values(this.sides).map((side) => (side.shown.row?.key ?? "layout").replace(/[^\w.-]/g, "_")).join("-");
    saveFile(`${name}.${kind}`, blob);
    this.page.say(`Saved ${name}.${kind}.`);
  }

  async copy() {
    const address = this.page.link.href();
    try {
      await navigator.clipboard.writeText(address);
      this.page.say("The address is copied.");
    } catch (error) {
      this.page.say(`The browser did not let the page copy (${error.message}); the address line has the same link.`, "error");
    }
  }
}

function shortPlane(name) {
  return name === "k" || name === "v" ? name.toUpperCase() : name.slice(0, 1);
}

function placeWords(table, cell) {
  if (cell < 0) return "";
  const size = table.size[cell];
  const start = table.start[cell];
  const bit = start % 1 ? ", high half" : size < 1 ? ", low half" : "";
  const bytes = size < 1 ? "4 bits" : size === 1 ? "1 byte" : `${size} bytes`;
  return `${cellWords(table, cell)}: buffer ${table.sections[table.section[cell]].buffer}, byte ${withCommas(Math.floor(start))}${bit} (${bytes})`;
}

function sameIdentity(a, b) {
  return a && b && Object.keys(a).length === Object.keys(b).length && Object.entries(a).every(([name, value]) => b[name] === value);
}

function writeIdentity(identity) {
  return Object.entries(identity).map(([name, value]) => `${name}:${value}`).join(",");
}

function readIdentity(text) {
  if (!text) return null;
  const parts = text.split(",").map((part) => part.split(":"));
  if (parts.some((part) => part.length !== 2)) return null;
  return Object.fromEntries(parts.map(([name, value]) => [name, name === "plane" ? value : Number(value)]));
}

export const layoutsTab = {
  name: "layouts",
  title: "Layouts",
  mount(root, page) {
    const view = new LayoutsView(root, page);
    // For tests: what is drawn, out of the tables the maps draw from.
    return { close: () => view.close(), view };
  },
};
