// node check_plans.mjs STATIC FORMATS VECTORS: where planner.js says another plan; a line of JSON, { planned, refused, runs, wrong }.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, formatsPath, vectorsPath] = process.argv.slice(2);
const { makePlan, shardCaches, explainPlan, planRuns, PlanMistake } = await import(pathToFileURL(`${folder}/planner.js`));
const { SpecMistake } = await import(pathToFileURL(`${folder}/place.js`));
const formats = new Map(JSON.parse(readFileSync(formatsPath)).map((row) => [row.name, row]));
const result = { planned: 0, refused: 0, runs: 0, wrong: [] };

for (const vector of JSON.parse(readFileSync(vectorsPath))) {
  let plan;
  try {
    plan = makePlan(shardCaches(vector.src, vector.src_tp, formats), shardCaches(vector.dst, vector.dst_tp, formats, vector.dst_ranks), { partial: vector.dst_ranks !== null });
  } catch (error) {
    if (!(error instanceof PlanMistake || error instanceof SpecMistake)) throw error;
    if (error.message === vector.refused) result.refused += 1;
    else result.wrong.push({ vector, got: error.message });
    continue;
  }
  const text = explainPlan(plan);
  if (text !== vector.explain) result.wrong.push({ vector, got: text });
  const runs = [];
  if (vector.runs.length) for (const run of planRuns(plan)) { if (runs.length === vector.runs.length) break; runs.push([run.srcBuffer, run.srcByte, run.dstBuffer, run.dstByte, run.srcBytes]); }
  if (JSON.stringify(runs) !== JSON.stringify(vector.runs)) result.wrong.push({ vector, got: runs });
  result.planned += 1;
  result.runs += runs.length;
}
console.log(JSON.stringify(result));
