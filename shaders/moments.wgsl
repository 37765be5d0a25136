// Variance of a row, and its mean: corrected two-pass, so that a large mean costs no digits.
//
// reads      x          [outer, n, inner], by row-major index; n > 0
// writes     out        variance a row (`pair` false), or variance and mean
// params     those of rows.wgsl; divisor = max(0, n - correction)
// constants  those of rows.wgsl; pair

{% from "rows.wgsl" import place, tree with context %}
fn add(a: f32, b: f32) -> f32 { return a + b; }
fn add2(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> { return a + b; }
var<workgroup> pool: array<f32, {{ workgroup }}>;
var<workgroup> pool2: array<vec2<f32>, {{ workgroup }}>;

{{ entry(workgroup) }}
{{ place() }}
  var partial = 0.0;
  for (var k = lane; k < p.n; k += {{ lanes }}u) { partial += load_x(base + k * step); }
{{ tree("pool", "partial", "sum", "add", true) }}
  let count = f32(p.n);
  let rough = sum / count;
  var partial2 = vec2<f32>();
  for (var k = lane; k < p.n; k += {{ lanes }}u) {
    let d = load_x(base + k * step) - rough;
    partial2 += vec2<f32>(d, d * d);
  }
{{ tree("pool2", "partial2", "deviation", "add2", true) }}
  if (live && lane == 0u) {
    let squares = select(max(deviation.y - deviation.x * deviation.x / count, 0.0), nan(), is_nan(deviation.y));
    var variance = squares / p.divisor;
    if (p.divisor == 0.0) { variance = select(inf(), nan(), squares == 0.0 || is_nan(squares)); }
{% if pair %}
    store_variance(row, variance);
    // An infinite element makes every deviation infinite or NaN; the mean is what the sum says.
    store_mean(row, select(rough + deviation.x / count, rough, is_nan(deviation.x)));
{% else %}
    store(row, variance);
{% endif %}
  }
}
