// A chain of pointwise operators in one kernel: the work is in load_x.
//
// reads   x     the expression, by row-major index
// writes  out   count > 0 elements; with width 4, vectors of four, a multiple of `items` of them
// groups  ceil(count / (workgroup * items)); with several items, an invocation's reads are under way together

{{ entry(workgroup) }}
{% if width == 4 %}
  let first = (group * {{ workgroup }}u + lid) * {{ items }}u;
  if (first < p.count) {
{% for j in range(items) %}
    let v{{ j }} = load4_x(first + {{ j }}u);
{% endfor %}
{% for j in range(items) %}
    store4(first + {{ j }}u, v{{ j }});
{% endfor %}
  }
{% elif items == 1 %}
  let i = group * {{ workgroup }}u + lid;
  if (i < p.count) { store(i, load_x(i)); }
{% else %}
  let first = group * {{ workgroup * items }}u + lid;
{% for j in range(items) %}
  let v{{ j }} = load_x(min(first + {{ workgroup * j }}u, p.count - 1u));
{% endfor %}
{% for j in range(items) %}
  if (first + {{ workgroup * j }}u < p.count) { store(first + {{ workgroup * j }}u, v{{ j }}); }
{% endfor %}
{% endif %}
}
