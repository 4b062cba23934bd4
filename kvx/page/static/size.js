// size.js: the Size tab. A known model or a config.json, and what its KV cache costs: bytes by kind of layer, and what fits on which
// GPU. Reading is config_reader.js, counting size_count.js; here are controls, bars and tables.
import { make, fill, labelled } from "./dom.js"
import { readConfig, parseConfig, sizeFacts, ConfigError } from "./config_reader.js"
import { countSize, sizeFormats, STATE_FORMATS, FIRST_FORMATS } from "./size_count.js"

const MOST_CONFIG = 4 << 20; // characters of a config.json
const MOST_LINKED = 6000; // characters of a config that stands in the address
const KIND_COLOURS = [[/^full/, "c0"], [/^(sliding|SWA)/, "c1"], [/^chunked/, "c5"], [/^latent/, "c4"], [/^CSA/, "c2"], [/^HCA/, "c6"]];

export const sizeTab = {
  name: "size",
  title: "Size",
  mount(root, page) { return new SizeView(root, page); },
};

// As `kvx size` writes bytes.
export function humanBytes(n) {
  for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) if (n >= 1024 ** power) return `${(n / 1024 ** power).toFixed(2)} ${unit}`;
  return n ? `${n} B` : "0";
}

export const grouped = (n) => n.toLocaleString("en-US", { maximumFractionDigits: 6 });

// Of 8192, 128K or 1M: contexts are counted in powers of two.
export function parseTokens(text) {
  const match = /^([0-9]{1,15})\s*([KM]?)$/.exec(String(text).trim().toUpperCase());
  if (!match) throw new ConfigError(`The context is "${String(text).slice(0, 40)}"; it takes a number of tokens, like 8192, 128K or 1M (of 1024).`);
  return Number(match[1]) * { "": 1, K: 1024, M: 1024 ** 2 }[match[2]];
}

export const tokensText = (n) => n >= 2 ** 20 && n % 2 ** 20 === 0 ? `${n / 2 ** 20}M` : n >= 1024 && n % 1024 === 0 ? `${n / 1024}K` : String(n);

function wholeOf(text, what, least) {
  if (!/^[0-9]{1,15}$/.test(String(text).trim())) throw new ConfigError(`${what} is "${String(text).slice(0, 40)}"; it takes a whole number of ${least} or more.`);
  return Number(text);
}

// Memory as kvx size takes it: 80GB, 74.5 GiB. In GB where no unit is said.
function memoryOf(text, what) {
  const match = /^([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)$/.exec(String(text).trim());
  const unit = match ? { "": 1e9, GB: 1e9, MB: 1e6, TB: 1e12, GIB: 2 ** 30, MIB: 2 ** 20, TIB: 2 ** 40 }[match[2].toUpperCase()] : undefined;
  if (unit === undefined) throw new ConfigError(`${what} is "${String(text).slice(0, 40)}"; it takes a number and GB or GiB, like 16GB.`);
  return Math.floor(Number(match[1]) * unit);
}

const kindColour = (name, i) => KIND_COLOURS.find(([pattern]) => pattern.test(name))?.[1] ?? ["c3", "c7", "c8", "c9"][i % 4];

// What a row of layers keeps, in the words of `kvx size`.
function keptText(g) {
  let kept = g.window ? `${g.isChunked ? "chunk of" : "last"} ${grouped(g.window)} tokens` : "all tokens";
  if (g.ringTokens) kept = `last ${grouped(g.ringTokens)} tokens${g.ratio > 1 ? `, 1 entry per ${g.ratio}` : ""}`;
  if (g.planes.length) kept = g.blockBytes ? `${kept}, and one state` : "one state";
  return kept;
}

class SizeView {
  constructor(root, page) {
    this.page = page;
    this.facts = sizeFacts(page.data.size, page.data.formats);
    this.dropped = null; // { name, config } of a config.json that stands in no address
    this.controls = this.makeControls();
    this.output = make("div", { class: "size-output" });
    const side = make("section", { class: "card size-side", "aria-label": "Model and options" }, this.controls.box);
    root.append(make("div", { class: "size-grid" }, side, this.output));
    for (const kind of ["dragover", "drop"]) {
      root.addEventListener(kind, (event) => {
        event.preventDefault();
        if (kind === "drop") this.takeFile(event.dataTransfer?.files?.[0]);
      });
    }
    this.stop = page.link.changed(() => this.show());
    this.show();
  }

  close() { this.stop(); }

  makeControls() {
    const set = (changes) => { this.page.link.set(changes); this.show(); };
    const onChange = (name) => (event) => set({ [name]: event.target.value });
    const model = make("select", { onchange: (event) => { this.dropped = null; set({ model: event.target.value, config: null, format: null, state: null, index: null }); } });
    for (const name of Object.keys(this.facts.models)) model.append(make("option", { value: name }, name));
    const file = make("input", { type: "file", accept: ".json,application/json", onchange: (event) => { const chosen = event.target.files[0]; event.target.value = ""; this.takeFile(chosen); } });
    const pasted = make("textarea", { rows: 4, spellcheck: "false", placeholder: '{"model_type": "llama", "num_hidden_layers": 32, …}' });
    const read = make("button", { onclick: () => this.takeText("the pasted config", pasted.value) }, "Read it");
    const more = make("details", { class: "size-own" }, make("summary", {}, "Your own config.json"),
      make("p", { class: "note" }, "Drop it anywhere here, choose the file, or paste its text. It stays in this page."),
      labelled("config.json", file), labelled("Text of a config.json", pasted), read);
    const format = make("select", { onchange: onChange("format") });
    const context = make("input", { inputmode: "numeric", class: "short", onchange: onChange("context") });
    const contextSlider = make("input", { type: "range", min: 10, max: 21, step: 1, "aria-label": "Context, powers of two", oninput: (event) => set({ context: tokensText(2 ** Number(event.target.value)) }) });
    const requests = make("input", { inputmode: "numeric", class: "short", onchange: onChange("requests") });
    const requestsSlider = make("input", { type: "range", min: 0, max: 12, step: 1, "aria-label": "Requests, powers of two", oninput: (event) => set({ requests: 2 ** Number(event.target.value) }) });
    const tp = make("input", { inputmode: "numeric", class: "short", onchange: onChange("tp") });
    const tpSlider = make("input", { type: "range", min: 0, max: 5, step: 1, "aria-label": "Tensor parallel size, powers of two", oninput: (event) => set({ tp: 2 ** Number(event.target.value) }) });
    const shared = make("input", { inputmode: "numeric", class: "short", onchange: onChange("shared") });
    const block = make("select", { onchange: onChange("block") }, ["0", "1", "8", "16", "32", "64", "128", "256", "512"].map((n) => make("option", { value: n }, n === "0" ? "default" : n)));
    const weights = make("input", { class: "short", onchange: onChange("weights") });
    const state = make("select", { onchange: onChange("state") }, make("option", { value: "" }, "default"), STATE_FORMATS.map((n) => make("option", { value: n }, n)));
    const index = make("select", { onchange: onChange("index") }, make("option", { value: "" }, "the model's own"), ["bf16", "fp8_e4m3", "fp8_e4m3_per_128", "mxfp4"].map((n) => make("option", { value: n }, n)));
    const stateField = labelled("Format of recurrent states", state), indexField = labelled("Format of index keys", index);
    const pair = (words, input, slider) => make("div", { class: "size-pair" }, labelled(words, input), slider);
    const error = make("p", { class: "error", role: "alert", hidden: true });
    const box = make("div", { class: "size-controls" }, labelled("Model", model), more, labelled("Format", format),
      pair("Context, tokens", context, contextSlider), pair("Requests", requests, requestsSlider), pair("Tensor parallel size", tp, tpSlider),
      make("div", { class: "row" }, labelled("Block size", block), labelled("Shared prefix, tokens", shared)),
      make("div", { class: "row" }, labelled("Weights and the rest, each GPU", weights)), stateField, indexField, error);
    return { box, model, more, file, pasted, format, context, contextSlider, requests, requestsSlider, tp, tpSlider, shared, block, weights, state, index, stateField, indexField, error };
  }

  async takeFile(file) {
    if (!file) return;
    if (file.size > MOST_CONFIG) return this.fail(`${file.name.slice(0, 80)} has ${grouped(file.size)} bytes; a config.json has a few thousand. Drop the model's config.json.`);
    this.takeText(file.name.slice(0, 80), await file.text());
  }

  takeText(name, text) {
    try {
      if (!text.trim()) throw new ConfigError("There is no text to read yet. Paste a config.json, or choose a file.");
      if (text.length > MOST_CONFIG) throw new ConfigError(`${name} has ${grouped(text.length)} characters; a config.json has a few thousand.`);
      const config = parseConfig(text);
      const said = typeof config?._name_or_path === "string" && config._name_or_path ? config._name_or_path : typeof config?.model_type === "string" ? config.model_type : "config";
      readConfig(said.slice(0, 80), config, this.facts); // refuses here, before anything else changes
      const kept = JSON.stringify(config, (key, value) => key === "id2label" || key === "label2id" || key === "vision_config" ? undefined : value);
      this.dropped = { name: said.slice(0, 80), config };
      this.page.link.set({ model: null, config: kept.length <= MOST_LINKED ? kept : null, format: null, state: null, index: null });
      this.show();
      this.page.say(`Read ${name}: ${said.slice(0, 80)}.${kept.length > MOST_LINKED ? " It is too long to stand in a link." : ""}`);
    } catch (error) {
      if (!(error instanceof ConfigError)) throw error;
      this.fail(`${name}: ${error.message}`);
    }
  }

  fail(sentence) {
    this.controls.error.hidden = false;
    this.controls.error.textContent = sentence;
    this.page.say(sentence, "error");
  }

  // { model, isKnown, argument } of the address: a known model, or the config in it.
  chosen() {
    const text = this.page.link.get("config");
    if (text) {
      const config = parseConfig(text.slice(0, MOST_CONFIG));
      const said = typeof config?._name_or_path === "string" && config._name_or_path ? config._name_or_path : typeof config?.model_type === "string" ? config.model_type : "config";
      return { model: readConfig(said.slice(0, 80), config, this.facts), argument: "config.json" };
    }
    if (this.dropped && !this.page.link.get("model")) return { model: readConfig(this.dropped.name, this.dropped.config, this.facts), argument: "config.json" };
    const asked = this.page.link.get("model") || "Llama-3.1-8B";
    const name = Object.keys(this.facts.models).find((known) => known.toLowerCase() === asked.toLowerCase()); // as kvx size takes it
    if (!name) throw new ConfigError(`"${asked.slice(0, 80)}" is not among the known models. Choose one, or give its config.json.`);
    return { model: readConfig(name, this.facts.models[name], this.facts, true), argument: name, known: name };
  }

  show() {
    const c = this.controls, get = (name, other) => this.page.link.get(name) ?? other;
    c.error.hidden = true;
    this.page.say("");
    const raw = { context: get("context", "8K"), requests: get("requests", "1"), tp: get("tp", "1"), shared: get("shared", "0"), block: get("block", "0"), weights: get("weights", "0GB") };
    for (const name of ["context", "requests", "tp", "shared", "weights"]) c[name].value = raw[name];
    try {
      const { model, argument, known } = this.chosen();
      c.model.value = known ?? "";
      const formats = sizeFormats(model, this.facts.formats, true), wanted = get("format", formats.includes("bf16") ? "bf16" : formats[0]);
      const first = FIRST_FORMATS.filter((f) => formats.includes(f)), rest = formats.filter((f) => !first.includes(f));
      fill(c.format, make("optgroup", { label: "most used" }, first.map((f) => make("option", { value: f }, f))), make("optgroup", { label: "every other" }, rest.map((f) => make("option", { value: f }, f))));
      c.format.value = wanted;
      if (!formats.includes(wanted)) throw new ConfigError(`${model.name} does not take the format "${wanted.slice(0, 40)}". It takes ${formats.join(", ")}.`);
      if (![...c.block.options].some((o) => o.value === raw.block)) c.block.append(make("option", { value: raw.block }, raw.block.slice(0, 12)));
      c.block.value = raw.block;
      c.stateField.hidden = !model.kinds.some((kind) => kind.planes.some((plane) => !plane.isConv));
      c.indexField.hidden = !model.kinds.some((kind) => kind.rows.some((row) => row.indexFormat));
      c.state.value = get("state", "");
      c.index.value = get("index", "");
      const asked = {
        context: parseTokens(raw.context), requests: wholeOf(raw.requests, "Requests", 1), shared: wholeOf(raw.shared, "The shared prefix", 0),
        tp: wholeOf(raw.tp, "Tensor parallel size", 1), blockSize: wholeOf(raw.block, "Block size", 0), weights: memoryOf(raw.weights, "Weights and the rest"),
      };
      c.contextSlider.value = Math.round(Math.log2(Math.max(1, asked.context)));
      c.contextSlider.setAttribute("aria-valuetext", `${grouped(asked.context)} tokens`);
      c.requestsSlider.value = Math.round(Math.log2(Math.max(1, asked.requests)));
      c.requestsSlider.setAttribute("aria-valuetext", grouped(asked.requests));
      c.tpSlider.value = Math.round(Math.log2(Math.max(1, asked.tp)));
      c.tpSlider.setAttribute("aria-valuetext", grouped(asked.tp));
      const options = { tp: asked.tp, blockSize: asked.blockSize, indexFormat: get("index", ""), stateFormat: get("state", "") };
      const size = countSize(model, { ...options, format: wanted }, this.facts.formats);
      this.draw(model, size, asked, first.includes(wanted) ? first : [wanted, ...first], options, argument);
    } catch (error) {
      if (!(error instanceof ConfigError)) throw error;
      fill(this.output);
      this.fail(error.message);
    }
  }

  draw(model, size, asked, formats, options, argument) {
    const { context, requests, shared, tp } = asked, blocks = Math.ceil(context / size.blockSize);
    const total = size.totalBytes(context, requests, shared), ofRequest = size.totalBytes(context);
    const parts = size.groups.map((g, i) => ({ name: g.name, colour: kindColour(g.name, i), bytes: g.privateBytes(blocks), group: g }));
    const fact = (words, value, exact) => make("div", { class: "size-fact" }, make("span", { class: "field-name" }, words), make("strong", {}, value), make("span", { class: "note" }, exact));
    const facts = make("div", { class: "size-facts" },
      fact("per token", humanBytes(Math.round(size.tokenBytes)), `${grouped(size.tokenBytes)} bytes`), fact("fixed, per request", humanBytes(size.fixedBytes), `${grouped(size.fixedBytes)} bytes`),
      fact(`a request of ${grouped(context)}`, humanBytes(ofRequest), `${grouped(ofRequest)} bytes`), fact(requests === 1 ? "1 request" : `${grouped(requests)} requests`, humanBytes(total), `${grouped(total)} bytes`));
    const remarks = [...(model.isChecked ? [] : [`unchecked: model_type ${model.modelType} was not compared with a real cache; its config is read like that of any decoder with these fields`]), ...model.notes];
    const heads = ["kind", "layers", "stored", "kept per request", "bytes/token", "fixed", "per request"];
    const rows = parts.map(({ name, colour, bytes, group }) => make("tr", {},
      make("th", { scope: "row" }, make("span", { class: "swatch", style: { background: `var(--${colour})` } }), name), make("td", { class: "number" }, grouped(group.numLayers)), make("td", {}, group.stores), make("td", {}, keptText(group)),
      make("td", { class: "number" }, grouped(group.maxBlocks ? 0 : group.tokenBytes)), make("td", { class: "number", title: `${grouped(group.fixedBytes)} bytes` }, humanBytes(group.fixedBytes)), make("td", { class: "number", title: `${grouped(bytes)} bytes` }, humanBytes(bytes))));
    const command = `kvx size ${argument} --format ${size.format} --context ${context} --requests ${requests}${tp > 1 ? ` --tp ${tp}` : ""}${shared ? ` --shared-prefix ${shared}` : ""}${options.blockSize ? ` --block-size ${options.blockSize}` : ""}${options.stateFormat ? ` --state-format ${options.stateFormat}` : ""}${options.indexFormat ? ` --index-format ${options.indexFormat}` : ""}`;
    fill(this.output,
      make("section", { class: "card", "aria-labelledby": "size-title" }, make("h2", { id: "size-title" }, `${model.name}, ${size.format}`, tp > 1 ? `, each of ${grouped(tp)} ranks` : ""), facts,
        make("h3", {}, "Bytes of a request by kind of layer"), this.bar(parts, ofRequest, ofRequest),
        make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Kinds of layers" }, make("table", { class: "size-kinds" }, make("thead", {}, make("tr", {}, heads.map((h, i) => make("th", { scope: "col", class: i === 1 || i > 3 ? "number" : "" }, h)))), make("tbody", {}, rows))),
        remarks.map((line) => make("p", { class: "note size-remark" }, `${line}.`)),
        make("p", { class: "note" }, "The same numbers: ", make("code", { class: "size-command" }, command))),
      this.formatsCard(model, formats, options, asked, blocks), this.gpuCard(size, asked, total));
  }

  // A stacked bar; `whole` is the bytes of its full width.
  bar(parts, bytes, whole) {
    const said = parts.map((p) => `${p.name} ${humanBytes(p.bytes)}`).join(", ");
    return make("div", { class: "size-bar", role: "img", "aria-label": `${humanBytes(bytes)}: ${said}` }, make("div", { class: "size-stack", style: { width: `${100 * bytes / whole}%` } },
      parts.filter((p) => p.bytes).map((p) => make("div", { class: "size-part", title: `${p.name}: ${grouped(p.bytes)} bytes, ${(100 * p.bytes / bytes).toFixed(1)} %`, style: { background: `var(--${p.colour})`, flexGrow: String(p.bytes / bytes) } },
        p.bytes / bytes > 0.12 ? make("span", {}, p.name) : null))));
  }

  formatsCard(model, formats, options, { context, requests, shared }, blocks) {
    const lines = formats.flatMap((format) => {
      try {
        const size = countSize(model, { ...options, format }, this.facts.formats);
        return [{ format, bytes: size.totalBytes(context), total: size.totalBytes(context, requests, shared), parts: size.groups.map((g, i) => ({ name: g.name, colour: kindColour(g.name, i), bytes: g.privateBytes(blocks) })) }];
      } catch (error) { if (error instanceof ConfigError) return []; throw error; }
    });
    const most = Math.max(...lines.map((line) => line.bytes));
    return make("section", { class: "card" }, make("h3", {}, `A request of ${grouped(context)} tokens in other formats`), make("div", { class: "size-lines" },
      lines.map((line) => make("div", { class: "size-line" }, make("button", { class: "size-line-name", "aria-label": `Show ${line.format}`, onclick: () => { this.page.link.set({ format: line.format }); this.show(); } }, line.format), this.bar(line.parts, line.bytes, most), make("span", { class: "number" }, humanBytes(line.bytes))))));
  }

  gpuCard(size, { context, requests, shared, weights, tp }, total) {
    const rows = Object.entries(this.facts.gpus).map(([name, memory]) => {
      const left = Math.max(0, memory - weights), fit = size.fitRequests(left, context, shared), longest = size.fitContext(left, requests, shared), share = left ? total / left : Infinity;
      return make("tr", { class: share <= 1 ? "" : "over" }, make("th", { scope: "row" }, name),
        make("td", { class: "size-taken" }, make("div", { class: "size-fill", role: "img", "aria-label": share <= 1 ? `${(100 * share).toFixed(0)} % full` : "does not fit" }, make("div", { style: { width: `${Math.min(100, 100 * share)}%` } }))),
        make("td", {}, share <= 1 ? "fits" : "too large"), make("td", { class: "number" }, grouped(fit)), make("td", { class: "number" }, grouped(fit * context)), make("td", { class: "number" }, longest === null ? "any" : grouped(longest)));
    });
    const heads = ["GPU", "taken", "", "requests fit", "tokens fit", requests > 1 ? `longest of ${grouped(requests)} requests` : "longest request"];
    return make("section", { class: "card" }, make("h3", {}, `What fits on one GPU${tp > 1 ? ` of ${grouped(tp)}` : ""}`), make("p", { class: "note" }, weights ? `${humanBytes(weights)} of each are for weights and the rest.` : "All memory for the cache: say what weights and the rest take to see what is left."),
      make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "What fits on which GPU" }, make("table", { class: "size-gpus" }, make("thead", {}, make("tr", {}, heads.map((h, i) => make("th", { scope: "col", class: i > 2 ? "number" : i === 1 ? "size-taken" : "" }, h)))), make("tbody", {}, rows))));
  }
}
