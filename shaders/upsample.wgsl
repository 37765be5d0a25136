// A picture at another size, one invocation a result, by torch's rules for coordinates (all in float32).
//
// reads   x      [planes, in_h, in_w] by row-major index
// writes  out    [planes, out_h, out_w]
// params  count = planes * out_h * out_w; scale_h, scale_w: input steps for one output step
// groups  ceil(count / 64)
//
// MODE nearest: element floor(o * scale). MODE linear: between the two elements around o * scale (corners aligned), or
// (o + 0.5) * scale - 0.5 (HALF). MODE cubic: the four elements around it, by Keys' kernel with A = -0.75; places
// outside the picture are its border.

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

{% if MODE == "cubic" %}
// The element before and the place between it and the one behind.
fn source(o: u32, size: u32, scale: f32) -> vec2<f32> {
{% if HALF %}
  let at = (f32(o) + 0.5) * scale - 0.5;
{% else %}
  let at = f32(o) * scale;
{% endif %}
  let before = min(floor(at), f32(size - 1u));
  return vec2<f32>(before, clamp(at - before, 0.0, 1.0));
}
fn near(x: f32) -> f32 { return (1.25 * x - 2.25) * x * x + 1.0; }
fn far(x: f32) -> f32 { return ((-0.75 * x + 3.75) * x - 6.0) * x + 3.0; }
fn weights(t: f32) -> array<f32, 4> { return array<f32, 4>(far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)); }
fn inside(before: f32, step: i32, size: u32) -> u32 { return u32(clamp(i32(before) + step, 0, i32(size) - 1)); }
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
{% elif MODE == "cubic" %}
  let sy = source(oy, p.in_h, p.scale_h);
  let sx = source(ox, p.in_w, p.scale_w);
  let wx = weights(sx.y);
  let wy = weights(sy.y);
  var sum = 0.0;
  for (var dy = 0; dy < 4; dy++) {
    let row = plane + inside(sy.x, dy - 1, p.in_h) * p.in_w;
    var line = 0.0;
    for (var dx = 0; dx < 4; dx++) { line += wx[dx] * load_x(row + inside(sx.x, dx - 1, p.in_w)); }
    sum += wy[dy] * line;
  }
  store(i, sum);
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
