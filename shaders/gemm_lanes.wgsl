// Matrix product for processors that stand in for a GPU: an invocation sums R rows at 8 neighbouring columns. There a load
// costs as much as dozens of multiplications, so the 4 invocations of a quad, which have the same rows, share those of a:
// each loads every fourth row, and broadcasts it. No workgroup memory, which is no nearer than any other, no barriers.
//
// reads   a, b  raw: element (batch, m, k) of a at a_start + its batch strides + m * a_outer + k * a_k, b alike with n;
//               load4 where a_vec is "k", and where b_vec names the axis that is contiguous and aligned
//         with b_bits, b is quantized: b, scale and zero as codes.wgsl says, one matrix for all (batch = 1)
// writes  out   element (batch, m, n) at batch * rows * cols + m * out_m + n * out_n; sums are f32 whatever the storage
// params  rows, cols, depth > 0, strides as above, batch_<d> and a_batch_<d>, b_batch_<d>; blocks: of R rows; spans: of
//         8 W columns
// groups  batch * blocks * spans
//
// W: invocations of a group, whole quads. R is a multiple of 4. RAGGED: depth is not divisible by 4, the depth of a step.
// RUN: so many products are added one after the other, then their sum to those before; 0: depth is no more than that.
{% import "tile.wgsl" as t %}
{% import "codes.wgsl" as q %}

{{ entry(W) }}
  let batch = group / (p.spans * p.blocks);
  let m = group / p.spans % p.blocks * {{ R }}u;
  let n = (group % p.spans * {{ W }}u + lid) * 8u;
{{ t.batch_offsets(batch_dims) }}
{% for j in range(R // 4) %}
  let row{{ j }} = a_base + min(m + {{ 4 * j }}u + lid % 4u, p.rows - 1u) * p.a_outer;
{% endfor %}
{% if b_bits %}
{% for c in range(8) %}
  let n{{ c }} = min(n + {{ c }}u, p.cols - 1u);
{% endfor %}
{% elif b_vec == "outer" %}
{% for h in range(2) %}
  let column{{ h }} = b_base + min(n + {{ 4 * h }}u, p.cols - 4u);
{% endfor %}
{% else %}
{% for c in range(8) %}
  let column{{ c }} = b_base + min(n + {{ c }}u, p.cols - 1u) * p.b_outer;
{% endfor %}
{% endif %}
{% for r in range(R) %}{% for h in range(2) %}
  var s{{ r }}_{{ h }} = vec4<f32>();
{% if RUN %}
  var sum{{ r }}_{{ h }} = vec4<f32>();
{% endif %}
{% endfor %}{% endfor %}
{% if RUN %}
  for (var part = 0u; part < p.depth; part += {{ RUN }}u) {
  for (var k = part; k < min(p.depth, part + {{ RUN }}u); k += 4u) {
{% else %}
  for (var k = 0u; k < p.depth; k += 4u) {
{% endif %}
{% for kk in range(4) %}
{% if RAGGED %}
    let k{{ kk }} = min(k + {{ kk }}u, p.depth - 1u);
    let in{{ kk }} = k + {{ kk }}u < p.depth;
{% else %}
    let k{{ kk }} = k + {{ kk }}u;
{% endif %}
{% endfor %}
{% if b_bits %}
    // Beyond depth lies padding, which is finite, and meets zeros of a.
    let g = k / p.group;
{% for c in range(8) %}
    let g{{ c }} = n{{ c }} * p.scales + g;
    let w{{ c }} = ({{ q.four("n%d * p.words" % c, "k", b_bits) }} - {{ q.zero("g%d" % c, b_bits, has_zero) }}) * load_scale(g{{ c }});
{% endfor %}
{% elif b_vec == "k" %}
{% for c in range(8) %}
    let w{{ c }} = load4_b((column{{ c }} + k) / 4u);
{% endfor %}
{% endif %}
{% for kk in range(4) %}{% for h in range(2) %}
{% if b_bits or b_vec == "k" %}
    let b{{ kk }}_{{ h }} = vec4<f32>({% for c in range(4) %}w{{ 4 * h + c }}[{{ kk }}]{{ ", " if c < 3 }}{% endfor %});
{% elif b_vec == "outer" %}
    let b{{ kk }}_{{ h }} = {{ "select(vec4<f32>(), load4_b((column%d + k%d * p.b_k) / 4u), in%d)" % (h, kk, kk) if RAGGED else "load4_b((column%d + k%d * p.b_k) / 4u)" % (h, kk) }};
{% else %}
    let b{{ kk }}_{{ h }} = {{ "select(vec4<f32>(), " if RAGGED }}vec4<f32>({% for c in range(4) %}load_b(column{{ 4 * h + c }} + k{{ kk }} * p.b_k){{ ", " if c < 3 }}{% endfor %}){{ ", in%d)" % kk if RAGGED }};
{% endif %}
{% endfor %}{% endfor %}
{% for j in range(R // 4) %}
{% if a_vec %}
    let a{{ j }} = load4_a((row{{ j }} + k) / 4u);
{% else %}
    let a{{ j }} = vec4<f32>({% for kk in range(4) %}{{ "select(0.0, load_a(row%d + k%d * p.a_k), in%d)" % (j, kk, kk) if RAGGED else "load_a(row%d + k%d * p.a_k)" % (j, kk) }}{{ ", " if kk < 3 }}{% endfor %});
{% endif %}
{% endfor %}
{% for r in range(R) %}
    {
      let x = quadBroadcast(a{{ r // 4 }}, {{ r % 4 }}u);
{% for kk in range(4) %}{% for h in range(2) %}
      s{{ r }}_{{ h }} = fma(vec4<f32>(x[{{ kk }}]), b{{ kk }}_{{ h }}, s{{ r }}_{{ h }});
{% endfor %}{% endfor %}
    }
{% endfor %}
  }
{% if RUN %}
{% for r in range(R) %}{% for h in range(2) %}
  sum{{ r }}_{{ h }} += s{{ r }}_{{ h }};
  s{{ r }}_{{ h }} = vec4<f32>();
{% endfor %}{% endfor %}
  }
{% for r in range(R) %}{% for h in range(2) %}
  s{{ r }}_{{ h }} = sum{{ r }}_{{ h }};
{% endfor %}{% endfor %}
{% endif %}
  // One store in the text: with all that was fused into it, it is long.
  let count = select(0u, min(8u, p.cols - n), n < p.cols);
  var out = batch * p.rows * p.cols + m * p.out_m + n * p.out_n;
  for (var r = 0u; r < min({{ R }}u, p.rows - m); r++) {
    var low = s0_0;
    var high = s0_1;
    for (var j = 0u; j < count; j++) {
      store(out + j * p.out_n, low.x);
      low = vec4<f32>(low.yzw, high.x);
      high = high.yzwx;
    }
{% for r in range(R - 1) %}{% for h in range(2) %}
    s{{ r }}_{{ h }} = s{{ r + 1 }}_{{ h }};
{% endfor %}{% endfor %}
    out += p.out_m;
  }
}
