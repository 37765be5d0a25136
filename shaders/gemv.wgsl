// Product of up to 16 rows with a matrix: the matrix is read once, from memory that neighbouring invocations share.
//
// reads   a, b  raw: element (batch, m, k) of a at a_start + its batch strides + m * a_outer + k * a_k, b alike with n
// writes  out   element (batch, m, n) at batch * rows * cols + m * out_m + n * out_n; sums are f32 (i32 for integers)
// params  rows <= ROWS, cols, depth > 0, tiles_n, strides as above, batch_<d> and a_batch_<d>, b_batch_<d>
// groups  batch * tiles_n
// norm    "rms" or "layer": a is the norm's input (axis "k", width 4, a_vec; see tile.wgsl), else ""
//
// axis "k": b is contiguous along k; WORKERS invocations walk k, for 4 columns (width 4: depth divisible by 4, b read by
//           vec4); STEPS: in how many steps, where all take as many, else 0.
// axis "n": LANES invocations hold 4 columns each, WORKERS / LANES slices of k run side by side.
{% import "tile.wgsl" as t %}
{% set vector = "vec4<" ~ scalar ~ ">" %}

{{ t.norm_pool(ROWS, norm, WORKERS) }}
var<workgroup> partial: array<{{ vector }}, {{ WORKERS * ROWS }}>;

{{ entry(WORKERS) }}
  let tile_n = group % p.tiles_n;
  let batch = group / p.tiles_n;
{{ t.batch_offsets(batch_dims) }}
{% for m in range(ROWS) %}
  var s{{ m }} = {{ vector }}();
  let a{{ m }} = a_base + min({{ m }}u, p.rows - 1u) * p.a_outer;
{% endfor %}
{% if axis == "k" %}
  let n = tile_n * 4u;
{% for c in range(4) %}
  let b{{ c }} = b_base + min(n + {{ c }}u, p.cols - 1u) * p.b_outer;
{% endfor %}
{{ t.norm_before(ROWS, norm, WORKERS, STEPS) }}
{% for step in range(STEPS or 1) %}
{{ t.walk(WORKERS, width, STEPS, step) }}
{{ t.norm_factors("k", 0, norm, norm_weight, norm_bias) }}
{% for c in range(4) %}
    let w{{ c }} = {{ "load4_b((b%d + k) / 4u)" % c if width == 4 else "load_b(b%d + k)" % c }};
{% endfor %}
{% for m in range(ROWS) %}
    {
{% if width == 1 %}
      s{{ m }} += load_a(a{{ m }} + k * p.a_k) * {{ vector }}(w0, w1, w2, w3);
{% else %}
{% if a_vec %}
      var x = load4_a((a{{ m }} + k) / 4u);
{{ t.norm_rows("x", m, 0, norm, norm_weight, norm_bias) }}
{% else %}
      let at = a{{ m }} + k * p.a_k;
      let x = {{ vector }}(load_a(at), load_a(at + p.a_k), load_a(at + 2u * p.a_k), load_a(at + 3u * p.a_k));
{% endif %}
      s{{ m }} += {{ vector }}(dot(x, w0), dot(x, w1), dot(x, w2), dot(x, w3));
{% endif %}
    }
{% endfor %}
  }
{% endfor %}
{{ t.norm_after(ROWS, norm, WORKERS) }}
{{ t.finish_gemv(ROWS, WORKERS) }}
    store(batch * p.rows * p.cols + m * p.out_m + (n + c) * p.out_n, sum);
  }
{% else %}
  let lane = lid % {{ LANES }}u;
  let n = (tile_n * {{ LANES }}u + lane) * 4u;
{% if width == 4 %}
  let column = b_base + min(n, p.cols - 4u);
{% else %}
{% for c in range(4) %}
  let b{{ c }} = b_base + min(n + {{ c }}u, p.cols - 1u) * p.b_outer;
{% endfor %}
{% endif %}
  for (var k = lid / {{ LANES }}u; k < p.depth; k += {{ WORKERS // LANES }}u) {
    let down = k * p.b_k;
{% if width == 4 %}
    let w = load4_b((column + down) / 4u);
{% else %}
    let w = {{ vector }}(load_b(b0 + down), load_b(b1 + down), load_b(b2 + down), load_b(b3 + down));
{% endif %}
{% for m in range(ROWS) %}
    s{{ m }} += load_a(a{{ m }} + k * p.a_k) * w;
{% endfor %}
  }
{% for m in range(ROWS) %}
  partial[{{ WORKERS * m }}u + lid] = s{{ m }};
{% endfor %}
  workgroupBarrier();
  for (var e = lid; e < p.rows * {{ 4 * LANES }}u; e += {{ WORKERS }}u) {
    let m = e / {{ 4 * LANES }}u;
    let q = e % {{ 4 * LANES }}u;
    let col = tile_n * {{ 4 * LANES }}u + q;
    if (col < p.cols) {
      var sum = partial[m * {{ WORKERS }}u + q / 4u][q % 4u];
      for (var i = 1u; i < {{ WORKERS // LANES }}u; i++) { sum += partial[m * {{ WORKERS }}u + i * {{ LANES }}u + q / 4u][q % 4u]; }
      store(batch * p.rows * p.cols + m * p.out_m + col * p.out_n, sum);
    }
  }
{% endif %}
}
