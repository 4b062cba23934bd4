// config_reader.js: a model's config.json read as kvx/spec reads it: which rows the layers of a model store, and what its recurrent
// layers keep. A second implementation of config_fields.py, layer_types.py, state_planes.py and layer_kinds.py, in their order;
// tests/page compares both. What Transformers' classes fill in comes from `facts.defaults`; what cannot be known here is refused by
// the name of its field. Bytes are left to size_count.js.

export class ConfigError extends Error {}

const MAX_LAYERS = 10000;
const ALSO = {
  num_hidden_layers: ["n_layer", "n_layers", "num_layers"],
  num_attention_heads: ["n_head", "n_heads", "num_heads"],
  hidden_size: ["n_embd", "d_model"],
  num_key_value_heads: ["num_kv_heads", "n_head_kv"],
};
const INNER = ["text_config", "llm_config", "language_config", "thinker_config"];
const LAYER_RULES = ["hybrid_layer_pattern", "block_types", "attn_layer_period", "attn_layer_indices", "full_attn_idxs", "layers_block_type", "full_attention_interval", "attn_type_list", "linear_attn_config", "hybrid_override_pattern", "block_configs"];
const OF_LAYERS = ["layer_types", "layers_block_type", "per_layer_config"];
const FULL = ["full_attention", "attention", "global"];
const INDEXED = ["indexed_attention", "deepseek_sparse_attention"];
const STATE_TYPES = new Set(["linear_attention", "mamba", "mamba2", "mamba1", "conv", "short_conv", "recurrent", "gated_delta_net", "kda", "lightning_attention", "rwkv", "gdn"]);
const MAMBA_TYPES = ["mamba", "mamba2", "falcon_mamba"];
const NOTHING = new Set(["mlp", "moe", "no_op"]);
const BOTH = { hybrid: "full_attention", hybrid_sliding: "sliding_attention" };
const LETTERS = { M: "mamba", "*": "full_attention", "-": "mlp", E: "moe" };
const RECURRENT_FIELDS = ["attn_layer_period", "attn_type_list", "full_attention_interval", "hybrid_override_pattern", "layers_block_type", "linear_attn_config", "linear_num_key_heads", "mamba_d_state", "mamba_expand", "ssm_state_size", "state_size", "time_step_rank", "block_types", "conv_L_cache", "lru_width", "mamba_d_ssm"];
const PATTERNS = { gemma2: 2, gpt_oss: 2, cohere2: 4 };
const own = (object, key) => Object.prototype.hasOwnProperty.call(object, key);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
// As Python has it: empty lists and objects are not true.
const isTrue = (value) => Array.isArray(value) ? value.length > 0 : isObject(value) ? Object.keys(value).length > 0 : Boolean(value);

// A value in a sentence: short, and text only.
export function shownValue(value) {
  const text = JSON.stringify(value) ?? String(value);
  return text.length > 80 ? `${text.slice(0, 80)}…` : text;
}

// The text of a config.json; Python writes Infinity and NaN into some, which no size hangs on.
export function parseConfig(text) {
  try { return JSON.parse(text); } catch (error) {
    try { return JSON.parse(text.replace(/"(?:[^"\\]|\\.)*"|-?\bInfinity\b|\bNaN\b/g, (token) => token.startsWith('"') ? token : "null")); } catch {
      throw new ConfigError(`This is not JSON: ${String(error.message).slice(0, 160)}.`);
    }
  }
}

// The fields of the text model, those that are null taken as absent.
class ConfigFields {
  constructor(name, config, { facts = null, isKnown = false } = {}) {
    while (!own(config, "num_hidden_layers")) { // the decoder of a model that sees or hears
      const inner = INNER.find((n) => own(config, n) && isObject(config[n]));
      if (inner === undefined) break;
      config = config[inner];
    }
    this.name = name;
    this.modelType = own(config, "model_type") ? (typeof config.model_type === "string" ? config.model_type : shownValue(config.model_type)) : "?";
    const given = Object.fromEntries(Object.entries(config).filter(([, value]) => value !== null));
    const leftOut = facts && !isKnown ? this.leftOut(config, facts) : {};
    const first = facts && own(facts.published, this.modelType) ? facts.published[this.modelType] : {};
    this.fields = { ...first, ...leftOut, ...given };
  }

  // What Transformers' class of this model_type puts where the config says nothing.
  leftOut(config, facts) {
    const says = (field) => [field, ...(ALSO[field] ?? [])].some((n) => own(config, n));
    const count = ["num_hidden_layers", ...ALSO.num_hidden_layers].map((n) => config[n]).find((v) => v !== null && v !== undefined) ?? 1;
    if (!Number.isInteger(count) || count < 1 || count > MAX_LAYERS) return {};
    if (!(says("num_attention_heads") || own(config, "state_size")) || !(says("hidden_size") || own(config, "head_dim"))) return {};
    if (this.modelType === "deepseek_v4") return {};
    const hasRule = LAYER_RULES.some((rule) => own(config, rule));
    const known = own(facts.defaults, this.modelType) ? facts.defaults[this.modelType] : null;
    if (known === null) {
      const needed = own(config, "kv_lora_rank") || MAMBA_TYPES.includes(this.modelType) ? [] : ["num_key_value_heads", "head_dim", "sliding_window"];
      const absent = needed.filter((field) => !own(config, field));
      if (absent.length) throw new ConfigError(`This page does not know model_type ${shownValue(this.modelType)}, and the config does not say ${absent.join(", ")}. Add ${absent.length > 1 ? "them" : "it"} (null means that there is none), or run kvx size, which asks Transformers for what a config leaves out.`);
      return {};
    }
    const found = {};
    for (const [field, value] of Object.entries(known)) {
      if (own(config, field) || (OF_LAYERS.includes(field) && hasRule)) continue;
      if (field === "sliding_window" && value === "?" && config.use_sliding_window === false && !own(config, "layer_types")) continue; // no layer has a window
      if (value === "?") throw new ConfigError(`The config of ${this.name} leaves out ${field}, which Transformers' class for ${this.modelType} works out. Add it, or run kvx size, which asks Transformers.`);
      if (value === "=heads") found[field] = this.firstOf(config, "num_attention_heads");
      else if (value === "=dim") {
        const hidden = this.firstOf(config, "hidden_size"), heads = this.firstOf(config, "num_attention_heads");
        if (Number.isInteger(hidden) && Number.isInteger(heads) && heads > 0) found[field] = Math.floor(hidden / heads);
      } else found[field] = value;
      if (found[field] === undefined) delete found[field];
    }
    return found;
  }

  firstOf(config, field) {
    return [field, ...(ALSO[field] ?? [])].map((n) => config[n]).find((v) => v !== null && v !== undefined);
  }

  has(field) { return own(this.fields, field); }

  get(field) { return this.has(field) ? this.fields[field] : undefined; }

  // A whole number of 1 or more; where it has a default, 0 too.
  int(field, fallback) {
    const least = fallback === undefined ? 1 : 0, names = [field, ...(ALSO[field] ?? [])];
    for (const name of names) {
      const value = this.get(name);
      if (value !== undefined && value !== null) {
        if (!Number.isSafeInteger(value) || value < least) throw new ConfigError(`${name} of ${this.name} is ${shownValue(value)}; it takes a whole number of ${least} or more.`);
        return value;
      }
    }
    if (fallback === undefined) throw this.missing(...names);
    return fallback;
  }

  get numLayers() {
    let count = this.int("num_hidden_layers");
    if (this.modelType === "longcat_flash" && !this.has("num_hidden_layers")) count *= 2;
    if (count > MAX_LAYERS) throw new ConfigError(`num_hidden_layers of ${this.name} is ${count}; it takes 1 to ${MAX_LAYERS}.`);
    return count;
  }

  // One entry a layer; more are those of draft layers. `whole`: a list of `count` or more, all of it.
  list(field, count, whole = false) {
    const value = this.fields[field];
    if (!Array.isArray(value) || value.length < count) throw new ConfigError(`${field} of ${this.name} ${whole ? `is ${shownValue(value)}; it takes a list` : `does not list its ${count} layers (num_hidden_layers)`}.`);
    return whole ? value : value.slice(0, count);
  }

  missing(field, ...others) {
    return new ConfigError(`The config of ${this.name} has no ${field}${others.length ? ` (nor ${others.join(", ")})` : ""}, which decides the cache's size. Add it.`);
  }

  unsupported(what) {
    return new ConfigError(`${this.name} (model_type ${this.modelType}) ${what}. Counted are the caches of full, sliding and chunked attention, of latents (MLA), of recurrent layers and of DeepSeek-V4.`);
  }
}

// ---- what each layer is (layer_types.py)

function kvHeads(config) {
  // Falcon's older models and GPT-BigCode share one head, whatever their other fields say.
  if (isTrue(config.get("multi_query")) && !isTrue(config.get("new_decoder_architecture"))) return 1;
  const attention = config.get("attn_config");
  if (isObject(attention)) { // DBRX, MPT
    if (attention.attn_type === "multiquery_attention") return 1;
    if (attention.kv_n_heads !== undefined && attention.kv_n_heads !== null) return new ConfigFields(config.name, { kv_n_heads: attention.kv_n_heads }).int("kv_n_heads");
  }
  return config.int("num_key_value_heads", 0) || config.int("num_attention_heads");
}

function headDim(config) {
  if (config.modelType === "jetmoe" && config.has("kv_channels")) return config.int("kv_channels");
  const said = config.int("head_dim", 0) || config.int("attention_head_dim", 0);
  return said || Math.floor(config.int("hidden_size") / config.int("num_attention_heads"));
}

// Tokens a sliding layer sees, its own among them; 0: none is said.
function windowOf(config) {
  if (config.has("sliding_window_size")) return config.int("sliding_window_size") + (config.modelType.startsWith("mimo_v2") ? 1 : 0);
  return config.int("sliding_window", 0) || config.int("attention_window_size", 0);
}

function fullAt(config, field, count, other) {
  const places = config.list(field, 0, true);
  if (places.some((i) => !Number.isInteger(i) || i < 0 || i >= count)) throw new ConfigError(`${field} of ${config.name} has layers outside of 0 to ${count - 1} (num_hidden_layers).`);
  return Array.from({ length: count }, (_, i) => places.includes(i) ? "full_attention" : other);
}

// From a field that says it for each layer, by whatever name.
function listedTypes(config) {
  if (config.has("hybrid_override_pattern") && !config.has("layer_types")) {
    const letters = String(config.get("hybrid_override_pattern"));
    if ([...letters].some((x) => !own(LETTERS, x))) throw config.unsupported(`has hybrid_override_pattern ${shownValue(letters)}, of which ${Object.keys(LETTERS).join(" ")} are known`);
    return [...letters].map((x) => LETTERS[x]);
  }
  for (const field of ["layer_types", "layers_block_type"]) {
    if (config.has(field)) {
      const listed = config.get(field);
      const count = config.int("num_hidden_layers", 0) || (Array.isArray(listed) ? listed.length : 0);
      return config.list(field, count).map(String);
    }
  }
  if (config.modelType === "falcon_h1") return Array(config.numLayers).fill("hybrid");
  if (MAMBA_TYPES.includes(config.modelType)) return Array(config.numLayers).fill("mamba");
  const count = LAYER_RULES.some((name) => config.has(name)) ? config.numLayers : 0;
  const all = (make) => Array.from({ length: count }, (_, i) => make(i));
  if (config.has("hybrid_layer_pattern")) return config.list("hybrid_layer_pattern", count).map((x) => isTrue(x) ? "sliding_attention" : "full_attention");
  if (config.has("block_types")) { // RecurrentGemma: repeated to the end; its attention has a window
    const block = config.list("block_types", 1, true), attention = windowOf(config) ? "sliding_attention" : "full_attention";
    return all((i) => { const name = String(block[i % block.length]); return name === "attention" ? attention : name; });
  }
  if (config.has("attn_layer_period")) { // Jamba, Zamba
    const period = config.int("attn_layer_period"), offset = config.int("attn_layer_offset", 0);
    if (config.modelType === "zamba") {
      const later = Array.from({ length: Math.max(0, count - 3) }, (_, i) => i % period === offset ? "hybrid" : "mamba");
      return ["mamba", "mamba", "hybrid", ...later].slice(0, count);
    }
    return all((i) => i % period === offset ? "full_attention" : "mamba");
  }
  if (config.has("attn_layer_indices")) return fullAt(config, "attn_layer_indices", count, "mamba");
  if (config.has("full_attn_idxs")) return fullAt(config, "full_attn_idxs", count, "conv");
  if (config.has("full_attention_interval")) {
    const interval = config.int("full_attention_interval");
    return all((i) => (i + 1) % interval ? "linear_attention" : "full_attention");
  }
  if (config.has("attn_type_list")) return config.list("attn_type_list", count).map((x) => isTrue(x) ? "full_attention" : "linear_attention");
  const linear = config.get("linear_attn_config");
  if (isObject(linear) && Array.isArray(linear.full_attn_layers)) return all((i) => linear.full_attn_layers.includes(i + 1) ? "full_attention" : "kda");
  return null;
}

function windowedLayers(config, count) {
  const every = (make) => Array.from({ length: count }, (_, i) => make(i));
  if (!windowOf(config) || config.get("use_sliding_window") === false) return every(() => false);
  if (typeof config.get("sliding_window_pattern") === "string") throw config.unsupported("spells sliding_window_pattern in letters; add layer_types, one per layer");
  const pattern = config.int("sliding_window_pattern", own(PATTERNS, config.modelType) ? PATTERNS[config.modelType] : 0);
  if (pattern) return every((i) => (i + 1) % pattern !== 0);
  if (config.has("use_sliding_window") && config.modelType !== "qwen3_moe") { // Qwen: the upper layers
    const first = config.int("max_window_layers", 28);
    return every((i) => i >= first);
  }
  return every(() => true);
}

// Layers with rotary embedding see their own chunk, the others everything.
function llama4Types(config, count) {
  const interval = config.int("no_rope_layer_interval", 4) || 4;
  const hasRope = isTrue(config.get("no_rope_layers")) ? config.list("no_rope_layers", count) : Array.from({ length: count }, (_, i) => (i + 1) % interval);
  const chunked = config.int("attention_chunk_size", 0) ? "chunked_attention" : "full_attention";
  return hasRope.map((rotary) => isTrue(rotary) ? chunked : "full_attention");
}

function nasAttention(config, i) {
  const block = config.list("block_configs", config.numLayers)[i];
  const attention = isObject(block) ? block.attention : null;
  if (!isObject(attention)) throw new ConfigError(`block_configs of ${config.name} has no attention for layer ${i}.`);
  for (const name of ["window_length", "sparsify", "num_sink_tokens", "unshifted_sink", "is_mamba", "mamba"]) {
    if (isTrue(attention[name])) throw config.unsupported(`has ${name} in block_configs`);
  }
  return attention;
}

function layerTypes(config) {
  let types = listedTypes(config);
  if (types === null) {
    const recurrent = RECURRENT_FIELDS.find((field) => isTrue(config.get(field)));
    if (recurrent !== undefined) throw config.unsupported(`has recurrent layers (${recurrent}) and does not say which; add layer_types, one per layer`);
    const count = config.numLayers;
    types = config.modelType === "llama4_text" ? llama4Types(config, count) : windowedLayers(config, count).map((x) => x ? "sliding_attention" : "full_attention");
  }
  const crossing = config.get("cross_attention_layers");
  if (Array.isArray(crossing)) types = types.map((t, i) => crossing.includes(i) ? "cross_attention" : t); // Mllama
  if (config.has("block_configs")) {
    types = types.map((t, i) => { const attention = nasAttention(config, i); return isTrue(attention.no_op) || isTrue(attention.replace_with_linear) ? "no_op" : t; });
  }
  // A window as long as the longest context hides nothing: such layers are full ones.
  const window = windowOf(config), longest = config.int("max_position_embeddings", 0);
  if ((!window && !config.has("per_layer_config")) || (longest > 0 && longest <= window)) types = types.map((t) => t === "sliding_attention" ? "full_attention" : t);
  return types;
}

const SOUNDS = /attn|attention|kv_|_kv|window|sliding|recurren|mamba|ssm|lru|cla_|_cla$|sparse|latent|lora_rank|compress|hybrid|pattern|layer_types|block_type|block_config|share|cross|linear_|conv|state_size|chunk/;
const HARMLESS = /dropout|drop$|bias|softcap|logit|scal|multiplier|implementation|output_|rope|norm|init|dtype|temperature|mlp|expert|moe|vision|audio|image|video|mtp|draft|feed_forward|flash|fused|sink|value_scale|alpha|beta|precision|mask|act$|pipeline|parallel|a_log|dt_m|intermediate|is_causal|bidirectional|loss|router|_fn|gate|vocab|tie_|embedding|prediction|use_qk|qk_|in_attn|reorder|out_dim|type_vocab/;
const RULE = /every_n|interval|pattern|period|offset|indices|idx/;
const READ = new Set(("num_attention_heads num_key_value_heads num_kv_heads n_head_kv num_kv_shared_layers multi_query sliding_window use_sliding_window max_window_layers sliding_window_pattern sliding_window_size layer_types " +
  "layers_block_type hybrid_override_pattern hybrid_layer_pattern block_types attention_window_size use_cla attn_layer_period attn_layer_offset attn_layer_indices full_attn_idxs full_attention_interval block_configs " +
  "attn_type_list linear_attn_config cla_share_factor cross_attention_layers attn_config kv_lora_rank attention_head_dim attention_chunk_size attention_k_eq_v per_layer_config num_key_value_heads_per_layer " +
  "swa_num_key_value_heads swa_head_dim swa_v_head_dim num_global_key_value_heads compress_ratios compress_rates q_lora_rank o_lora_rank kv_channels attention_layers attention_types hybrid_layer_ids " +
  "mamba_d_state mamba_d_conv mamba_expand mamba_d_head mamba_n_heads mamba_n_groups mamba_chunk_size mamba_d_ssm mamba_dt_rank mamba_num_heads mamba_head_dim mamba_headdim mamba_ngroups mamba_ssm_cache_dtype " +
  "n_mamba_heads use_mamba_kernels ssm_state_size state_size conv_kernel conv_L_cache lru_width chunk_size conv1d_width linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim " +
  "linear_conv_kernel_dim linear_head_dim linear_num_heads num_attention_heads_per_layer attention_hidden_size use_shared_attention_adapter hybrid_block_size chunk_size_feed_forward use_cache " +
  "cca_time0 cca_time1 sconv_kernel_size mamba_ssm_dtype ple_layer_ids short_conv_kernel_size conv_kernel_size number_of_conv_states swa_num_attention_heads").split(" "));

function isSuspect(name, value) {
  const isOff = value === null || value === undefined || value === 0 || value === 1 || value === "" || typeof value === "boolean" || ((Array.isArray(value) || isObject(value)) && !isTrue(value));
  return !isOff && !READ.has(name) && SOUNDS.test(name) && !HARMLESS.test(name);
}

// What the config says of this layer alone.
function ofLayer(config, i) {
  if (config.has("block_configs")) { // Nemotron-NAS
    const group = nasAttention(config, i).n_heads_in_group, heads = config.int("num_attention_heads");
    if (!Number.isInteger(group) || group < 1 || heads % group) throw new ConfigError(`n_heads_in_group of layer ${i} of ${config.name} is ${shownValue(group)}; it takes a divisor of ${heads}.`);
    return { num_key_value_heads: heads / group };
  }
  if (config.has("num_key_value_heads_per_layer")) return { num_key_value_heads: config.list("num_key_value_heads_per_layer", config.numLayers)[i] }; // DeciLM
  const every = config.get("per_layer_config");
  if (!isTrue(every)) return {};
  if (!isObject(every)) throw new ConfigError(`per_layer_config of ${config.name} is no object of layers.`);
  const said = own(every, String(i)) && isTrue(every[String(i)]) ? every[String(i)] : {};
  if (!isObject(said)) throw new ConfigError(`per_layer_config of ${config.name} has ${shownValue(said)} for layer ${i}; it takes an object.`);
  const known = ["num_key_value_heads", "head_dim", "v_head_dim", "sliding_window"];
  const strange = Object.keys(said).filter((k) => !known.includes(k) && isSuspect(k, said[k]));
  if (strange.length) throw config.unsupported(`has layers of their own ${strange.join(", ")} (per_layer_config)`);
  return Object.fromEntries(Object.entries(said).filter(([k, v]) => known.includes(k) && v !== null));
}

function oneLayer(config, i, type) {
  const isBoth = own(BOTH, type);
  const state = STATE_TYPES.has(type) || isBoth ? layerState(config, type) : null;
  const also = isBoth && state === null ? "a state beside attention" : "";
  let kind = isBoth ? BOTH[type] : type;
  const none = { type: "", heads: 0, k: 0, v: 0, window: 0, state: null, also: "" };
  if (STATE_TYPES.has(kind) || kind === "cross_attention") return { ...none, state, also: state ? "" : kind };
  if (NOTHING.has(kind)) return none;
  if (FULL.includes(kind)) kind = "full_attention";
  if (config.has("kv_lora_rank")) return { ...none, type: kind, state, also }; // a latent, whatever the heads are
  const mine = ofLayer(config, i);
  let heads = kvHeads(config), dim = headDim(config), vDim = config.int("v_head_dim", 0) || dim;
  if (kind === "sliding_attention") {
    const twice = config.modelType === "mimo_v2_flash" ? 2 : 1; // a rule of its class, whose config does not say it
    heads = config.int("swa_num_key_value_heads", twice * heads);
    vDim = config.int("swa_v_head_dim", 0) || config.int("v_head_dim", 0) || config.int("swa_head_dim", 0) || dim;
    dim = config.int("swa_head_dim", dim);
  } else if (config.has("global_head_dim")) { // Gemma 4: layers that see everything have heads of their own
    dim = vDim = config.int("global_head_dim");
    if (config.get("attention_k_eq_v") !== false) heads = config.int("num_global_key_value_heads", heads);
  }
  if (own(mine, "head_dim")) {
    vDim = vDim === dim ? mine.head_dim : vDim;
    dim = mine.head_dim;
  }
  heads = own(mine, "num_key_value_heads") ? mine.num_key_value_heads : heads;
  vDim = own(mine, "v_head_dim") ? mine.v_head_dim : vDim;
  for (const [name, value] of [["num_key_value_heads", heads], ["head_dim", dim], ["v_head_dim", vDim]]) {
    if (!Number.isSafeInteger(value) || value < 1) throw new ConfigError(`${name} of layer ${i} of ${config.name} is ${shownValue(value)}; it takes a whole number of 1 or more.`);
  }
  const window = kind === "sliding_attention" ? mine.sliding_window ?? 0 : 0;
  return { type: kind, heads, k: dim, v: vDim, window, state, also };
}

function countsText(names) {
  const counts = new Map();
  for (const name of names) if (name) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].map(([name, n]) => `${n} ${name}`).join(", ") || "nothing";
}

function keptLayers(config) {
  if (isTrue(config.get("is_encoder_decoder"))) throw config.unsupported("is an encoder and a decoder, and caches cross attention too");
  const found = layerTypes(config).map((type, i) => oneLayer(config, i, type));
  const mine = found.length - config.int("num_kv_shared_layers", 0); // the last ones read the KV of earlier ones
  const share = isTrue(config.get("use_cla")) ? config.int("cla_share_factor") : 1; // Hunyuan: of so many layers the first has it
  const kept = found.map((layer, i) => i < mine && i % share === 0 ? layer : { type: "", heads: 0, k: 0, v: 0, window: 0, state: null, also: "" });
  if (!kept.some((layer) => layer.type || layer.state)) {
    if (mine < 1 && found.length) throw new ConfigError(`num_kv_shared_layers of ${config.name} leaves no layer that stores anything.`);
    throw config.unsupported(`has no layer with K and V of its tokens (${countsText(found.map((layer) => layer.also))})`);
  }
  return kept;
}

// What the answer leaves out, and what of the config it did not understand.
function notesOf(config, kept) {
  const said = [], states = kept.map((layer) => layer.also).filter((also) => also && also !== "cross_attention");
  if (states.length) said.push(`not counted: ${states.length} layers (${countsText(states)}) keep a state of fixed size for each request, and the config does not give its size in a field that KVX knows`);
  const cross = kept.filter((layer) => layer.also === "cross_attention").length;
  if (cross) {
    const row = `${kvHeads(config)} x ${headDim(config)}`;
    said.push(`not counted: ${cross} cross-attention layers keep K and V of image or encoder tokens, K ${row} and V ${row} per token and layer`);
  }
  if (isTrue(config.get("ple_layer_ids"))) said.push("not counted: what the layers in ple_layer_ids keep of the last tokens");
  if (config.has("index_head_dim") && !config.has("kv_lora_rank") && config.modelType !== "deepseek_v4") said.push("not counted: the index keys (index_head_dim)");
  const unknown = Object.keys(config.fields).filter((n) => isSuspect(n, config.get(n)) && !(config.has("layer_types") && RULE.test(n)));
  if (unknown.length) said.push(`not understood: ${unknown.sort().slice(0, 8).join(", ")}. If they concern attention, the numbers are wrong`);
  return said;
}

// ---- what a recurrent layer keeps (state_planes.py)

const firstName = (config, ...names) => names.find((name) => config.has(name)) ?? "";

// Of the first of these names that is there; "auto" is as if it was not.
function intOf(config, names, fallback) {
  const name = names.find((n) => config.has(n) && config.get(n) !== "auto");
  if (name !== undefined) return config.int(name);
  if (fallback === undefined) throw config.missing(...names);
  return fallback;
}

function convPlane(channels, kernel, shares = [], { name = "conv", isF32 = false } = {}) {
  if (kernel < 2) throw new ConfigError(`A convolution of ${channels} channels has a kernel of ${kernel}; it takes 2 or more.`);
  return { name, axes: [["channel", channels], ["tap", kernel - 1]], shares, isF32, isConv: true };
}

const matrixPlane = (name, axes, isF32 = true) => ({ name, axes, shares: [], isF32, isConv: false });

function deltaNet(config) {
  const attention = config.int("num_attention_heads", 0);
  const kHeads = config.int("linear_num_key_heads", attention), vHeads = config.int("linear_num_value_heads", attention);
  const kDim = config.int("linear_key_head_dim"), vDim = config.int("linear_value_head_dim");
  const shares = [[kHeads * kDim, kDim], [kHeads * kDim, kDim], [vHeads * vDim, vDim]];
  return [convPlane(2 * kHeads * kDim + vHeads * vDim, config.int("linear_conv_kernel_dim"), shares), matrixPlane("delta", [["head", vHeads], ["row", kDim], ["column", vDim]])];
}

function kimiDelta(config) {
  const said = config.get("linear_attn_config"), inner = new ConfigFields(config.name, isObject(said) ? said : {});
  const isBailing = config.modelType === "bailing_hybrid"; // its linear heads are those of its attention
  const value = (there, here, other) => inner.has(there) ? inner.int(there) : config.int(config.has(here) || !isBailing ? here : other);
  const heads = value("num_heads", "linear_num_heads", "num_attention_heads"), dim = value("head_dim", "linear_head_dim", "head_dim");
  const kernel = value("short_conv_kernel_size", "linear_conv_kernel_dim", "short_conv_kernel_size"), width = heads * dim;
  return [convPlane(3 * width, kernel, [[width, dim], [width, dim], [width, dim]]), matrixPlane("delta", [["head", heads], ["row", dim], ["column", dim]])];
}

// The width inside a Mamba layer. `mamba_expand` may be a fraction.
function expandedWidth(config) {
  if (["mamba", "falcon_mamba"].includes(config.modelType) && config.has("intermediate_size")) return config.int("intermediate_size");
  const expand = config.has("mamba_expand") ? config.get("mamba_expand") : config.get("expand");
  if (expand === undefined) throw config.missing("mamba_expand", "expand");
  const width = typeof expand === "number" ? Math.trunc(expand * config.int("hidden_size")) : 0;
  if (!(width >= 1)) throw new ConfigError(`mamba_expand of ${config.name} is ${shownValue(expand)}; it takes a number over 0.`);
  return width;
}

function mambaTwo(config) {
  const isOwn = config.modelType === "mamba2";
  const heads = isOwn ? config.int("num_heads") : intOf(config, ["mamba_n_heads", "mamba_num_heads", "n_mamba_heads"]);
  const size = intOf(config, ["mamba_d_state", "ssm_state_size", "state_size"]);
  const groups = intOf(config, ["mamba_n_groups", "mamba_ngroups", "n_groups"], 1);
  const kernel = intOf(config, ["mamba_d_conv", "conv_kernel"]);
  let dim = intOf(config, isOwn ? ["head_dim"] : ["mamba_head_dim", "mamba_d_head", "mamba_headdim"], 0);
  const inner = config.int("mamba_d_ssm", 0) || (config.has("mamba_head_dim") ? heads * dim : 0) || expandedWidth(config);
  dim = dim || Math.floor(inner / heads);
  return [convPlane(inner + 2 * groups * size, kernel, [[inner, dim], [groups * size, size], [groups * size, size]]), matrixPlane("ssm", [["head", heads], ["row", dim], ["column", size]])];
}

function mambaOne(config) {
  const size = intOf(config, ["mamba_d_state", "ssm_state_size", "state_size"]), kernel = intOf(config, ["mamba_d_conv", "conv_kernel"]);
  const inner = expandedWidth(config);
  if (config.modelType !== "zamba") return [convPlane(inner, kernel), matrixPlane("ssm", [["channel", inner], ["column", size]])];
  const heads = config.int("n_mamba_heads"), dim = Math.floor(inner / heads);
  return [convPlane(inner, kernel, [[inner, dim]]), matrixPlane("ssm", [["head", heads], ["row", dim], ["column", size]])];
}

function zayaPlanes(config) {
  const dim = config.int("head_dim"), q = config.int("num_attention_heads") * dim, kv = config.int("num_key_value_heads") * dim;
  const taps = config.int("cca_time0", 2) + config.int("cca_time1", 2) - 2;
  return [convPlane(q + kv, taps + 1, [[q, dim], [kv, dim]]), matrixPlane("ssm", [["channel", Math.floor(kv / 2)], ["column", 1]], false)];
}

function inklingPlanes(config, kind) {
  const swa = kind === "hybrid_sliding" ? "swa_" : "", dim = config.int(`${swa}head_dim`);
  const kv = config.int(`${swa}num_key_value_heads`) * dim, hidden = config.int("hidden_size");
  const kernel = intOf(config, ["conv_kernel_size", "sconv_kernel_size"]);
  return [["conv", kv, dim], ["conv2", kv, dim], ["conv3", hidden, 1], ["conv4", hidden, 1]].map(([name, size, unit]) => convPlane(size, kernel, [[size, unit]], { name, isF32: true }));
}

// Of a layer of this type (a word of layer_types); null: its fields say nothing that is known here.
function layerState(config, kind) {
  const isBeside = kind.startsWith("hybrid");
  if (config.modelType === "zaya" && isBeside) return { name: "CCA", planes: zayaPlanes(config) };
  if (config.modelType === "inkling_text" && isBeside) return { name: "4 convs", planes: inklingPlanes(config, kind) };
  if (kind === "conv" || kind === "short_conv") return { name: "short conv", planes: [convPlane(config.int("hidden_size"), config.int("conv_L_cache"))] };
  if (kind === "recurrent" && (config.has("lru_width") || config.has("conv1d_width"))) {
    const width = config.int("lru_width", 0) || config.int("hidden_size");
    return { name: "RG-LRU", planes: [convPlane(width, config.int("conv1d_width")), matrixPlane("ssm", [["channel", width], ["column", 1]])] };
  }
  if (config.has("linear_num_key_heads") || config.has("linear_num_value_heads")) return { name: "GDN", planes: deltaNet(config) };
  if (isObject(config.get("linear_attn_config")) || config.has("linear_num_heads") || config.modelType === "bailing_hybrid") return { name: "KDA", planes: kimiDelta(config) };
  if (firstName(config, "mamba_d_state", "ssm_state_size", "state_size")) {
    const hasHeads = firstName(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads") || config.modelType === "mamba2";
    return hasHeads && config.modelType !== "zamba" ? { name: "Mamba-2", planes: mambaTwo(config) } : { name: "Mamba", planes: mambaOne(config) };
  }
  if (config.has("attn_type_list") || config.modelType === "minimax") {
    const heads = config.int("num_attention_heads"), dim = config.int("head_dim", 0) || Math.floor(config.int("hidden_size") / heads);
    return { name: "lightning", planes: [matrixPlane("delta", [["head", heads], ["row", dim], ["column", dim]], false)] };
  }
  return null;
}

// ---- kinds of layers (layer_kinds.py)

const rowOf = (name, heads, dims, indexFormat = "", records = {}) => ({ name, heads, dims, indexFormat, records });
const kindOf = (name, count, rows, more = {}) => ({ name, count, rows, planes: [], ratio: 1, window: 0, isChunked: false, ring: [], ringTokens: 0, stateFloats: 0, tightFloats: 0, resumeFloats: 0, ...more });

function latentRows(config) {
  const latent = config.int("kv_lora_rank"), rope = config.int("qk_rope_head_dim");
  // vLLM's two: 512 fp8 + 4 scales + 64 bf16 are 656 bytes; 512 e2m1 + 32 scales + 64 fp8 without a scale are 352.
  const records = latent % 128 ? {} : { fp8_ds_mla: latent + latent / 128 * 4 + 2 * rope, nvfp4_ds_mla: latent / 2 + latent / 16 + rope };
  const row = rowOf("latent", 1, [latent, rope], "", records);
  return config.has("index_head_dim") ? [row, rowOf("index", 1, [config.int("index_head_dim")], "fp8_e4m3_per_128")] : [row];
}

function attentionKind(config, layer, count) {
  const isLatent = config.has("kv_lora_rank");
  if (isLatent && (FULL.includes(layer.type) || INDEXED.includes(layer.type))) {
    const rows = latentRows(config);
    return kindOf(rows.length === 1 ? "latent" : "latent + index", count, rows);
  }
  if (isLatent || ![...FULL, "sliding_attention", "chunked_attention"].includes(layer.type)) throw config.unsupported(`has layers of type ${layer.type}${isLatent ? " beside latents" : ""}`);
  const rows = [rowOf("K", layer.heads, [layer.k]), rowOf("V", layer.heads, [layer.v])];
  if (layer.type === "sliding_attention") return kindOf("sliding", count, rows, { window: layer.window || windowOf(config) || config.int("sliding_window") });
  if (layer.type === "chunked_attention") return kindOf("chunked", count, rows, { window: config.int("attention_chunk_size"), isChunked: true });
  return kindOf("full", count, rows);
}

// DeepSeek-V4: a window of rows everywhere, and entries that stand for 4 tokens (CSA, with an indexer) or 128 (HCA).
function compressedKinds(config) {
  const count = config.numLayers;
  let ratios;
  if (config.has("compress_ratios")) ratios = config.list("compress_ratios", count);
  else if (config.has("layer_types")) {
    const rates = { compressed_sparse_attention: 4, heavily_compressed_attention: 128, sliding_attention: 0, ...(isObject(config.get("compress_rates")) ? config.get("compress_rates") : {}) };
    ratios = config.list("layer_types", count).map((t) => own(rates, String(t)) ? rates[String(t)] : t);
  } else throw config.missing("compress_ratios", "layer_types");
  ratios.forEach((ratio, i) => { if (!Number.isInteger(ratio) || ratio < 0) throw new ConfigError(`Layer ${i} of ${config.name} has compress ratio ${shownValue(ratio)}; it takes 0, 4 or 128.`); });
  const dim = config.int("head_dim"), window = config.int("sliding_window"), rope = config.int("qk_rope_head_dim", 0) || 64;
  // 448 fp8 + 7 power-of-two scales padded to 8 bytes + 64 bf16 are 584 bytes.
  const coded = dim - rope, records = coded <= 0 || coded % 64 ? {} : { fp8_ds_mla: coded + Math.ceil(coded / 64 / 8) * 8 + 2 * rope };
  const row = rowOf("KV", 1, [dim], "", records), ring = { ring: [row], ringTokens: window };
  return [...new Set(ratios)].sort((a, b) => a - b).map((ratio) => {
    const layers = ratios.filter((r) => r === ratio).length;
    if (ratio <= 1) return kindOf("SWA", layers, [], ring);
    if (ratio === 4) {
      const index = rowOf("index", 1, [config.int("index_head_dim")], "mxfp4"), numbers = 2 * (dim + index.dims[0]);
      return kindOf("CSA", layers, [row, index], { ratio, ...ring, stateFloats: 16 * numbers, tightFloats: 12 * numbers, resumeFloats: 4 * numbers });
    }
    if (ratio === 128) return kindOf("HCA", layers, [row], { ratio, ...ring, stateFloats: 256 * dim, tightFloats: 3 * dim });
    throw config.unsupported(`compresses ${ratio} tokens into one; 4 (CSA) and 128 (HCA) are known here`);
  });
}

// What kvx/page/size_data.py packed and the formats of the page, as { models, defaults, formats, ... } by name.
export function sizeFacts({ models, defaults, ...rest }, formats) {
  const whole = (value) => isObject(value) && own(value, "cycle") ? Array.from({ length: value.length }, (_, i) => value.cycle[i % value.cycle.length]) : value;
  const configOf = ({ name, more, ...columns }) => [name, Object.fromEntries(Object.entries({ ...columns, ...more }).filter(([, value]) => value !== null).map(([field, value]) => [field, whole(value)]))];
  const counted = (row) => [row.name, {
    bits: row.element_bits, quantised: !["bf16", "f16", "f32", "f64"].includes(row.element), scale: row.scale_bits, group: row.group_size, inline: row.is_inline,
    perToken: ["token_head", "group"].includes(row.granularity), perBlock: { block: "tensor", block_head: "head" }[row.granularity] ?? "",
  }];
  return { ...rest, models: Object.fromEntries(models.map(configOf)), defaults: Object.fromEntries(defaults.flatMap(([table, names]) => names.split(" ").map((name) => [name, table]))), formats: Object.fromEntries(formats.map(counted)) };
}

// The kinds of layers of a config, and what is said beside them. `isKnown`: a row of the known models, which leaves nothing out.
export function readConfig(name, config, facts, isKnown = false) {
  if (!isObject(config)) throw new ConfigError("This holds no object; a Transformers config.json is one.");
  const fields = new ConfigFields(name, config, { facts, isKnown });
  const about = { name, modelType: fields.modelType, isChecked: own(facts.defaults, fields.modelType) };
  if (fields.has("compress_ratios") || fields.modelType === "deepseek_v4") return { ...about, kinds: compressedKinds(fields), notes: [] };
  const kept = keptLayers(fields), same = new Map();
  for (const layer of kept) {
    if (!layer.type && !layer.state) continue;
    const key = JSON.stringify({ ...layer, also: "" });
    if (same.has(key)) same.get(key).count += 1;
    else same.set(key, { layer, count: 1 });
  }
  const kinds = [...same.values()].map(({ layer, count }) => {
    if (!layer.state) return attentionKind(fields, layer, count);
    if (!layer.type) return kindOf(layer.state.name, count, [], { planes: layer.state.planes });
    const kind = attentionKind(fields, layer, count);
    return { ...kind, name: `${kind.name} + ${layer.state.name}`, planes: layer.state.planes };
  });
  return { ...about, kinds, notes: notesOf(fields, kept) };
}
