// The patches that a convolution multiplies its kernels with, as rows: the rest is a matrix product.
//
// reads   x      raw: [N, C, H, W] at x_start + n * x_n + c * x_c + y * x_h + x * x_w
// writes  out    [N * positions, C * kernel_h * kernel_w], row-major, 0 where a tap is outside
// params  positions = out_h * out_w, depth = C * kernel_h * kernel_w, count = N * positions * depth
// groups  ceil(count / 64)

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let k = i % p.depth;
  let at = i / p.depth;
  let n = at / p.positions;
  let position = at % p.positions;
  let taps = p.kernel_h * p.kernel_w;
  let tap = k % taps;
  // In front of the input these wrap to huge numbers, which are not inside either.
  let y = (position / p.out_w) * p.stride_h + (tap / p.kernel_w) * p.dil_h - p.pad_h;
  let x = (position % p.out_w) * p.stride_w + (tap % p.kernel_w) * p.dil_w - p.pad_w;
  var v = 0.0;
  if (y < p.in_h && x < p.in_w) { v = load_x(p.x_start + n * p.x_n + (k / taps) * p.x_c + y * p.x_h + x * p.x_w); }
  store(i, v);
}
