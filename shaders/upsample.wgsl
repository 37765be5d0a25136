// A picture at another size, one invocation a result, by torch's rules for coordinates (all in float32).
//
// reads   x      [planes, in_h, in_w] by row-major index
// writes  out    [planes, out_h, out_w]
// params  count = planes * out_h * out_w; scale_h, scale_w: input steps for one output step
// groups  ceil(count / 64)
//
// MODE nearest: element floor(o * scale). MODE linear: between the two elements around o * scale (corners aligned), or
// (o + 0.5) * scale - 0.5 (HALF).

{% if MODE == "linear" %}
// The element before and the share of the one behind it.
fn source(o: u32, size: u32, out: u32, scale: f32) -> vec2<f32> {
  if (out == size) { return vec2<f32>(f32(o), 0.0); }
{% if HALF %}
  let at = max((f32(o) + 0.5) * scale - 0.5, 0.0);
{% else %}
  let at = f32(o) * scale;
{% endif %}
  let before = min(floor(at), f32(size - 1u));
  return vec2<f32>(before, clamp(at - before, 0.0, 1.0));
}
{% endif %}

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  let oy = i / p.out_w % p.out_h;
  let ox = i % p.out_w;
  let plane = i / (p.out_h * p.out_w) * (p.in_h * p.in_w);
{% if MODE == "nearest" %}
  let y = min(u32(floor(f32(oy) * p.scale_h)), p.in_h - 1u);
  let x = min(u32(floor(f32(ox) * p.scale_w)), p.in_w - 1u);
  store(i, load_x(plane + y * p.in_w + x));
{% else %}
  let sy = source(oy, p.in_h, p.out_h, p.scale_h);
  let sx = source(ox, p.in_w, p.out_w, p.scale_w);
  let row = plane + u32(sy.x) * p.in_w;
  let below = plane + min(u32(sy.x) + 1u, p.in_h - 1u) * p.in_w;
  let x = u32(sx.x);
  let right = min(x + 1u, p.in_w - 1u);
  let upper = (1.0 - sx.y) * load_x(row + x) + sx.y * load_x(row + right);
  let lower = (1.0 - sx.y) * load_x(below + x) + sx.y * load_x(below + right);
  store(i, (1.0 - sy.y) * upper + sy.y * lower);
{% endif %}
}
