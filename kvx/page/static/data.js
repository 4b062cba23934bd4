// data.js: what `kvx page` embedded, as it was before kvx/page/bundle.py packed lists of objects into tables.

function unpackTables(value) {
  if (Array.isArray(value)) return value.map(unpackTables);
  if (typeof value !== "object" || value === null) return value;
  if (Array.isArray(value.$columns)) return value.$rows.map((row) => Object.fromEntries(row.map((part, i) => [value.$columns[i], unpackTables(part)])));
  return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, unpackTables(part)]));
}

export const embeddedData = () => unpackTables(JSON.parse(document.querySelector("#kvx-data").textContent));
