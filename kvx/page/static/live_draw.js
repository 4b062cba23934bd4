// Canvases of the Live tab: the map of blocks, sequences over time, blocks and tier traffic over time.
import { themeColour } from "./dom.js"
import { LIVE_STATES } from "./live_state.js"

// Of each state: a colour of page.css, and a letter that says the same where cells are large enough.
export const LIVE_COLOURS = ["well", "c0", "c2", "c1", "c4", "c3"];
export const LIVE_LETTERS = ["", "k", "", "s", "p", "f"];

// A canvas as large as it is shown, in the screen's own pixels. Returns its context in CSS pixels, and its size.
function liveCanvas(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const w = Math.max(1, Math.round(width * scale)), h = Math.max(1, Math.round(height * scale));
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

// [r, g, b] of a colour name, whatever form page.css writes it in.
function liveRgb(name) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = themeColour(name);
  const hex = probe.fillStyle;
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// The map of blocks: one cell a block, row after row. Only what is in view is drawn, one pixel a cell and then enlarged, so a
// hundred thousand blocks cost no more than a picture of as many pixels.
export class BlockMap {
  constructor(box, canvas, spacer) {
    this.box = box; // scrolls
    this.canvas = canvas; // stays at its top
    this.spacer = spacer; // as high as all rows
    this.small = document.createElement("canvas");
    this.image = null;
    this.cursor = -1;
    this.width = 0; // of the box, as it was measured last
    this.readColours();
  }

  readColours() {
    const isLittle = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;
    const word = (name) => {
      const [r, g, b] = liveRgb(name);
      return isLittle ? ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0 : ((r << 24) | (g << 16) | (b << 8) | 255) >>> 0;
    };
    this.words = new Uint32Array(LIVE_COLOURS.map(word));
    this.inkWord = word("ink");
    this.cardWord = word("card");
    this.ink = themeColour("ink");
    this.card = themeColour("card");
  }

  // Cells as large as fit, 2 to 22 pixels.
  place(num) {
    const width = Math.max(40, this.width);
    const side = Math.max(2, Math.min(22, Math.floor(Math.sqrt((width * 300) / Math.max(1, num)))));
    const columns = Math.max(1, Math.floor(width / side));
    return { side, columns, rows: Math.ceil(num / columns), width };
  }

  draw(states) {
    const at = (this.at = this.place(states.length));
    const height = at.rows * at.side, seen = Math.min(height, 340) || at.side;
    if (this.height !== height) {
      this.height = height;
      this.spacer.style.height = `${height}px`;
      this.box.style.height = `${seen}px`;
    }
    const top = height > seen ? this.box.scrollTop : 0; // reading it lays the page out
    const first = Math.floor(top / at.side);
    const rows = Math.min(at.rows - first, Math.ceil(seen / at.side) + 1);
    if (rows <= 0) return;
    const isFine = at.side < 5; // too small for lines and letters: the canvas has one pixel a cell, and the screen enlarges it
    if (isFine) {
      this.canvas.style.width = `${at.columns * at.side}px`;
      this.canvas.style.height = `${rows * at.side}px`;
    }
    const sheet = isFine ? this.canvas : this.small;
    if (sheet.width !== at.columns || sheet.height !== rows) {
      sheet.width = at.columns;
      sheet.height = rows;
    }
    const paper = sheet.getContext("2d", { alpha: false });
    if (this.image?.width !== at.columns || this.image?.height !== rows) this.image = paper.createImageData(at.columns, rows);
    const pixels = new Uint32Array(this.image.data.buffer), words = this.words;
    const from = first * at.columns, count = Math.min(states.length - from, at.columns * rows);
    for (let i = 0; i < count; i++) pixels[i] = words[states[from + i]];
    pixels.fill(this.cardWord, count);
    if (isFine && this.cursor >= from && this.cursor < from + count) pixels[this.cursor - from] = this.inkWord;
    paper.putImageData(this.image, 0, 0);
    if (isFine) return;
    const context = liveCanvas(this.canvas, at.width, seen);
    context.clearRect(0, 0, at.width, seen);
    const shift = first * at.side - top;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.small, 0, shift, at.columns * at.side, rows * at.side);
    this.drawGrid(context, at, rows, shift, seen);
    if (at.side >= 12) this.drawLetters(context, at, states, from, count, shift);
    if (this.cursor >= 0 && this.cursor < states.length) {
      const x = (this.cursor % at.columns) * at.side, y = Math.floor(this.cursor / at.columns) * at.side - top;
      context.strokeStyle = this.ink;
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, at.side + 1, at.side + 1);
    }
  }

  drawGrid(context, at, rows, shift, seen) {
    context.fillStyle = this.card;
    for (let c = 1; c <= at.columns; c++) context.fillRect(c * at.side - 1, 0, 1, seen);
    for (let r = 1; r <= rows; r++) context.fillRect(0, shift + r * at.side - 1, at.columns * at.side, 1);
  }

  drawLetters(context, at, states, from, count, shift) {
    context.fillStyle = this.card;
    context.globalAlpha = 0.7;
    context.font = `${at.side - 6}px monospace`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let i = 0; i < count; i++) {
      const letter = LIVE_LETTERS[states[from + i]];
      if (letter) context.fillText(letter, ((i % at.columns) + 0.5) * at.side - 0.5, shift + (Math.floor(i / at.columns) + 0.5) * at.side);
    }
    context.globalAlpha = 1;
  }

  // The block under a point of the canvas; -1: none.
  hit(x, y, num) {
    if (!this.at || x < 0 || x >= this.at.columns * this.at.side) return -1;
    const block = Math.floor((y + this.box.scrollTop) / this.at.side) * this.at.columns + Math.floor(x / this.at.side);
    return block >= 0 && block < num ? block : -1;
  }

  // Scrolls so that the cursor is in view.
  reveal() {
    const y = Math.floor(this.cursor / this.at.columns) * this.at.side;
    if (y < this.box.scrollTop) this.box.scrollTop = y;
    else if (y + this.at.side > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = y + this.at.side - this.box.clientHeight;
  }
}

function liveSpan(timeline) {
  const begin = timeline.begin, end = Math.max(timeline.end, begin + 0.001);
  return { begin, end, x: (t, width) => ((t - begin) / (end - begin)) * width };
}

function drawNow(context, span, t, width, height, colour) {
  context.fillStyle = colour;
  context.fillRect(Math.min(width - 1.5, Math.max(0, span.x(t, width) - 0.75)), 0, 1.5, height);
}

function drawTimes(context, span, width, y, colour) {
  context.fillStyle = colour;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "bottom";
  const digits = span.end - span.begin < 10 ? 2 : 0;
  for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
    context.textAlign = align;
    context.fillText(`${(span.begin + share * (span.end - span.begin)).toFixed(digits)} s`, share * width, y);
  }
}

// All colours that charts use, read once for a picture.
export function liveTheme() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["ink", "soft", "card", "well", "line", "error", "c0", "c1", "c2", "c3", "c4", "c6", "c7"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// A bar for each of the newest sequences: what was found at its beginning, how it ended.
export function drawSequences(canvas, width, timeline, state, theme) {
  const span = liveSpan(timeline), rows = [...timeline.head.requests.values()].slice(-26), line = 15;
  const height = Math.max(60, rows.length * line + 20), context = liveCanvas(canvas, width, height);
  context.clearRect(0, 0, width, height);
    rows.forEach((row, i) => {
    const y = i * line, from = span.x(row.t, width), isBegun = row.t <= state.t;
    const until = row.end === undefined || row.end > state.t ? Math.max(row.t, state.t) : row.end;
    const to = Math.max(from + 3, span.x(until, width));
    context.globalAlpha = isBegun ? 1 : 0.15;
    context.fillStyle = theme.c2;
    context.fillRect(from, y + 2, to - from, line - 5);
    const share = row.tokens ? Math.min(1, row.cached / row.tokens) : 0; // of the prompt, as much of the bar's height
    context.fillStyle = theme.c0;
    context.fillRect(from, y + 2 + (line - 5) * (1 - share), to - from, (line - 5) * share);
    if (row.how === "preempted" && row.end <= state.t) {
      context.fillStyle = theme.error;
      context.beginPath();
      context.moveTo(to, y + 1);
      context.lineTo(to + 5, y + line / 2 - 0.5);
      context.lineTo(to, y + line - 2);
      context.fill();
    }
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const text = `${row.seq}`, wide = context.measureText(text).width + 8;
    const inside = to - from > wide;
    context.fillStyle = inside ? theme.card : theme.ink;
    context.textAlign = inside || to + wide < width ? "left" : "right";
    context.fillText(text, inside ? from + 4 : to + wide < width ? to + 8 : from - 4, y + line / 2 - 0.5);
  });
  context.globalAlpha = 1;
  drawTimes(context, span, width, height, theme.soft);
  drawNow(context, span, state.t, width, height - 16, theme.ink);
  return rows.length;
}

// How many blocks were in which state, one above the other; preemptions as marks at the top.
export function drawHistory(canvas, width, timeline, state, group, theme) {
  const height = 120, bottom = height - 16, context = liveCanvas(canvas, width, height), span = liveSpan(timeline);
  context.clearRect(0, 0, width, height);
  context.fillStyle = theme.well;
  context.fillRect(0, 0, width, bottom);
  const total = Math.max(1, timeline.header.groups[group].blocks), columns = Math.max(1, Math.floor(width)), samples = timeline.samples;
  const colours = LIVE_COLOURS.map((name) => theme[name]), order = [2, 3, 4, 5, 1];
  let next = 0, now = null, from = 0;
  for (let x = 0; x <= columns; x++) { // columns of one sample are one bar
    const t = span.begin + ((x + 1) / columns) * (span.end - span.begin), before = now;
    while (next < samples.length && samples[next].t <= t) now = samples[next++];
    if (now === before && x < columns) continue;
    let y = bottom;
    for (const kind of before ? order : []) {
      const part = (before.counts[group][kind] / total) * bottom;
      if (!part) continue;
      context.fillStyle = colours[kind];
      context.fillRect(from, y - part, x - from, part);
      y -= part;
    }
    from = x;
  }
  context.fillStyle = theme.error;
  for (const one of samples) {
    if (!one.preempted) continue;
    const x = span.x(one.t, width);
    context.beginPath();
    context.moveTo(x - 4, 0);
    context.lineTo(x + 4, 0);
    context.lineTo(x, 7);
    context.fill();
  }
  drawTimes(context, span, width, height, theme.soft);
  drawNow(context, span, state.t, width, bottom, theme.ink);
}

// Bytes to tiers above the line, from them below it, in each part of the time.
export function drawTraffic(canvas, width, timeline, state, theme) {
  const height = 110, bottom = height - 16, middle = bottom / 2, context = liveCanvas(canvas, width, height), span = liveSpan(timeline);
  context.clearRect(0, 0, width, height);
  const parts = Math.max(1, Math.min(120, Math.floor(width / 6))), sums = Array.from({ length: parts }, () => [0, 0]);
  let before = null;
  for (const one of timeline.samples) {
    const now = one.tiers.reduce(([a, b], [to, from]) => [a + to, b + from], [0, 0]);
    if (before) {
      const part = Math.min(parts - 1, Math.max(0, Math.floor(span.x(one.t, parts))));
      sums[part][0] += Math.max(0, now[0] - before[0]);
      sums[part][1] += Math.max(0, now[1] - before[1]);
    }
    before = now;
  }
  const most = Math.max(1, ...sums.flat()), step = width / parts;
  sums.forEach(([to, from], i) => {
    context.fillStyle = theme.c6;
    context.fillRect(i * step, middle - (to / most) * (middle - 2), Math.max(1, step - 1), (to / most) * (middle - 2));
    context.fillStyle = theme.c7;
    context.fillRect(i * step, middle, Math.max(1, step - 1), (from / most) * (middle - 2));
  });
  context.fillStyle = theme.line;
  context.fillRect(0, middle - 0.5, width, 1);
  drawTimes(context, span, width, height, theme.soft);
  drawNow(context, span, state.t, width, bottom, theme.ink);
}

export function stateWords(counts) {
  return LIVE_STATES.map((name, i) => `${counts[i]} ${name}`).join(", ");
}
