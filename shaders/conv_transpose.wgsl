// Transposed convolution as a gather: every output sums the taps that reach it.
//
// reads   channels: x raw, [N, C, H, W] at x_start + n * x_n + c * x_c + y * x_h + x * x_w, and
//         weight raw, [C, out_c, kernel_h, kernel_w], contiguous from w_start; in_c, out_c count a group's channels.
//         Otherwise x holds products already summed over channels: [N, out_c, kernel_h, kernel_w, H, W] from x_start.
// writes  out     [N, O, positions], row-major; positions = out_h * out_w; sums are f32
// params  step_h, step_w: stride / gcd(stride, dilation), the distance of taps that reach the same output;
//         count = N * sets * out_c * positions; sets (groups)
// groups  ceil(count / 64)

// DENSE: dilation 1. FLAT: one row, with kernels of one row.

{% if not DENSE %}
// The first tap that reaches coordinate t (the padding added), or `step` when none does.
fn first_tap(t: u32, dilation: u32, stride: u32, step: u32) -> u32 {
  var k = 0u;
  while (k < step && fmod_i32(i32(t) - i32(k * dilation), i32(stride)) != 0) { k++; }
  return k;
}
{% endif %}

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let position = i % p.positions;
  let channel = (i / p.positions) % (p.sets * p.out_c);
  let n = i / (p.positions * p.sets * p.out_c);
{% for axis in (["w"] if FLAT else ["w", "h"]) %}
  let t_{{ axis }} = i32({{ "position" if FLAT else ("position % p.out_w" if axis == "w" else "position / p.out_w") }} + p.pad_{{ axis }});
{% if DENSE %}
  let k0_{{ axis }} = u32(t_{{ axis }}) % p.stride_{{ axis }};
{% else %}
  let k0_{{ axis }} = first_tap(u32(t_{{ axis }}), p.dil_{{ axis }}, p.stride_{{ axis }}, p.step_{{ axis }});
  if (k0_{{ axis }} >= p.step_{{ axis }}) { store(i, 0.0); return; }
{% endif %}
  // The input that the first tap meets; each further tap meets one `back` in front of it. Negative: outside.
  let at_{{ axis }} = (t_{{ axis }} - i32(k0_{{ axis }} * p.dil_{{ axis }})) / i32(p.stride_{{ axis }});
  let back_{{ axis }} = i32(p.step_{{ axis }} * p.dil_{{ axis }} / p.stride_{{ axis }});
{% endfor %}
  let taps = p.kernel_h * p.kernel_w;
  var sum = 0.0;
{% if channels %}
  let part = channel / p.out_c;
  let plane = p.x_start + n * p.x_n + part * p.in_c * p.x_c;
  let filters = p.w_start + (part * p.in_c * p.out_c + channel % p.out_c) * taps;
{% else %}
  let plane = p.x_start + (n * p.out_c + channel) * taps * p.in_h * p.in_w;
{% endif %}
{% if FLAT %}
  let y = 0;
  let ky = 0u;
  {
{% else %}
  var y = at_h;
  for (var ky = k0_h; ky < p.kernel_h && y >= 0; ky += p.step_h) {
{% endif %}
    if (u32(y) < p.in_h) {
      var x = at_w;
      for (var kx = k0_w; kx < p.kernel_w && x >= 0; kx += p.step_w) {
        if (u32(x) < p.in_w) {
          let tap = ky * p.kernel_w + kx;
{% if channels %}
          var at = plane + u32(y) * p.x_h + u32(x) * p.x_w;
          var filter_at = filters + tap;
          for (var c = 0u; c < p.in_c; c++) {
            sum = fma(load_x(at), load_weight(filter_at), sum);
            at += p.x_c;
            filter_at += p.out_c * taps;
          }
{% else %}
          sum += load_x(plane + (tap * p.in_h + u32(y)) * p.in_w + u32(x));
{% endif %}
        }
        x -= back_w;
      }
    }
{% if not FLAT %}
    y -= back_h;
{% endif %}
  }
  store(i, sum);
}
