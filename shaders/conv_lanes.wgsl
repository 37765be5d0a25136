// Convolution for processors that stand in for a GPU: an invocation sums BLOCK output channels at SPAN neighbouring
// positions of a row. There a load costs as much as dozens of multiplications, so the 4 invocations of a quad, which have
// neighbouring spans, share those of the weights: each loads a quarter, and broadcasts it.
//
// reads   x       raw: [N, C, H, W] at x_start + n * x_n + c * x_c + y * x_h + x * x_w
//         weight  load4 of [sets, in_c, kernel_h, KW, out_c], aligned; in_c and out_c count a group's channels; out_c is
//                 divisible by 4
// writes  out     [N, O, out_h, out_w], row-major; sums are f32
// params  blocks: of BLOCK channels a group; sets (groups); spans: of SPAN positions a row; picture: spans of one, rounded
//         up to 4; planes = N * sets * blocks; w_start, last_quad: of weight, in fours
// groups  ceil(planes * picture / 64)
//
// DEEP: the sums of p.run channels at a time are added to those before, so that a long row of sums loses no digits.
// BLOCK is a multiple of 16, SPAN of 4. COLUMNS: the inputs of a row that a span needs, counted from its first one.
{% set parts = BLOCK // 16 %}
{% set halves = SPAN // 4 %}

{{ entry(64) }}
  // What is over computes the last span or block once more, for it has to broadcast, and stores nothing.
  let i = group * 64u + lid;
  let span = min(i % p.picture, p.out_h * p.spans - 1u);
  let plane = min(i / p.picture, p.planes - 1u);
  let first = plane % p.blocks * {{ BLOCK }}u;
  let part = plane / p.blocks % p.sets;
  let n = plane / (p.blocks * p.sets);
  let ox = span % p.spans * {{ SPAN }}u;
  let oy = span / p.spans;
{% for column in COLUMNS %}
  // In front of the row these wrap to huge numbers, which are not inside either.
  let in{{ column }} = ox * {{ STRIDE }}u + {{ column }}u - p.pad_w < p.in_w;
  let to{{ column }} = min(ox * {{ STRIDE }}u + {{ column }}u - p.pad_w, p.in_w - 1u) * p.x_w;
{% endfor %}
  var from_x = p.x_start + n * p.x_n + part * p.in_c * p.x_c;
  var q = p.w_start + (part * p.in_c * p.kernel_h * {{ KW }}u * p.out_c + first) / 4u + lid % 4u;
{% for r in range(BLOCK) %}{% for h in range(halves) %}
  var s{{ r }}_{{ h }} = vec4<f32>();
{% if DEEP %}
  var sum{{ r }}_{{ h }} = vec4<f32>();
{% endif %}
{% endfor %}{% endfor %}
{% if DEEP %}
  for (var c0 = 0u; c0 < p.in_c; c0 += p.run) {
  for (var c = c0; c < min(p.in_c, c0 + p.run); c++) {
{% else %}
  for (var c = 0u; c < p.in_c; c++) {
{% endif %}
    for (var ky = 0u; ky < p.kernel_h; ky++) {
      let y = oy * p.stride_h + ky * p.dil_h - p.pad_h;
      let row = from_x + min(y, p.in_h - 1u) * p.x_h;
      let inside = y < p.in_h;
{% for column in COLUMNS %}
      let x{{ column }} = select(0.0, load_x(row + to{{ column }}), inside && in{{ column }});
{% endfor %}
{% for k in range(KW) %}
      {
{% for h in range(halves) %}
        let v{{ h }} = vec4<f32>({% for j in range(4) %}x{{ (4 * h + j) * STRIDE + k * DILATION }}{{ ", " if j < 3 }}{% endfor %});
{% endfor %}
{% for part in range(parts) %}
        let w{{ part }} = load4_weight(min(q + {{ 4 * part }}u, p.last_quad));
{% endfor %}
{% for r in range(BLOCK) %}
        let b{{ r }} = vec4<f32>(quadBroadcast(w{{ r // 16 }}[{{ r % 4 }}], {{ r // 4 % 4 }}u));
{% for h in range(halves) %}
        s{{ r }}_{{ h }} = fma(v{{ h }}, b{{ r }}, s{{ r }}_{{ h }});
{% endfor %}
{% endfor %}
        q += p.out_c / 4u;
      }
{% endfor %}
    }
    from_x += p.x_c;
  }
{% if DEEP %}
{% for r in range(BLOCK) %}{% for h in range(halves) %}
  sum{{ r }}_{{ h }} += s{{ r }}_{{ h }};
  s{{ r }}_{{ h }} = vec4<f32>();
{% endfor %}{% endfor %}
  }
{% for r in range(BLOCK) %}{% for h in range(halves) %}
  s{{ r }}_{{ h }} = sum{{ r }}_{{ h }};
{% endfor %}{% endfor %}
{% endif %}
  let is_own = i % p.picture == span && i / p.picture == plane;
  let count = select(0u, min({{ SPAN }}u, p.out_w - ox), is_own);
  // One store in the text: with all that was fused into it, it is long.
  var out = (((n * p.sets + part) * p.out_c + first) * p.out_h + oy) * p.out_w + ox;
  for (var r = 0u; r < min({{ BLOCK }}u, p.out_c - first); r++) {
{% for h in range(halves) %}
    var left{{ h }} = s0_{{ h }};
{% endfor %}
    for (var j = 0u; j < count; j++) {
      store(out + j, left0.x);
{% for h in range(halves) %}
      left{{ h }} = {{ "vec4<f32>(left%d.yzw, left%d.x)" % (h, h + 1) if h + 1 < halves else "left%d.yzwx" % h }};
{% endfor %}
    }
{% for r in range(BLOCK - 1) %}{% for h in range(halves) %}
    s{{ r }}_{{ h }} = s{{ r + 1 }}_{{ h }};
{% endfor %}{% endfor %}
    out += p.out_h * p.out_w;
  }
}
