// A map of cells, drawn true to bytes: lines of a fixed number of them, a cell as wide as its bytes, padding hatched. One geometry, and
// one walk over it, for the canvas and for the picture that is exported; a canvas draws only what is in view.
import { make, fill, themeColour, onThemeChange } from "./dom.js"
import { ELEMENT } from "./cells.js"
import { withCommas } from "./language.js"

const GUTTER = 58; // for byte offsets
const TITLE = 24; // height of a section's title
const GAP = 12; // between sections
const WIDEST = 26;
const LABELLED = 15;
const NARROWEST = 3;

// Where everything stands, for a width in pixels.
export class MapGeometry {
  constructor(table, width) {
    this.table = table;
    this.width = width;
    const room = Math.max(80, width - GUTTER - 8);
    const unit = table.count ? table.size.reduce((least, size) => Math.min(least, size), Infinity) : 1;
    // The longest run of the layout that fits with cells wide enough for a label; smaller cells where none of eight or more does.
    const spans = table.sections[0]?.spans ?? [];
    let cell = LABELLED;
    let best = 0;
    for (; cell >= NARROWEST; cell--) {
      const most = Math.floor(room / cell) * unit;
      best = Math.max(0, ...spans.filter((span) => span <= most));
      if (best / unit >= 8 || best === table.sections[0]?.bytes) break;
    }
    this.cellWidth = Math.max(NARROWEST, best ? Math.min(WIDEST, Math.floor((room * unit) / best)) : cell);
    this.lineHeight = Math.max(9, Math.min(19, Math.round(this.cellWidth * 0.9)));
    this.perByte = this.cellWidth / unit;
    const most = Math.floor(room / this.perByte);
    let top = 4;
    this.tops = [];
    this.lines = [];
    this.lineBytes = [];
    for (const section of table.sections) {
      const fits = section.spans.filter((span) => span <= most);
      const line = fits.length ? Math.max(...fits) : Math.max(unit, Math.floor(most / (16 * unit)) * 16 * unit || Math.floor(most / unit) * unit);
      this.tops.push(top);
      this.lineBytes.push(Math.min(line, Math.max(section.bytes, unit)));
      this.lines.push(Math.max(1, Math.ceil(section.bytes / this.lineBytes[this.lineBytes.length - 1])));
      top += TITLE + this.lines[this.lines.length - 1] * this.lineHeight + GAP;
    }
    this.height = top;
  }

  sectionAt(y) {
    let low = 0;
    let high = this.tops.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tops[middle] <= y) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  }

  // The section and byte under a point; null beside the cells.
  byteAt(x, y) {
    if (!this.tops.length) return null;
    const section = this.sectionAt(y);
    const line = Math.floor((y - this.tops[section] - TITLE) / this.lineHeight);
    const inLine = (x - GUTTER) / this.perByte;
    if (line < 0 || line >= this.lines[section] || inLine < 0 || inLine >= this.lineBytes[section]) return null;
    const byte = line * this.lineBytes[section] + inLine;
    return byte < this.table.sections[section].bytes ? { section, byte } : null;
  }

  // Rectangles of a run of bytes: one, or two where a line ends inside it.
  rects(section, start, size) {
    const found = [];
    const width = this.lineBytes[section];
    let at = start;
    const end = start + size;
    while (at < end - 1e-6) {
      const line = Math.floor(at / width + 1e-9);
      const stop = Math.min(end, (line + 1) * width);
      found.push({ x: GUTTER + (at - line * width) * this.perByte, y: this.tops[section] + TITLE + line * this.lineHeight, w: (stop - at) * this.perByte, h: this.lineHeight });
      at = stop;
    }
    return found;
  }
}

// Draws what lies between two heights. `look` is { colour(cell), label(cell), isMarked(cell) }, `painter` has rect, hatch, text, frame.
export function paintMap(painter, geometry, look, from, to) {
  const { table } = geometry;
  if (!table.sections.length) return;
  const inset = geometry.cellWidth >= 6 ? 1 : geometry.cellWidth >= 4 ? 0.5 : 0;
  const hasLabels = geometry.cellWidth >= 15 && geometry.lineHeight >= 12;
  for (let s = geometry.sectionAt(from); s < table.sections.length && geometry.tops[s] <= to; s++) {
    const section = table.sections[s];
    const width = geometry.lineBytes[s];
    const top = geometry.tops[s];
    if (top + TITLE >= from) painter.text(GUTTER, top + TITLE - 8, look.title(section, s), "title");
    const firstLine = Math.max(0, Math.floor((from - top - TITLE) / geometry.lineHeight));
    const lastLine = Math.min(geometry.lines[s] - 1, Math.floor((to - top - TITLE) / geometry.lineHeight));
    if (lastLine < firstLine) continue;
    for (let line = firstLine; line <= lastLine; line++) {
      painter.text(GUTTER - 8, top + TITLE + (line + 0.5) * geometry.lineHeight + 3.5, section.line ? `${section.line} ${line}` : withCommas(Math.round(line * width)), "offset");
    }
    let byte = firstLine * width;
    const endByte = Math.min(section.bytes, (lastLine + 1) * width);
    let cell = firstCell(table, section, byte);
    while (byte < endByte - 1e-6) {
      const isCell = cell < section.last && table.start[cell] < endByte;
      const start = isCell ? table.start[cell] : endByte;
      if (start > byte + 1e-6) for (const r of geometry.rects(s, byte, start - byte)) painter.hatch(r.x, r.y, r.w - inset, r.h - inset);
      if (!isCell) break;
      for (const r of geometry.rects(s, start, table.size[cell])) {
        painter.rect(r.x, r.y, r.w - inset, r.h - inset, look.colour(cell), table.kind[cell] !== ELEMENT);
        if (look.isMarked?.(cell)) painter.mark(r.x, r.y, r.w - inset, r.h - inset);
        if (hasLabels && r.w >= 14) painter.text(r.x + (r.w - inset) / 2, r.y + r.h / 2 + 3.2, look.label(cell), "label");
      }
      byte = start + table.size[cell];
      cell += 1;
    }
  }
}

// The first of a section's cells that ends behind a byte.
function firstCell(table, section, byte) {
  let low = section.first;
  let high = section.last;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (table.start[middle] + table.size[middle] <= byte + 1e-6) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function mapColours() {
  return Object.fromEntries(["card", "well", "ink", "soft", "line", "accent", "error"].map((name) => [name, themeColour(name)]));
}

const FONTS = { title: "600 12px system-ui, sans-serif", offset: "10.5px ui-monospace, Menlo, Consolas, monospace", label: "10px system-ui, sans-serif" };

// Words and marks wait until the end: a context that changes its font or colour with every cell is slow.
class CanvasPainter {
  constructor(context, colours, scroll) {
    this.context = context;
    this.colours = colours;
    this.scroll = scroll;
    this.pattern = null;
    this.words = { title: [], offset: [], label: [] };
    this.marks = []; // corners: x, y, size
  }

  rect(x, y, w, h, colour, isScale) {
    const { context } = this;
    if (!isScale) {
      if (this.colour !== colour) context.fillStyle = this.colour = colour;
      context.fillRect(x, y - this.scroll, w, h);
      return;
    }
    context.fillStyle = this.colour = colour;
    context.globalAlpha = 0.3;
    context.fillRect(x, y - this.scroll, w, h);
    context.globalAlpha = 1;
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.strokeRect(x + 0.75, y - this.scroll + 0.75, Math.max(0, w - 1.5), h - 1.5);
  }

  hatch(x, y, w, h) {
    this.context.fillStyle = this.pattern ??= this.makePattern();
    this.colour = null;
    this.context.fillRect(x, y - this.scroll, w, h);
  }

  makePattern() {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = this.colours.well;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = this.colours.line;
    pen.lineWidth = 1.4;
    pen.beginPath();
    for (const at of [-6, 0, 6]) {
      pen.moveTo(at, 6);
      pen.lineTo(at + 6, 0);
    }
    pen.stroke();
    return this.context.createPattern(tile, "repeat");
  }

  mark(x, y, w, h) {
    this.marks.push(x + w, y - this.scroll, Math.min(w, h, 7));
  }

  text(x, y, text, kind) {
    if (text) this.words[kind].push(text, x, y - this.scroll);
  }

  finish() {
    const { context, marks } = this;
    context.fillStyle = this.colours.ink;
    context.beginPath();
    for (let i = 0; i < marks.length; i += 3) {
      context.moveTo(marks[i] - marks[i + 2], marks[i + 1]);
      context.lineTo(marks[i], marks[i + 1]);
      context.lineTo(marks[i], marks[i + 1] + marks[i + 2]);
    }
    context.fill();
    for (const [kind, words] of Object.entries(this.words)) {
      context.font = FONTS[kind];
      context.textAlign = { title: "left", offset: "right", label: "center" }[kind];
      context.fillStyle = kind === "label" ? "rgba(0,0,0,.72)" : kind === "title" ? this.colours.ink : this.colours.soft;
      for (let i = 0; i < words.length; i += 3) context.fillText(words[i], words[i + 1], words[i + 2]);
    }
  }
}

function frameRect(context, rect, scroll, colours, colour, isStrong) {
  context.lineWidth = isStrong ? 3 : 2;
  context.strokeStyle = colours.card;
  context.strokeRect(rect.x - 2.5, rect.y - 2.5 - scroll, rect.w + 4, rect.h + 4);
  context.strokeStyle = colour;
  context.strokeRect(rect.x - 1, rect.y - 1 - scroll, rect.w + 1, rect.h + 1);
}

// The map as a control: scrolls, follows the mouse, and has a cursor for the keyboard. `on` has hover(cell), pick(cell), cursor(cell).
export class ByteMap {
  constructor(name, on) {
    this.on = on;
    this.table = null;
    this.look = null;
    this.lights = []; // [{ section, start, size, isStrong }]
    this.cursor = -1;
    this.canvas = make("canvas", { role: "img", tabindex: "0", "aria-label": name, class: "bytemap-canvas" });
    this.overlay = make("canvas", { class: "bytemap-canvas bytemap-overlay", "aria-hidden": "true" }); // frames alone: a hover draws nothing else
    this.spacer = make("div", { class: "bytemap-spacer" }, make("div", { class: "bytemap-sticky" }, this.canvas, this.overlay));
    this.arrow = make("button", { class: "bytemap-arrow", hidden: true, tabindex: "-1", onclick: () => this.showLight() });
    this.scroller = make("div", { class: "bytemap-scroll" }, this.spacer);
    this.element = make("div", { class: "bytemap" }, this.scroller, this.arrow);
    this.isWaiting = false;
    this.isStale = true; // the cells, and not the frames alone
    this.colours = mapColours();
    this.mouse = null;
    this.scroller.addEventListener("scroll", () => {
      if (this.mouse) this.hover();
      this.redraw(false);
    }, { passive: true });
    this.scroller.addEventListener("pointermove", (event) => {
      this.mouse = { x: event.clientX, y: event.clientY };
      this.hover();
    });
    this.scroller.addEventListener("pointerleave", () => {
      this.mouse = null;
      this.on.hover(-1);
    });
    this.scroller.addEventListener("click", (event) => {
      const cell = this.cellAt(event.clientX, event.clientY);
      this.cursor = cell >= 0 ? cell : this.cursor;
      this.on.pick(cell);
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.redraw(false));
    this.canvas.addEventListener("blur", () => this.redraw(false));
    this.resize = new ResizeObserver(() => this.measure());
    this.resize.observe(this.scroller);
    this.stopTheme = onThemeChange(() => {
      this.colours = mapColours();
      this.redraw();
    });
  }

  close() {
    this.resize.disconnect();
    this.stopTheme();
  }

  // Another table, or null for none. The place that was scrolled to is kept where it can be.
  show(table, look, label) {
    if (table !== this.table) this.cursor = -1;
    this.table = table;
    this.look = look;
    if (label) this.canvas.setAttribute("aria-label", label);
    this.measure();
  }

  measure() {
    const width = this.scroller.clientWidth;
    this.geometry = this.table && width ? new MapGeometry(this.table, width) : null;
        const ratio = devicePixelRatio || 1;
    const height = this.scroller.clientHeight;
    this.spacer.style.height = `${Math.max(this.geometry?.height ?? 0, height)}px`;
    for (const canvas of [this.canvas, this.overlay]) {
      if (canvas.width === Math.round(width * ratio) && canvas.height === Math.round(height * ratio)) continue;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.redraw();
  }

  // At the next frame; with `isStale` false the frames around cells, and what scrolls into view.
  redraw(isStale = true) {
    this.isStale ||= isStale;
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.draw();
    });
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const scroll = this.scroller.scrollTop;
    const height = this.scroller.clientHeight;
    if (this.isStale) this.drawCells(ratio, scroll, height, 0, height);
    else if (this.drawnScroll !== scroll) {
      // What is still in view moves; what comes into view is drawn.
      const context = this.canvas.getContext("2d", { alpha: false });
      const by = scroll - this.drawnScroll;
      if (Math.abs(by) < height && Number.isInteger(by * ratio)) {
        context.setTransform(1, 0, 0, 1, 0, 0);
        context.drawImage(this.canvas, 0, -by * ratio);
        this.drawCells(ratio, scroll, height, by > 0 ? height - by : 0, by > 0 ? height : -by);
      } else this.drawCells(ratio, scroll, height, 0, height);
    }
    this.drawFrames(ratio, scroll, height);
  }

  // The part of the view between two heights.
  drawCells(ratio, scroll, height, from, to) {
    const context = this.canvas.getContext("2d", { alpha: false });
    this.isStale = false;
    this.drawnScroll = scroll;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.save();
    context.beginPath();
    context.rect(0, from, this.canvas.width, to - from);
    context.clip();
    context.fillStyle = this.colours.card;
    context.fillRect(0, from, this.canvas.width, to - from);
    if (this.geometry) {
      const painter = new CanvasPainter(context, this.colours, scroll);
      paintMap(painter, this.geometry, this.look, scroll + from, scroll + to);
      painter.finish();
    }
    context.restore();
  }

  drawFrames(ratio, scroll, height) {
    const { geometry, colours, table, cursor } = this;
    const context = this.overlay.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.overlay.width, this.overlay.height);
    this.arrow.hidden = true;
    if (!geometry) return;
    for (const light of this.lights) {
      for (const rect of geometry.rects(light.section, light.start, light.size)) frameRect(context, rect, scroll, colours, colours.ink, light.isStrong);
    }
    if (cursor >= 0 && document.activeElement === this.canvas) {
      for (const rect of geometry.rects(table.section[cursor], table.start[cursor], table.size[cursor])) frameRect(context, rect, scroll, colours, colours.accent, true);
    }
    this.pointToLight(scroll, height);
  }

  // Where the lit element is out of view, an arrow says on which side and leads to it.
  pointToLight(scroll, height) {
    const light = this.lights.find((one) => !one.isOwn);
    const rect = light && this.geometry.rects(light.section, light.start, light.size)[0];
    if (!rect || (rect.y + rect.h > scroll && rect.y < scroll + height)) return;
    const isAbove = rect.y < scroll;
    fill(this.arrow, `${isAbove ? "↑" : "↓"} the same element`);
    this.arrow.dataset.at = isAbove ? "top" : "bottom";
    this.arrow.hidden = false;
  }

  showLight() {
    const light = this.lights[0];
    if (light) this.reveal(light.section, light.start, light.size);
  }

  light(lights) {
    if (!lights.length && !this.lights.length) return;
    this.lights = lights;
    this.redraw(false);
  }

  reveal(section, start, size) {
    const rect = this.geometry?.rects(section, start, size)[0];
    if (!rect) return;
    const { scrollTop, clientHeight } = this.scroller;
    if (rect.y < scrollTop + TITLE || rect.y + rect.h > scrollTop + clientHeight - 8) this.scroller.scrollTop = Math.max(0, rect.y - clientHeight / 2);
  }

  cellAt(clientX, clientY) {
    if (!this.geometry) return -1;
    const box = this.scroller.getBoundingClientRect();
    const at = this.geometry.byteAt(clientX - box.left, clientY - box.top + this.scroller.scrollTop);
    return at ? this.table.at(at.section, at.byte) : -1;
  }

  hover() {
    this.on.hover(this.cellAt(this.mouse.x, this.mouse.y));
  }

  key(event) {
    if (!this.table?.count) return;
    const { table, geometry } = this;
    const at = this.cursor;
    const section = at >= 0 ? table.section[at] : 0;
    const { first, last } = table.sections[section];
    const line = geometry.lineBytes[section];
    const beside = (bytes) => {
      const to = table.start[at] + bytes;
      if (to >= 0 && to < table.sections[section].bytes) return table.at(section, to);
      const next = section + Math.sign(bytes);
      return next >= 0 && next < table.sections.length ? (bytes > 0 ? table.sections[next].first : table.sections[next].last - 1) : at;
    };
    const moves = {
      ArrowRight: () => Math.min(at + 1, table.count - 1),
      ArrowLeft: () => Math.max(at - 1, 0),
      ArrowDown: () => (at < 0 ? 0 : beside(line)),
      ArrowUp: () => (at < 0 ? 0 : beside(-line)),
      Home: () => first,
      End: () => last - 1,
    };
    if (event.key === "Enter" || event.key === " ") this.on.pick(at);
    else if (event.key === "Escape") this.on.pick(-1);
    else if (moves[event.key]) {
      const to = moves[event.key]();
      if (to >= 0) this.cursor = to;
      this.reveal(table.section[this.cursor], table.start[this.cursor], table.size[this.cursor]);
      this.on.cursor(this.cursor);
      this.redraw(false);
    } else return;
    event.preventDefault();
  }
}
