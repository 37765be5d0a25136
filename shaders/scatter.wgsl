// Elements written to a region of a tensor that keeps the rest of its contents.
//
// reads   x      the new elements, by row-major index
//         index  (indexed) the position on one axis, one an element of x; negative: not written
// writes  out    at start + sum of coordinate × stride_d (+ index × step)
// params  size_d the sizes of x, neighbouring axes merged
// groups  ceil(count / workgroup)

{{ entry(workgroup) }}
  let i = group * {{ workgroup }}u + lid;
  if (i >= p.count) { return; }
  var to = p.start;
{% if rank %}
  var rest = i;
{% endif %}
{% for d in range(rank - 1, -1, -1) %}
  to += (rest % p.size{{ d }}) * p.stride{{ d }};
  rest = rest / p.size{{ d }};
{% endfor %}
{% if indexed %}
  let index = load_index(i);
  if (index < 0) { return; }
  to += u32(index) * p.step;
{% endif %}
  store(to, load_x(i));
}
