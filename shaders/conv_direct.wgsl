// Convolution without staging: an invocation sums BLOCK output channels at 4 neighbouring positions of a row (WIDE) or
// at one. For few channels, depthwise and grouped kernels, where a tile would be mostly empty.
//
// reads   x       raw: [N, C, H, W] at x_start + n * x_n + c * x_c + y * x_h + x * x_w
//         weight  [O, in_c, kernel_h, kernel_w], contiguous from w_start; in_c and out_c count a group's channels.
//                 PACKED: load4 of [sets, in_c, kernel_h, kernel_w, out_c] instead, out_c divisible by 4
// writes  out     [N, O, out_h, out_w], row-major; sums are f32
// params  blocks: of BLOCK channels a group; sets (groups); spans: of 4 positions (1) a row;
//         count = N * sets * blocks * out_h * spans
// groups  ceil(count / 64)
//
// DEEP: the sums of p.run channels at a time are added to those before, so that a long row of sums loses no digits.
// SLIDE (stride and dilation 1 along a row): the 4 inputs of the next tap are those of the last one and one more.
{% set vector = "vec4<f32>" if WIDE else "f32" %}

// Element x of a row, 0 outside; in front of it x has wrapped to a huge number.
fn at(row: u32, x: u32) -> f32 {
  return select(0.0, load_x(row + min(x, p.in_w - 1u) * p.x_w), x < p.in_w);
}

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let ox = (i % p.spans) * {{ 4 if WIDE else 1 }}u;
  let oy = (i / p.spans) % p.out_h;
  let block = (i / (p.spans * p.out_h)) % (p.blocks * p.sets);
  let n = i / (p.spans * p.out_h * p.blocks * p.sets);
  let part = block / p.blocks;
  let first = (block % p.blocks) * {{ BLOCK }}u;
  let x0 = ox * p.stride_w - p.pad_w;
  let y0 = i32(oy * p.stride_h) - i32(p.pad_h);
  // The rows of the kernel that fall inside the input.
  let ky0 = select(0u, (u32(-y0) + p.dil_h - 1u) / p.dil_h, y0 < 0);
  let ky1 = select(0u, min(p.kernel_h, (u32(i32(p.in_h) - y0) + p.dil_h - 1u) / p.dil_h), y0 < i32(p.in_h));
  let taps = p.kernel_h * p.kernel_w;
{% for r in range(BLOCK) %}
  var s{{ r }} = {{ vector }}();
{% if DEEP %}
  var sum{{ r }} = {{ vector }}();
{% endif %}
{% if not PACKED %}
  // Past the group's last channel the last one is computed again, and not stored.
  let w{{ r }} = p.w_start + (part * p.out_c + min(first + {{ r }}u, p.out_c - 1u)) * p.in_c * taps;
{% endif %}
{% endfor %}
  var plane = p.x_start + n * p.x_n + part * p.in_c * p.x_c;
{% if DEEP %}
  for (var c0 = 0u; c0 < p.in_c; c0 += p.run) {
  for (var c = c0; c < min(p.in_c, c0 + p.run); c++) {
{% else %}
  for (var c = 0u; c < p.in_c; c++) {
{% endif %}
    for (var ky = ky0; ky < ky1; ky++) {
      let row = plane + (u32(y0) + ky * p.dil_h) * p.x_h;
      let tap = c * taps + ky * p.kernel_w;
{% if SLIDE %}
      var v = vec4<f32>(0.0, at(row, x0), at(row, x0 + 1u), at(row, x0 + 2u));
{% endif %}
      for (var kx = 0u; kx < p.kernel_w; kx++) {
{% if SLIDE %}
        v = vec4<f32>(v.yzw, at(row, x0 + kx + 3u));
{% else %}
        let x = x0 + kx * p.dil_w;
{% if WIDE %}
        let v = vec4<f32>(at(row, x), at(row, x + p.stride_w), at(row, x + 2u * p.stride_w), at(row, x + 3u * p.stride_w));
{% else %}
        let v = at(row, x);
{% endif %}
{% endif %}
{% if PACKED %}
        let q = (p.w_start + (part * p.in_c * taps + tap + kx) * p.out_c + first) / 4u;
{% for b in range(BLOCK // 4) %}
        let w{{ b }} = load4_weight({{ "q" if b == 0 else "min(q + %du, p.last_quad)" % b }});
{% for r in range(4) %}
        s{{ 4 * b + r }} = fma(v, {{ vector }}(w{{ b }}[{{ r }}]), s{{ 4 * b + r }});
{% endfor %}
{% endfor %}
{% else %}
{% for r in range(BLOCK) %}
        s{{ r }} = fma(v, {{ vector }}(load_weight(w{{ r }} + tap + kx)), s{{ r }});
{% endfor %}
{% endif %}
      }
    }
    plane += p.x_c;
  }
{% if DEEP %}
{% for r in range(BLOCK) %}
  sum{{ r }} += s{{ r }};
  s{{ r }} = {{ vector }}();
{% endfor %}
  }
{% for r in range(BLOCK) %}
  s{{ r }} = sum{{ r }};
{% endfor %}
{% endif %}
  // One store in the text: with all that was fused into it, it is long.
  var out = (((n * p.sets + part) * p.out_c + first) * p.out_h + oy) * p.out_w + ox;
  for (var r = 0u; r < min({{ BLOCK }}u, p.out_c - first); r++) {
{% if WIDE %}
    var left = s0;
    for (var j = 0u; j < min(4u, p.out_w - ox); j++) {
      store(out + j, left.x);
      left = left.yzwx;
    }
{% else %}
    store(out, s0);
{% endif %}
{% for r in range(BLOCK - 1) %}
    s{{ r }} = s{{ r + 1 }};
{% endfor %}
    out += p.out_h * p.out_w;
  }
}
