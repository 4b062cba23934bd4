// node language_check.mjs STATIC < {"vectors": ..., "formats": [...]}: holds the page's reading of the language to the vectors, and
// prints {"checked": ..., "elements": ..., "wrong": [...]} as JSON.
import { readFileSync } from "node:fs";

const folder = process.argv[2];
const { parseLayout } = await import(`${folder}/language.js`);
const { makeCache, makeStates, locateElement, locateUnit, elementAxes, scaleAxes } = await import(`${folder}/place.js`);
const given = JSON.parse(readFileSync(0, "utf8"));
const formats = new Map(given.formats.map((row) => [row.name, row]));
const wrong = [];
let elements = 0;

const TABLE = Array.from({ length: 256 }, (_, n) => {
  let c = n;
  for (let k = 0; k < 8; k++) c = c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1;
  return c >>> 0;
});

function crcOf(cache, plane) {
  const axes = elementAxes(cache, plane);
  const index = Object.fromEntries(axes.map(([name]) => [name, 0]));
  const words = new DataView(new ArrayBuffer(16));
  let crc = 0xffffffff;
  for (;;) {
    const { buffer, byte } = locateElement(plane, index);
    words.setBigInt64(0, BigInt(buffer), true);
    words.setBigInt64(8, BigInt(byte), true);
    for (let i = 0; i < 16; i++) crc = TABLE[(crc ^ words.getUint8(i)) & 255] ^ (crc >>> 8);
    elements += 1;
    let at = axes.length - 1;
    while (at >= 0 && ++index[axes[at][0]] === axes[at][1]) index[axes[at--][0]] = 0;
    if (at < 0) return (crc ^ 0xffffffff) >>> 0;
  }
}

function same(name, what, got, want) {
  if (JSON.stringify(got) !== JSON.stringify(want)) wrong.push(`${name}: ${what} is ${JSON.stringify(got)}, expected ${JSON.stringify(want)}`);
}

function cacheOf(one) {
  if (one.spec) return makeCache({ ...one.spec, layout: one.layout, block_bytes: one.block_bytes }, formats);
  const [[, numLayers], [, numBlocks]] = one.planes[0].axes;
  const planes = one.planes.map((plane) => ({ name: plane.name, format: plane.format, axes: plane.axes.slice(2) }));
  return makeStates({ layout: one.layout, planes, numLayers, numBlocks, blockBytes: one.block_bytes }, formats);
}

for (const one of given.vectors.places) {
  try {
    const cache = cacheOf(one);
    same(one.name, "buffers", cache.bufferSizes, one.buffers);
    for (const [i, want] of one.planes.entries()) {
      const plane = cache.planes[i];
      same(one.name, "axes", [plane.name, elementAxes(cache, plane)], [want.name, want.axes]);
      for (const [point, ...where] of want.elements) {
        const { buffer, byte, bit } = locateElement(plane, Object.fromEntries(want.axes.map(([name], n) => [name, point[n]])));
        same(one.name, `${want.name} ${point}`, where.length > 2 ? [buffer, byte, bit] : [buffer, byte], where);
      }
      same(one.name, `all of ${want.name}`, crcOf(cache, plane), want.crc32);
      same(one.name, "has scales", plane.scalePlace !== null, want.scales !== undefined);
      for (const [point, ...where] of want.scales ?? []) {
        const index = Object.fromEntries(scaleAxes(cache, plane).map(([name], n) => [name, point[n]]));
        same(one.name, `scale of ${want.name} ${point}`, locateUnit(plane.scalePlace, index), where);
      }
      for (const [[layer], ...where] of want.tensor_scales ?? []) same(one.name, "tensor scale", [plane.tensorScaleBuffer, 4 * layer], where);
    }
  } catch (error) {
    wrong.push(`${one.name}: ${one.layout}: ${error.stack}`);
  }
}
for (const one of given.vectors.refused) {
  let said = null;
  try {
    if (one.spec) makeCache({ ...one.spec, layout: one.layout }, formats);
    else parseLayout(one.layout);
  } catch (error) {
    said = error.message;
  }
  same(one.layout, "error", said, one.error);
}
console.log(JSON.stringify({ places: given.vectors.places.length, refused: given.vectors.refused.length, elements, wrong }));
