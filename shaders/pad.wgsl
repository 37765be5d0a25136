// A tensor with a border of one value.
//
// reads   x      by row-major index
// writes  out    count elements
// params  wide_d the output's size on axis d, size_d the input's, before_d the border in front; value
// groups  ceil(count / workgroup)

{{ entry(workgroup) }}
  let i = group * {{ workgroup }}u + lid;
  if (i >= p.count) { return; }
  var rest = i;
  var inside = true;
  var at = 0u;
  var step = 1u;
{% for d in range(rank - 1, -1, -1) %}
  {
    // In front of the tensor the difference wraps to a huge number, which is not inside either.
    let c = rest % p.wide{{ d }} - p.before{{ d }};
    rest = rest / p.wide{{ d }};
    inside = inside && c < p.size{{ d }};
    at += c * step;
    step *= p.size{{ d }};
  }
{% endfor %}
  var v: {{ kind }} = {{ "p.value != 0u" if kind == "bool" else "p.value" }};
  if (inside) { v = load_x(at); }
  store(i, v);
}
