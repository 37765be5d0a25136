// Attention over many queries, with running softmax: 32 queries a workgroup, 32 keys a step, no buffer of scores.
//
// reads   q, k, v  raw: element (batch, head, position, e) through strides; load4 where <name>_vec names an aligned axis
//                  (q_outer is the stride of a position and q_k of e; k alike; v_k is that of a position, v_outer of e)
//         mask     optional: bool (false hides a key) or float (added), through strides, 0 where it repeats
// writes  out      [batch, queries, heads, values], row-major: heads side by side, as the product behind wants them
// params  empty (what a query without keys gives), heads, queries, keys > 0, depth, values, q_tiles, scale, strides,
//         chunks (of 32 * BLOCKS columns of v), k_repeat and v_repeat: query heads that share a head of k and of v
// groups  batch * heads * q_tiles * chunks
//
// Invocation (tx, ty) holds the scores of 4 queries and 4 keys, then 4 queries and BLOCKS x 4 columns of the result.
// The running maximum starts at the lowest finite float, so that no infinity is subtracted from another unless a score is
// +inf; hidden keys are left out by flag, and a query with nothing to look at gives 0.
//
// With a mask, 64 steps at a time are looked through first, and a step that hides all its keys (a cache that is not full,
// a padded end, the other half of a causal mask) is not made.
{% import "tile.wgsl" as t %}

var<workgroup> tile: array<vec4<f32>, 576>;
var<workgroup> weights: array<vec4<f32>, 288>;
var<workgroup> row_part: array<vec4<f32>, 64>;
{% if mask %}
var<workgroup> seen: array<atomic<u32>, 2>; // a bit a step
var<workgroup> steps: vec2<u32>;
{% endif %}

{{ entry(64) }}
  let chunk = group % p.chunks;
  let first_q = ((group / p.chunks) % p.q_tiles) * 32u;
  let pair = group / (p.chunks * p.q_tiles);
  let head = pair % p.heads;
  let batch = pair / p.heads;
  let q_base = p.q_start + batch * p.q_batch + head * p.q_head;
  let k_base = p.k_start + batch * p.k_batch + head / p.k_repeat * p.k_head;
  let v_base = p.v_start + batch * p.v_batch + head / p.v_repeat * p.v_head;
  let first_column = chunk * {{ 32 * BLOCKS }}u;
  let tx = lid % 8u;
  let ty = lid / 8u;
  let q0 = first_q + ty * 4u;
{% if mask %}
  let mask_base = p.mask_start + batch * p.mask_batch + head * p.mask_head;
{% for r in range(4) %}
  let mask_row{{ r }} = mask_base + min(q0 + {{ r }}u, p.queries - 1u) * p.mask_query;
{% endfor %}
{% endif %}
  let lowest = bitcast<f32>(0xff7fffffu);
  var top = vec4<f32>(lowest);
  var total = vec4<f32>();
{% for r in range(4) %}{% for c in range(BLOCKS) %}
  var o{{ r }}_{{ c }} = vec4<f32>();
{% endfor %}{% endfor %}
{% if causal %}
  let end = min(p.keys, first_q + 32u);
{% else %}
  let end = p.keys;
{% endif %}
{% if mask %}
  let mask_rows = select(min(32u, p.queries - first_q), 1u, p.mask_query == 0u);
  for (var part = 0u; part < end; part += 2048u) {
  if (lid < 2u) { atomicStore(&seen[lid], 0u); }
  workgroupBarrier();
  for (var key = part + lid; key < min(end, part + 2048u); key += 64u) {
    var visible = false; // found without a branch, so that reads do not wait for each other
    let at = mask_base + first_q * p.mask_query + key * p.mask_key;
    for (var r = 0u; r < mask_rows; r++) {
{% if mask == "bool" %}
      visible = visible | load_mask(at + r * p.mask_query);
{% else %}
      visible = visible | (bitcast<u32>(load_mask(at + r * p.mask_query)) != 0xff800000u);
{% endif %}
    }
    if (visible) { atomicOr(&seen[(key - part) / 1024u], 1u << ((key - part) / 32u % 32u)); }
  }
  workgroupBarrier();
  if (lid == 0u) { steps = vec2<u32>(atomicLoad(&seen[0]), atomicLoad(&seen[1])); }
  let wanted = workgroupUniformLoad(&steps);
  for (var key0 = part; key0 < min(end, part + 2048u); key0 += 32u) {
    if ((select(wanted.x, wanted.y, key0 - part >= 1024u) >> ((key0 - part) / 32u % 32u) & 1u) == 0u) { continue; }
{% else %}
  for (var key0 = 0u; key0 < end; key0 += 32u) {
{% endif %}
{% for r in range(4) %}
    var s{{ r }} = vec4<f32>();
{% endfor %}
    for (var e0 = 0u; e0 < p.depth; e0 += 32u) {
{{ t.stage("q", "q_base", "p.depth", "p.queries", "first_q", "e0", q_vec, "k", 32, 8, "0u", "f32") }}
{{ t.stage("k", "k_base", "p.depth", "p.keys", "key0", "e0", k_vec, "k", 32, 8, "288u", "f32") }}
      workgroupBarrier();
      for (var e = 0u; e < 32u; e++) {
        let a = tile[e * 9u + ty];
        let b = tile[288u + e * 9u + tx];
{% for r in range(4) %}
        s{{ r }} += a[{{ r }}] * b;
{% endfor %}
      }
      workgroupBarrier();
    }
    let key = key0 + tx * 4u + vec4<u32>(0u, 1u, 2u, 3u);
{% for r in range(4) %}
    var ok{{ r }} = key < vec4<u32>(p.keys);
{% if causal %}
    ok{{ r }} = ok{{ r }} & (key <= vec4<u32>(q0 + {{ r }}u));
{% endif %}
    s{{ r }} *= p.scale;
{% if mask %}
    {
      let at = mask_row{{ r }} + min(key, vec4<u32>(p.keys - 1u)) * p.mask_key;
{% if mask == "bool" %}
      ok{{ r }} = ok{{ r }} & vec4<bool>(load_mask(at.x), load_mask(at.y), load_mask(at.z), load_mask(at.w));
{% else %}
      s{{ r }} += vec4<f32>(load_mask(at.x), load_mask(at.y), load_mask(at.z), load_mask(at.w));
{% endif %}
    }
{% endif %}
    let c{{ r }} = select(vec4<f32>(lowest), s{{ r }}, ok{{ r }});
{% endfor %}
    row_part[lid] = vec4<f32>({% for r in range(4) %}max(max(c{{ r }}.x, c{{ r }}.y), max(c{{ r }}.z, c{{ r }}.w)){{ ", " if r < 3 }}{% endfor %});
    workgroupBarrier();
    var above = top;
    for (var i = 0u; i < 8u; i++) { above = max(above, row_part[ty * 8u + i]); }
    let shrink = exp(top - above);
    top = above;
{% for r in range(4) %}
    let w{{ r }} = select(vec4<f32>(), exp(s{{ r }} - above[{{ r }}]), ok{{ r }});
{% endfor %}
    total = total * shrink + vec4<f32>({% for r in range(4) %}dot(w{{ r }}, vec4<f32>(1.0)){{ ", " if r < 3 }}{% endfor %});
{% for c in range(4) %}
    weights[(tx * 4u + {{ c }}u) * 9u + ty] = vec4<f32>(w0[{{ c }}], w1[{{ c }}], w2[{{ c }}], w3[{{ c }}]);
{% endfor %}
{% for r in range(4) %}{% for c in range(BLOCKS) %}
    o{{ r }}_{{ c }} *= shrink[{{ r }}];
{% endfor %}{% endfor %}
{% for first in range(0, BLOCKS, 2) %}
{% set here = range(first, [first + 2, BLOCKS] | min) %}
{% for c in here %}
{{ t.stage("v", "v_base", "p.keys", "p.values", "first_column + %du" % (32 * c), "key0", v_vec, v_fast, 32, 8, (288 * (c - first)) ~ "u", "f32") }}
{% endfor %}
    workgroupBarrier();
    for (var i = 0u; i < 32u; i++) {
      let a = weights[i * 9u + ty];
{% for c in here %}
      let b{{ c }} = tile[{{ 288 * (c - first) }}u + i * 9u + tx];
{% for r in range(4) %}
      o{{ r }}_{{ c }} += a[{{ r }}] * b{{ c }};
{% endfor %}
{% endfor %}
    }
    workgroupBarrier();
{% endfor %}
  }
{% if mask %}
  }
{% endif %}
  row_part[lid] = total;
  workgroupBarrier();
  var sum = vec4<f32>();
  for (var i = 0u; i < 8u; i++) { sum += row_part[ty * 8u + i]; }
{% for first in range(0, BLOCKS, 2) %}
{% set here = range(first, [first + 2, BLOCKS] | min) %}
{% set wide = here | length %}
{% for r in range(4) %}{% for c in here %}
  tile[(ty * 4u + {{ r }}u) * {{ 8 * wide }}u + {{ 8 * (c - first) }}u + tx] = select(o{{ r }}_{{ c }} / sum[{{ r }}], vec4<f32>(p.empty), sum[{{ r }}] == 0.0);
{% endfor %}{% endfor %}
  workgroupBarrier();
  for (var e = lid; e < {{ 1024 * wide }}u; e += 64u) {
    let row = first_q + e / {{ 32 * wide }}u;
    let column = first_column + {{ 32 * first }}u + e % {{ 32 * wide }}u;
    if (row < p.queries && column < p.values) { store(((batch * p.queries + row) * p.heads + head) * p.values + column, tile[e / 4u][e % 4u]); }
  }
  workgroupBarrier();
{% endfor %}
}
