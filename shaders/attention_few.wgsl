// Attention of one query over a span of 64 * EACH keys: the decoder's step over its cache, parallel over keys.
//
// reads   q, k, v  raw: element (batch, head, position, e) through strides (q_outer, k_outer, v_k of a position, q_k, k_k,
//                  v_outer of e); q and k by vec4 where width is 4, v where v_vec
//         mask     optional: bool (false hides a key) or float (added), through strides, 0 where it repeats
// writes  out      [rows, values], row-major, where one span holds all keys (ONE), else for attention_merge:
//         sums     [rows, spans, values]: sum of weights x v;  stats [rows, spans, 2]: largest score, sum of weights
// params  empty (what a query without keys gives), heads, queries, keys > 0, depth, values, spans, chunks (of 4 * LANES columns of v), scale, strides, k_repeat and
//         v_repeat: query heads that share a head of k and of v
// groups  rows * chunks * spans, rows = batch * heads * queries
//
// 64 * SPLIT invocations. SPLIT of them make a key's score together, reading neighbouring elements, STEPS vec4 each where
// that is known (0: a loop); EACH is at most 4 then. For the result, each holds 4 columns of v for some of the keys.
// What a hidden key (by a bool mask, or by causality) holds does not matter, and a span without any other is not read, nor
// are its sums written: an almost empty cache costs little. The weight of a hidden key is marked by -1.
{% set WORKERS = 64 * SPLIT %}
{% set KEYS = 64 * EACH %}
{% set SLICES = WORKERS // LANES %}
{# How many invocations look after the keys' weights, and after how many each, `OWNERS` apart. #}
{% set OWN = EACH if SPLIT == 1 else 1 %}
{% set OWNERS = KEYS // OWN %}

var<workgroup> weights: array<f32, {{ KEYS }}>;
var<workgroup> pool: array<f32, {{ OWNERS }}>;
var<workgroup> partial: array<vec4<f32>, {{ WORKERS }}>;
{% if SPLIT > 1 and not ONE %}
var<workgroup> seen: atomic<u32>;
var<workgroup> is_seen: u32;
{% endif %}

{# Makes of one variable of each owner what `join` makes of the variable `all` and a value `one`, over all of them. #}
{% macro over_owners(all, join) %}
{% set one = "pool[%s]" %}
  if (lid < {{ OWNERS }}u) { pool[lid] = {{ all }}; }
  workgroupBarrier();
  if (lid < {{ OWNERS // 8 }}u) {
    {{ all }} = pool[lid * 8u];
    for (var i = 1u; i < 8u; i++) { {{ all }} = {{ join % (one % "lid * 8u + i") }}; }
    pool[lid * 8u] = {{ all }};
  }
  workgroupBarrier();
  {{ all }} = pool[0];
  for (var i = 8u; i < {{ OWNERS }}u; i += 8u) { {{ all }} = {{ join % (one % "i") }}; }
{% endmacro %}

{{ entry(WORKERS) }}
  let span = group % p.spans;
  let chunk = (group / p.spans) % p.chunks;
  let row = group / (p.spans * p.chunks);
  let query = row % p.queries;
  let head = (row / p.queries) % p.heads;
  let batch = row / (p.queries * p.heads);
  let q_at = p.q_start + batch * p.q_batch + head * p.q_head + query * p.q_outer;
  let k_base = p.k_start + batch * p.k_batch + head / p.k_repeat * p.k_head;
  let v_base = p.v_start + batch * p.v_batch + head / p.v_repeat * p.v_head;
{% if mask %}
  let mask_base = p.mask_start + batch * p.mask_batch + head * p.mask_head + query * p.mask_query;
{% endif %}
  let first = span * {{ KEYS }}u;
{% if SPLIT > 1 %}
  let sub = lid % {{ SPLIT }}u;
{% endif %}
{% for j in range(EACH) %}
  let key{{ j }} = first + {{ 64 * j }}u + lid{{ " / %du" % SPLIT if SPLIT > 1 }};
  var s{{ j }} = 0.0;
  var ok{{ j }} = key{{ j }} < p.keys;
{% if causal %}
  ok{{ j }} = ok{{ j }} && key{{ j }} <= query;
{% endif %}
{% if mask == "bool" %}
  if (ok{{ j }}) { ok{{ j }} = load_mask(mask_base + key{{ j }} * p.mask_key); }
{% endif %}
{% endfor %}
{% if SPLIT > 1 and not ONE %}
  if (lid == 0u) { atomicStore(&seen, 0u); }
  workgroupBarrier();
  if ({% for j in range(EACH) %}ok{{ j }}{{ " || " if not loop.last }}{% endfor %}) { atomicOr(&seen, 1u); }
  workgroupBarrier();
  if (lid == 0u) { is_seen = atomicLoad(&seen); }
  if (workgroupUniformLoad(&is_seen) == 0u) {
    if (lid == 0u && chunk == 0u) {
      store_stats((row * p.spans + span) * 2u, bitcast<f32>(0xff7fffffu));
      store_stats((row * p.spans + span) * 2u + 1u, 0.0);
    }
    return;
  }
{% endif %}
{% for j in range(EACH) %}
{# A GPU asks for all keys at once, and drops the scores of hidden ones; a processor leaves those out. #}
  {{ "if (ok%d) " % j if SPLIT == 1 }}{
    let k_at = k_base + {{ "key%d" % j if SPLIT == 1 else "min(key%d, p.keys - 1u)" % j }} * p.k_outer;
{% if width == 4 %}
    var sum = vec4<f32>();
{% if STEPS %}
    let from_q = q_at / 4u{{ " + sub" if SPLIT > 1 }};
    let from_k = k_at / 4u{{ " + sub" if SPLIT > 1 }};
{% for step in range(STEPS) %}
    sum += load4_q(from_q + {{ step * SPLIT }}u) * load4_k(from_k + {{ step * SPLIT }}u);
{% endfor %}
{% else %}
    for (var e = {{ "4u * sub" if SPLIT > 1 else "0u" }}; e < p.depth; e += {{ 4 * SPLIT }}u) { sum += load4_q((q_at + e) / 4u) * load4_k((k_at + e) / 4u); }
{% endif %}
    s{{ j }} = dot(sum, vec4<f32>(1.0));
{% else %}
    for (var e = {{ "sub" if SPLIT > 1 else "0u" }}; e < p.depth; e += {{ SPLIT }}u) { s{{ j }} += load_q(q_at + e * p.q_k) * load_k(k_at + e * p.k_k); }
{% endif %}
  }
{% endfor %}
{% if SPLIT > 1 %}
  partial[lid] = vec4<f32>({% for j in range(4) %}{{ "s%d" % j if j < EACH else "0.0" }}{{ ", " if not loop.last }}{% endfor %});
{% for j in range(EACH) %}
  if (sub == 0u) { weights[{{ 64 * j }}u + lid / {{ SPLIT }}u] = select(-1.0, 0.0, ok{{ j }}); }
{% endfor %}
  workgroupBarrier();
  let mine = first + lid;
  let own = min(lid, {{ OWNERS - 1 }}u);
  let owned0 = lid < {{ OWNERS }}u && weights[own] == 0.0;
  var score0 = 0.0;
  for (var i = 0u; i < {{ SPLIT }}u; i++) { score0 += partial[own % 64u * {{ SPLIT }}u + i][own / 64u]; }
{% else %}
{% for j in range(EACH) %}
  let owned{{ j }} = ok{{ j }};
  var score{{ j }} = s{{ j }};
{% endfor %}
{% endif %}
  var top = bitcast<f32>(0xff7fffffu);
{% for j in range(OWN) %}
  score{{ j }} *= p.scale;
  if (owned{{ j }}) {
{% if mask == "float" %}
    score{{ j }} += load_mask(mask_base + {{ "mine" if SPLIT > 1 else "key%d" % j }} * p.mask_key);
{% endif %}
    top = max_nan(top, score{{ j }});
  }
{% endfor %}
{{ over_owners("top", "max_nan(top, %s)") }}
  var total = 0.0;
{% for j in range(OWN) %}
  let w{{ j }} = exp(score{{ j }} - top);
{% if SPLIT > 1 %}
  if (lid < {{ OWNERS }}u) { weights[lid] = select(-1.0, w0, owned0); }
{% else %}
  weights[{{ 64 * j }}u + lid] = select(-1.0, w{{ j }}, owned{{ j }});
{% endif %}
  total += select(0.0, w{{ j }}, owned{{ j }});
{% endfor %}
  workgroupBarrier();
{{ over_owners("total", "total + %s") }}

  let column = (chunk * {{ LANES }}u + lid % {{ LANES }}u) * 4u;
{% if v_vec %}
  let v_at = v_base + min(column, p.values - 4u);
{% else %}
{% for c in range(4) %}
  let v{{ c }} = v_base + min(column + {{ c }}u, p.values - 1u) * p.v_outer;
{% endfor %}
{% endif %}
{% macro value(down) %}
{{ "load4_v((v_at + %s) / 4u)" % down if v_vec else "vec4<f32>(load_v(v0 + %s), load_v(v1 + %s), load_v(v2 + %s), load_v(v3 + %s))" % (down, down, down, down) }}
{%- endmacro %}
  var sum = vec4<f32>();
{% if SPLIT > 1 %}
{# Reads that wait for nothing, several at a time: hidden keys' too, which do not count. #}
{% set AT_ONCE = [KEYS // SLICES, 8] | min %}
  let last = p.keys - 1u;
  let count = select({{ KEYS }}u, 0u, total == 0.0);
  for (var start = lid / {{ LANES }}u; start < count; start += {{ AT_ONCE * SLICES }}u) {
{% for i in range(AT_ONCE) %}
    let w{{ i }} = weights[start + {{ i * SLICES }}u];
    let down{{ i }} = min(first + start + {{ i * SLICES }}u, last) * p.v_k;
    let x{{ i }} = {{ value("down%d" % i) }};
{% endfor %}
{% for i in range(AT_ONCE) %}
    sum += select(w{{ i }} * x{{ i }}, vec4<f32>(), bitcast<u32>(w{{ i }}) == 0xbf800000u);
{% endfor %}
  }
{% else %}
  let count = select(min({{ KEYS }}u, p.keys - first), 0u, total == 0.0);
  for (var i = lid / {{ LANES }}u; i < count; i += {{ SLICES }}u) {
    let w = weights[i];
    if (bitcast<u32>(w) != 0xbf800000u) {
      let down = (first + i) * p.v_k;
      sum += w * {{ value("down") }};
    }
  }
{% endif %}
  partial[lid] = sum;
  workgroupBarrier();
  for (var e = lid; e < {{ 4 * LANES }}u; e += {{ WORKERS }}u) {
    let at = chunk * {{ 4 * LANES }}u + e;
    if (at < p.values) {
      var r = partial[e / 4u][e % 4u];
      for (var i = 1u; i < {{ SLICES }}u; i++) { r += partial[i * {{ LANES }}u + e / 4u][e % 4u]; }
{% if ONE %}
      let to = (batch * p.queries + query) * p.heads + head;
      store(to * p.values + at, select(r / total, p.empty, total == 0.0));
{% else %}
      store_sums((row * p.spans + span) * p.values + at, r);
{% endif %}
    }
  }
{% if not ONE %}
  if (lid == 0u && chunk == 0u) {
    store_stats((row * p.spans + span) * 2u, top);
    store_stats((row * p.spans + span) * 2u + 1u, total);
  }
{% endif %}
}
