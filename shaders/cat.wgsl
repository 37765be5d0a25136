// Several tensors side by side along one axis, in one pass.
//
// reads   x0…   the parts, part n as [outer, len_n], where len_n counts its axis and everything inside
// writes  out   [outer, out_row]; this dispatch fills `row` elements of each row, from `start`
// params  end_n the first element of a row after part n
// groups  ceil(count / workgroup), count = outer × row

{{ entry(workgroup) }}
  let i = group * {{ workgroup }}u + lid;
  if (i >= p.count) { return; }
  let o = i / p.row;
  let r = i % p.row;
  var v: {{ kind }};
{% for n in range(parts) %}
  {% if not loop.first %}else {% endif %}
  {% if not loop.last %}if (r < p.end{{ n }}) {% endif %}{ v = load_x{{ n }}(o * p.len{{ n }} + r{% if n %} - p.end{{ n - 1 }}{% endif %}); }
{% endfor %}
  store(o * p.out_row + p.start + r, v);
}
