// A picture at another size, one invocation a result, by torch's rules for coordinates.
//
// reads   x      [planes, in_h, in_w] by row-major index
// writes  out    [planes, out_h, out_w]
// params  count = planes * out_h * out_w
//         nearest: scale_h, scale_w: input steps for one output step
//         others: num_h, off_h, den_h and those of w: output o lies at (o * num + off) / den, between -1 and 2**31 / den
// groups  ceil(count / 64)
//
// MODE nearest: element floor(o * scale), in float32 as torch rounds it. MODE linear: between the two elements around
// the place. MODE cubic: the four elements around it, by Keys' kernel with A = -0.75; places outside the picture are its
// border. Places are fractions of integers, so that a share of a neighbour is exact to its last digit however large the
// picture is.

{% if MODE != "nearest" %}
struct Place { before: i32, share: f32 }
// The element before, and how far the place lies towards the one behind it.
fn source(o: u32, size: u32, num: u32, off: i32, den: u32) -> Place {
  let at = i32(o * num) + off;
{% if MODE == "linear" %}
  if (at < 0) { return Place(0, 0.0); }
{% else %}
  if (at < 0) { return Place(-1, f32(at + i32(den)) / f32(den)); }
{% endif %}
  let before = u32(at) / den;
  if (before >= size) { return Place(i32(size) - 1, 1.0); }
  return Place(i32(before), f32(u32(at) - before * den) / f32(den));
}
{% endif %}

{% if MODE == "cubic" %}
// Keys' kernel at distances t and 1 + t, in factors: nothing cancels.
fn near(t: f32) -> f32 { return (1.0 - t) * (1.0 + t * (1.0 - 1.25 * t)); }
fn far(t: f32) -> f32 { return -0.75 * t * (1.0 - t) * (1.0 - t); }
fn weights(t: f32) -> array<f32, 4> { return array<f32, 4>(far(t), near(t), near(1.0 - t), far(1.0 - t)); }
fn inside(before: i32, step: i32, size: u32) -> u32 { return u32(clamp(before + step, 0, i32(size) - 1)); }
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
  let sy = source(oy, p.in_h, p.num_h, p.off_h, p.den_h);
  let sx = source(ox, p.in_w, p.num_w, p.off_w, p.den_w);
{% if MODE == "cubic" %}
  let wx = weights(sx.share);
  let wy = weights(sy.share);
  var sum = 0.0;
  for (var dy = 0; dy < 4; dy++) {
    let row = plane + inside(sy.before, dy - 1, p.in_h) * p.in_w;
    var line = 0.0;
    for (var dx = 0; dx < 4; dx++) { line += wx[dx] * load_x(row + inside(sx.before, dx - 1, p.in_w)); }
    sum += wy[dy] * line;
  }
  store(i, sum);
{% else %}
  let row = plane + u32(sy.before) * p.in_w;
  let below = plane + min(u32(sy.before) + 1u, p.in_h - 1u) * p.in_w;
  let x = u32(sx.before);
  let right = min(x + 1u, p.in_w - 1u);
  let upper = (1.0 - sx.share) * load_x(row + x) + sx.share * load_x(row + right);
  let lower = (1.0 - sx.share) * load_x(below + x) + sx.share * load_x(below + right);
  store(i, (1.0 - sy.share) * upper + sy.share * lower);
{% endif %}
{% endif %}
}
