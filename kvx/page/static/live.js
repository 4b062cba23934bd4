// Live: a cache while it works, from the server of `kvx view` or `kvx generate --view`, or a recording of one.
import { make, fill, labelled, onThemeChange } from "./dom.js"
import { LIVE_STATES, LiveTimeline, readRecording } from "./live_state.js"
import { BlockMap, LIVE_COLOURS, LIVE_LETTERS, drawHistory, drawSequences, drawTraffic, liveTheme, stateWords } from "./live_draw.js"

const LIVE_REASONS = {
  all: "found all", differs: "differs", extra: "another extra", salt: "another salt", evicted: "evicted", window: "window",
  never: "never seen", cleared: "cleared", short: "short", fork: "fork", off: "no prefixes", unknown: "not known",
};
const LIVE_SPEEDS = { "0.25": "¼×", "1": "1×", "4": "4×", "16": "16×" };
const LIVE_MOST_ROWS = 100;

const liveDigits = new Intl.NumberFormat("en"); // made once: toLocaleString() makes one for every number
const liveCount = (n) => liveDigits.format(Number(n ?? 0));
const liveBytes = (n) => (n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`);
const livePlural = (n, noun) => `${liveCount(n)} ${noun}${n === 1 ? "" : "s"}`;

// What was read outlives the tab: whoever looks at another and comes back finds it as it was, and nothing of a live run is missed.
const liveSession = { timeline: null, name: "", stream: null, isLive: false, isLost: false, listeners: new Set() };

function tellLive(what, detail) {
  for (const listener of liveSession.listeners) listener(what, detail);
}

// Shows a recording: its text, and the file's name. An error's sentence where it is none.
export function openRecording(text, name) {
  try {
    liveSession.timeline = readRecording(text);
  } catch (error) {
    return `${name} is no recording that this page can show: ${error.message}. \`kvx generate --record FILE\` and kvx.view.record() make them.`;
  }
  Object.assign(liveSession, { name, isLive: false });
  tellLive("opened");
  return "";
}

function followServer() {
  if (liveSession.stream) return;
  const stream = (liveSession.stream = new EventSource(`events${location.search}`));
  stream.onmessage = (message) => {
    for (const record of JSON.parse(message.data)) {
      if (record.type === "header") {
        Object.assign(liveSession, { timeline: new LiveTimeline(record), name: record.title || "a cache", isLive: true });
        tellLive("opened");
      } else if (liveSession.isLive) liveSession.timeline.append(record);
      if (record.type === "end") stream.close();
    }
    liveSession.isLost = false;
    if (liveSession.isLive) tellLive("came");
  };
  stream.onerror = () => {
    if (liveSession.isLost || liveSession.timeline?.isOver) return;
    liveSession.isLost = true;
    tellLive("lost");
  };
  stream.addEventListener("wrong", (message) => tellLive("wrong", message.data));
}

class LiveTab {
  constructor(root, page) {
    Object.assign(this, { root, page, isFollowing: true, isPlaying: false, speed: 1, group: 0, reason: "", drawn: {}, frame: 0 });
    root.live = this;
    this.stops = [onThemeChange(() => this.readTheme()), page.link.changed(() => this.readLink())];
    this.hear = (what, detail) => this.heard(what, detail);
    liveSession.listeners.add(this.hear);
    this.resized = new ResizeObserver(() => {
      if (root.clientWidth === this.width) return; // its height is our own doing
      this.measure();
      this.redraw();
    });
    this.resized.observe(root);
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this.inView.set(target, isIntersecting);
      this.redraw();
    });
    this.makeDrop();
    if (page.data.recording && !liveSession.timeline) {
      const told = openRecording(page.data.recording.map((record) => JSON.stringify(record)).join("\n") + "\n", page.data.recording_name ?? "the recording of this page");
      if (told) page.say(told, "error");
    }
    if (!this.bar) this.show();
    if (page.data.live) followServer();
  }

  close() {
    liveSession.listeners.delete(this.hear);
    cancelAnimationFrame(this.frame);
    clearTimeout(this.later);
    clearTimeout(this.owing);
    this.resized.disconnect();
    this.seen.disconnect();
    for (const stop of this.stops) stop();
  }

  get timeline() {
    return liveSession.timeline;
  }

  heard(what, detail) {
    if (what === "opened") this.show();
    else if (what === "came") {
      if (this.isFollowing) this.state = this.timeline.head;
      this.redraw();
      if (this.timeline.isOver) this.page.say("The run is over. What it did can be replayed here.");
    } else if (what === "lost") {
      this.page.say("The server does not answer any more; it is tried again.", "error");
      this.redraw();
    } else if (what === "wrong") this.page.say(detail, "error");
  }

  // --- files --------------------------------------------------------------------------------------------------------------

  makeDrop() {
    this.root.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.root.classList.add("live-over");
    });
    this.root.addEventListener("dragleave", () => this.root.classList.remove("live-over"));
    this.root.addEventListener("drop", (event) => {
      event.preventDefault();
      this.root.classList.remove("live-over");
      if (event.dataTransfer.files[0]) this.open(event.dataTransfer.files[0]);
    });
  }

  async open(file) {
    if (file.size > 1e9) return this.page.say(`${file.name} has ${liveBytes(file.size)}; this page reads recordings of up to 1 GB.`, "error");
    this.page.say(`Reading ${file.name}.`);
    const told = openRecording(await file.text(), file.name);
    this.page.say(told || `${file.name}: ${livePlural(this.timeline.records.length, "record")}, ${this.timeline.end.toFixed(2)} s.`, told ? "error" : "info");
  }

  fileField(words) {
    return labelled(words, make("input", { type: "file", accept: ".jsonl,.json,.txt,application/x-ndjson", onchange: (event) => event.target.files[0] && this.open(event.target.files[0]) }));
  }

  // --- what stands there --------------------------------------------------------------------------------------------------

  show() {
    this.drawn = {};
    this.drawnAt = new Map();
    this.inView = new Map();
    this.seen.disconnect();
    if (!this.timeline) {
      fill(this.root, make("div", { class: "card live-empty" },
        make("h2", {}, this.page.data.live ? "Waiting for the server" : "See a cache while it works"),
        make("p", { class: "note" }, "Drop a recording here, or open one. ", make("code", {}, "kvx generate --record run.jsonl"), " and ", make("code", {}, "kvx.view.record(cache, file)"), " make them; ", make("code", {}, "kvx generate --view"), " and ", make("code", {}, "kvx.view.attach(cache)"), " serve this page live."),
        this.fileField("Open a recording")));
      return;
    }
    this.state = this.timeline.head;
    this.makeBar();
    this.makeMap();
    this.sequenceChart = make("canvas", { class: "live-chart", role: "img" });
    this.historyChart = make("canvas", { class: "live-chart", role: "img" });
    this.trafficChart = make("canvas", { class: "live-chart", role: "img" });
    this.tree = make("ol", { class: "live-tree", "aria-label": "Prefixes in the cache" });
    this.treeNote = make("span", { class: "note" });
    this.trafficNote = make("span", { class: "note" });
    this.sequenceNote = make("span", { class: "note" }, "Blue is the share of the prompt that was found.");
    this.numbers = make("div", { class: "live-numbers" });
    const card = (title, note, ...rest) => {
      const section = make("section", { class: "card" }, make("div", { class: "live-head" }, make("h2", {}, title), note), rest);
      this.seen.observe(section);
      return section;
    };
    this.trafficCard = card("Tiers", this.trafficNote, this.trafficChart);
    this.sequenceCard = card("Sequences over time", this.sequenceNote, this.sequenceChart);
    this.historyCard = card("Blocks over time", make("span", { class: "note" }, "A mark at the top is a preemption."), this.historyChart);
    this.treeCard = card("Prefixes", this.treeNote, this.tree);
    fill(this.root, this.bar, this.numbers, this.mapCard,
      make("div", { class: "live-pair" },
        this.sequenceCard, make("div", { class: "live-pair" }, this.historyCard, this.trafficCard)),
      (this.tableCard = this.makeTable()),
      this.treeCard);
    this.seen.observe(this.tableCard);
    this.measure();
    this.readLink();
  }

  makeBar() {
    const timeline = this.timeline;
    this.play = make("button", { onclick: () => this.togglePlay() });
    this.badge = make("span", { class: "live-badge" });
    this.slider = make("input", { type: "range", min: 0, max: 1, step: "any", "aria-label": "Time", oninput: () => this.seek(Number(this.slider.value)) });
    this.clock = make("span", { class: "live-clock" });
    this.follow = make("button", { onclick: () => this.followEnd() }, "To the end");
    const speed = make("select", { "aria-label": "Speed", onchange: (event) => { this.speed = Number(event.target.value); } }, Object.entries(LIVE_SPEEDS).map(([value, text]) => make("option", { value, selected: value === "1" }, text)));
    this.bar = make("section", { class: "card live-bar", "aria-label": "Replay" },
      make("span", {}, make("span", { class: "live-name" }, liveSession.name), " ", this.badge),
      make("span", { class: "row" },
        make("button", { "aria-label": "One record back", title: "One record back", onclick: () => this.step(-1) }, "◀"),
        this.play,
        make("button", { "aria-label": "One record on", title: "One record on", onclick: () => this.step(1) }, "▶"), speed, this.follow),
      make("span", { class: "live-time" }, this.slider, this.clock),
      liveSession.isLive ? null : this.fileField("Another recording"));
    if (timeline.header.groups.length > 1) {
      this.groupSelect = make("select", { onchange: () => this.setGroup(Number(this.groupSelect.value)) }, timeline.header.groups.map((group, i) => make("option", { value: String(i) }, String(group.name))));
    } else this.groupSelect = null;
  }

  makeMap() {
    this.legend = make("div", { class: "live-legend" }, LIVE_STATES.map(() => make("span", {}, make("i"), " ")));
    const canvas = make("canvas", { role: "img", tabIndex: 0, "aria-roledescription": "map of blocks" }), spacer = make("div", { class: "live-spacer" });
    const box = make("div", { class: "live-map" }, canvas, spacer);
    this.map = new BlockMap(box, canvas, spacer);
    this.detail = make("p", { class: "note live-detail" }, "Point at a block, or use the arrow keys.");
    box.addEventListener("scroll", () => { this.drawn.map = null; this.redraw(); }, { passive: true });
    canvas.addEventListener("pointermove", (event) => this.point(this.map.hit(event.offsetX, event.offsetY, this.state.blocks[this.group].length), false));
    canvas.addEventListener("keydown", (event) => this.moveCursor(event));
    this.mapCard = make("section", { class: "card" }, make("div", { class: "live-head" }, make("span", { class: "live-group" }, make("h2", {}, "Blocks"), this.groupSelect ? make("label", { class: "note" }, "Layer group ", this.groupSelect) : null), this.legend), box, this.detail);
  }

  makeTable() {
    this.body = make("tbody");
    this.tableNote = make("span", { class: "note" });
    this.reasonSelect = make("select", { onchange: () => { this.reason = this.reasonSelect.value; this.page.link.set({ why: this.reason }); this.drawn.table = null; this.redraw(true); } },
      make("option", { value: "" }, "all"), Object.entries(LIVE_REASONS).map(([value, text]) => make("option", { value }, text)));
    const heads = [["Sequence", "number"], ["Admitted", "number"], ["Prompt", "number"], ["Found", "number"], ["From tiers", "number"], ["Ended", ""], ["Why its prefix ended there", ""]];
    return make("section", { class: "card" }, make("div", { class: "live-head" }, make("h2", {}, "Requests"), this.tableNote, labelled("Why", this.reasonSelect)),
      make("div", { class: "live-table", tabIndex: 0, role: "region", "aria-label": "Requests and why their prefixes ended" },
        make("table", {}, make("thead", {}, make("tr", {}, heads.map(([text, kind]) => make("th", { scope: "col", class: kind || null }, text)))), this.body)));
  }

  // --- time ---------------------------------------------------------------------------------------------------------------

  readLink() {
    if (!this.timeline) return;
    const group = Number(this.page.link.get("group") ?? 0), t = this.page.link.get("t"), why = this.page.link.get("why") ?? "";
    this.group = Number.isInteger(group) && group >= 0 && group < this.timeline.header.groups.length ? group : 0;
    if (this.groupSelect) this.groupSelect.value = String(this.group);
    this.reason = why in LIVE_REASONS ? why : "";
    this.reasonSelect.value = this.reason;
    if (t !== null && Number.isFinite(Number(t))) this.seek(Number(t));
    else this.followEnd();
  }

  setGroup(group) {
    this.group = group;
    this.map.cursor = -1;
    this.page.link.set({ group: group || null });
    this.redraw(true);
  }

  seek(t) {
    this.goTo(this.timeline.indexAt(t), t);
  }

  // After so many records; at a time between two of them, where one is given.
  goTo(at, t = null) {
    this.isFollowing = false;
    this.at = Math.max(1, Math.min(at, this.timeline.records.length));
    this.state = this.timeline.stateAt(this.at);
    if (this.state === this.timeline.head) this.state = this.state.clone(); // which goes on
    this.now = Math.max(this.timeline.begin, Math.min(t ?? this.state.t, this.timeline.end));
    this.page.link.set({ t: this.now.toFixed(4) }); // as records have it
    this.redraw();
  }

  step(by) {
    this.pause();
    const at = this.isFollowing ? this.timeline.records.length : this.at;
    this.goTo(at + by);
    this.page.say(`${this.state.t.toFixed(3)} s: ${stateWords(this.state.stateCounts[this.group])}.`);
  }

  followEnd() {
    this.pause();
    this.isFollowing = true;
    this.state = this.timeline.head;
    this.page.link.set({ t: null });
    this.redraw(true);
  }

  togglePlay() {
    if (this.isPlaying) return this.pause();
    if (this.isFollowing || this.now >= this.timeline.end) this.seek(this.timeline.begin);
    Object.assign(this, { isPlaying: true, began: performance.now(), beganAt: this.now });
    this.playOn();
    this.redraw(true);
  }

  pause() {
    this.isPlaying = false;
    clearTimeout(this.later);
    this.redraw(true);
  }

  // Four pictures a second would do; twelve look smooth.
  playOn() {
    if (!this.isPlaying) return;
    const t = this.beganAt + ((performance.now() - this.began) / 1000) * this.speed;
    if (t >= this.timeline.end) {
      this.isPlaying = false;
      this.goTo(this.timeline.records.length);
      return;
    }
    this.seek(t);
    this.later = setTimeout(() => this.playOn(), 80);
  }

  // --- drawing ------------------------------------------------------------------------------------------------------------

  readTheme() {
    this.map?.readColours();
    this.theme = null;
    this.drawn = {};
    this.redraw(true);
  }

  redraw(isAll = false) { // isAll: a person did something, and sees all of it at once
    if (isAll) this.drawnAt?.clear();
    if (!this.timeline || !this.map || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  // Widths are read when they change, and not while drawing: reading lays the whole page out.
  measure() {
    this.width = this.root.clientWidth;
    if (!this.map) return;
    this.map.width = this.map.box.clientWidth;
    this.widths = [this.sequenceChart, this.historyChart, this.trafficChart].map((canvas) => Math.max(60, (canvas.parentElement.clientWidth || this.historyChart.parentElement.clientWidth) - 34));
  }

  get isMoving() {
    return this.isPlaying || (this.isFollowing && liveSession.isLive && !this.timeline.isOver);
  }

  // Whether a part is to be drawn now. While a large cache is watched, its map is drawn at every update and the rest once a second:
  // a browser composes anew one rectangle around all that changed. So is what is out of sight. When all stands still, all is drawn.
  isDue(section, wait = this.isLargeLive || this.inView.get(section) === false ? 990 : 0) {
    const now = performance.now();
    if (this.isMoving && now - (this.drawnAt.get(section) ?? -1e9) < wait) {
      this.owing ??= setTimeout(() => this.redraw(), 1000); // where no update comes before
      return false;
    }
    this.drawnAt.set(section, now);
    return true;
  }

  get isLargeLive() {
    return this.isFollowing && this.state.blocks[this.group].length > 20000;
  }

  draw() {
    clearTimeout(this.owing);
    this.owing = null;
    const { state, timeline, group } = this, counts = state.stateCounts[group];
    const now = this.isFollowing ? timeline.end : this.now;
    if (this.trafficCard.hidden === Object.keys(timeline.head.tiers).length > 0) {
      this.trafficCard.hidden = !this.trafficCard.hidden;
      this.measure();
    }
    if (this.isDue(this.bar)) this.drawBar(now);
    if (this.isDue(this.numbers)) this.drawNumbers();
    const theme = (this.theme ??= liveTheme());
    if (this.isDue(this.legend)) this.legend.childNodes.forEach((entry, i) => {
      entry.firstChild.style.background = theme[LIVE_COLOURS[i]];
      entry.lastChild.data = `${liveCount(counts[i])} ${LIVE_STATES[i]}${LIVE_LETTERS[i] ? ` (${LIVE_LETTERS[i]})` : ""}`;
    });
    this.map.draw(state.blocks[group]);
    if (this.isDue(this.map)) this.map.canvas.setAttribute("aria-label", `${livePlural(state.blocks[group].length, "block")}: ${stateWords(counts)}. Arrow keys go from block to block.`);
    if (this.isDue(this.sequenceCard)) {
      const rows = drawSequences(this.sequenceChart, this.widths[0], timeline, state, theme);
      this.sequenceChart.setAttribute("aria-label", `${livePlural(state.sequences.size, "sequence")} in the cache; the newest ${rows} over time. The table of requests has the same.`);
    }
    if (this.isDue(this.historyCard)) {
      drawHistory(this.historyChart, this.widths[1], timeline, state, group, theme);
      this.historyChart.setAttribute("aria-label", `Blocks by state over time. Now: ${stateWords(counts)}.`);
    }
    if (!this.trafficCard.hidden && this.isDue(this.trafficCard)) this.drawTiers(this.widths[2], theme);
    if (this.isDue(this.tableCard)) this.drawTable();
    if (this.isDue(this.treeCard, this.isLargeLive ? 1990 : this.inView.get(this.treeCard) === false ? 990 : 400)) this.drawTree();
  }

  drawBar(now) {
    const timeline = this.timeline, isLive = liveSession.isLive && !timeline.isOver;
    this.slider.min = timeline.begin;
    this.slider.max = Math.max(timeline.end, timeline.begin + 0.001);
    this.slider.value = now;
    this.slider.setAttribute("aria-valuetext", `${now.toFixed(2)} of ${timeline.end.toFixed(2)} seconds`);
    fill(this.clock, `${now.toFixed(2)} / ${timeline.end.toFixed(2)} s`);
    fill(this.play, this.isPlaying ? "Pause" : "Play");
    this.play.setAttribute("aria-pressed", String(this.isPlaying));
    this.follow.setAttribute("aria-pressed", String(this.isFollowing));
    fill(this.follow, isLive ? "Live" : "To the end");
    fill(this.badge, liveSession.isLive ? (timeline.isOver ? "the run is over" : liveSession.isLost ? "no answer" : "live") : "recording");
    this.badge.dataset.kind = isLive && !liveSession.isLost ? "live" : "";
  }

  drawNumbers() {
    const { state } = this, c = state.counts, used = state.stateCounts[this.group].slice(2).reduce((a, b) => a + b, 0), all = state.blocks[this.group].length;
    const tokens = [...state.sequences.values()].reduce((sum, [length]) => sum + length, 0);
    const share = c.tokens_asked ? `${Math.round((100 * c.tokens_hit) / c.tokens_asked)} %` : "–";
    const rows = [
      [all ? `${Math.round((100 * used) / all)} %` : "–", `${liveCount(used)} of ${livePlural(all, "block")} in use`],
      [liveCount(state.sequences.size), `sequences, ${livePlural(tokens, "token")}`],
      [share, `${liveCount(c.tokens_hit)} of ${liveCount(c.tokens_asked)} prompt tokens found`],
      [liveCount(c.evicted), "blocks evicted"],
      [liveCount(c.preemptions), c.preemptions === 1 ? "preemption" : "preemptions"],
    ];
    const text = rows.flat().join("|");
    if (this.drawn.numbers === text) return;
    this.drawn.numbers = text;
    fill(this.numbers, rows.map(([big, small]) => make("div", { class: "card live-number" }, make("b", {}, big), make("span", {}, small))));
  }

  drawTiers(width, theme) {
    const tiers = Object.entries(this.state.tiers);
    drawTraffic(this.trafficChart, width, this.timeline, this.state, theme);
    const words = tiers.map(([name, n]) => `${name.replace(/^\d+ /, "")}: ${liveBytes(n[4] ?? 0)} in, ${liveBytes(n[5] ?? 0)} out, ${livePlural(n[2] ?? 0, "hit")}`).join("; ");
    fill(this.trafficNote, words ? `${words}. Up is to a tier, down is from one.` : "Nothing yet.");
    this.trafficChart.setAttribute("aria-label", `Bytes to and from tiers over time. ${words}`);
  }

  drawTree() {
    const { state, group } = this, key = `${state.treeVersion} ${group} ${state.t}`;
    if (this.drawn.tree === key) return;
    this.drawn.tree = key;
    const runs = state.runs(group, LIVE_MOST_ROWS), bs = state.header.block_size, tables = [...state.tables[group].values()];
    const most = runs.reduce((max, run) => Math.max(max, run.count), 1);
    fill(this.treeNote, runs.length ? `${livePlural(state.held[group].size, "block")}. A line is a run without a branch.` : "No prefix is in the cache.");
    fill(this.tree, runs.slice(0, LIVE_MOST_ROWS).map((run) => {
      const used = tables.filter((blocks) => blocks[run.depth] === run.block).length;
      return make("li", { style: { paddingLeft: `${Math.min(run.indent, 12) * 18}px` } },
        make("span", { class: "live-stem", "data-used": used ? "yes" : "no", style: { width: `${Math.max(3, (run.count / most) * 160)}px` } }),
        make("span", {}, `tokens ${liveCount(run.depth * bs)}–${liveCount((run.depth + run.count) * bs - 1)}, ${livePlural(run.count, "block")}, ${used ? `used by ${livePlural(used, "sequence")}` : "kept"}`));
    }), runs.length > LIVE_MOST_ROWS ? make("li", { class: "note" }, "and more") : null);
  }

  drawTable() {
    const all = [...this.state.requests.values()].reverse(), rows = all.filter((row) => !this.reason || row.reason?.kind === this.reason).slice(0, LIVE_MOST_ROWS);
    fill(this.tableNote, `${livePlural(all.length, "request")}${rows.length < all.length ? `, ${liveCount(rows.length)} shown` : ""}.`);
    const known = this.drawn.table ?? new Map(), now = new Map(); // sequence -> { key, line }; lines that stay are left as they are
    if (!known.size) fill(this.body);
    let place = this.body.firstChild;
    for (const row of rows) {
      const key = `${row.how ?? ""} ${row.cached} ${row.end}`, old = known.get(row.seq);
      const line = old?.key === key ? old.line : this.makeLine(row);
      if (old && old.line !== line) {
        if (place === old.line) place = line;
        old.line.replaceWith(line);
      }
      now.set(row.seq, { key, line });
      if (line === place) place = place.nextSibling;
      else this.body.insertBefore(line, place);
    }
    while (place) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
    this.drawn.table = now;
    if (!rows.length) fill(this.body, make("tr", {}, make("td", { colspan: "7", class: "note" }, "None.")));
  }

  makeLine(row) {
    const number = (text) => make("td", { class: "number" }, text), kind = String(row.reason?.kind);
    return make("tr", {}, number(row.seq), number(`${Number(row.t).toFixed(3)} s`), number(liveCount(row.tokens)), number(liveCount(row.cached)), number(row.brought ? liveCount(row.brought) : ""),
      make("td", {}, row.end === undefined ? "running" : `${row.how} at ${Number(row.end).toFixed(3)} s`),
      make("td", {}, make("span", { class: "live-why", "data-kind": kind }, LIVE_REASONS[kind] ?? kind), String(row.reason?.text ?? "")));
  }

  // --- one block ----------------------------------------------------------------------------------------------------------

  point(block, isSaid) {
    if (block === this.map.cursor && !isSaid) return;
    this.map.cursor = block;
    if (block < 0) {
      fill(this.detail, "Point at a block, or use the arrow keys.");
      return this.redraw();
    }
    const { state, group } = this, { sequences, node } = state.ownersOf(group, block), bs = state.header.block_size;
    const who = sequences.length ? ` Used by ${sequences.length === 1 ? "sequence" : "sequences"} ${sequences.slice(0, 8).join(", ")}${sequences.length > 8 ? " and others" : ""}.` : "";
    const depth = node === null ? 0 : state.depthOf(node);
    const text = `Block ${block}: ${LIVE_STATES[state.blocks[group][block]]}.${who}${node === null ? "" : ` It holds tokens ${liveCount(depth * bs)} to ${liveCount((depth + 1) * bs - 1)} of a prefix.`}`;
    fill(this.detail, text);
    if (isSaid) this.page.say(text);
    this.redraw();
  }

  moveCursor(event) {
    const num = this.state.blocks[this.group].length, columns = this.map.at?.columns ?? 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -num, End: num }[event.key];
    if (!step || !num) return;
    event.preventDefault();
    const from = Math.max(0, this.map.cursor), to = this.map.cursor < 0 ? 0 : from + step;
    this.point(Math.max(0, Math.min(num - 1, to)), true);
    this.map.reveal();
  }
}

export const liveTab = {
  name: "live",
  title: "Live",
  mount(root, page) {
    return new LiveTab(root, page);
  },
  open: ({ text, name }) => openRecording(text, name), // a recording that was dropped on the Files tab
};
