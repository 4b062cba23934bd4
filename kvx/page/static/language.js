// The layout language: text in, axes out. The twin of kvx/layout/axes.py, held to it by the vectors of `kvx layouts --vectors`,
// sentences of errors included. Where elements lie is place.js's to say.

const AXIS_NAMES = ["layer", "block", "kv", "token", "head", "dim"];
const STATE_AXIS_NAMES = ["channel", "tap", "row", "column"];
const INNER_AXES = ["token", "head", "dim", ...STATE_AXIS_NAMES];
const PLANE_AXES = ["kv", "plane"];
const NICKNAMES = { NHD: "kv | block token head dim", HND: "kv | block head token dim" };
const MOST_CHARACTERS = 1000;

// A layout string that cannot be read: `start` and `end` are the characters that are wrong.
export class LayoutMistake extends Error {
  constructor(message, what, start, end) {
    super(message);
    this.what = what;
    this.start = start;
    this.end = end;
  }
}

// Text as Python shows it, in quotes.
export function pythonRepr(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const short = { "\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", [quote]: `\\${quote}` };
  const inside = [...text].map((c) => short[c] ?? (/\p{C}|\p{Zl}|\p{Zp}/u.test(c) ? escapeOf(c) : c)).join("");
  return quote + inside + quote;
}

function escapeOf(character) {
  const code = character.codePointAt(0);
  const hex = code.toString(16);
  return code < 256 ? `\\x${hex.padStart(2, "0")}` : code < 65536 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
}

export function withCommas(number) {
  return String(number).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

// { text, planes: Map of name to { left, dims, order, isArea }, first, left, hasLayer, hasKv, numBuffers }.
// An axis is { name, part, factor, unused }: part is "" (whole), "/" (outer) or "%" (inner part of a split by factor).
export function parseLayout(given) {
  const text = given.length < 8 ? NICKNAMES[given.trim().toUpperCase()] ?? given : given;
  const length = [...text].length;
  if (length > MOST_CHARACTERS) {
    const start = pythonRepr([...text].slice(0, 40).join(""));
    const what = `${withCommas(length)} characters, beginning ${start}; a layout has at most ${MOST_CHARACTERS}. Axes are ${AXIS_NAMES.join(" ")}, each once or split in two.`;
    throw new LayoutMistake(`layout: ${what}`, what, 0, text.length);
  }
  return new LayoutReader(text).read();
}

function planeLayout(left, dims, isArea = false) {
  return { left, dims, isArea, order: dims.flat() };
}

function layoutOf(text, planes) {
  const first = planes.values().next().value;
  const isApart = first.left.some((axis) => PLANE_AXES.includes(axis.name));
  return {
    text,
    planes,
    first,
    left: first.left,
    hasLayer: [...first.left, ...first.order].some((axis) => axis.name === "layer"),
    hasKv: [...planes.keys()].join() === "k,v",
    numBuffers: isApart ? planes.size : 1,
  };
}

// The factor an axis is split by; "" when it is whole.
export function splitOf(plane, name) {
  return plane.order.find((axis) => axis.name === name && axis.part)?.factor ?? "";
}

export function isPlaneAxis(axis) {
  return PLANE_AXES.includes(axis.name);
}

class LayoutReader {
  constructor(text) {
    this.text = text;
  }

  fail(start, end, what) {
    const count = (from, to) => [...this.text.slice(from, to)].length;
    const marks = " ".repeat(count(0, start)) + "^".repeat(Math.max(1, count(start, end)));
    const help = `Axes are ${AXIS_NAMES.join(" ")}; \`dim/8 token dim%8\` splits, \`( )\` fuses, \`|\` ends an allocation.`;
    throw new LayoutMistake(`layout: ${what}\n  ${this.text}\n  ${marks}\n  ${help}`, what, start, end);
  }

  read() {
    const split = /(?<![\p{L}\p{N}_])(kv|plane)\[/u.exec(this.text);
    if (split) return this.readPlanes(split[1], split.index);
    const [left, dims] = this.readAxes(0, this.text.length);
    this.requireAxes(left, dims, 0, this.text.length, ["token", "head", "dim"]);
    const plane = planeLayout(left, dims);
    const hasKv = [...left, ...plane.order].some((axis) => axis.name === "kv");
    return layoutOf(this.text, new Map(hasKv ? [["k", plane], ["v", plane]] : [["k", plane]]));
  }

  // kv[K: ...; V: ...] or plane[name: ...; name: ...]: an inner order for each plane.
  readPlanes(word, at) {
    const { text } = this;
    const [left, prefix] = this.readAxes(0, at);
    if ([...left, ...prefix.flat()].some(isPlaneAxis)) this.fail(0, at, `\`kv\` stands before ${word}[...] already`);
    const pattern = /\s*([A-Za-z_][A-Za-z0-9_]*):([^;\]]*)([;\]])\s*/y;
    const found = [];
    let end = at + word.length + 1;
    let closed = false;
    while (!closed) {
      pattern.lastIndex = end;
      const part = pattern.exec(text);
      if (!part) break;
      const begin = part.index + part[0].indexOf(":") + 1;
      found.push({ name: part[1], begin, end: begin + part[2].length });
      end = pattern.lastIndex;
      closed = part[3] === "]";
    }
    const names = found.map((part) => part.name);
    if (!closed || end < text.length || (word === "kv" && names.join() !== "K,V")) {
      const how = word === "kv" ? "kv[K: axes; V: axes]" : "plane[name: axes; name: axes]";
      this.fail(at, text.length, `${word}[...] is written ${how}, and is the last thing`);
    }
    if (word === "plane" && (new Set(names).size < names.length || names.some((n) => n !== n.toLowerCase() || n === "k" || n === "v"))) {
      this.fail(at, text.length, "planes have lower case names, each its own; k and v are those of kv");
    }
    const planes = new Map(found.map((part) => [part.name.toLowerCase(), this.readPlane(word, at, left, prefix, part.begin, part.end)]));
    if (new Set([...planes.values()].map((plane) => plane.isArea)).size > 1) {
      this.fail(at, text.length, `${names.join(" and ")} all begin with \`|\`, or none does`);
    }
    return layoutOf(text, planes);
  }

  readPlane(word, at, left, prefix, begin, end) {
    const [innerLeft, dims] = this.readAxes(begin, end);
    if ([...innerLeft, ...dims.flat()].some(isPlaneAxis)) this.fail(begin, end, `\`${word}\` cannot stand again inside ${word}[...]`);
    if (innerLeft.length) this.fail(begin, end, `what chooses an allocation stands before ${word}[...]`);
    const flat = prefix.flat();
    const hasBar = this.text.slice(begin, end).includes("|");
    if (hasBar && flat.some((axis) => axis.name !== "layer" && axis.name !== "block")) this.fail(0, at, "only layer and block can choose an allocation");
    const planeAxis = { name: word, part: "", factor: "", unused: 0 };
    // Without a bar, planes are apart when nothing but `layer` stands outside them.
    const isApart = hasBar || (!this.text.slice(0, at).includes("|") && flat.every((axis) => axis.name === "layer"));
    const plane = isApart ? planeLayout([...left, ...flat, planeAxis], dims) : planeLayout(left, [...prefix, [planeAxis], ...dims], true);
    this.requireAxes(plane.left, plane.dims, begin, end, word === "kv" ? ["token", "head", "dim"] : []);
    return plane;
  }

  // [axes left of the bar, dimensions] of text[begin:end].
  readAxes(begin, end) {
    let left = [];
    let dims = [];
    let group = null;
    let groupAt = 0;
    let hasBar = false;
    for (const token of this.text.slice(begin, end).matchAll(/\s+|[()|]|[^\s()|]+/g)) {
      const word = token[0];
      const at = begin + token.index;
      if (!word.trim()) continue;
      if (word === "|") {
        if (hasBar || group) this.fail(at, at + 1, "one `|` at most, outside parentheses");
        hasBar = true;
        for (const dim of dims) {
          if (dim.length > 1 || !["layer", "kv", "block"].includes(dim[0].name) || dim[0].part) {
            this.fail(begin, at, "only whole layer, kv and block axes can stand left of `|`");
          }
        }
        left = dims.map((dim) => dim[0]);
        dims = [];
      } else if (word === "(") {
        if (group) this.fail(at, at + 1, "parentheses do not nest");
        group = [];
        groupAt = at;
      } else if (word === ")") {
        if (!group?.length) this.fail(at, at + 1, "nothing is fused here");
        dims.push(group);
        group = null;
      } else {
        const axis = this.readAxis(word, at);
        if (axis.name === "layer" && group) this.fail(at, at + word.length, "`layer` cannot be fused: ops work on one layer's view");
        if (group) group.push(axis);
        else dims.push([axis]);
      }
    }
    if (group) this.fail(groupAt, groupAt + 1, "this parenthesis is not closed");
    return [left, dims];
  }

  readAxis(word, at) {
    const end = at + word.length;
    const match = /^([a-z_]+)(?:([/%])([0-9]{1,9}|x)|\+([1-9][0-9]{0,3}))?$/.exec(word);
    if (!match || ![...AXIS_NAMES, ...INNER_AXES].includes(match[1])) {
      if (new RegExp(`^(${INNER_AXES.join("|")})[/%][0-9]{10,}$`).test(word)) this.fail(at, end, "a split by a number of more than nine digits");
      this.fail(at, end, `unknown axis "${word}"`);
    }
    const [, name, part = "", factor = "", unused = "0"] = match;
    if (part && !INNER_AXES.includes(name)) this.fail(at, end, `only token, head and dim can be split; ${name} cannot`);
    if (factor && factor !== "x" && Number(factor) === 0) this.fail(at, end, "a split by 0");
    if (Number(unused) && !STATE_AXIS_NAMES.includes(name)) this.fail(at, end, `only axes of states can have unused ones before them; ${name} cannot`);
    return { name, part, factor, unused: Number(unused) };
  }

  // Every axis once, or split in two; those that are needed, and no other where some are.
  requireAxes(left, dims, begin, end, needed) {
    const flat = [...left, ...dims.flat()];
    const count = (name) => flat.filter((axis) => axis.name === name).length;
    for (const name of ["layer", "kv"]) if (count(name) > 1) this.fail(begin, end, `\`${name}\` stands here twice`);
    if (count("block") !== 1) this.fail(begin, end, "`block` must stand here exactly once");
    const there = flat.map((axis) => axis.name).filter((name) => INNER_AXES.includes(name));
    const other = there.find((name) => needed.length && !needed.includes(name));
    if (other) this.fail(begin, end, `K and V have no \`${other}\`; name the planes that have one: plane[name: ...]`);
    for (const name of needed.length ? needed : new Set(there)) {
      const mine = flat.filter((axis) => axis.name === name);
      const isWhole = mine.length === 1 && !mine[0].part;
      const isSplit = mine.map((axis) => axis.part).sort().join() === "%,/" && mine[0].factor === mine[1].factor;
      if (!isWhole && !isSplit) this.fail(begin, end, `\`${name}\` must stand here once, or as \`${name}/8 ... ${name}%8\``);
    }
    for (const group of dims) {
      const names = group.map((axis) => axis.name);
      if (names.slice(0, -1).includes("dim")) this.fail(begin, end, "`dim` is the last axis of the parentheses it stands in");
      if (names.includes("kv") && group.some((axis) => axis.name === "dim" && axis.part)) this.fail(begin, end, "`kv` cannot be fused with a split dim");
    }
  }
}
