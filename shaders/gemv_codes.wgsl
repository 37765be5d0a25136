// Product of up to 8 rows with a quantized weight: packed codes are read once, a word at a time.
//
// reads   a               raw: element (m, k) of a at a_start + m * a_outer + k * a_k; load4 with a_vec
//         b, scale, zero  as codes.wgsl says
// writes  out  [rows, cols]; sums are f32
// params  rows <= ROWS, cols, depth > 0, words, scales, group, strides as above
// groups  ceil(cols / (4 * QUADS))
// norm    "rms" or "layer": a is the norm's input (a_vec, QUADS 1; see tile.wgsl), else ""
//
// WORKERS invocations walk k for 4 * QUADS columns, a word of each column a step; STEPS: how many, where all have as many, else 0.
// `ragged`: depth ends within a word.
{% import "tile.wgsl" as t %}
{% import "codes.wgsl" as q %}
{% set width = 32 // bits %}

{{ t.norm_pool(ROWS, norm, WORKERS) }}
var<workgroup> partial: array<vec4<f32>, {{ WORKERS * ROWS * QUADS }}>;

{{ entry(WORKERS) }}
  let n = group * {{ 4 * QUADS }}u;
{% for m in range(ROWS) %}
  let a{{ m }} = p.a_start + min({{ m }}u, p.rows - 1u) * p.a_outer;
{% endfor %}
{% for r in range(ROWS * QUADS) %}
  var s{{ r }} = vec4<f32>();
{% endfor %}
{% for c in range(4 * QUADS) %}
  let n{{ c }} = min(n + {{ c }}u, p.cols - 1u);
{% endfor %}
{{ t.norm_before(ROWS, norm, WORKERS, STEPS * width // 4) }}
{% for step in range(STEPS or 1) %}
{{ t.walk(WORKERS, width, STEPS, step) }}
{% for part in range(width // 4) %}
{{ t.norm_factors("k + %du" % (4 * part), part, norm, norm_weight, norm_bias) }}
{% endfor %}
    let g = k / p.group;
{% for c in range(4 * QUADS) %}
{{ q.halves("word%d" % c, "bitcast<u32>(load_b(n%d * p.words + k / %du))" % (c, width), bits) }}
    let g{{ c }} = n{{ c }} * p.scales + g;
    let zero{{ c }} = {{ q.zero("g%d" % c, bits, has_zero) }};
{% endfor %}
{% for quad in range(QUADS) %}
    let scale{{ quad }} = vec4<f32>({% for c in range(4) %}load_scale(g{{ 4 * quad + c }}){{ ", " if not loop.last }}{% endfor %});
{% endfor %}
{% for part in range(width // 4) %}
{% for c in range(4 * QUADS) %}
    let w{{ c }}_{{ part }} = {{ q.lifted("word%d" % c, part, bits) }} - ({{ q.base("zero%d" % c, part, bits) }});
{% endfor %}
{% endfor %}
{% for m in range(ROWS) %}
    {
{% for part in range(width // 4) %}
{% if a_vec %}
      var x{{ part }} = load4_a((a{{ m }} + k) / 4u + {{ part }}u);
{{ t.norm_rows("x%d" % part, m, part, norm, norm_weight, norm_bias) }}
{% elif ragged %}
      var x{{ part }} = vec4<f32>();
{% for i in range(4 * part, 4 * part + 4) %}
      if (k + {{ i }}u < p.depth) { x{{ part }}[{{ i % 4 }}] = load_a(a{{ m }} + (k + {{ i }}u) * p.a_k); }
{% endfor %}
{% else %}
      let at{{ part }} = a{{ m }} + (k + {{ 4 * part }}u) * p.a_k;
      var x{{ part }} = vec4<f32>(load_a(at{{ part }}), load_a(at{{ part }} + p.a_k), load_a(at{{ part }} + 2u * p.a_k), load_a(at{{ part }} + 3u * p.a_k));
{% endif %}
      x{{ part }} *= {{ q.steps(part, bits, True) }};
{% endfor %}
{% for quad in range(QUADS) %}
      {
        var sum = vec4<f32>();
{% for part in range(width // 4) %}
        sum += vec4<f32>({% for c in range(4) %}dot(x{{ part }}, w{{ 4 * quad + c }}_{{ part }}){{ ", " if not loop.last }}{% endfor %});
{% endfor %}
        s{{ m + ROWS * quad }} += sum * scale{{ quad }};
      }
{% endfor %}
    }
{% endfor %}
  }
{% endfor %}
{{ t.norm_after(ROWS, norm, WORKERS) }}
{{ t.finish_gemv(ROWS, WORKERS, QUADS) }}
    store(m * p.cols + n + c, sum);
  }
}
