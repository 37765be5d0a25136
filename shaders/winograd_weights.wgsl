// Kernels of 3 x 3 as conv_winograd.wgsl multiplies them: G g G' with the rows (1 0 0), (1 1 1)/2, (1 -1 1)/2, (0 0 1) of G.
//
// reads   weight  raw: [O, C, 3, 3], contiguous from w_start
// writes  out     [C, 16, wide], the 16 points row by row; 0 from channel O on
// params  out_c = O, in_c = C, wide: O rounded up to 4; count = C * 16 * wide
// groups  ceil(count / 64)

fn along(row: u32, a: f32, b: f32, c: f32) -> f32 {
  if (row == 0u) { return a; }
  if (row == 3u) { return c; }
  return 0.5 * (a + c + select(-b, b, row == 1u));
}

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let o = i % p.wide;
  let point = i / p.wide % 16u;
  let c = i / (p.wide * 16u);
  var v = 0.0;
  if (o < p.out_c) {
    let at = p.w_start + (o * p.in_c + c) * 9u;
    let column = point % 4u;
{% for y in range(3) %}
    let r{{ y }} = along(column, load_weight(at + {{ 3 * y }}u), load_weight(at + {{ 3 * y + 1 }}u), load_weight(at + {{ 3 * y + 2 }}u));
{% endfor %}
    v = along(point / 4u, r0, r1, r2);
  }
  store(i, v);
}
