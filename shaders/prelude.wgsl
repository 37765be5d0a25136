// Functions that every kernel may call.
//
// Drivers may assume that NaN and infinities do not occur and fold away tests such as x != x, so these are made on
// bits, and infinities are built at run time. Their own transcendental functions may be off by thousands of roundings
// (WGSL allows it), so what matters is computed here from polynomials; the only built-ins trusted are exp, log, sqrt.
// Coefficients are minimax fits of relative error (tests/ops/test_pointwise.py holds each to float64).

fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }
fn inf() -> f32 { var bits = 0x7f800000u; return bitcast<f32>(bits); }
fn nan() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
fn copysign(x: f32, y: f32) -> f32 {
  return bitcast<f32>((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(y) & 0x80000000u));
}

// The nearest value of half precision, ties to even. A conversion there and back is what drivers fold away.
fn to_half(x: f32) -> f32 {
  let bits = bitcast<u32>(x);
  let a = bits & 0x7fffffffu;
  if (a > 0x7f800000u) { return x; }
  var rounded = (a + 0xfffu + ((a >> 13u) & 1u)) & 0xffffe000u; // 10 of 23 bits of mantissa
  if (a < 0x38800000u) { rounded = bitcast<u32>(round(bitcast<f32>(a) * 16777216.0) / 16777216.0); } // steps of 2^-24
  if (rounded >= 0x47800000u) { rounded = 0x7f800000u; }
  return bitcast<f32>(rounded | (bits & 0x80000000u));
}

// Byte i % 4 of a word, the lowest first, and all four of them.
fn unsigned_byte(word: u32, i: u32) -> i32 { return i32((word >> (8u * (i & 3u))) & 255u); }
fn signed_byte(word: u32, i: u32) -> i32 { return bitcast<i32>(word << (24u - 8u * (i & 3u))) >> 24u; }
fn unsigned_bytes(word: u32) -> vec4<i32> {
  return vec4<i32>((vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u));
}
fn signed_bytes(word: u32) -> vec4<i32> {
  return bitcast<vec4<i32>>(vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u);
}

// max and min that pass NaN on, as torch's do.
fn max_nan(a: f32, b: f32) -> f32 { return select(select(max(a, b), b, is_nan(b)), a, is_nan(a)); }
fn min_nan(a: f32, b: f32) -> f32 { return select(select(min(a, b), b, is_nan(b)), a, is_nan(a)); }

// --- error function and GELU ---

// erf(x) for |x| < 0.93.
fn erf_near(x: f32) -> f32 {
  let s = x * x;
  var r = fma(8.31677244e-5, s, -8.13001185e-4);
  r = fma(r, s, 5.19990642e-3);
  r = fma(r, s, -2.68589407e-2);
  r = fma(r, s, 0.112836875);
  r = fma(r, s, -0.376126319);
  return x * fma(r, s, 1.12837923);
}
// erfc(a) for a >= 0.9: exp(-a^2) times a polynomial in 1 / (1 + a/2).
fn erfc_far(a: f32) -> f32 {
  let t = 1.0 / fma(0.5, a, 1.0);
  var r = fma(9.29578766e-2, t, -0.225779369);
  r = fma(r, t, 8.32135454e-2);
  r = fma(r, t, 5.96185513e-2);
  r = fma(r, t, 0.179644853);
  r = fma(r, t, 0.246701136);
  r = fma(r, t, 0.282078534);
  r = fma(r, t, 0.282096177);
  return t * r * exp(-a * a);
}
fn erf(x: f32) -> f32 {
  let a = abs(x);
  if (a < 0.93) { return erf_near(x); }
  return copysign(1.0 - erfc_far(a), x);
}
fn erfc(x: f32) -> f32 {
  let a = abs(x);
  if (a < 0.93) { return 1.0 - erf_near(x); }
  let tail = erfc_far(a);
  return select(tail, 2.0 - tail, x < 0.0);
}
// x Φ(x), with Φ from erfc on the negative side, where 1 + erf would cancel.
fn gelu_erf(x: f32) -> f32 {
  let z = x * 0.70710678;
  let a = abs(z);
  if (a < 0.93) { return 0.5 * x * (1.0 + erf_near(z)); }
  let tail = 0.5 * erfc_far(a);
  return times_gate(x, select(tail, 1.0 - tail, x > 0.0));
}
// 0.5 (1 + tanh u) is sigmoid(2u), which neither cancels nor overflows.
fn gelu_tanh(x: f32) -> f32 { return times_gate(x, sigmoid(1.5957691 * fma(0.044715 * x * x, x, x))); }

// --- exponentials ---

fn sigmoid(x: f32) -> f32 {
  let t = exp(-abs(x));
  return select(t, 1.0, x >= 0.0) / (1.0 + t);
}
// x gate, where a gate of 0 stands for less than any x could raise: 0 and not NaN for -inf.
fn times_gate(x: f32, gate: f32) -> f32 { return select(x * gate, -0.0, gate == 0.0); }
fn silu(x: f32) -> f32 { return times_gate(x, sigmoid(x)); }
fn tanh_exact(x: f32) -> f32 {
  let a = abs(x);
  if (a < 0.25) {
    let s = x * x;
    return x * fma(s, fma(s, fma(s, fma(s, 2.1869488e-2, -5.3968254e-2), 0.13333333), -0.33333333), 1.0);
  }
  let t = exp(-2.0 * a);
  return copysign((1.0 - t) / (1.0 + t), x);
}
fn expm1_exact(x: f32) -> f32 {
  if (abs(x) < 0.25) {
    var r = fma(x, 1.9841270e-4, 1.3888889e-3);
    r = fma(x, r, 8.3333333e-3);
    r = fma(x, r, 4.1666667e-2);
    r = fma(x, r, 0.16666667);
    return fma(x * x, fma(x, r, 0.5), x);
  }
  return exp(x) - 1.0;
}
// log(1 + x) = 2 atanh(x / (2 + x)) for -0.5 <= x <= 1, where adding 1 would lose what matters.
fn log1p_near(x: f32) -> f32 {
  let z = x / (2.0 + x);
  let s = z * z;
  var r = fma(0.244130597, s, 0.213932529);
  r = fma(r, s, 0.286207229);
  r = fma(r, s, 0.399986923);
  return z * fma(fma(r, s, 0.666666806), s, 2.0);
}
fn log1p_exact(x: f32) -> f32 {
  if (abs(x) < 0.5) { return log1p_near(x); }
  return log_exact(1.0 + x);
}
fn log_exact(x: f32) -> f32 {
  if (x < 0.0) { return nan(); }
  if (x > 0.5 && x < 2.0) { return log1p_near(x - 1.0); }
  return log(x);
}
// log(1 + exp(x)), and mish's tanh of it, (w^2 + 2w) / (w^2 + 2w + 2) with w = exp(x).
fn softplus(x: f32) -> f32 { return max_nan(x, 0.0) + log1p_exact(exp(-abs(x))); }
fn mish(x: f32) -> f32 {
  if (x > 20.0) { return x; }
  let w = exp(x);
  let n = w * (w + 2.0);
  return times_gate(x, n / (n + 2.0));
}
fn sinh_exact(x: f32) -> f32 {
  let a = abs(x);
  if (a < 0.5) {
    let s = x * x;
    return x * fma(s, fma(s, fma(s, 1.9841270e-4, 8.3333333e-3), 0.16666667), 1.0);
  }
  let h = exp(0.5 * a); // exp(a) itself overflows before its half does
  return copysign(0.5 * h * h - 0.5 / h / h, x);
}
fn cosh_exact(x: f32) -> f32 {
  let h = exp(0.5 * abs(x));
  return 0.5 * h * h + 0.5 / h / h;
}
fn asinh_exact(x: f32) -> f32 {
  let a = abs(x);
  if (a > 1e8) { return copysign(log(a) + 0.69314718, x); }
  return copysign(log1p_exact(a + a * a / (1.0 + sqrt(fma(a, a, 1.0)))), x);
}
fn acosh_exact(x: f32) -> f32 {
  if (x < 1.0) { return nan(); }
  if (x > 1e8) { return log(x) + 0.69314718; }
  let t = x - 1.0;
  return log1p_exact(t + sqrt(t * (t + 2.0)));
}
fn atanh_exact(x: f32) -> f32 {
  let a = abs(x);
  if (a > 1.0) { return nan(); }
  if (a == 1.0) { return copysign(inf(), x); }
  return copysign(0.5 * log1p_exact(2.0 * a / (1.0 - a)), x);
}

// --- circular functions ---

// 32 bits of 2/pi from bit 32 i - 31 after the binary point.
fn two_over_pi(i: u32) -> u32 {
  switch i {
    case 0u: { return 0u; }
    case 1u: { return 0xa2f9836eu; }
    case 2u: { return 0x4e441529u; }
    case 3u: { return 0xfc2757d1u; }
    case 4u: { return 0xf534ddc0u; }
    case 5u: { return 0xdb629599u; }
    default: { return 0x3c439041u; }
  }
}
// |x| as quarter turns mod 4 in units of 2^-30, for any finite |x| >= 0.5. In integers, because drivers merge the
// steps of a reduction in floats into one that is off by 1e-2 at 1e5.
fn quarter_turns(x: f32) -> u32 {
  let bits = bitcast<u32>(x) & 0x7fffffffu;
  let m = (bits & 0x7fffffu) | 0x800000u;
  let first = (bits >> 23u) - 120u; // x = m 2^e, and m's unit meets the bits of 2/pi from e + 30 on
  let word = first >> 5u;
  let shift = first & 31u;
  let a = two_over_pi(word);
  let b = two_over_pi(word + 1u);
  let c = two_over_pi(word + 2u);
  let high = (a << shift) | ((b >> 1u) >> (31u - shift));
  let low = (b << shift) | ((c >> 1u) >> (31u - shift));
  return m * high + u32(f32(m) * f32(low) * 2.3283064e-10);
}
fn sin_near(r: f32) -> f32 {
  let s = r * r;
  return fma(r * s, fma(s, fma(s, -1.94931359e-4, 8.33194796e-3), -0.166666493), r);
}
fn cos_near(r: f32) -> f32 {
  let s = r * r;
  return fma(s, fma(s, fma(s, fma(s, 2.43615614e-5, -1.38864049e-3), 4.16666083e-2), -0.5), 1.0);
}
// sin(|x|) with 0, cos(x) with 1 quarter turn ahead.
fn turned(x: f32, ahead: u32) -> f32 {
  if (is_inf(x) || is_nan(x)) { return nan(); }
  var q = ahead;
  var r = abs(x);
  if (r > 0.7853981) {
    let t = quarter_turns(x);
    let k = (t + 0x20000000u) >> 30u;
    r = f32(bitcast<i32>(t - (k << 30u))) * 1.46291807e-9; // pi/2 2^-30
    q += k;
  }
  let v = select(sin_near(r), cos_near(r), (q & 1u) == 1u);
  return select(v, -v, (q & 2u) == 2u);
}
fn sin_exact(x: f32) -> f32 { return select(turned(x, 0u), -turned(x, 0u), x < 0.0); }
fn cos_exact(x: f32) -> f32 { return turned(x, 1u); }

// atan for |x| <= 1, asin for |x| <= 0.5.
fn atan_near(x: f32) -> f32 {
  let s = x * x;
  var r = fma(2.84985197e-3, s, -1.6068479e-2);
  r = fma(r, s, 4.26912755e-2);
  r = fma(r, s, -7.50427395e-2);
  r = fma(r, s, 0.106409244);
  r = fma(r, s, -0.142036423);
  r = fma(r, s, 0.199926198);
  r = fma(r, s, -0.333330721);
  return fma(x * s, r, x);
}
fn asin_near(x: f32) -> f32 {
  let s = x * x;
  var r = fma(4.26355675e-2, s, 2.38582157e-2);
  r = fma(r, s, 4.5550175e-2);
  r = fma(r, s, 7.49443471e-2);
  return fma(x * s, fma(r, s, 0.166667908), x);
}
fn atan_exact(x: f32) -> f32 {
  if (abs(x) <= 1.0) { return atan_near(x); }
  return copysign(1.57079633, x) - atan_near(1.0 / x);
}
fn asin_exact(x: f32) -> f32 {
  let a = abs(x);
  if (a > 1.0) { return nan(); }
  if (a <= 0.5) { return asin_near(x); }
  return copysign(1.57079633 - 2.0 * asin_near(sqrt(0.5 - 0.5 * a)), x);
}
fn acos_exact(x: f32) -> f32 {
  let a = abs(x);
  if (a > 1.0) { return nan(); }
  if (a <= 0.5) { return 1.57079633 - asin_near(x); }
  let r = 2.0 * asin_near(sqrt(0.5 - 0.5 * a));
  return select(r, 3.14159265 - r, x < 0.0);
}
fn atan2_exact(y: f32, x: f32) -> f32 {
  if (is_nan(x) || is_nan(y)) { return nan(); }
  let a = abs(x);
  let c = abs(y);
  var r = 0.0;
  if (is_inf(x) && is_inf(y)) { r = 0.78539816; }
  else if (c > a) { r = 1.57079633 - atan_near(a / c); }
  else if (a > 0.0) { r = atan_near(c / a); }
  return copysign(select(r, 3.14159265 - r, (bitcast<u32>(x) >> 31u) == 1u), y);
}

// --- powers and division ---

// pow of torch: negative bases take integral exponents; WGSL's own is undefined for them.
fn pow_exact(x: f32, y: f32) -> f32 {
  if (y == 0.0 || x == 1.0) { return 1.0; }
  if (is_nan(x) || is_nan(y)) { return nan(); }
  let a = abs(x);
  var r: f32;
  if (is_inf(y)) {
    if (a == 1.0) { return 1.0; }
    return select(0.0, inf(), (a > 1.0) == (y > 0.0));
  }
  if (a == 0.0) { r = select(0.0, inf(), y < 0.0); }
  else if (is_inf(x)) { r = select(inf(), 0.0, y < 0.0); }
  else { r = exp2(y * log2(a)); }
  if ((bitcast<u32>(x) >> 31u) == 1u) {
    if (y != floor(y)) { return select(nan(), r, is_inf(x) || a == 0.0); }
    let odd = abs(y) < 16777216.0 && (i32(y) & 1) == 1;
    return select(r, -r, odd);
  }
  return r;
}
// Integers: powers wrap, and a negative exponent leaves only what is 1 / x.
fn pow_i32(x: i32, n: i32) -> i32 {
  if (n < 0) { return select(select(0, select(-1, 1, (n & 1) == 0), x == -1), 1, x == 1); }
  var result = 1;
  var base = x;
  for (var rest = n; rest > 0; rest >>= 1u) {
    if ((rest & 1) == 1) { result *= base; }
    base *= base;
  }
  return result;
}
// Exact: long division of the mantissas, 8 bits a step. Subnormal divisors count as 0.
fn fmod_f32(x: f32, y: f32) -> f32 {
  let a = bitcast<u32>(x) & 0x7fffffffu;
  let c = bitcast<u32>(y) & 0x7fffffffu;
  if (a >= 0x7f800000u || c > 0x7f800000u || c < 0x800000u) { return nan(); }
  if (a < c) { return x; }
  let m = (c & 0x7fffffu) | 0x800000u;
  var r = ((a & 0x7fffffu) | 0x800000u) % m;
  for (var steps = (a >> 23u) - (c >> 23u); steps > 0u; ) {
    let shift = min(steps, 8u);
    r = (r << shift) % m;
    steps -= shift;
  }
  return copysign(f32(r) * 1.1920929e-7 * bitcast<f32>(c & 0x7f800000u), x);
}
// The result has the sign of the divisor, as in Python.
fn remainder_f32(x: f32, y: f32) -> f32 {
  let r = fmod_f32(x, y);
  return select(r, r + y, r != 0.0 && (r < 0.0) != (y < 0.0));
}
fn floor_div_f32(x: f32, y: f32) -> f32 {
  if (y == 0.0) { return x / y; }
  let r = fmod_f32(x, y);
  let q = round((x - r) / y);
  return select(q, q - 1.0, r != 0.0 && (r < 0.0) != (y < 0.0));
}
// A GPU's own % is undefined for negative operands (SPIR-V's OpSRem under Vulkan); its / is not.
fn fmod_i32(x: i32, y: i32) -> i32 { return x - x / y * y; }
fn remainder_i32(x: i32, y: i32) -> i32 { let r = fmod_i32(x, y); return select(r, r + y, r != 0 && (r < 0) != (y < 0)); }
fn floor_div_i32(x: i32, y: i32) -> i32 {
  let q = x / y;
  return select(q, q - 1, (fmod_i32(x, y) != 0) && ((x < 0) != (y < 0)));
}
fn hypot(x: f32, y: f32) -> f32 {
  if (is_inf(x) || is_inf(y)) { return inf(); }
  let m = max_nan(abs(x), abs(y));
  if (m == 0.0) { return 0.0; }
  let n = min_nan(abs(x), abs(y)) / m;
  return m * sqrt(fma(n, n, 1.0));
}
