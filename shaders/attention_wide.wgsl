// Attention over many queries on a GPU, with running softmax: TY RM queries a workgroup, 4 TX RN keys a step.
//
// reads   q, k, v  raw: element (batch, head, position, e) through strides; load4 where <name>_vec
//                  (q_outer is the stride of a position and q_k of e; k alike; v_k is that of a position, v_outer of e)
//         mask     optional: bool (false hides a key) or float (added), through strides, 0 where it repeats
//         seen     where SEEN: what attention_seen.wgsl found about the mask of a tile of queries and a step of keys
// writes  out      [batch, queries, heads, values], row-major, where one span holds all keys (ONE), else for
//                  attention_merge, rows being [batch, heads, queries]:
//         sums     [rows, spans, values]: sum of weights x v;  stats [rows, spans, 2]: largest score, sum of weights
// params  empty (what a query without keys gives), heads, queries, keys > 0, depth, values, q_tiles, scale, strides,
//         spans, chunks (of 4 TX RC columns of v), k_repeat and v_repeat: query heads that share a head of k and of v
//         where SEEN: seen_batch, seen_head, seen_tile: strides, 0 where the mask repeats
// groups  batch * heads * q_tiles * spans * chunks
//
// Span s makes steps s, s + spans, ...: what a mask or causality leaves to see is shared out evenly, wherever it lies. A
// step that hides all its keys is not made, and its keys and values are not read; where all are visible the mask is not.
// Tiles are taken from the last on, as causality gives that the longest way to go.
//
// Invocation (tx, ty) has queries ty + TY r, of which it holds the scores of keys 4 (tx + TX c) to + 3, then columns
// 4 (tx + TX c) to + 3 of the result. Operands are staged as they lie, a vec4 along e or the columns, in rows of an odd
// pitch; rows of k are ordered so that neighbouring invocations read neighbouring ones. Weights take the place of q and k.
// With AHEAD, a part is fetched while the one before is multiplied. Arrays are nested so that in the inner loops one
// index varies and the others are constants: each dynamic one is checked by the driver.
{% set threads = TX * TY %}
{% set M = TY * RM %}
{% set N = 4 * TX * RN %}
{% set quads = KT // 4 %}
{% set wide = TX * RC %}
{% set lanes = [TX, TY] | max %}
{% set rows = [M + N, M * ((N + KT - 1) // KT), (TY * wide + quads - 1) // quads] | max %}

var<workgroup> tile: array<array<array<vec4<f32>, {{ quads + 1 }}>, {{ lanes }}>, {{ (rows + lanes - 1) // lanes }}>;
var<workgroup> tile_v: array<array<array<array<vec4<f32>, {{ TX }}>, {{ RC }}>, 4>, {{ KV // 4 }}>;
var<workgroup> parts: array<vec4<f32>, {{ M * TX // 4 }}>; // of a row, a component an invocation

{% if SEEN %}
var<workgroup> open_from: atomic<u32>;
var<workgroup> open_to: atomic<u32>;
var<workgroup> open: vec2<u32>;
{% endif %}

{% macro row(at) %}tile[({{ at }}) / {{ lanes }}u][({{ at }}) % {{ lanes }}u]{% endmacro %}
{# Row n * width + lane of an invocation's own lane. #}
{% macro own(n, width, lane) %}tile[{{ n * width // lanes }}u][{{ lane }}{{ " + %du" % (n * width % lanes) if n * width % lanes }}]{% endmacro %}
{% macro spot(along, s, count, across) %}
{% if along %}
        let row = (lid + {{ s * threads }}u) / {{ across }}u; let quad = (lid + {{ s * threads }}u) % {{ across }}u;
{% else %}
        let row = (lid + {{ s * threads }}u) % {{ count }}u; let quad = (lid + {{ s * threads }}u) / {{ count }}u;
{% endif %}
{% endmacro %}
{# Reads count x across quads of an operand, from position `first` and element `e0` on. What lies beyond the elements, or
   for v beyond the keys, is 0; positions of q and k beyond the last repeat it. #}
{% macro fetch(name, base, count, across, first, e0, outer, depth, outer_stride, stride, vec, along) %}
{% for s in range((count * across + threads - 1) // threads) %}
      {
{{ spot(along, s, count, across) }}
        let line = {{ base }} + min({{ first }} + row, {{ outer }} - 1u) * {{ outer_stride }};
        let e = {{ e0 }} + quad * 4u;
{% if vec %}
        let got = load4_{{ name }}((line + min(e, {{ depth }} - 4u)) / 4u);
{% else %}
        let at = line + min(vec4<u32>(e, e + 1u, e + 2u, e + 3u), vec4<u32>({{ depth }} - 1u)) * {{ stride }};
        let got = vec4<f32>(load_{{ name }}(at.x), load_{{ name }}(at.y), load_{{ name }}(at.z), load_{{ name }}(at.w));
{% endif %}
{% if name == "v" %}
        {{ name }}{{ s }} = select(vec4<f32>(), got, {{ first }} + row < {{ outer }});
{% else %}
        {{ name }}{{ s }} = select(vec4<f32>(), got, vec4<u32>(e, e + 1u, e + 2u, e + 3u) < vec4<u32>({{ depth }}));
{% endif %}
      }
{% endfor %}
{% endmacro %}
{% macro put(name, count, across, along) %}
{% for s in range((count * across + threads - 1) // threads) %}
      {{ "if (lid < %du) " % (count * across - s * threads) if (s + 1) * threads > count * across }}{
{{ spot(along, s, count, across) }}
{% if name == "v" %}
        tile_v[row / 4u][row % 4u][quad / {{ TX }}u][quad % {{ TX }}u] = v{{ s }};
{% elif name == "k" %}
        let at = {{ M }}u + row % 4u * {{ N // 4 }}u + row / 4u;
        {{ row("at") }}[quad] = k{{ s }};
{% else %}
        {{ row("row") }}[quad] = q{{ s }};
{% endif %}
      }
{% endfor %}
{% endmacro %}
{% macro fetch_qk(e0) %}
{{ fetch("q", "q_base", M, quads, "first_q", e0, "p.queries", "p.depth", "p.q_outer", "p.q_k", q_vec, q_along) }}
{{ fetch("k", "k_base", N, quads, "key0", e0, "p.keys", "p.depth", "p.k_outer", "p.k_k", k_vec, k_along) }}
{% endmacro %}
{% macro fetch_v(first) %}
{{ fetch("v", "v_base", KV, wide, first, "first_column", "p.keys", "p.values", "p.v_k", "p.v_outer", v_vec, v_along) }}
{% endmacro %}

{{ entry(threads) }}
  let chunk = group % p.chunks;
  let span = group / p.chunks % p.spans;
  let q_tile = p.q_tiles - 1u - group / (p.chunks * p.spans) % p.q_tiles;
  let pair = group / (p.chunks * p.spans * p.q_tiles);
  let first_q = q_tile * {{ M }}u;
  let head = pair % p.heads;
  let batch = pair / p.heads;
  let q_base = p.q_start + batch * p.q_batch + head * p.q_head;
  let k_base = p.k_start + batch * p.k_batch + head / p.k_repeat * p.k_head;
  let v_base = p.v_start + batch * p.v_batch + head / p.v_repeat * p.v_head;
  let first_column = chunk * {{ 4 * wide }}u;
  let tx = lid % {{ TX }}u;
  let ty = lid / {{ TX }}u;
  let lowest = bitcast<f32>(0xff7fffffu);
{% for r in range(RM) %}
  var top{{ r }} = lowest;
  var total{{ r }} = 0.0; // of this invocation's keys
{% if mask %}
  let mask_row{{ r }} = p.mask_start + batch * p.mask_batch + head * p.mask_head + min(first_q + ty + {{ TY * r }}u, p.queries - 1u) * p.mask_query;
{% endif %}
{% for c in range(RC) %}
  var o{{ r }}_{{ c }} = vec4<f32>();
{% endfor %}{% endfor %}
{% if causal %}
  let end = min(p.keys, first_q + {{ M }}u);
{% else %}
  let end = p.keys;
{% endif %}
{% if SEEN %}
  // From the first step of the span that is made to the last: in a cache that is not full most are behind it.
  if (lid == 0u) { atomicStore(&open_from, 0xffffffffu); atomicStore(&open_to, 0u); }
  workgroupBarrier();
  let seen_at = batch * p.seen_batch + head * p.seen_head + q_tile * p.seen_tile;
  for (var step = span + lid * p.spans; step * {{ N }}u < end; step += {{ threads }}u * p.spans) {
    if (load_seen(seen_at + step) != 0) { atomicMin(&open_from, step); atomicMax(&open_to, step + 1u); }
  }
  workgroupBarrier();
  if (lid == 0u) { open = vec2<u32>(atomicLoad(&open_from), atomicLoad(&open_to)) * {{ N }}u; }
  let stretch = workgroupUniformLoad(&open);
{% endif %}
{% if not ONE %}
  var made = false; // of a span that sees nothing the sums are not read
{% endif %}
  for (var key0 = {{ "stretch.x" if SEEN else "span * %du" % N }}; key0 < {{ "min(end, stretch.y)" if SEEN else "end" }}; key0 += p.spans * {{ N }}u) {
{% if SEEN %}
    let state = load_seen(seen_at + key0 / {{ N }}u);
    if (state == 0) { continue; }
{% endif %}
{% if not ONE %}
    made = true;
{% endif %}
{% for r in range(RM) %}{% for n in range(4 * RN) %}
    var s{{ r }}_{{ n }} = 0.0;
{% endfor %}{% endfor %}
{% for name, count in (("q", M * quads), ("k", N * quads), ("v", KV * wide)) %}{% for s in range((count + threads - 1) // threads) %}
    var {{ name }}{{ s }}: vec4<f32>;
{% endfor %}{% endfor %}
{% if AHEAD %}
{{ fetch_qk("0u") }}
{% endif %}
    for (var e0 = 0u; e0 < p.depth; e0 += {{ KT }}u) {
{% if not AHEAD %}
{{ fetch_qk("e0") }}
{% endif %}
      workgroupBarrier();
{{ put("q", M, quads, q_along) }}
{{ put("k", N, quads, k_along) }}
      workgroupBarrier();
{% if AHEAD %}
      if (e0 + {{ KT }}u < p.depth) {
{{ fetch_qk("(e0 + %du)" % KT) }}
      } else {
{{ fetch_v("key0") }}
      }
{% endif %}
      for (var i = 0u; i < {{ quads }}u; i++) {
{% for r in range(RM) %}
        let a{{ r }} = {{ own(r, TY, "ty") }}[i];
{% endfor %}
{% for n in range(4 * RN) %}
        { let b = {{ own(M // TX + n % 4 * RN + n // 4, TX, "tx") }}[i];
{% for r in range(RM) %}
        s{{ r }}_{{ n }} = fma(a{{ r }}.w, b.w, fma(a{{ r }}.z, b.z, fma(a{{ r }}.y, b.y, fma(a{{ r }}.x, b.x, s{{ r }}_{{ n }}))));
{% endfor %} }
{% endfor %}
      }
    }
{% for r in range(RM) %}
    var above{{ r }} = lowest;
{% endfor %}
{% for c in range(RN) %}
    let keys{{ c }} = key0 + (tx + {{ TX * c }}u) * 4u + vec4<u32>(0u, 1u, 2u, 3u);
{% if mask %}
    let mask_at{{ c }} = min(keys{{ c }}, vec4<u32>(p.keys - 1u)) * p.mask_key;
{% endif %}
{% for r in range(RM) %}
    var x{{ r }}_{{ c }} = vec4<f32>(s{{ r }}_{{ 4 * c }}, s{{ r }}_{{ 4 * c + 1 }}, s{{ r }}_{{ 4 * c + 2 }}, s{{ r }}_{{ 4 * c + 3 }}) * p.scale;
    var ok{{ r }}_{{ c }} = keys{{ c }} < vec4<u32>(p.keys);
{% if causal %}
    ok{{ r }}_{{ c }} = ok{{ r }}_{{ c }} & (keys{{ c }} <= vec4<u32>(first_q + ty + {{ TY * r }}u));
{% endif %}
{% endfor %}{% endfor %}
{% if mask %}
    {{ "if (state == 1) " if SEEN }}{
{% for r in range(RM) %}{% for c in range(RN) %}
      {
        let at = mask_row{{ r }} + mask_at{{ c }};
{% if mask == "bool" %}
        ok{{ r }}_{{ c }} = ok{{ r }}_{{ c }} & vec4<bool>(load_mask(at.x), load_mask(at.y), load_mask(at.z), load_mask(at.w));
{% else %}
        x{{ r }}_{{ c }} += vec4<f32>(load_mask(at.x), load_mask(at.y), load_mask(at.z), load_mask(at.w));
{% endif %}
      }
{% endfor %}{% endfor %}
    }
{% endif %}
{% for r in range(RM) %}{% for c in range(RN) %}
    { let shown = select(vec4<f32>(lowest), x{{ r }}_{{ c }}, ok{{ r }}_{{ c }}); above{{ r }} = max(above{{ r }}, max(max(shown.x, shown.y), max(shown.z, shown.w))); }
{% endfor %}
    parts[(ty + {{ TY * r }}u) * {{ TX // 4 }}u + tx / 4u][tx % 4u] = above{{ r }};
{% endfor %}
    workgroupBarrier();
{% for r in range(RM) %}
    {
      var all = parts[(ty + {{ TY * r }}u) * {{ TX // 4 }}u];
{% for i in range(1, TX // 4) %}
      all = max(all, parts[(ty + {{ TY * r }}u) * {{ TX // 4 }}u + {{ i }}u]);
{% endfor %}
      let highest = max(top{{ r }}, max(max(all.x, all.y), max(all.z, all.w)));
      let shrink = exp(top{{ r }} - highest);
      top{{ r }} = highest;
      total{{ r }} *= shrink;
{% for c in range(RC) %}
      o{{ r }}_{{ c }} *= shrink;
{% endfor %}
{% for c in range(RN) %}
      let w{{ c }} = select(vec4<f32>(), exp(x{{ r }}_{{ c }} - highest), ok{{ r }}_{{ c }});
      total{{ r }} += (w{{ c }}.x + w{{ c }}.y) + (w{{ c }}.z + w{{ c }}.w);
      { let quad = {{ TX * c }}u + tx; let at = quad / {{ quads }}u * {{ M }}u + {{ TY * r }}u + ty; {{ row("at") }}[quad % {{ quads }}u] = w{{ c }}; }
{% endfor %}
    }
{% endfor %}
    let count = min({{ N }}u, end - key0);
    for (var j0 = 0u; j0 < count; j0 += {{ KV }}u) {
{% if not AHEAD %}
{{ fetch_v("(key0 + j0)") }}
{% endif %}
      if (j0 > 0u) { workgroupBarrier(); }
{{ put("v", KV, wide, v_along) }}
      workgroupBarrier();
{% if AHEAD %}
      if (j0 + {{ KV }}u < count) {
{{ fetch_v("(key0 + j0 + %du)" % KV) }}
      }
{% endif %}
      for (var i = 0u; i < {{ KV // 4 }}u; i++) {
        let quad = j0 / 4u + i;
{% for r in range(RM) %}
        let a{{ r }} = tile[(quad / {{ quads }}u * {{ M }}u + {{ TY * r }}u + ty) / {{ lanes }}u][({{ TY * r }}u + ty) % {{ lanes }}u][quad % {{ quads }}u];
{% endfor %}
{% for j in range(4) %}{% for c in range(RC) %}
        { let b = tile_v[i][{{ j }}][{{ c }}][tx];
{% for r in range(RM) %}
        o{{ r }}_{{ c }} = fma(vec4<f32>(a{{ r }}[{{ j }}]), b, o{{ r }}_{{ c }});
{% endfor %} }
{% endfor %}{% endfor %}
      }
    }
  }
  workgroupBarrier();
{% for r in range(RM) %}
  parts[(ty + {{ TY * r }}u) * {{ TX // 4 }}u + tx / 4u][tx % 4u] = total{{ r }};
{% endfor %}
  workgroupBarrier();
{% for r in range(RM) %}
  {
    var all = parts[(ty + {{ TY * r }}u) * {{ TX // 4 }}u];
{% for i in range(1, TX // 4) %}
    all += parts[(ty + {{ TY * r }}u) * {{ TX // 4 }}u + {{ i }}u];
{% endfor %}
    let sum = (all.x + all.y) + (all.z + all.w);
{% for c in range(RC) %}
    { let at = ty * {{ wide }}u + {{ TX * c }}u + tx; {{ row("at / %du" % quads) }}[at % {{ quads }}u] = {{ "select(o%d_%d / sum, vec4<f32>(p.empty), sum == 0.0)" % (r, c) if ONE else "o%d_%d" % (r, c) }}; }
{% endfor %}
    workgroupBarrier();
    for (var e = lid; e < {{ 4 * TY * wide }}u; e += {{ threads }}u) {
      let row = first_q + {{ TY * r }}u + e / {{ 4 * wide }}u;
      let column = first_column + e % {{ 4 * wide }}u;
      let got = {{ row("e / %du" % (4 * quads)) }}[e / 4u % {{ quads }}u][e % 4u];
      if (row < p.queries && column < p.values{{ " && made" if not ONE }}) {
{% if ONE %}
        store(((batch * p.queries + row) * p.heads + head) * p.values + column, got);
{% else %}
        store_sums(((pair * p.queries + row) * p.spans + span) * p.values + column, got);
{% endif %}
      }
    }
{% if not ONE %}
    if (tx == 0u && chunk == 0u && first_q + ty + {{ TY * r }}u < p.queries) {
      let at = ((pair * p.queries + first_q + ty + {{ TY * r }}u) * p.spans + span) * 2u;
      store_stats(at, top{{ r }});
      store_stats(at + 1u, sum);
    }
{% endif %}
{% if r < RM - 1 %}
    workgroupBarrier();
{% endif %}
  }
{% endfor %}
}
