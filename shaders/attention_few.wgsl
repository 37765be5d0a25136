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
// A key that is hidden by a bool mask, or by causality, is never read, nor its value: an almost empty cache costs little.
// The weight of a hidden key is marked by -1.

var<workgroup> weights: array<f32, {{ 64 * EACH }}>;
var<workgroup> largest: array<f32, 64>;
var<workgroup> totals: array<f32, 64>;
var<workgroup> partial: array<vec4<f32>, 64>;

{{ entry(64) }}
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
  let first = span * {{ 64 * EACH }}u;
  var top = bitcast<f32>(0xff7fffffu);
{% for j in range(EACH) %}
  let key{{ j }} = first + {{ 64 * j }}u + lid;
  var s{{ j }} = 0.0;
  var ok{{ j }} = key{{ j }} < p.keys;
{% if causal %}
  ok{{ j }} = ok{{ j }} && key{{ j }} <= query;
{% endif %}
{% if mask == "bool" %}
  if (ok{{ j }}) { ok{{ j }} = load_mask(mask_base + key{{ j }} * p.mask_key); }
{% endif %}
  if (ok{{ j }}) {
    let k_at = k_base + key{{ j }} * p.k_outer;
{% if width == 4 %}
    var sum = vec4<f32>();
    for (var e = 0u; e < p.depth; e += 4u) { sum += load4_q((q_at + e) / 4u) * load4_k((k_at + e) / 4u); }
    s{{ j }} = dot(sum, vec4<f32>(1.0)) * p.scale;
{% else %}
    for (var e = 0u; e < p.depth; e++) { s{{ j }} += load_q(q_at + e * p.q_k) * load_k(k_at + e * p.k_k); }
    s{{ j }} *= p.scale;
{% endif %}
{% if mask == "float" %}
    s{{ j }} += load_mask(mask_base + key{{ j }} * p.mask_key);
{% endif %}
    top = max_nan(top, s{{ j }});
  }
{% endfor %}
  largest[lid] = top;
  workgroupBarrier();
  if (lid < 8u) {
    top = largest[lid * 8u];
    for (var i = 1u; i < 8u; i++) { top = max_nan(top, largest[lid * 8u + i]); }
    largest[lid * 8u] = top;
  }
  workgroupBarrier();
  top = largest[0];
  for (var i = 8u; i < 64u; i += 8u) { top = max_nan(top, largest[i]); }
  var total = 0.0;
{% for j in range(EACH) %}
  let w{{ j }} = exp(s{{ j }} - top);
  weights[{{ 64 * j }}u + lid] = select(-1.0, w{{ j }}, ok{{ j }});
  total += select(0.0, w{{ j }}, ok{{ j }});
{% endfor %}
  totals[lid] = total;
  workgroupBarrier();
  if (lid < 8u) {
    total = totals[lid * 8u];
    for (var i = 1u; i < 8u; i++) { total += totals[lid * 8u + i]; }
    totals[lid * 8u] = total;
  }
  workgroupBarrier();
  total = totals[0];
  for (var i = 8u; i < 64u; i += 8u) { total += totals[i]; }

  let column = (chunk * {{ LANES }}u + lid % {{ LANES }}u) * 4u;
{% if v_vec %}
  let v_at = v_base + min(column, p.values - 4u);
{% else %}
{% for c in range(4) %}
  let v{{ c }} = v_base + min(column + {{ c }}u, p.values - 1u) * p.v_outer;
{% endfor %}
{% endif %}
  let count = select(min({{ 64 * EACH }}u, p.keys - first), 0u, total == 0.0);
  var sum = vec4<f32>();
  for (var i = lid / {{ LANES }}u; i < count; i += {{ 64 // LANES }}u) {
    let w = weights[i];
    if (bitcast<u32>(w) != 0xbf800000u) {
      let down = (first + i) * p.v_k;
{% if v_vec %}
      sum += w * load4_v((v_at + down) / 4u);
{% else %}
      sum += w * vec4<f32>(load_v(v0 + down), load_v(v1 + down), load_v(v2 + down), load_v(v3 + down));
{% endif %}
    }
  }
  partial[lid] = sum;
  workgroupBarrier();
  for (var e = lid; e < {{ 4 * LANES }}u; e += 64u) {
    let at = chunk * {{ 4 * LANES }}u + e;
    if (at < p.values) {
      var r = partial[e / 4u][e % 4u];
      for (var i = 1u; i < {{ 64 // LANES }}u; i++) { r += partial[i * {{ LANES }}u + e / 4u][e % 4u]; }
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
