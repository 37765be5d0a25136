// Transposed convolution as a gather: every output sums the taps that reach it.
//
// reads   channels: x raw, [N, C, H, W] at x_start + n * x_n + c * x_c + y * x_h + x * x_w, and
//         weight raw, [C, out_c, kernel_h, kernel_w], contiguous from w_start; in_c, out_c count a group's channels.
//         Otherwise x holds products already summed over channels: [N, out_c, kernel_h, kernel_w, H, W] from x_start.
// writes  out     [N, O, positions], row-major; positions = out_h * out_w; sums are f32
// params  step_h, step_w: stride / gcd(stride, dilation), the distance of taps that reach the same output;
//         count = N * sets * out_c * positions; sets (groups)
// groups  ceil(count / 64)

// The first tap that reaches coordinate t (the padding added), or `step` when none does.
fn first_tap(t: u32, dilation: u32, stride: u32, step: u32) -> u32 {
  var k = 0u;
  while (k < step && (i32(t) - i32(k * dilation)) % i32(stride) != 0) { k++; }
  return k;
}

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let position = i % p.positions;
  let channel = (i / p.positions) % (p.sets * p.out_c);
  let n = i / (p.positions * p.sets * p.out_c);
  let ty = position / p.out_w + p.pad_h;
  let tx = position % p.out_w + p.pad_w;
  let ky0 = first_tap(ty, p.dil_h, p.stride_h, p.step_h);
  let kx0 = first_tap(tx, p.dil_w, p.stride_w, p.step_w);
  let taps = p.kernel_h * p.kernel_w;
  var sum = 0.0;
{% if channels %}
  let part = channel / p.out_c;
  let plane = p.x_start + n * p.x_n + part * p.in_c * p.x_c;
  let filters = p.w_start + (part * p.in_c * p.out_c + channel % p.out_c) * taps;
{% else %}
  let plane = p.x_start + (n * p.out_c + channel) * taps * p.in_h * p.in_w;
{% endif %}
  if (ky0 < p.step_h && kx0 < p.step_w) {
    // Further taps read further left, and above: once in front of the input, all the rest is too.
    for (var ky = ky0; ky < p.kernel_h && ky * p.dil_h <= ty; ky += p.step_h) {
      let y = (ty - ky * p.dil_h) / p.stride_h;
      if (y >= p.in_h) { continue; }
      for (var kx = kx0; kx < p.kernel_w && kx * p.dil_w <= tx; kx += p.step_w) {
        let x = (tx - kx * p.dil_w) / p.stride_w;
        if (x >= p.in_w) { continue; }
        let tap = ky * p.kernel_w + kx;
{% if channels %}
        var at = plane + y * p.x_h + x * p.x_w;
        var filter_at = filters + tap;
        for (var c = 0u; c < p.in_c; c++) {
          sum = fma(load_x(at), load_weight(filter_at), sum);
          at += p.x_c;
          filter_at += p.out_c * taps;
        }
{% else %}
        sum += load_x(plane + (tap * p.in_h + y) * p.in_w + x);
{% endif %}
      }
    }
  }
  store(i, sum);
}
