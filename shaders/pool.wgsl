// Maximum or mean over windows of a picture, one invocation a result.
//
// reads   x        [planes, in_h, in_w] by row-major index
// writes  out      [planes, out_h, out_w]; with INDICES also out_indices, where in its plane the maximum lies
// params  count = planes * out_h * out_w; kernel, stride, pad, dil (MODE max only) of both axes;
//         MODE avg: divisor, or 0 for the window's own size, its padding included when count_pad is 1;
//         MODE adaptive: window o of an axis is floor(o * in / out) to ceil((o + 1) * in / out)
// groups  ceil(count / 64)

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let oy = i / p.out_w % p.out_h;
  let ox = i % p.out_w;
  let plane = i / (p.out_h * p.out_w) * (p.in_h * p.in_w);
{% if MODE == "max" %}
  var y0 = i32(oy * p.stride_h) - i32(p.pad_h);
  var x0 = i32(ox * p.stride_w) - i32(p.pad_w);
  let y1 = u32(min(y0 + i32((p.kernel_h - 1u) * p.dil_h) + 1, i32(p.in_h)));
  let x1 = u32(min(x0 + i32((p.kernel_w - 1u) * p.dil_w) + 1, i32(p.in_w)));
  while (y0 < 0) { y0 += i32(p.dil_h); }
  while (x0 < 0) { x0 += i32(p.dil_w); }
  var best = -inf();
  var at = u32(y0) * p.in_w + u32(x0);
  for (var y = u32(y0); y < y1; y += p.dil_h) {
    for (var x = u32(x0); x < x1; x += p.dil_w) {
      let v = load_x(plane + y * p.in_w + x);
      // The first of equal maxima, but the last NaN, as torch has it.
      if (is_nan(v) || (v > best && !is_nan(best))) { best = v; at = y * p.in_w + x; }
    }
  }
  store(i, best);
{% if INDICES %}
  store_indices(i, i32(at));
{% endif %}
{% else %}
{% if MODE == "adaptive" %}
  let y0 = oy * p.in_h / p.out_h;
  let x0 = ox * p.in_w / p.out_w;
  let y1 = ((oy + 1u) * p.in_h + p.out_h - 1u) / p.out_h;
  let x1 = ((ox + 1u) * p.in_w + p.out_w - 1u) / p.out_w;
  let divisor = (y1 - y0) * (x1 - x0);
{% else %}
  // The window, first with its padding, then without.
  let top = i32(oy * p.stride_h) - i32(p.pad_h);
  let left = i32(ox * p.stride_w) - i32(p.pad_w);
  let bottom = min(top + i32(p.kernel_h), i32(p.in_h + p.pad_h));
  let right = min(left + i32(p.kernel_w), i32(p.in_w + p.pad_w));
  let y0 = u32(max(top, 0));
  let x0 = u32(max(left, 0));
  let y1 = u32(max(min(bottom, i32(p.in_h)), i32(y0)));
  let x1 = u32(max(min(right, i32(p.in_w)), i32(x0)));
  var divisor = select((y1 - y0) * (x1 - x0), u32((bottom - top) * (right - left)), p.count_pad == 1u);
{% endif %}
  var sum = 0.0;
  for (var y = y0; y < y1; y++) {
    for (var x = x0; x < x1; x++) { sum += load_x(plane + y * p.in_w + x); }
  }
{% if MODE == "adaptive" %}
  store(i, sum / f32(divisor));
{% else %}
  let by = select(f32(divisor), p.divisor, p.divisor != 0.0);
  store(i, select(sum / by, 0.0, y0 >= y1 || x0 >= x1));
{% endif %}
{% endif %}
}
