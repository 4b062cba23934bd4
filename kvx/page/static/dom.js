// Elements, made by createElement and textContent only: no text, of a file or of an address, is ever read as HTML.

const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "hidden", "min", "max", "step", "type", "htmlFor", "tabIndex"]);

// make("button", { class: "quiet", onclick: go, style: { width: "3em" } }, "Go"): children are text, elements, arrays of them, or null.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  const properties = [];
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.assign(element.style, value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (typeof value === "function" && name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) properties.push([name, value]);
    else if (/^on|html$/i.test(name)) throw new Error(`make(): ${name} takes a function, and no text.`);
    else element.setAttribute(name, value === true ? "" : value);
  }
  addChildren(element, children);
  for (const [name, value] of properties) element[name] = value; // last: a <select> has its options, a slider its ends
  return element;
}

function addChildren(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

// What an element holds, replaced.
export function fill(element, ...children) {
  element.textContent = "";
  addChildren(element, children);
  return element;
}

// A control under its label: the words are the control's name for a screen reader too.
export function labelled(words, control, attributes = {}) {
  return make("label", { ...attributes, class: `field ${attributes.class ?? ""}`.trim() }, make("span", { class: "field-name" }, words), control);
}

// A colour of page.css by its name: themeColour("accent"). Canvases read colours this way, so that one place has them all.
export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Calls back when the reader's system changes between light and dark; returns a function that stops it.
export function onThemeChange(callback) {
  const query = matchMedia("(prefers-color-scheme: dark)");
  query.addEventListener("change", callback);
  return () => query.removeEventListener("change", callback);
}
