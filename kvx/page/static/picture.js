// The maps as a picture to keep: SVG of the same geometry and walk as the canvas, and PNG of that SVG.
import { MapGeometry, paintMap, mapColours } from "./bytemap.js"

const MOST_HEIGHT = 6000; // of one map; the rest is said to be left out
const STYLES = { title: 'font-weight="600" font-size="12"', offset: 'font-family="ui-monospace,Menlo,Consolas,monospace" font-size="10.5" text-anchor="end"', label: 'font-size="10" text-anchor="middle"' };

export function xmlText(text) {
  return String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");
}

class SvgPainter {
  constructor(colours) {
    this.colours = colours;
    this.parts = [];
  }

  rect(x, y, w, h, colour, isScale) {
    if (isScale) this.parts.push(`<rect x="${round2(x + 0.75)}" y="${round2(y + 0.75)}" width="${round2(Math.max(0, w - 1.5))}" height="${round2(h - 1.5)}" fill="${colour}" fill-opacity=".3" stroke="${colour}" stroke-width="1.5"/>`);
    else this.parts.push(`<rect x="${round2(x)}" y="${round2(y)}" width="${round2(w)}" height="${round2(h)}" fill="${colour}"/>`);
  }

  hatch(x, y, w, h) {
    this.parts.push(`<rect x="${round2(x)}" y="${round2(y)}" width="${round2(w)}" height="${round2(h)}" fill="url(#padding)"/>`);
  }

  mark(x, y, w, h) {
    const size = Math.min(w, h, 7);
    this.parts.push(`<path d="M${round2(x + w - size)} ${round2(y)}h${round2(size)}v${round2(size)}z" fill="${this.colours.ink}"/>`);
  }

  text(x, y, text, kind) {
    if (text === "") return;
    const colour = kind === "label" ? "#000000" : kind === "title" ? this.colours.ink : this.colours.soft;
    this.parts.push(`<text x="${round2(x)}" y="${round2(y)}" ${STYLES[kind]} fill="${colour}"${kind === "label" ? ' fill-opacity=".72"' : ""}>${xmlText(text)}</text>`);
  }
}

function round2(number) {
  return Math.round(number * 100) / 100;
}

// sides: [{ table, look, title, subtitle }], drawn beside each other.
export function mapsSvg(sides, { width = 620 } = {}) {
  const colours = mapColours();
  const maps = sides.map((side) => {
    const geometry = new MapGeometry(side.table, width);
    const painter = new SvgPainter(colours);
    const height = Math.min(geometry.height, MOST_HEIGHT);
    paintMap(painter, geometry, side.look, 0, height);
    if (geometry.height > MOST_HEIGHT) painter.text(58, height + 16, "the rest is left out", "title");
    return { painter, height: height + 24, side };
  });
  const height = 60 + Math.max(...maps.map((map) => map.height));
  const total = maps.length * width + 20;
  const body = maps.map(({ painter, side }, i) => {
    const head = `<text x="10" y="22" font-size="15" font-weight="700" fill="${colours.ink}">${xmlText(side.title)}</text><text x="10" y="41" font-size="12" font-family="ui-monospace,Menlo,Consolas,monospace" fill="${colours.soft}">${xmlText(side.subtitle)}</text>`;
    return `<g transform="translate(${i * width + 10} 0)">${head}<g transform="translate(0 52)">${painter.parts.join("")}</g></g>`;
  });
  const hatch = `<pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="${colours.well}"/><path d="M-1 1L1-1M0 6L6 0M5 7L7 5" stroke="${colours.line}" stroke-width="1.4"/></pattern>`;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${total} ${height}" width="${total}" height="${height}" font-family="system-ui,sans-serif"><defs>${hatch}</defs><rect width="${total}" height="${height}" fill="${colours.card}"/>${body.join("")}</svg>`;
}

// The SVG drawn by the browser, twice as large as it says.
export async function svgToPng(svg) {
  const picture = new Image();
  const address = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  try {
    picture.src = address;
    await picture.decode();
    const canvas = document.createElement("canvas");
    const scale = Math.min(2, 12000 / picture.height);
    canvas.width = Math.round(picture.width * scale);
    canvas.height = Math.round(picture.height * scale);
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

// Hands a file to the reader.
export function saveFile(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
