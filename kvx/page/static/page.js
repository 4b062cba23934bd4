// The page's entry: its tabs, the address, and the line that says what happens. A tab is { name, title, mount(root, page) },
// and mount returns { close() }. Tabs are mounted when they are shown and closed when another is.
import { make, fill } from "./dom.js"
import { embeddedData } from "./data.js"
import { layoutsTab } from "./layouts.js"
import { readAddress, writeAddress, TabLink } from "./address.js"
import { planTab } from "./plan.js"
import { filesTab } from "./files.js"
import { sizeTab } from "./size.js"
import { liveTab } from "./live.js"

// Each tab: one import above, one entry here.
const TABS = [
  layoutsTab,
  planTab,
  sizeTab,
  liveTab,
  filesTab,
];

class Page {
  constructor(tabs, data) {
    this.tabs = tabs;
    this.data = data;
    this.links = new Map(); // of tabs that were shown: what their address was
    this.shown = null; // { tab, link, handle }
    this.buttons = new Map();
    this.panel = document.querySelector("#panel");
    this.line = document.querySelector(".say");
    fill(document.querySelector(".version"), data.version ? `kvx ${data.version}` : "");
    this.makeTabList();
    addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  makeTabList() {
    const list = document.querySelector("[role=tablist]");
    for (const tab of this.tabs) {
      const button = make("button", { role: "tab", id: `tab-${tab.name}`, "aria-controls": "panel", onclick: () => this.go(tab.name) }, tab.title);
      this.buttons.set(tab.name, button);
      list.append(button);
    }
    list.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const at = this.tabs.findIndex((tab) => tab.name === this.shown?.tab.name);
      const next = this.tabs[(at + step + this.tabs.length) % this.tabs.length];
      this.go(next.name);
      this.buttons.get(next.name).focus();
      event.preventDefault();
    });
  }

  // To another tab, as it was left; the reader's Back comes back here.
  go(name) {
    const values = this.links.get(name)?.values ?? {};
    history.pushState(null, "", writeAddress(name, values));
    this.follow();
  }

  // Hands to another tab what was read in this one. A tab that takes such has open(given), which answers with a sentence where it cannot.
  open(name, given) {
    const tab = this.tabs.find((one) => one.name === name);
    const told = tab?.open ? tab.open(given) : `This page has no view "${name}" that could show it.`;
    if (!told) this.go(name);
    return told;
  }

  // Shows what the address says.
  follow() {
    const { tab: name, values } = readAddress(location.hash);
    const tab = this.tabs.find((one) => one.name === name) ?? this.tabs[0];
    if (!tab) return;
    if (this.shown?.tab === tab) {
      this.shown.link.replace(name === tab.name ? values : {});
      return;
    }
    this.shown?.handle?.close?.();
    this.say("");
    const link = new TabLink(tab.name, name === tab.name ? values : {}, (one) => this.shown?.link === one);
    this.links.set(tab.name, link);
    this.shown = { tab, link, handle: null };
    for (const [other, button] of this.buttons) {
      button.setAttribute("aria-selected", String(other === tab.name));
      button.tabIndex = other === tab.name ? 0 : -1;
    }
    this.panel.setAttribute("aria-labelledby", `tab-${tab.name}`);
    document.title = `${tab.title} · KVX`;
    fill(this.panel);
    const root = make("div", { class: `tab tab-${tab.name}` });
    this.panel.append(root);
    this.shown.handle = tab.mount(root, { data: this.data, link, say: (text, kind) => this.say(text, kind), make, open: (name, given) => this.open(name, given) });
    if (name && name !== tab.name) this.say(`The address names a view "${name}", which this page does not have. This is ${tab.title}.`, "error");
  }

  // One polite line for what a screen reader should say too; kind is "info" or "error".
  say(text, kind = "info") {
    this.line.textContent = text;
    this.line.dataset.kind = kind;
  }
}

// By its name from the console too: kvxPage.shown is the tab and what its mount() returned.
globalThis.kvxPage = new Page(TABS, embeddedData());
