// Rows of a table that are summed, averaged or compared by bags of indices: embedding_bag.
//
// reads   table    [size, inner] by row-major index
//         index    [n] rows; one out of range stands for the nearest, `padding` is left out
//         offsets  [number of offsets] where each bag starts; the last bag ends at the next offset or at n
//         scale    (WEIGHTED) [n] factors
// writes  out      [bags, inner]; an empty bag gives 0
// params  count = bags * inner, inner, size, n, offsets = how many there are; padding
// groups  ceil(count / workgroup)

{{ entry(workgroup) }}
  let i = group * {{ workgroup }}u + lid;
  if (i >= p.count) { return; }
  let bag = i / p.inner;
  let c = i % p.inner;
  let first = u32(clamp(load_offsets(bag), 0, i32(p.n)));
  var end = p.n;
  if (bag + 1u < p.offsets) { end = u32(clamp(load_offsets(bag + 1u), 0, i32(p.n))); }
  var result = 0.0;
  var taken = 0u;
  for (var j = first; j < end; j++) {
    let row = load_index(j);
    if (row == p.padding) { continue; }
    let v = load_table(u32(clamp(row, 0, i32(p.size) - 1)) * p.inner + c){{ " * load_scale(j)" if WEIGHTED }};
{% if MODE == "max" %}
    result = select(result, v, taken == 0u || v > result || is_nan(v));
{% else %}
    result += v;
{% endif %}
    taken++;
  }
{% if MODE == "mean" %}
  result /= f32(max(taken, 1u));
{% endif %}
  store(i, result);
}
