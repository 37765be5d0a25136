// Puts together what attention_few found in each span of keys.
//
// reads   sums   raw, contiguous [rows, spans, values];  stats raw, contiguous [rows, spans, 2]
// writes  out    [batch, queries, heads, values] of rows [batch, heads, queries]; p.empty for a row that sees no key
// params  heads, queries, values, spans, chunks = ceil(values / 64), empty
// groups  rows * chunks
//
// The invocations share out the spans to find what each one counts, then each adds up a column, span after span.

var<workgroup> largest: array<f32, 64>;
var<workgroup> shrinks: array<f32, 64>; // of a span's sums; -1: it saw no key
var<workgroup> shares: array<f32, 64>;  // of the sum of weights

{{ entry(64) }}
  let row = group / p.chunks;
  let column = (group % p.chunks) * 64u + lid;
  let first = row * p.spans;
  var top = bitcast<f32>(0xff7fffffu);
  for (var s = lid; s < p.spans; s += 64u) { top = max_nan(top, load_stats((first + s) * 2u)); }
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
  var sum = 0.0;
  var total = 0.0;
  for (var start = 0u; start < p.spans; start += 64u) {
    workgroupBarrier();
    let mine = start + lid;
    if (mine < p.spans) {
      let found = load_stats((first + mine) * 2u + 1u);
      let shrink = exp(load_stats((first + mine) * 2u) - top);
      let sees = found != 0.0 || is_nan(found);
      shrinks[lid] = select(-1.0, shrink, sees);
      shares[lid] = select(0.0, found * shrink, sees);
    }
    workgroupBarrier();
    for (var i = 0u; i < min(64u, p.spans - start); i++) {
      let shrink = shrinks[i];
      total += shares[i];
      if (bitcast<u32>(shrink) != 0xbf800000u && column < p.values) {
        sum += load_sums((first + start + i) * p.values + column) * shrink;
      }
    }
  }
  let pair = row / p.queries;
  let to = (pair / p.heads * p.queries + row % p.queries) * p.heads + pair % p.heads;
  if (column < p.values) { store(to * p.values + column, select(sum / total, p.empty, total == 0.0)); }
}
