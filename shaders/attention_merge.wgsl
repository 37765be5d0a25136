// Puts together what attention_few found in each span of keys.
//
// reads   sums   raw, contiguous [rows, spans, values];  stats raw, contiguous [rows, spans, 2]
// writes  out    [rows, values], row-major; p.empty for a row that sees no key
// params  count = rows * values, values, spans, empty
// groups  ceil(count / 64)

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let row = i / p.values;
  let column = i % p.values;
  var top = load_stats(row * p.spans * 2u);
  for (var s = 1u; s < p.spans; s++) { top = max_nan(top, load_stats((row * p.spans + s) * 2u)); }
  var sum = 0.0;
  var total = 0.0;
  for (var s = 0u; s < p.spans; s++) {
    let at = row * p.spans + s;
    let found = load_stats(at * 2u + 1u);
    if (found != 0.0 || is_nan(found)) {
      let shrink = exp(load_stats(at * 2u) - top);
      total += found * shrink;
      sum += load_sums(at * p.values + column) * shrink;
    }
  }
  store(i, select(sum / total, p.empty, total == 0.0));
}
