// Rows of a table of packed codes, picked by positions that are data and dequantized.
//
// reads   b, scale, zero as codes.wgsl says; index: positions of rows, in range
// writes  out  [positions, depth], count elements; an invocation makes 4 neighbours of a row
// params  count = positions * quads, depth, quads = ceil(depth / 4), words, scales, group
// groups  ceil(count / workgroup)
{% import "codes.wgsl" as q %}

{{ entry(workgroup) }}
  let i = group * {{ workgroup }}u + lid;
  if (i >= p.count) { return; }
  let position = i / p.quads;
  let k = (i % p.quads) * 4u;
  let row = u32(load_index(position));
  let g = row * p.scales + k / p.group;
  let w = ({{ q.four("row * p.words", "k", bits) }} - {{ q.zero("g", bits, has_zero) }}) * load_scale(g);
{% for j in range(4) %}
  if (k + {{ j }}u < p.depth) { store(position * p.depth + k + {{ j }}u, w[{{ j }}]); }
{% endfor %}
}
