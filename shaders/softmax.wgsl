// Softmax, its logarithm, or the logarithm of the sum of exponentials along one axis.
//
// reads      x     [outer, n, inner], by row-major index; once when `held` > 0, else three times
// writes     out   as x; for op lse a number a row
// params     those of rows.wgsl
// constants  those of rows.wgsl; op (softmax, log_softmax, lse), held: elements a lane keeps in registers, 0 for any number
//
// A row with NaN, with +inf, or of -inf alone gives NaN throughout, as in torch (lse: NaN, inf, -inf). That is written
// out, because drivers assume that neither NaN nor infinities occur. Idle lanes repeat the row's last element for the
// maximum, which changes nothing, and add nothing to the sum.

{% from "rows.wgsl" import place, tree with context %}
fn add(a: f32, b: f32) -> f32 { return a + b; }
// exp of what is at most 0: from -120 on it is 0 in f32, and -inf never reaches the driver's exp.
fn exp_falling(d: f32) -> f32 { return exp(max(d, -120.0)); }
var<workgroup> pool: array<f32, {{ workgroup }}>;

{{ entry(workgroup) }}
{{ place() }}
{% if held %}
  let last = p.n - 1u;
{% for h in range(held) %}
  let x{{ h }} = load_x(base + min(lane + {{ h * lanes }}u, last) * step);
{% endfor %}
  var high = x0;
{% for h in range(1, held) %}
  high = max_nan(high, x{{ h }});
{% endfor %}
{% else %}
  var high = load_x(base + min(lane, p.n - 1u) * step);
  for (var k = lane + {{ lanes }}u; k < p.n; k += {{ lanes }}u) { high = max_nan(high, load_x(base + k * step)); }
{% endif %}
{{ tree("pool", "high", "top", "max_nan") }}
  var partial = 0.0;
{% if held %}
{% for h in range(held) %}
  let e{{ h }} = exp_falling(x{{ h }} - top);
  partial += select(0.0, e{{ h }}, lane + {{ h * lanes }}u < p.n);
{% endfor %}
{% else %}
  for (var k = lane; k < p.n; k += {{ lanes }}u) { partial += exp_falling(load_x(base + k * step) - top); }
{% endif %}
{{ tree("pool", "partial", "sum", "add", true) }}
  if (!live) { return; }
  let broken = is_inf(top) || is_nan(top);
{% if op == "lse" %}
  if (lane == 0u) { store(row, select(top + log(sum), top, broken)); }
{% else %}
{% if op == "softmax" %}
  let scale = select(1.0 / sum, nan(), broken);
{% else %}
  let shift = select(log(sum), nan(), broken);
{% endif %}
{% for h in range(held) %}
  if (lane + {{ h * lanes }}u < p.n) {
    store(base + (lane + {{ h * lanes }}u) * step, {{ "select(e%d * scale, scale, broken)" % h if op == "softmax" else "select((x%d - top) - shift, shift, broken)" % h }});
  }
{% endfor %}
{% if not held %}
  for (var k = lane; k < p.n; k += {{ lanes }}u) {
    let d = load_x(base + k * step) - top;
    store(base + k * step, {{ "select(exp_falling(d) * scale, scale, broken)" if op == "softmax" else "select(d - shift, shift, broken)" }});
  }
{% endif %}
{% endif %}
}
