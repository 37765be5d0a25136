// LayerNorm, GroupNorm and RMSNorm of rows: (x - mean) * rstd * weight + bias.
//
// reads      x              [rows, n], by row-major index; once when `held` > 0, else two or three times
//            weight, bias   (optional) one an element of the row; with `channels`, one a channel: element k of row r has
//                           channel (r % row_groups) * group_channels + k / spatial
// writes     out; or those of y, mean, rstd that are in `writes`
// params     those of rows.wgsl; eps; row_groups, group_channels, spatial
// constants  those of rows.wgsl; rms, weight, bias, channels, writes, held: elements a lane keeps in registers, 0 for any
//
// All in f32: the square of an f16 overflows f16. The mean is found first, then deviations from it, and their own mean
// corrects it: a mean far above the spread costs no digits.

{% from "rows.wgsl" import place, tree with context %}
fn add(a: f32, b: f32) -> f32 { return a + b; }
fn add2(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> { return a + b; }
var<workgroup> pool: array<f32, {{ workgroup }}>;
{% if not rms %}
var<workgroup> pool2: array<vec2<f32>, {{ workgroup }}>;
{% endif %}

{{ entry(workgroup) }}
{{ place() }}
  let count = f32(p.n);
{% if held %}
  let last = p.n - 1u;
{% for h in range(held) %}
  let in{{ h }} = lane + {{ h * lanes }}u < p.n;
  let x{{ h }} = load_x(base + min(lane + {{ h * lanes }}u, last));
{% endfor %}
{% endif %}
  var partial = 0.0;
{% macro each(body) %}
{% if held %}
{% for h in range(held) %}
  {{ body | replace("X", "x%d" % h) | replace("IN", "in%d" % h) }}
{% endfor %}
{% else %}
  for (var k = lane; k < p.n; k += {{ lanes }}u) {
    let x = load_x(base + k);
    {{ body | replace("X", "x") | replace("IN", "true") }}
  }
{% endif %}
{% endmacro %}
{% if rms %}
{{ each("partial += select(0.0, X * X, IN);") }}
{{ tree("pool", "partial", "squares", "add", true) }}
  let rstd = 1.0 / sqrt(squares / count + p.eps);
{% else %}
{{ each("partial += select(0.0, X, IN);") }}
{{ tree("pool", "partial", "sum", "add", true) }}
  let rough = sum / count;
  var partial2 = vec2<f32>();
{{ each("partial2 += select(vec2<f32>(), vec2<f32>(X - rough, (X - rough) * (X - rough)), IN);") }}
{{ tree("pool2", "partial2", "deviation", "add2", true) }}
  let off = deviation.x / count;
  let rstd = 1.0 / sqrt(max_nan(deviation.y / count - off * off, 0.0) + p.eps);
{% endif %}
  if (!live) { return; }
{% if "mean" in writes %}
  if (lane == 0u) { store_mean(row, rough + off); }
{% endif %}
{% if "rstd" in writes %}
  if (lane == 0u) { store_rstd(row, rstd); }
{% endif %}
{% set scaled = "x * rstd" if rms else "((x - rough) - off) * rstd" %}
{% macro finish(x, k) %}
    var y = {{ scaled | replace("x ", x ~ " ") }};
{% if channels and (weight or bias) %}
    let c = (row % p.row_groups) * p.group_channels + {{ k }} / p.spatial;
{% elif weight or bias %}
    let c = {{ k }};
{% endif %}
{% if weight %}
    y *= load_weight(c);
{% endif %}
{% if bias %}
    y += load_bias(c);
{% endif %}
    {{ "store" if writes == "out" else "store_y" }}(base + {{ k }}, y);
{% endmacro %}
{% if writes == "out" or "y" in writes %}
{% for h in range(held) %}
  if (in{{ h }}) {
    let k = lane + {{ h * lanes }}u;
{{ finish("x%d" % h, "k") }}
  }
{% endfor %}
{% if not held %}
  for (var k = lane; k < p.n; k += {{ lanes }}u) {
    let x = load_x(base + k);
{{ finish("x", "k") }}
  }
{% endif %}
{% endif %}
}
