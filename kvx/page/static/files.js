// files.js: the Files tab. Drop a KVX file, two of them, a handover's folder, a recording, or what `kvx verify --json` printed: manifest,
// layout, digest by block, and where two files differ. Reading is cache_file.js, digests content_digest.js. Nothing leaves the page.
import { make, fill, labelled, themeColour, onThemeChange } from "./dom.js"
import { withCommas } from "./language.js"
import { writeAddress } from "./address.js"
import { readCacheFile, readHandover, partRanges, FileMistake } from "./cache_file.js"
import { blockDigest, newDigest, fieldDifference, tokenDifferences } from "./content_digest.js"

const MOST_COUNTED = 64 << 20; // bytes of a file whose digests are counted here
const MOST_TEXT_FILE = 512 << 20;
const MOST_LINES = 512; // of a list

// What was dropped outlives the tab: whoever looks at another and comes back finds it.
const filesSession = { shown: null };

export const filesTab = {
  name: "files",
  title: "Files",
  mount(root, page) { return new FilesView(root, page); },
};

const breath = () => new Promise((resolve) => setTimeout(resolve));
const shortName = (name) => name.length > 80 ? `${name.slice(0, 60)}…${name.slice(-16)}` : name;
const bytesText = (n) => `${withCommas(n)} bytes`;

// Files of a drop, folders opened; by the last part of their names.
async function droppedFiles(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter((entry) => entry);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files];
  const out = [];
  const walk = async (entry, depth) => {
    if (out.length > 5000 || depth > 4) return;
    if (entry.isFile) out.push(await new Promise((take, fail) => entry.file(take, fail)));
    else {
      const reader = entry.createReader();
      for (let more = true; more;) {
        const some = await new Promise((take, fail) => reader.readEntries(take, fail));
        more = some.length > 0;
        for (const one of some) await walk(one, depth + 1);
      }
    }
  };
  for (const entry of entries) await walk(entry, 0);
  return out;
}

class FilesView {
  constructor(root, page) {
    this.page = page;
    this.formats = new Map(page.data.formats.map((row) => [row.name, row]));
    this.turn = 0; // what is read for an older drop is not shown any more
    this.painters = new Set();
    const pick = (words, more) => labelled(words, make("input", { type: "file", ...more, onchange: (event) => {
      const files = [...event.target.files];
      event.target.value = ""; // so that the same file, changed meanwhile, can be chosen again
      this.take(files);
    } }));
    const drop = make("section", { class: "card files-drop", "aria-label": "Open files" }, make("h2", {}, "Drop files here"),
      make("p", { class: "note" }, "A KVX file, two to compare, a handover's folder, a recording, or what ", make("code", {}, "kvx verify --json"), " printed. They are read in this page and sent nowhere."),
      make("div", { class: "row" }, pick("Files", { multiple: true }), pick("A handover's folder", { webkitdirectory: true })));
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.output = make("div", { class: "files-output" });
    root.append(make("div", { class: "files-grid" }, drop, this.error, this.output));
    for (const kind of ["dragover", "dragleave", "drop"]) {
      root.addEventListener(kind, async (event) => {
        event.preventDefault();
        drop.classList.toggle("files-over", kind === "dragover");
        if (kind === "drop") this.take(await droppedFiles(event.dataTransfer));
      });
    }
    const repaint = () => { for (const paint of this.painters) paint(); };
    this.watch = new ResizeObserver(repaint);
    this.watch.observe(this.output);
    this.stop = onThemeChange(repaint);
    if (filesSession.shown) this.take(filesSession.shown);
  }

  close() {
    this.turn += 1;
    this.stop();
    this.watch.disconnect();
  }

  fail(sentence) {
    this.error.hidden = false;
    this.error.textContent = sentence;
    this.page.say(sentence.slice(0, 300), "error");
  }

  async take(files) {
    if (!files.length) return;
    const turn = this.turn += 1, isOld = () => turn !== this.turn;
    this.error.hidden = true;
    this.painters.clear();
    fill(this.output);
    filesSession.shown = files;
    this.page.say(`Reading ${files.length === 1 ? shortName(files[0].name) : `${files.length} files`}.`);
    try {
      const byName = new Map(files.map((file) => [file.name, file]));
      if (byName.has("handover.json")) await this.showHandover(byName, isOld);
      else if (files.length === 1) await this.showOne(files[0], isOld);
      else if (files.length === 2) await this.showTwo(files, isOld);
      else throw new FileMistake(`${files.length} files were given; this view takes one, two to compare, or a handover's folder (with its handover.json).`);
    } catch (error) {
      if (isOld()) return;
      if (!(error instanceof FileMistake) && error?.name !== "NotReadableError" && error?.name !== "NotFoundError") throw error;
      fill(this.output);
      this.fail(error instanceof FileMistake ? error.message : "The file cannot be read any more; it was moved or changed. Drop it again.");
    }
  }

  async showOne(file, isOld) {
    const start = new TextDecoder().decode(await file.slice(0, 4096).arrayBuffer()).trimStart();
    if (start.startsWith("{")) return this.showText(file, start);
    const read = await readCacheFile(file, shortName(file.name), this.formats);
    if (isOld()) return;
    const digests = make("section", { class: "card", "aria-label": "Digests" });
    this.output.append(this.cacheCard(read), digests);
    await this.countDigests(read, digests, isOld);
  }

  // ---- text: a recording, or what kvx verify printed

  async showText(file, start) {
    if (file.size > MOST_TEXT_FILE) throw new FileMistake(`${shortName(file.name)} has ${bytesText(file.size)}; this page reads text of ${bytesText(MOST_TEXT_FILE)}.`);
    if (/^\{[^\n]{0,200}"kvx"\s*:\s*"recording"/.test(start)) return this.showRecording(file);
    if (file.size > 32 << 20) throw new FileMistake(`${shortName(file.name)} has ${bytesText(file.size)} of text; of JSON this page reads 32 MiB.`);
    let told;
    try { told = JSON.parse(await file.text()); } catch (error) { throw new FileMistake(`${shortName(file.name)} is no JSON: ${String(error.message).slice(0, 120)}.`); }
    if (told?.kvx_verify === 1) return this.showVerified(told);
    if (told?.kvx_handover !== undefined) throw new FileMistake("This is the manifest of a handover. Drop its whole folder, with the parts.");
    if (typeof told?.model_type === "string" || told?.num_hidden_layers) throw new FileMistake("This looks like a model's config.json. The Size tab reads it.");
    throw new FileMistake(`${shortName(file.name)} is JSON that this page does not know. It takes KVX files, a handover's folder, recordings, and the output of kvx verify --json.`);
  }

  async showRecording(file) {
    const text = await file.text(), lines = text.split("\n").filter((line) => line);
    let header;
    try { header = JSON.parse(lines[0]); } catch { throw new FileMistake(`${shortName(file.name)} is no recording: its first line is cut short.`); }
    const show = make("button", { class: "primary", onclick: () => { const told = this.page.open("live", { text, name: file.name }); if (told) this.fail(told); } }, "Show it in Live");
    this.output.append(make("section", { class: "card", "aria-label": "Recording" }, make("h2", {}, shortName(file.name)), this.table([["what", "a recording of a cache"], ["title", String(header.title ?? "")], ["made by", `kvx ${String(header.by ?? "?")}`], ["records", withCommas(lines.length - 1)], ["size", bytesText(file.size)]]), show));
    this.page.say(`A recording of ${withCommas(lines.length - 1)} records.`);
  }

  showVerified(told) {
    const files = Array.isArray(told.files) ? told.files.slice(0, 2) : [];
    this.output.append(make("section", { class: "card", "aria-label": "Verified" }, make("h2", {}, "What kvx verify found"), this.verdict(told.is_same === false || files.some((f) => f?.is_whole === false) ? "bad" : "good", String(told.verdict ?? "").slice(0, 2000))));
    for (const file of files) {
      const parts = (Array.isArray(file?.parts) ? file.parts : []).filter((p) => typeof p === "object" && p !== null).map((p) => ({ path: String(p.path ?? ""), first: Number(p.first_block), end: Number(p.end_block), digest: String(p.digest), kept: typeof p.kept === "string" ? p.kept : "" }));
      this.output.append(make("section", { class: "card" }, make("h3", {}, shortName(String(file?.name ?? ""))), this.table([["digest", String(file?.digest ?? "")], ["seal", file?.is_sealed ? (file?.is_whole ? "as it was written" : "broken") : "none"]]), this.partsTable(parts)));
    }
    this.page.say(String(told.verdict ?? "").slice(0, 300));
  }

  // ---- a cache file

  table(rows) {
    return make("table", { class: "files-facts" }, make("tbody", {}, rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)))));
  }

  verdict(kind, text) { return make("p", { class: `files-verdict files-${kind}` }, text); }

  cacheCard(read, title = read.name) {
    const { fields, cache, isState } = read.manifest, many = read.entries.length;
    const rows = [["size", bytesText(read.size)], ["model", fields.model || "not said"], ["layout", make("code", {}, fields.layout)],
      ["formats", cache.planes.map((p) => `${p.name}: ${p.format.name}`).join(", ")], ["blocks", `${withCommas(cache.numBlocks)}${isState ? " states" : ` of ${withCommas(cache.blockSize)} tokens`}`], ["layers", `${cache.layerStart} to ${cache.layerStart + cache.numLayers - 1}`],
      ...(isState ? [["planes", cache.planes.map((p) => `${p.name} ${p.axes.map(([axis, n]) => `${axis} ${n}`).join(" x ")}`).join("; ")]] : [["KV heads", `${cache.headStart} to ${cache.headStart + fields.num_kv_heads - 1}`], ["head_dim", `${fields.head_dim}${fields.v_head_dim ? `, V ${fields.v_head_dim}` : ""}`]]),
      ["tensors", `${withCommas(many)}: ${read.entries.slice(0, 2).map((e) => `${e.name} ${e.type} [${e.shape.join(", ")}]`).join(", ")}${many > 2 ? ", …" : ""}`], ["manifest digest", make("code", {}, read.manifest.digest)],
      ["seal", read.isSealed ? "there, and of these digests" : "none: it was written without"], ...(read.content ? [["content digest, as written", make("code", {}, read.content)]] : [])];
    const small = (n, most) => Math.min(n, most), layers = small(cache.numLayers, 4);
    const link = isState ? null : make("p", { class: "row files-link" },
      make("a", { href: writeAddress("layouts", { left: fields.layout, "left-format": fields.format, "left-block": cache.blockSize, layers, heads: fields.num_kv_heads, dim: fields.head_dim, tokens: small(2 * cache.blockSize, 64) }) }, "Its layout, byte by byte"),
      make("a", { href: writeAddress("plan", { from: fields.layout, ff: fields.format, ft: fields.format, m: "1", n: "1", bf: cache.blockSize, bt: cache.blockSize, layers, heads: fields.num_kv_heads, dim: fields.head_dim, blocks: small(cache.numBlocks, 4) }) }, "A plan to another"));
    return make("section", { class: "card", "aria-label": title }, make("h2", {}, title), this.table(rows), link,
      make("details", {}, make("summary", {}, "The manifest"), make("pre", { class: "plan-text", tabIndex: 0 }, JSON.stringify(fields, null, 1).slice(0, 100000))));
  }

  async buffersOf(read) {
    const bytes = new Uint8Array(await read.blob.arrayBuffer());
    return read.spans.map(([begin, size]) => bytes.subarray(begin, begin + size));
  }

  whyNotCounted(read) {
    if (read.size > MOST_COUNTED) return `The file has ${bytesText(read.size)}; this page counts digests of up to ${bytesText(MOST_COUNTED)}. Run kvx verify --json, and drop what it prints here.`;
    return "";
  }

  // Every block's digest, told while it is counted; [] where it is not.
  async blockDigests(read, buffers, said, isOld, where = {}) {
    const out = [], { cache } = read.manifest;
    let last = performance.now();
    for (let block = 0; block < cache.numBlocks; block += 1) {
      out.push(blockDigest(cache, buffers, block, where));
      if (performance.now() - last > 40) {
        said.textContent = `Counted ${withCommas(block + 1)} of ${withCommas(cache.numBlocks)} blocks.`;
        await breath();
        if (isOld()) return [];
        last = performance.now();
      }
    }
    return out;
  }

  async countDigests(read, card, isOld) {
    card.append(make("h3", {}, "Digest by block"));
    const why = this.whyNotCounted(read);
    if (why) {
      card.append(make("p", { class: "note" }, why));
      if (read.parts.length) card.append(this.partsTable(partRanges(read.manifest.cache.numBlocks).map(([first, end], i) => ({ first, end, digest: "", kept: read.parts[i] }))));
      this.page.say(why);
      return;
    }
    const said = make("p", { class: "note" }, "Counting.");
    card.append(said);
    const blocks = await this.blockDigests(read, await this.buffersOf(read), said, isOld);
    if (isOld()) return;
    const total = newDigest(), parts = partRanges(blocks.length).map(([first, end], i) => {
      const sum = newDigest();
      for (const one of blocks.slice(first, end)) sum.add(one);
      total.add(sum);
      return { first, end, digest: String(sum), kept: read.parts[i] ?? "" };
    });
    const bad = parts.filter((p) => p.kept && p.kept !== p.digest), isGood = read.isSealed && !bad.length && String(total) === read.content;
    const verdict = !read.isSealed ? "It has no seal, so nothing can be said of its bytes." : isGood ? "As it was written." : `Damaged: blocks ${bad.map((p) => p.end - p.first > 1 ? `${p.first} to ${p.end - 1}` : p.first).slice(0, 20).join(", ") || "unknown"} are not what was written.`;
    said.replaceWith(this.verdict(!read.isSealed ? "unknown" : isGood ? "good" : "bad", verdict));
    card.append(this.table([["content digest, counted here", make("code", {}, String(total))]]), this.partsTable(parts),
      make("details", {}, make("summary", {}, "Every block"), make("ol", { class: "files-blocks", start: 0 }, blocks.slice(0, MOST_LINES).map((d) => make("li", {}, make("code", {}, String(d))))), blocks.length > MOST_LINES ? make("p", { class: "note" }, `${withCommas(blocks.length - MOST_LINES)} more.`) : null));
    this.page.say(`${read.name}: ${verdict}`, bad.length ? "error" : "info");
  }

  partsTable(parts) {
    const status = (p) => !p.digest || !p.kept ? "not checked" : p.digest === p.kept ? "as written" : "differs";
    return make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Digests of parts" }, make("table", {}, make("thead", {}, make("tr", {}, ["blocks", "digest", "as written", ""].map((h) => make("th", { scope: "col" }, h)))), make("tbody", {}, parts.slice(0, MOST_LINES).map((p) =>
      make("tr", { class: status(p) === "differs" ? "files-differs" : "" }, make("th", { scope: "row" }, p.end - p.first > 1 ? `${withCommas(p.first)} to ${withCommas(p.end - 1)}` : withCommas(p.first)), make("td", {}, make("code", {}, p.digest || "not counted")), make("td", {}, make("code", {}, p.kept || "not kept")), make("td", {}, status(p)))))));
  }

  // ---- two files

  async showTwo(files, isOld) {
    const reads = [];
    for (const file of files) reads.push(await readCacheFile(file, shortName(file.name), this.formats));
    if (isOld()) return;
    const [a, b] = reads, card = make("section", { class: "card", "aria-label": "Comparison" }, make("h2", {}, "Where they differ"));
    this.output.append(card, make("div", { class: "files-pair" }, reads.map((read) => this.cacheCard(read))));
    const why = this.whyNotCounted(a) || this.whyNotCounted(b);
    const fields = fieldDifference(a.manifest, b.manifest), { isState } = a.manifest;
    const tell = (kind, text) => { card.append(this.verdict(kind, text)); this.page.say(text, kind === "bad" ? "error" : "info"); };
    if (fields) return tell("bad", `They differ: ${fields}.`);
    if (why) return tell("unknown", why);
    const said = make("p", { class: "note" }, "Comparing.");
    card.append(said);
    const [x, y] = [await this.buffersOf(a), await this.buffersOf(b)], found = await this.compare(a, x, b, y, said, isOld);
    if (isOld()) return;
    said.remove();
    const slots = [...found.keys()], { cache } = a.manifest;
    if (!slots.length) return tell("good", `The same ${isState ? "states" : "KV"}, element by element, whatever their layouts.`);
    const first = found.get(slots[0])[0], place = (slot, row) => `${row.plane} of layer ${row.layer}, ${isState ? `state ${slot}, index ${row.head} of what ranks share` : `block ${Math.floor(slot / cache.blockSize)}, token ${slot % cache.blockSize} (slot ${slot}), head ${row.head}`}`;
    tell("bad", `They differ: ${place(slots[0], first)}, and in ${withCommas([...found.values()].reduce((n, rows) => n + rows.length, 0))} rows of ${withCommas(slots.length)} ${isState ? "states" : "tokens"} in all.`);
    card.append(this.differenceMap(a.manifest, found), make("details", {}, make("summary", {}, "The first of them"), make("ul", { class: "files-blocks" }, slots.flatMap((slot) => found.get(slot).map((row) => place(slot, row))).slice(0, 200).map((text) => make("li", {}, text)))));
  }

  async compare(a, x, b, y, said, isOld) {
    const found = new Map(), { cache } = a.manifest, count = cache.numBlocks * cache.blockSize;
    let last = performance.now();
    for (let slot = 0; slot < count; slot += 1) {
      const rows = tokenDifferences(cache, x, b.manifest.cache, y, slot);
      if (rows.length) found.set(slot, rows);
      if (performance.now() - last > 40) {
        said.textContent = `Compared ${withCommas(slot + 1)} of ${withCommas(count)} tokens.`;
        await breath();
        if (isOld()) return found;
        last = performance.now();
      }
    }
    return found;
  }

  // Tokens from left to right, K and V of each layer from top to bottom; what differs is coloured.
  differenceMap({ cache }, found) {
    const what = cache.isState ? "states" : "tokens", names = cache.planes.map((p) => p.name), rows = cache.numLayers * names.length, tokens = cache.numBlocks * cache.blockSize, height = Math.max(rows * 3, Math.min(rows * 14, 320));
    const canvas = make("canvas", { class: "files-map", role: "img", "aria-label": `A map of ${withCommas(tokens)} ${what} by ${rows} planes of layers: ${withCommas(found.size)} ${what} differ, the first at slot ${[...found.keys()][0]}.` });
    const paint = () => {
      const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
      if (!width) return;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.height = `${height}px`;
      const ink = canvas.getContext("2d"), w = width / tokens, h = height / rows;
      ink.setTransform(ratio, 0, 0, ratio, 0, 0);
      ink.fillStyle = themeColour("well");
      ink.fillRect(0, 0, width, height);
      ink.fillStyle = themeColour("line");
      for (let block = 1; block < cache.numBlocks && w * cache.blockSize > 6; block += 1) ink.fillRect(block * cache.blockSize * w, 0, 1, height);
      ink.fillStyle = themeColour("error");
      for (const [slot, list] of found) for (const row of list) ink.fillRect(slot * w, ((row.layer - cache.layerStart) * names.length + names.indexOf(row.plane)) * h, Math.max(2, w), Math.max(1, h - 1));
    };
    this.painters.add(paint);
    requestAnimationFrame(paint);
    return make("div", {}, make("p", { class: "note" }, `From left to right ${what}, from top to bottom ${cache.isState ? "planes" : "K and V"} of each layer.`), canvas);
  }

  // ---- a handover

  async showHandover(files, isOld) {
    const { body, parts } = await readHandover(files, this.formats);
    if (isOld()) return;
    const card = make("section", { class: "card", "aria-label": "Handover" }, make("h2", {}, "A handover"), this.table([["tokens", `${withCommas(body.tokens.length)}: ${body.tokens.slice(0, 12).join(", ")}${body.tokens.length > 12 ? ", …" : ""}`.slice(0, 300)], ["parts", String(parts.length)], ["manifest", "its digest is that of its fields"]]));
    this.output.append(card);
    let bad = 0;
    for (const [n, part] of parts.entries()) {
      const verdict = make("p", { class: "note" }, part.problem || "Counting.");
      const box = part.file ? this.cacheCard(part.file, `Part ${n}`) : make("section", { class: "card" }, make("h2", {}, `Part ${n}`));
      box.append(this.table([["layers", Array.isArray(part.fields.layers) ? part.fields.layers.slice(0, 100).join(", ") : ""], ["window", part.fields.window ? withCommas(part.fields.window) : "none"], ["first token", String(part.fields.first_token)], ["content, as sealed", make("code", {}, part.content)]]), verdict);
      this.output.append(box);
      const why = part.problem || this.whyNotCounted(part.file);
      if (part.problem) { bad += 1; verdict.className = "files-verdict files-bad"; }
      if (why) { verdict.textContent = why; continue; }
      const sum = newDigest(), where = part.file.manifest.isState ? {} : { firstBlock: part.fields.first_block, from: part.fields.first_token, end: part.numTokens };
      for (const one of await this.blockDigests(part.file, await this.buffersOf(part.file), verdict, isOld, where)) sum.add(one);
      if (isOld()) return;
      const isGood = String(sum) === part.content;
      bad += isGood ? 0 : 1;
      verdict.replaceWith(this.verdict(isGood ? "good" : "bad", isGood ? "Its tokens' rows are as they were sealed." : `Damaged: its content is ${sum}, and was ${part.content} when it was sealed.`));
    }
    this.page.say(bad ? `${bad} of ${parts.length} parts are not as they were sealed.` : "The handover was read.", bad ? "error" : "info");
  }
}
