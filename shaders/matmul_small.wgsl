// Many small matrix products: one invocation a result.
//
// reads   a, b  raw: element (batch, m, k) of a at a_start + its batch strides + m * a_outer + k * a_k, b alike with n
// writes  out   [batch, rows, cols], row-major; sums are f32 (i32 for integers)
// params  count = batch * rows * cols, rows, cols, depth, strides as above, batch_<d> and a_batch_<d>, b_batch_<d>
// groups  ceil(count / 64)
{% import "tile.wgsl" as t %}

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let n = i % p.cols;
  let m = (i / p.cols) % p.rows;
  let batch = i / (p.cols * p.rows);
{{ t.batch_offsets(batch_dims) }}
  a_base += m * p.a_outer;
  b_base += n * p.b_outer;
  var sum = {{ scalar }}();
  for (var k = 0u; k < p.depth; k++) { sum += load_a(a_base + k * p.a_k) * load_b(b_base + k * p.b_k); }
  store(i, sum);
}
