// Convolution, one invocation for BLOCK output channels at one position: few channels, depthwise, grouped.
//
// reads   x       raw: [N, C, H, W] at x_start + n * x_n + c * x_c + y * x_h + x * x_w
//         weight  raw: [O, in_c, kernel_h, kernel_w], contiguous from w_start; in_c and out_c count a group's channels
// writes  out     [N, O, positions], row-major; positions = out_h * out_w; sums are f32
// params  also blocks (of BLOCK channels) a group, sets (groups), count = N * sets * blocks * positions
// groups  ceil(count / 64)

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let position = i % p.positions;
  let block = (i / p.positions) % (p.blocks * p.sets);
  let n = i / (p.positions * p.blocks * p.sets);
  let part = block / p.blocks;
  let first = (block % p.blocks) * {{ BLOCK }}u;
  let y0 = i32((position / p.out_w) * p.stride_h) - i32(p.pad_h);
  let x0 = i32((position % p.out_w) * p.stride_w) - i32(p.pad_w);
  // The taps that fall inside the input.
  let ky0 = select(0u, (u32(-y0) + p.dil_h - 1u) / p.dil_h, y0 < 0);
  let kx0 = select(0u, (u32(-x0) + p.dil_w - 1u) / p.dil_w, x0 < 0);
  let ky1 = select(0u, min(p.kernel_h, (u32(i32(p.in_h) - y0) + p.dil_h - 1u) / p.dil_h), y0 < i32(p.in_h));
  let kx1 = select(0u, min(p.kernel_w, (u32(i32(p.in_w) - x0) + p.dil_w - 1u) / p.dil_w), x0 < i32(p.in_w));
  let taps = p.kernel_h * p.kernel_w;
  // Past the group's last channel the last one is computed again, and not stored.
{% for r in range(BLOCK) %}
  let w{{ r }} = p.w_start + (part * p.out_c + min(first + {{ r }}u, p.out_c - 1u)) * p.in_c * taps;
  var s{{ r }} = 0.0;
{% endfor %}
  // Coordinates in front of the input wrap around, and back when the tap is added.
  var plane = p.x_start + n * p.x_n + part * p.in_c * p.x_c + u32(y0) * p.x_h + u32(x0) * p.x_w;
  for (var c = 0u; c < p.in_c; c++) {
    for (var ky = ky0; ky < ky1; ky++) {
      let row = plane + ky * p.dil_h * p.x_h;
      let tap = c * taps + ky * p.kernel_w;
      for (var kx = kx0; kx < kx1; kx++) {
        let v = load_x(row + kx * p.dil_w * p.x_w);
{% for r in range(BLOCK) %}
        s{{ r }} = fma(v, load_weight(w{{ r }} + tap + kx), s{{ r }});
{% endfor %}
      }
    }
    plane += p.x_c;
  }
  let out = ((n * p.sets + part) * p.out_c + first) * p.positions + position;
{% if BLOCK == 1 %}
  store(out, s0);
{% else %}
  // One store in the text: with all that was fused into it, it is long.
  var left = vec4<f32>(s0, s1, s2, s3);
  for (var r = 0u; r < min(4u, p.out_c - first); r++) {
    store(out + r * p.positions, left.x);
    left = left.yzwx;
  }
{% endif %}
}
