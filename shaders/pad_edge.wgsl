// A picture with a border of itself, mirrored (REFLECT) or its edge repeated; negative borders cut.
//
// reads   x      [planes, in_h, in_w] by row-major index
// writes  out    [planes, out_h, out_w]
// params  count = planes * out_h * out_w; before_h, before_w: the border in front (i32)
// groups  ceil(count / 64)

fn source(o: u32, before: i32, size: u32) -> u32 {
  let last = i32(size) - 1;
{% if REFLECT %}
  return u32(last - abs(last - abs(i32(o) - before)));
{% else %}
  return u32(clamp(i32(o) - before, 0, last));
{% endif %}
}

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let y = source(i / p.out_w % p.out_h, p.before_h, p.in_h);
  let x = source(i % p.out_w, p.before_w, p.in_w);
  store(i, load_x((i / (p.out_h * p.out_w) * p.in_h + y) * p.in_w + x));
}
