// node check_files.mjs STATIC FORMATS FILE...: reads each file as the page does and prints a line of JSON for it: its digest and those
// of its parts as counted here, or the sentence why not.
import { readFileSync, openAsBlob } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, formatsPath, ...paths] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(`${folder}/${name}`));
const { readCacheFile, partRanges, FileMistake } = await load("cache_file.js");
const { blockDigest, newDigest } = await load("content_digest.js");
const formats = new Map(JSON.parse(readFileSync(formatsPath)).map((row) => [row.name, row]));

for (const path of paths) {
  try {
    const file = await readCacheFile(await openAsBlob(path), path, formats), { cache } = file.manifest;
    const bytes = new Uint8Array(readFileSync(path)), buffers = file.spans.map(([begin, size]) => bytes.subarray(begin, begin + size));
    const total = newDigest();
    const parts = partRanges(cache.numBlocks).map(([first, end]) => {
      const part = newDigest();
      for (let block = first; block < end; block += 1) part.add(blockDigest(cache, buffers, block));
      total.add(part);
      return String(part);
    });
    console.log(JSON.stringify({ content: String(total), parts, kept: file.content, keptParts: file.parts }));
  } catch (error) {
    if (!(error instanceof FileMistake)) throw error;
    console.log(JSON.stringify({ refused: error.message }));
  }
}
