// Puts together what attention_few found in each span of keys.
//
// reads   sums   raw, contiguous [rows, spans, values];  stats raw, contiguous [rows, spans, 2]
// writes  out    [batch, queries, heads, values] of rows [batch, heads, queries]; p.empty for a row that sees no key
// params  heads, queries, values, spans, chunks = ceil(values / COLUMNS), empty
// groups  rows * chunks
//
// COLUMNS * SLICES invocations: they share out the spans to find what each one counts, then add up a column each, of
// every SLICES-th span, with AT_ONCE reads on their way at a time.
{% set WORKERS = COLUMNS * SLICES %}

var<workgroup> largest: array<f32, {{ WORKERS }}>;
var<workgroup> shrinks: array<f32, {{ WORKERS }}>; // of a span's sums; -1: it saw no key
var<workgroup> shares: array<f32, {{ WORKERS }}>;  // of the sum of weights
{% if SLICES > 1 %}
var<workgroup> partial: array<vec2<f32>, {{ WORKERS }}>;
{% endif %}

{{ entry(WORKERS) }}
  let row = group / p.chunks;
  let column = (group % p.chunks) * {{ COLUMNS }}u + lid % {{ COLUMNS }}u;
  let first = row * p.spans;
  var top = bitcast<f32>(0xff7fffffu);
  for (var s = lid; s < p.spans; s += {{ WORKERS }}u) { top = max_nan(top, load_stats((first + s) * 2u)); }
  largest[lid] = top;
  workgroupBarrier();
  if (lid < {{ WORKERS // 8 }}u) {
    top = largest[lid * 8u];
    for (var i = 1u; i < 8u; i++) { top = max_nan(top, largest[lid * 8u + i]); }
    largest[lid * 8u] = top;
  }
  workgroupBarrier();
  top = largest[0];
  for (var i = 8u; i < {{ WORKERS }}u; i += 8u) { top = max_nan(top, largest[i]); }
  let at = min(column, p.values - 1u);
  var sum = 0.0;
  var total = 0.0;
  for (var start = 0u; start < p.spans; start += {{ WORKERS }}u) {
    workgroupBarrier();
    let mine = start + lid;
    shrinks[lid] = -1.0;
    shares[lid] = 0.0;
    if (mine < p.spans) {
      let found = load_stats((first + mine) * 2u + 1u);
      if (found != 0.0 || is_nan(found)) {
        shrinks[lid] = exp(load_stats((first + mine) * 2u) - top);
        shares[lid] = found * shrinks[lid];
      }
    }
    workgroupBarrier();
    let count = min({{ WORKERS }}u, p.spans - start);
    for (var i = lid / {{ COLUMNS }}u; i < count; i += {{ SLICES * AT_ONCE }}u) {
{% for j in range(AT_ONCE) %}
      let s{{ j }} = min(i + {{ SLICES * j }}u, {{ WORKERS - 1 }}u);
      let x{{ j }} = load_sums((first + min(start + s{{ j }}, p.spans - 1u)) * p.values + at);
{% endfor %}
{% for j in range(AT_ONCE) %}
      if (i + {{ SLICES * j }}u < count) {
        total += shares[s{{ j }}];
        let shrink{{ j }} = shrinks[s{{ j }}];
        sum += select(x{{ j }} * shrink{{ j }}, 0.0, bitcast<u32>(shrink{{ j }}) == 0xbf800000u);
      }
{% endfor %}
    }
  }
{% if SLICES > 1 %}
  partial[lid] = vec2<f32>(sum, total);
  workgroupBarrier();
  if (lid >= {{ COLUMNS }}u) { return; }
  for (var i = 1u; i < {{ SLICES }}u; i++) {
    sum += partial[lid + i * {{ COLUMNS }}u].x;
    total += partial[lid + i * {{ COLUMNS }}u].y;
  }
{% endif %}
  let pair = row / p.queries;
  let to = (pair / p.heads * p.queries + row % p.queries) * p.heads + pair % p.heads;
  if (column < p.values) { store(to * p.values + column, select(sum / total, p.empty, total == 0.0)); }
}
