// plan.js: the Plan tab. From one cache to another, TP m to n: which runs go where, how long they are, which kernel moves them and what
// is left out, stepped and animated. What a plan is comes from planner.js; here are controls, the picture and the table.
import { make, fill, labelled, themeColour, onThemeChange } from "./dom.js"
import { LayoutMistake, withCommas } from "./language.js"
import { SpecMistake } from "./place.js"
import { makePlan, shardCaches, explainPlan, planRuns, kernelOf, loopsText, runsOf, rectangleText, PlanMistake } from "./planner.js"

const MOST_RUNS = 20000; // that are stepped through
const MOST_ROWS = 160; // buffers drawn on a side
const KERNEL_WORDS = {
  "flat copy": "one run, copied as it is", "row copy": "runs of 16 bytes or more, or ones that keep their order", transpose: "short runs whose order changes: moved in tiles",
  cells: "rows that change their format: decoded and encoded",
};
const PLAN_DEFAULTS = { from: "vllm.lbnhc", to: "tensorrt_llm", m: "2", n: "4", bf: "4", bt: "4", layers: "2", heads: "4", dim: "8", blocks: "2", ff: "bf16", ft: "bf16", rank: "", step: "0" };

export const planTab = {
  name: "plan",
  title: "Plan",
  mount(root, page) { return new PlanView(root, page); },
};

class PlanView {
  constructor(root, page) {
    this.page = page;
    this.formats = new Map(page.data.formats.map((row) => [row.name, row]));
    this.engines = new Map(page.data.engines.map((row) => [row.name, row]));
    this.plan = null;
    this.runs = [];
    this.step = 0;
    this.timer = 0;
    this.makeControls(root);
    this.stops = [page.link.changed(() => this.show()), onThemeChange(() => this.paint())];
    this.watch = new ResizeObserver(() => this.paint());
    this.watch.observe(this.canvas);
    this.show();
  }

  close() {
    this.pause();
    this.watch.disconnect();
    for (const stop of this.stops) stop();
  }

  makeControls(root) {
    const set = (name) => (event) => { this.pause(); this.page.link.set({ [name]: event.target.value, step: null }); this.show(); };
    this.inputs = {};
    const input = (name, more = {}) => { this.inputs[name] = make("input", { onchange: set(name), spellcheck: "false", autocomplete: "off", ...more }); return this.inputs[name]; };
    const number = (name) => input(name, { inputmode: "numeric", class: "plan-number" });
    const format = (name) => { this.inputs[name] = make("select", { onchange: set(name) }, [...this.formats.keys()].map((f) => make("option", { value: f }, f))); return this.inputs[name]; };
    const names = make("datalist", { id: "plan-engines" }, [...this.engines.values()].map((row) => make("option", { value: row.name }, row.layout)));
    const side = (title, words, where, form, tp, block, ...more) => make("fieldset", { class: "card plan-side" }, make("legend", { class: "plan-legend" }, title),
      labelled(words, input(where, { list: "plan-engines", class: "plan-where" })), make("div", { class: "row" }, labelled("Format", format(form)), labelled("TP", number(tp)), labelled("Block size", number(block)), more));
    this.inputs.rank = make("select", { onchange: set("rank") });
    this.fromNote = make("p", { class: "note mono" });
    this.toNote = make("p", { class: "note mono" });
    const from = side("From", "Engine, or a layout", "from", "ff", "m", "bf"), to = side("To", "Engine, or a layout ", "to", "ft", "n", "bt", labelled("Ranks", this.inputs.rank));
    from.append(this.fromNote);
    to.append(this.toNote);
    const geometry = make("div", { class: "card row" }, labelled("Layers", number("layers")), labelled("KV heads", number("heads")), labelled("head_dim", number("dim")), labelled("Blocks", number("blocks")),
      make("button", { onclick: () => this.swap() }, "Swap sides"));
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.canvas = make("canvas", { class: "plan-canvas", tabIndex: 0, role: "img", onkeydown: (event) => this.onKey(event), onclick: (event) => this.onClick(event) });
    this.playButton = make("button", { class: "primary", onclick: () => this.timer ? this.pause() : this.play() }, "Play");
    this.slider = make("input", { type: "range", min: 0, max: 0, step: 1, "aria-label": "Step", oninput: (event) => { this.pause(); this.goTo(Number(event.target.value)); } });
    this.caption = make("p", { class: "plan-caption" });
    const buttons = make("div", { class: "row plan-buttons" }, make("button", { "aria-label": "To the start", onclick: () => { this.pause(); this.goTo(0); } }, "|◀"),
      make("button", { "aria-label": "One step back", onclick: () => { this.pause(); this.goTo(this.step - 1); } }, "◀"), this.playButton,
      make("button", { "aria-label": "One step on", onclick: () => { this.pause(); this.goTo(this.step + 1); } }, "▶"), make("button", { "aria-label": "To the end", onclick: () => { this.pause(); this.goTo(this.runs.length); } }, "▶|"), this.slider);
    this.picture = make("section", { class: "card plan-picture", "aria-label": "What moves" }, make("div", { class: "plan-heads" }, make("h3", {}, "From"), make("h3", {}, "To")), this.canvas, buttons, this.caption);
    this.facts = make("section", { class: "card plan-facts", "aria-label": "The plan" });
    root.append(make("div", { class: "plan-grid" }, names, make("div", { class: "plan-sides" }, from, to), geometry, this.error, this.picture, this.facts));
  }

  value(name) { return this.page.link.get(name) ?? PLAN_DEFAULTS[name]; }

  swap() {
    const v = (name) => this.value(name);
    this.pause();
    this.page.link.set({ from: v("to"), to: v("from"), ff: v("ft"), ft: v("ff"), m: v("n"), n: v("m"), bf: v("bt"), bt: v("bf"), rank: null, step: null });
    this.show();
  }

  whole(name, words) {
    const text = this.value(name).trim();
    if (!/^[0-9]{1,9}$/.test(text)) throw new PlanMistake(`${words} is "${text.slice(0, 40)}"; it takes a whole number of 1 or more.`);
    return Number(text);
  }

  sideSpec(where, format, block, numBlocks) {
    const said = this.value(where), row = this.engines.get(said.trim());
    return {
      layout: row ? row.layout : said, format: this.value(format), num_layers: this.whole("layers", "Layers"), num_kv_heads: this.whole("heads", "KV heads"), head_dim: this.whole("dim", "head_dim"),
      block_size: this.whole(block, "Block size"), num_blocks: numBlocks, v_head_dim: 0, v_format: "", block_bytes: 0,
    };
  }

  show() {
    for (const [name, control] of Object.entries(this.inputs)) if (name !== "rank") control.value = this.value(name);
    this.error.hidden = true;
    this.page.say("");
    try {
      const blocks = this.whole("blocks", "Blocks"), src = this.sideSpec("from", "ff", "bf", blocks), n = this.whole("n", "TP"), m = this.whole("m", "TP");
      const dst = this.sideSpec("to", "ft", "bt", Math.max(1, Math.ceil(blocks * src.block_size / this.whole("bt", "Block size"))));
      this.showRanks(n);
      const rank = this.value("rank"), ranks = rank === "" ? null : [Number(rank)];
      this.plan = makePlan(shardCaches(src, m, this.formats), shardCaches(dst, n, this.formats, ranks), { partial: ranks !== null });
      this.fromNote.textContent = src.layout;
      this.toNote.textContent = dst.layout;
      this.collectRuns(blocks * src.block_size);
      this.showFacts();
      this.picture.hidden = this.facts.hidden = false;
      this.slider.max = this.runs.length;
      this.goTo(/^[0-9]{1,6}$/.test(this.value("step")) ? Number(this.value("step")) : 0, false);
    } catch (error) {
      if (![PlanMistake, SpecMistake, LayoutMistake].some((kind) => error instanceof kind)) throw error;
      this.plan = null;
      this.picture.hidden = this.facts.hidden = true;
      this.error.hidden = false;
      this.error.textContent = error.message;
      this.page.say(error.message.split("\n")[0], "error");
    }
  }

  showRanks(n) {
    fill(this.inputs.rank, make("option", { value: "" }, "all"), Array.from({ length: Math.min(n, 64) }, (_, i) => make("option", { value: String(i) }, `rank ${i} alone`)));
    this.inputs.rank.value = this.value("rank");
    if (this.inputs.rank.selectedIndex < 0) throw new PlanMistake(`The destination has ${n} ranks; the address names rank ${this.value("rank").slice(0, 20)}.`);
  }

  collectRuns(tokens) {
    this.runs = [];
    const units = Math.floor(tokens / this.plan.unit), each = this.plan.boxes.reduce((sum, box) => sum + runsOf(box), 0);
    this.numRuns = units * each;
    for (let u = 0; u < units && this.runs.length < MOST_RUNS; u += 1) {
      for (const run of planRuns(this.plan, u)) {
        if (this.runs.length >= MOST_RUNS) break;
        this.runs.push({ ...run, unit: u });
      }
    }
    this.units = units;
    this.layOut();
  }

  // Rows of the picture: the buffers of each side, with the shard they are of.
  layOut() {
    const rows = (shards) => shards.flatMap((cache, shard) => cache.buffers.map((bytes, buffer) => ({ shard, rank: cache.rank, buffer, bytes })));
    this.rows = { src: rows(this.plan.src), dst: rows(this.plan.dst) };
  }

  showFacts() {
    const { plan } = this, lines = explainPlan(plan, this.units).split("\n");
    const shardName = (side, i) => plan[side].length > 1 || this.value("rank") !== "" ? `rank ${plan[side][i].rank}` : "all";
    const rows = plan.boxes.slice(0, 400).map((box, n) => make("tr", {}, make("th", { scope: "row" }, make("span", { class: "swatch", style: { background: `var(--c${box.from % 10})` } }), n), make("td", {}, `${shardName("src", box.from)} → ${shardName("dst", box.to)}`),
      make("td", { title: KERNEL_WORDS[kernelOf(box)] }, kernelOf(box)), make("td", { class: "number" }, `${withCommas(box.cell ? box.cell.rowBytes : box.run)} B`), make("td", { class: "number" }, withCommas(runsOf(box))), make("td", { class: "mono" }, loopsText(box))));
    const kernels = [...new Set(plan.boxes.map(kernelOf))];
    fill(this.facts, make("h3", {}, "The plan"), make("p", {}, lines[0]), make("p", {}, lines[1]),
      plan.leftOut.map((r) => make("p", { class: "plan-warn" }, `Left out: ${rectangleText(r)}, which the source holds and the destination does not.`)),
      plan.twice.map((r) => make("p", { class: "plan-warn" }, `Written twice: ${rectangleText(r)}, which several shards of the destination hold.`)),
      make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Boxes of the plan" }, make("table", { class: "plan-boxes" }, make("thead", {}, make("tr", {}, ["box", "shards", "kernel", "run", "runs", "loops (size: source / destination stride)"].map((h, i) => make("th", { scope: "col", class: i === 3 || i === 4 ? "number" : "" }, h)))), make("tbody", {}, rows))),
      plan.boxes.length > 400 ? make("p", { class: "note" }, `${withCommas(plan.boxes.length - 400)} boxes more.`) : null,
      make("p", { class: "note" }, kernels.map((name) => `${name}: ${KERNEL_WORDS[name]}. `)),
      make("details", {}, make("summary", {}, "As plan.explain() writes it"), make("pre", { class: "plan-text", tabIndex: 0 }, explainPlan(plan))));
  }

  // ---- stepping

  goTo(step, isSaid = true) {
    this.step = Math.max(0, Math.min(this.runs.length, step));
    this.slider.value = this.step;
    this.slider.setAttribute("aria-valuetext", `${this.step} of ${this.runs.length}`);
    if (!this.timer) this.page.link.set({ step: this.step ? String(this.step) : null });
    const text = this.stepText();
    this.caption.textContent = text;
    this.canvas.setAttribute("aria-label", `${this.runs.length} runs from ${this.rows.src.length} buffers to ${this.rows.dst.length}. ${text} Arrow keys step.`);
    if (isSaid && !this.timer) this.page.say(text);
    this.paint();
  }

  stepText() {
    const more = this.numRuns > this.runs.length ? ` The first ${withCommas(this.runs.length)} of ${withCommas(this.numRuns)} are shown.` : "";
    if (!this.step) return `${withCommas(this.numRuns)} runs, none moved yet.${more}`;
    const run = this.runs[this.step - 1], box = this.plan.boxes[run.box], a = this.rows.src[run.srcBuffer], b = this.rows.dst[run.dstBuffer];
    const bytes = run.srcBytes === run.dstBytes ? `${run.srcBytes} bytes` : `${run.srcBytes} bytes, which become ${run.dstBytes},`;
    return `Run ${withCommas(this.step)} of ${withCommas(this.runs.length)}, ${kernelOf(box)}: ${bytes} from rank ${a.rank}, buffer ${a.buffer}, byte ${withCommas(run.srcByte)} to rank ${b.rank}, buffer ${b.buffer}, byte ${withCommas(run.dstByte)}.${more}`;
  }

  play() {
    if (!this.runs.length) return;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { this.goTo(this.runs.length); return; } // the end, without what moves
    if (this.step >= this.runs.length) this.step = 0;
    const perSecond = Math.max(6, this.runs.length / 8), begin = this.step;
    let start = null;
    const frame = (now) => {
      start ??= now;
      this.timer = requestAnimationFrame(frame);
      const step = Math.min(this.runs.length, begin + 1 + Math.floor((now - start) / 1000 * perSecond));
      if (step !== this.step) this.goTo(step);
      if (this.step >= this.runs.length) { this.pause(); this.page.say("All runs moved."); }
    };
    this.timer = requestAnimationFrame(frame);
    this.playButton.textContent = "Pause";
  }

  pause() {
    if (this.timer) cancelAnimationFrame(this.timer);
    const was = this.timer;
    this.timer = 0;
    this.playButton.textContent = "Play";
    if (was) this.page.link.set({ step: String(this.step) });
  }

  onKey(event) {
    const to = { ArrowRight: this.step + 1, ArrowDown: this.step + 1, ArrowLeft: this.step - 1, ArrowUp: this.step - 1, Home: 0, End: this.runs.length, PageDown: this.step + 10, PageUp: this.step - 10 }[event.key];
    if (event.key === " ") this.timer ? this.pause() : this.play();
    else if (to === undefined) return;
    else { this.pause(); this.goTo(to); }
    event.preventDefault();
  }

  // To the first run that touches the byte under the pointer.
  onClick(event) {
    const at = this.byteAt(event.offsetX, event.offsetY);
    if (!at) return;
    const [buffer, byte] = at.side === "src" ? ["srcBuffer", "srcByte"] : ["dstBuffer", "dstByte"], size = at.side === "src" ? "srcBytes" : "dstBytes";
    const found = this.runs.findIndex((run) => run[buffer] === at.buffer && run[byte] <= at.byte && at.byte < run[byte] + run[size]);
    this.pause();
    if (found >= 0) this.goTo(found + 1);
    else this.page.say(`Byte ${withCommas(at.byte)} of buffer ${at.buffer} does not move.`);
  }

  // ---- the picture

  geometry() {
    const width = this.canvas.clientWidth, isNarrow = width < 520, gap = Math.max(26, width * 0.08), label = isNarrow ? 44 : 74, half = (width - gap) / 2 - label;
    const count = Math.min(MOST_ROWS, Math.max(this.rows.src.length, this.rows.dst.length)), rowHeight = count <= 4 ? 40 : count <= 10 ? 28 : 18;
    const at = (side) => ({ x: side === "src" ? label : width - half, scale: half / this.rows[side].reduce((most, row) => Math.max(most, row.bytes), 1) });
    return { width, isNarrow, label, half, rowHeight, count, height: count * rowHeight + 24, src: at("src"), dst: at("dst") };
  }

  byteAt(x, y) {
    if (!this.plan) return null;
    const g = this.geometry(), row = Math.floor((y - 4) / g.rowHeight);
    for (const side of ["src", "dst"]) {
      const there = this.rows[side][row], byte = Math.floor((x - g[side].x) / g[side].scale);
      if (there && row < g.count && byte >= 0 && byte < there.bytes) return { side, buffer: row, byte };
    }
    return null;
  }

  paint() {
    if (!this.plan || this.picture.hidden || !this.canvas.clientWidth) return;
    const g = this.geometry(), ratio = devicePixelRatio || 1;
    this.canvas.style.height = `${g.height}px`;
    if (this.canvas.width !== Math.round(g.width * ratio) || this.canvas.height !== Math.round(g.height * ratio)) { this.canvas.width = Math.round(g.width * ratio); this.canvas.height = Math.round(g.height * ratio); }
    const ink = this.canvas.getContext("2d"), colours = Array.from({ length: 10 }, (_, i) => themeColour(`c${i}`)), soft = themeColour("soft"), well = themeColour("well"), accent = themeColour("accent");
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, g.width, g.height);
    ink.font = "11px system-ui, sans-serif";
    ink.textBaseline = "middle";
    const bar = (side, buffer, byte, bytes) => [g[side].x + byte * g[side].scale, 4 + buffer * g.rowHeight, Math.max(1, bytes * g[side].scale), g.rowHeight - 4];
    for (const side of ["src", "dst"]) {
      this.rows[side].slice(0, g.count).forEach((row, i) => {
        ink.fillStyle = well;
        ink.fillRect(...bar(side, i, 0, row.bytes));
        ink.fillStyle = soft;
        ink.textAlign = "right";
        ink.fillText(g.isNarrow ? `${row.rank} · ${row.buffer}` : `rank ${row.rank} · ${row.buffer}`, g[side].x - 6, 4 + i * g.rowHeight + g.rowHeight / 2 - 2);
      });
      if (this.rows[side].length > g.count) {
        ink.textAlign = "left";
        ink.fillText(`and ${withCommas(this.rows[side].length - g.count)} buffers more`, g[side].x, g.height - 10);
      }
    }
    ink.globalAlpha = 0.28; // what is still to move
    for (const run of this.runs) {
      ink.fillStyle = colours[this.plan.boxes[run.box].from % 10];
      if (run.srcBuffer < g.count) ink.fillRect(...bar("src", run.srcBuffer, run.srcByte, run.srcBytes));
    }
    ink.globalAlpha = 1;
    for (const run of this.runs.slice(0, this.step)) {
      ink.fillStyle = colours[this.plan.boxes[run.box].from % 10];
      if (run.srcBuffer < g.count) ink.fillRect(...bar("src", run.srcBuffer, run.srcByte, run.srcBytes));
      if (run.dstBuffer < g.count) ink.fillRect(...bar("dst", run.dstBuffer, run.dstByte, run.dstBytes));
    }
    if (!this.step) return;
    const run = this.runs[this.step - 1], a = bar("src", run.srcBuffer, run.srcByte, run.srcBytes), b = bar("dst", run.dstBuffer, run.dstByte, run.dstBytes);
    if (run.srcBuffer >= g.count || run.dstBuffer >= g.count) return;
    ink.strokeStyle = accent;
    ink.lineWidth = 2;
    for (const r of [a, b]) ink.strokeRect(r[0] - 1, r[1] - 1, r[2] + 2, r[3] + 2);
    const x0 = a[0] + a[2] + 1, y0 = a[1] + a[3] / 2, x1 = b[0] - 1, y1 = b[1] + b[3] / 2, middle = g.src.x + g.half + (g.width - 2 * (g.src.x + g.half)) / 2;
    ink.beginPath();
    ink.moveTo(x0, y0);
    ink.bezierCurveTo(Math.max(middle, x0 + 20), y0, Math.min(middle, x1 - 20), y1, x1, y1);
    ink.stroke();
  }
}
