// Puts together what attention_wide found in SPANS spans of keys, an element an invocation: rows are many, spans are not.
//
// reads   sums   raw, contiguous [rows, SPANS, values];  stats raw, contiguous [rows, SPANS, 2]
// writes  out    [batch, queries, heads, values] of rows [batch, heads, queries]; p.empty for a row that sees no key
// params  heads, queries, values, count = rows * values, empty
// groups  ceil(count / 64)

{{ entry(64) }}
  let element = group * 64u + lid;
  if (element >= p.count) { return; }
  let row = element / p.values;
  let column = element % p.values;
  let first = row * {{ SPANS }}u;
  var top = bitcast<f32>(0xff7fffffu);
{% for s in range(SPANS) %}
  let high{{ s }} = load_stats((first + {{ s }}u) * 2u);
  let found{{ s }} = load_stats((first + {{ s }}u) * 2u + 1u);
  let x{{ s }} = load_sums((first + {{ s }}u) * p.values + column);
{% endfor %}
{% for s in range(SPANS) %}
  top = max_nan(top, high{{ s }});
{% endfor %}
  var sum = 0.0;
  var total = 0.0;
{% for s in range(SPANS) %}
  if (found{{ s }} != 0.0 || is_nan(found{{ s }})) {
    let shrink = exp(high{{ s }} - top);
    total += found{{ s }} * shrink;
    sum += x{{ s }} * shrink;
  }
{% endfor %}
  let pair = row / p.queries;
  let to = (pair / p.heads * p.queries + row % p.queries) * p.heads + pair % p.heads;
  store(to * p.values + column, select(sum / total, p.empty, total == 0.0));
}
