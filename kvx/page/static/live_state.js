// What a recording says, applied record after record: a cache's blocks, sequences, prefixes and requests at one moment, and the
// moments one after the other. docs/live.md has the form. No element is touched here.

export const LIVE_STATES = ["free", "kept", "used", "shared", "pinned", "in flight"];
const LIVE_MOST_BLOCKS = 1 << 26;
const LIVE_MOST_REQUESTS = 1000;
const LIVE_KEYFRAME = 500; // records between two moments that are kept whole
const LIVE_MOST_RECORDS = 40000; // of a page that watches for long; older ones are dropped

function liveNeed(is, what) {
  if (!is) throw new Error(what);
}

function liveRows(record, name) {
  const rows = record[name] ?? [];
  liveNeed(Array.isArray(rows), `"${name}" is no list`);
  return rows;
}

const liveIsCount = (n) => Number.isInteger(n) && n >= 0;

export class LiveState {
  constructor(header) {
    liveNeed(header && header.kvx === "recording", "its first line does not say that it is a recording of kvx");
    liveNeed(header.version === 1, `it is of version ${header.version}, and this page reads version 1. A newer kvx has a page that reads it`);
    liveNeed(Array.isArray(header.groups) && header.groups.length > 0, "its header names no layer groups");
    for (const group of header.groups) liveNeed(group && liveIsCount(group.blocks) && group.blocks <= LIVE_MOST_BLOCKS, `a layer group has ${group?.blocks} blocks; this page shows up to ${LIVE_MOST_BLOCKS}`);
    this.header = header;
    this.t = 0;
    this.isOver = false;
    this.empty();
  }

  empty() {
    this.blocks = this.header.groups.map((group) => new Uint8Array(group.blocks));
    this.stateCounts = this.header.groups.map((group) => [group.blocks, 0, 0, 0, 0, 0]);
    this.sequences = new Map(); // id -> [length, tokens]
    this.tables = this.header.groups.map(() => new Map()); // of each group: id -> block ids
    this.parents = new Map(); // node -> the node before it, -1: none
    this.kids = new Map(); // node, -1: of the beginning -> those after it, whether the cache has them or not; one alone is no list
    this.held = this.header.groups.map(() => new Map()); // node -> its block
    this.nodeOf = this.header.groups.map(() => new Map()); // and the other way round
    this.requests = new Map(); // id -> row; the newest are the last
    this.tiers = {};
    this.counts = {};
    this.treeVersion = 0;
  }

  clone() {
    const other = Object.assign(Object.create(LiveState.prototype), this);
    other.blocks = this.blocks.map((states) => states.slice());
    other.stateCounts = this.stateCounts.map((counts) => counts.slice());
    other.sequences = new Map(this.sequences);
    other.tables = this.tables.map((one) => new Map(one));
    other.parents = new Map(this.parents);
    other.kids = new Map(Array.from(this.kids, ([node, after]) => [node, Array.isArray(after) ? after.slice() : after]));
    other.held = this.held.map((one) => new Map(one));
    other.nodeOf = this.nodeOf.map((one) => new Map(one));
    other.requests = new Map(this.requests);
    return other;
  }

  apply(record) {
    liveNeed(record && typeof record === "object" && typeof record.type === "string", "it is no record with a type");
    if (Number.isFinite(record.t)) this.t = record.t;
    if (record.type === "end") this.isOver = true;
    if (record.type === "snapshot") this.empty();
    else if (record.type !== "changes") return; // of a later form: what it adds is not needed
    this.applyTree(record);
    for (const [group, state, first, count] of liveRows(record, "blocks")) this.setBlocks(group, state, first, count);
    for (const row of liveRows(record, "admitted")) this.admit(row);
    for (const [seq, length, tokens] of liveRows(record, "sequences")) this.sequences.set(seq, [length, tokens]);
    for (const [seq, group, first, blocks] of liveRows(record, "tables")) {
      liveNeed(group in this.tables && liveIsCount(first) && Array.isArray(blocks), "a table is of no group, or no list of blocks");
      this.tables[group].set(seq, (this.tables[group].get(seq) ?? []).slice(0, first).concat(blocks));
    }
    for (const [seq, t, how] of liveRows(record, "released")) this.release(seq, t, how);
    if (record.tiers && typeof record.tiers === "object") this.tiers = record.tiers;
    if (record.counts && typeof record.counts === "object") this.counts = record.counts;
  }

  setBlocks(group, state, first, count) {
    const states = this.blocks[group];
    liveNeed(states && state in LIVE_STATES && liveIsCount(first) && liveIsCount(count) && first + count <= states.length, `blocks ${first} to ${first + count} of group ${group} are not there, or their state ${state} is unknown`);
    const counts = this.stateCounts[group];
    for (let i = first; i < first + count; i++) {
      counts[states[i]]--;
      states[i] = state;
    }
    counts[state] += count;
  }

  applyTree(record) {
    const nodes = liveRows(record, "nodes"), content = liveRows(record, "content"), forgotten = liveRows(record, "forgotten");
    if (nodes.length || content.length || forgotten.length) this.treeVersion++;
    for (const [first, count, parent] of nodes) {
      liveNeed(liveIsCount(first) && liveIsCount(count) && count <= LIVE_MOST_BLOCKS, "nodes of the tree are no numbers");
      for (let i = 0; i < count; i++) this.addNode(first + i, i ? first + i - 1 : parent);
    }
    for (const [kind, group, some, values] of content) {
      liveNeed(group in this.held && Array.isArray(some) && Array.isArray(values), `"content" is of no group, or has no nodes`);
      const held = this.held[group], nodeOf = this.nodeOf[group];
      for (let i = 0; i < some.length; i++) {
        const node = some[i], before = held.get(node);
        if (before !== undefined && nodeOf.get(before) === node) nodeOf.delete(before);
        if (kind === "stored") {
          held.set(node, values[i]);
          nodeOf.set(values[i], node);
          if (!this.parents.has(node)) this.addNode(node, -1);
        } else held.delete(node);
      }
    }
    for (const node of forgotten) this.dropNode(node);
  }

  addNode(node, parent) {
    this.dropNode(node);
    this.parents.set(node, parent);
    const before = this.kids.get(parent);
    if (before === undefined) this.kids.set(parent, node);
    else if (Array.isArray(before)) before.push(node);
    else this.kids.set(parent, [before, node]);
  }

  // What came after it begins anew.
  dropNode(node) {
    const parent = this.parents.get(node);
    if (parent === undefined) return;
    this.parents.delete(node);
    const left = this.after(parent).filter((one) => one !== node);
    if (left.length) this.kids.set(parent, left);
    else this.kids.delete(parent);
    const orphans = this.after(node);
    this.kids.delete(node);
    for (const orphan of orphans) {
      this.parents.delete(orphan);
      this.addNode(orphan, -1);
    }
  }

  after(node) {
    const found = this.kids.get(node);
    return found === undefined ? [] : Array.isArray(found) ? found : [found];
  }

  admit(row) {
    liveNeed(row && liveIsCount(row.seq), "a request has no number");
    this.requests.delete(row.seq); // so that it is the newest
    this.requests.set(row.seq, row);
    for (const old of this.requests.keys()) {
      if (this.requests.size <= LIVE_MOST_REQUESTS) break;
      this.requests.delete(old);
    }
  }

  release(seq, t, how) {
    this.sequences.delete(seq);
    for (const one of this.tables) one.delete(seq);
    const row = this.requests.get(seq);
    if (row) this.requests.set(seq, { ...row, end: t, how });
  }

  // Sequences whose table has a block, and the node of the tree that it holds; null: none.
  ownersOf(group, block) {
    const found = [];
    for (const [seq, blocks] of this.tables[group]) if (blocks.includes(block)) found.push(seq);
    return { sequences: found, node: this.nodeOf[group].get(block) ?? null };
  }

  // The prefixes that are in a group, as runs without a branch: { depth, count, indent, block }, parents before children; no more
  // than `most`, and one more if there are.
  runs(group, most) {
    const held = this.held[group], found = [];
    const waiting = this.after(-1).toReversed().map((node) => ({ node, depth: 0, indent: 0 }));
    while (waiting.length && found.length <= most) {
      const { node, depth, indent } = waiting.pop();
      let count = 0, last = node, after = [node];
      if (held.has(node)) {
        do {
          last = after[0];
          count++;
          after = this.after(last).filter((one) => held.has(one));
        } while (after.length === 1);
        found.push({ depth, count, indent, block: held.get(node) });
      } else count = 1;
      for (const child of this.after(last).toReversed()) waiting.push({ node: child, depth: depth + count, indent: indent + (held.has(node) ? 1 : 0) });
    }
    return found;
  }

  depthOf(node) {
    let depth = 0;
    const seen = new Set();
    for (let at = this.parents.get(node) ?? -1; at >= 0 && !seen.has(at); at = this.parents.get(at) ?? -1) {
      seen.add(at);
      depth++;
    }
    return depth;
  }

  // Everything in plain values, for comparing two of them.
  summary() {
    const sorted = (map) => [...map].sort((a, b) => a[0] - b[0]);
    return {
      blocks: this.blocks.map((states) => Array.from(states).join("")),
      counts: this.counts,
      tiers: this.tiers,
      sequences: sorted(this.sequences),
      tables: this.tables.map(sorted),
      held: this.held.map(sorted),
      requests: sorted(this.requests).map(([, row]) => row),
    };
  }
}

// Records as they came, and any moment among them.
export class LiveTimeline {
  constructor(header) {
    this.first = new LiveState(header);
    this.head = this.first; // after the last record
    this.header = header;
    this.records = [];
    this.keyframes = []; // { at, state }: the state before record `at`
    this.samples = []; // one for each record that has a moment: { t, counts of every group, tiers, preemptions }
    this.isOver = false;
  }

  get end() {
    return this.records.length ? this.records.at(-1).t ?? 0 : 0;
  }

  get begin() {
    return this.records.length ? this.records[0].t ?? 0 : 0;
  }

  append(record) {
    if (this.records.length % LIVE_KEYFRAME === 0) this.keyframes.push({ at: this.records.length, state: this.head.clone() });
    if (this.head === this.first) this.head = this.first.clone();
    this.head.apply(record);
    this.records.push(record);
    this.isOver = this.head.isOver;
    if (record.type === "changes" || record.type === "snapshot") {
      const tiers = Object.values(this.head.tiers).map((counts) => [counts[4] ?? 0, counts[5] ?? 0]);
      this.samples.push({ t: this.head.t, counts: this.head.stateCounts.map((one) => one.slice()), tiers, preempted: (record.released ?? []).filter((row) => row[2] === "preempted").length });
    }
    if (this.records.length > LIVE_MOST_RECORDS) this.drop();
  }

  // The older half.
  drop() {
    const keep = this.keyframes.findIndex((one) => one.at >= LIVE_MOST_RECORDS / 2);
    const from = this.keyframes[keep].at;
    this.keyframes = this.keyframes.slice(keep).map((one) => ({ ...one, at: one.at - from }));
    this.records = this.records.slice(from);
    this.samples = this.samples.filter((one) => one.t >= this.begin);
  }

  // How many records there were at this time.
  indexAt(t) {
    let low = 0, high = this.records.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((this.records[middle].t ?? 0) <= t) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The state after so many records.
  stateAt(count) {
    if (count >= this.records.length) return this.head;
    let frame = this.keyframes[0];
    for (const one of this.keyframes) if (one.at <= count) frame = one;
    const state = frame.state.clone();
    for (let i = frame.at; i < count; i++) state.apply(this.records[i]);
    return state;
  }
}

// A timeline of a file's text. Errors say which line, and why it is not one of a recording.
export function readRecording(text) {
  let timeline = null, number = 0;
  for (const line of text.split("\n")) {
    number++;
    if (!line.trim()) continue;
    let record;
    try {
      record = JSON.parse(line);
    } catch {
      if (timeline && !text.endsWith("\n") && text.endsWith(line)) break; // it was cut off while it was written
      throw new Error(`line ${number} is no JSON`);
    }
    try {
      if (timeline) timeline.append(record);
      else timeline = new LiveTimeline(record);
    } catch (error) {
      throw new Error(number === 1 ? error.message : `line ${number}: ${error instanceof TypeError ? "it is not of the form of a record" : error.message}`);
    }
  }
  if (!timeline) throw new Error("it is empty");
  return timeline;
}
