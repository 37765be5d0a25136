// Rows rounded to the 256 values that an 8-bit code, a scale and a zero point of the row's own can give.
//
// reads   x    [rows, depth] by row-major index
//         bottom, top  with `given`: one number each, the least and the greatest value of all of x
// writes  out  [rows, depth]: (code - zero) * scale
// params  depth > 0, eps: the least scale, a normal number; with `given`, count: elements of x
// groups  rows; with `given`, pieces of depth elements, the last of which may be shorter
//
// Bit for bit what torchao's choose_qparams_affine (asymmetric, -128 … 127), quantize_affine and dequantize_affine give in
// eager mode: a code that differs by one where two are equally near would be an error of a whole step. So quotients are
// rounded correctly, which the division of WGSL is not, and with `half` each step is rounded to f16 as there. A row with
// infinities or NaN becomes NaN.

{% if not given %}
var<workgroup> least: array<f32, {{ workgroup }}>;
var<workgroup> most: array<f32, {{ workgroup }}>;
{% endif %}

fn step_of(v: f32) -> f32 { return {{ "to_half(v)" if half else "v" }}; }

// a / b for finite a >= 0 and normal b > 0, rounded to nearest, ties to even. What is below the normal numbers is 0.
fn quotient(a: f32, b: f32) -> f32 {
  let x = bitcast<u32>(a);
  let y = bitcast<u32>(b);
  if (x < 0x800000u) { return 0.0; }
  let m = (y & 0x7fffffu) | 0x800000u;
  var rest = (x & 0x7fffffu) | 0x800000u;
  var e = i32(x >> 23u) - i32(y >> 23u) + 127;
  if (rest < m) { rest <<= 1u; e -= 1; }
  var q = 1u; // rest / m is in [1, 2): 23 more bits, and the remainder decides the rounding
  rest -= m;
  for (var bits = 0u; bits < 23u; bits++) {
    rest <<= 1u;
    q <<= 1u;
    if (rest >= m) { rest -= m; q |= 1u; }
  }
  rest <<= 1u;
  if (rest > m || (rest == m && (q & 1u) == 1u)) { q += 1u; }
  if (e <= 0) { return 0.0; }
  return bitcast<f32>((u32(e) << 23u) + (q - 0x800000u)); // a carry of the mantissa moves into the exponent
}

{{ entry(workgroup) }}
  let base = group * p.depth;
{% if given %}
  let depth = min(p.depth, p.count - base);
  var low = load_bottom(0u);
  var high = load_top(0u);
  let bad = is_nan(low) || is_nan(high) || is_inf(low) || is_inf(high);
  low = select(min(low, 0.0), -inf(), bad);
  high = select(max(high, 0.0), inf(), bad);
{% else %}
  let depth = p.depth;
  var low = 0.0; // zero is always among the values
  var high = 0.0;
  var bad = false;
  for (var k = lid; k < depth; k += {{ workgroup }}u) {
    let v = load_x(base + k);
    bad = bad || is_nan(v) || is_inf(v);
    low = min(low, v);
    high = max(high, v);
  }
  least[lid] = select(low, -inf(), bad);
  most[lid] = select(high, inf(), bad);
  workgroupBarrier();
  for (var half = {{ workgroup // 2 }}u; half > 0u; half /= 2u) {
    if (lid < half) {
      least[lid] = min(least[lid], least[lid + half]);
      most[lid] = max(most[lid], most[lid + half]);
    }
    workgroupBarrier();
  }
  low = least[0];
  high = most[0];
{% endif %}
  let span = step_of(high - low);
  if (is_inf(span) || is_nan(span)) {
    for (var k = lid; k < depth; k += {{ workgroup }}u) { store(base + k, nan()); }
    return;
  }
  let scale = max(step_of(quotient(span, 255.0)), p.eps);
  let zero = clamp(round(step_of(quotient(abs(low), scale))) - 128.0, -128.0, 127.0);
  let inverse = step_of(quotient(1.0, scale));
  for (var k = lid; k < depth; k += {{ workgroup }}u) {
    let code = clamp(round(step_of(load_x(base + k) * inverse)) + zero, -128.0, 127.0);
    store(base + k, step_of((code - zero) * scale));
  }
}
