// Puts together what attention_wide found in a few spans of keys, an element an invocation: rows are many, spans are not.
//
// reads   sums   raw, contiguous [rows, spans, values];  stats raw, contiguous [rows, spans, 2]
// writes  out    [batch, queries, heads, values] of rows [batch, heads, queries]; p.empty for a row that sees no key
// params  heads, queries, values, spans, count = rows * values, empty
// groups  ceil(count / 64)

{{ entry(64) }}
  let element = group * 64u + lid;
  if (element >= p.count) { return; }
  let row = element / p.values;
  let column = element % p.values;
  let first = row * p.spans;
  var top = bitcast<f32>(0xff7fffffu);
  for (var s = first; s < first + p.spans; s++) { top = max_nan(top, load_stats(s * 2u)); }
  var sum = 0.0;
  var total = 0.0;
  for (var s = first; s < first + p.spans; s++) {
    let found = load_stats(s * 2u + 1u);
    if (found != 0.0 || is_nan(found)) {
      let shrink = exp(load_stats(s * 2u) - top);
      total += found * shrink;
      sum += load_sums(s * p.values + column) * shrink;
    }
  }
  let pair = row / p.queries;
  let to = (pair / p.heads * p.queries + row % p.queries) * p.heads + pair % p.heads;
  store(to * p.values + column, select(sum / total, p.empty, total == 0.0));
}
