// The state of the page in its address: #layouts?left=vllm.lbnhc&right=sglang.nhd. Whatever is shown can be linked.

// { tab, values } of location.hash.
export function readAddress(hash) {
  const text = hash.replace(/^#/, "");
  const at = text.indexOf("?");
  const tab = at < 0 ? text : text.slice(0, at);
  return { tab, values: Object.fromEntries(new URLSearchParams(at < 0 ? "" : text.slice(at + 1))) };
}

export function writeAddress(tab, values) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const text = query.toString();
  return `#${tab}${text ? `?${text}` : ""}`;
}

// The values of one tab, and who wants to hear of changes that the tab did not make itself: the reader's Back, or another link.
export class TabLink {
  constructor(tab, values, isShown) {
    this.tab = tab;
    this.values = { ...values };
    this.isShown = isShown;
    this.callbacks = new Set();
  }

  get(name) {
    return this.values[name] ?? null;
  }

  // set({ left: "vllm.lbnhc", right: null }): null takes a name out. Writes the address without a new entry of the history.
  set(changes) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") delete this.values[name];
      else this.values[name] = String(value);
    }
    if (this.isShown(this)) history.replaceState(null, "", writeAddress(this.tab, this.values));
  }

  // Calls back after the address was changed from outside; returns a function that stops it.
  changed(callback) {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  replace(values) {
    this.values = { ...values };
    for (const callback of this.callbacks) callback();
  }

  // The address as text, for a button that copies it.
  href() {
    return location.href.replace(/#.*$/, "") + writeAddress(this.tab, this.values);
  }
}
