// Functions that every kernel may call.
//
// Drivers assume that NaN and infinities do not occur and fold away tests such as x != x, so these
// are made on bits, and infinities are built at run time.

fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }
fn inf() -> f32 { var bits = 0x7f800000u; return bitcast<f32>(bits); }
fn nan() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }

// max and min that pass NaN on, as torch's do.
fn max_nan(a: f32, b: f32) -> f32 { return select(select(max(a, b), b, is_nan(b)), a, is_nan(a)); }
fn min_nan(a: f32, b: f32) -> f32 { return select(select(min(a, b), b, is_nan(b)), a, is_nan(a)); }

// Error function: Abramowitz-Stegun style minimax fits, error below 2e-7 everywhere (tests/ops/test_pointwise.py).
fn erf(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a < 0.921875) {
    let s = x * x;
    // Taylor terms of 2/sqrt(pi) * (1 - x^2/3 + x^4/10 - ...), economised on [0, 0.85].
    var r = -5.9477e-5;
    r = fma(r, s, 7.7468e-4);
    r = fma(r, s, -5.2146e-3);
    r = fma(r, s, 2.6857e-2);
    r = fma(r, s, -1.128375e-1);
    r = fma(r, s, 3.7612630e-1);
    return x * (1.1283792 - s * r);
  }
  if (a > 4.0) { return sign(x); }
  let t = 1.0 / fma(0.5, a, 1.0);
  // erfc by the fit of Numerical Recipes (erfcc), fractional error below 1.2e-7.
  var p = 0.17087277;
  p = fma(p, t, -0.82215223);
  p = fma(p, t, 1.48851587);
  p = fma(p, t, -1.13520398);
  p = fma(p, t, 0.27886807);
  p = fma(p, t, -0.18628806);
  p = fma(p, t, 0.09678418);
  p = fma(p, t, 0.37409196);
  p = fma(p, t, 1.00002368);
  p = fma(p, t, -1.26551223);
  return sign(x) * (1.0 - t * exp(p - a * a));
}

fn gelu_erf(x: f32) -> f32 {
  if (x < -6.0) { return select(-0.0, x, is_nan(x)); }
  return 0.5 * x * (1.0 + erf(x * 0.70710678118));
}

// Bounded argument: exp(2u) overflows for u > 44, and inf / inf is NaN.
fn tanh_exact(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x)) { return x; }
  if (a > 10.0) { return sign(x); }
  if (a < 0.25) {
    let s = x * x;
    return x * fma(s, fma(s, fma(s, fma(s, 2.1869488e-2, -5.3968254e-2), 1.3333333e-1), -3.3333333e-1), 1.0);
  }
  return sign(x) * (1.0 - 2.0 / (exp(2.0 * a) + 1.0));
}

fn gelu_tanh(x: f32) -> f32 {
  if (x < -10.0) { return select(-0.0, x, is_nan(x)); }
  if (x > 10.0) { return x; }
  return 0.5 * x * (1.0 + tanh_exact(0.7978845608 * fma(0.044715 * x * x, x, x)));
}

fn expm1_exact(x: f32) -> f32 {
  if (abs(x) < 0.25) {
    return x * fma(x, fma(x, fma(x, fma(x, fma(x, fma(x, 1.9841270e-4, 1.3888889e-3), 8.3333333e-3), 4.1666667e-2), 1.6666667e-1), 0.5), 1.0);
  }
  return exp(x) - 1.0;
}

fn log1p_exact(x: f32) -> f32 {
  if (abs(x) < 0.05) {
    return x * fma(x, fma(x, fma(x, fma(x, fma(x, -0.16666667, 0.2), -0.25), 0.33333333), -0.5), 1.0);
  }
  return log(1.0 + x);
}

fn sinh_exact(x: f32) -> f32 {
  if (abs(x) < 0.5) { let s = x * x; return x * fma(s, fma(s, fma(s, 1.9841270e-4, 8.3333333e-3), 1.6666667e-1), 1.0); }
  if (abs(x) > 80.0) { let h = exp(0.5 * abs(x)); return sign(x) * 0.5 * h * h; }
  return 0.5 * (exp(x) - exp(-x));
}

fn cosh_exact(x: f32) -> f32 {
  if (abs(x) > 80.0) { let h = exp(0.5 * abs(x)); return 0.5 * h * h; }
  return 0.5 * (exp(x) + exp(-x));
}

// sin and cos with the argument reduced by multiples of pi/2 held in three parts: drivers may answer
// with an absolute error of 2^-11, and worse for large arguments.
fn sincos_reduced(x: f32) -> vec2<f32> {
  let k = round(x * 0.63661977);
  var r = fma(k, -1.5707963109016418, x);
  r = fma(k, -1.5893254712295857e-8, r);
  r = fma(k, -6.0770999344e-15, r);
  return vec2<f32>(r, k);
}
fn sin_poly(r: f32) -> f32 {
  let s = r * r;
  return r * fma(s, fma(s, fma(s, fma(s, 2.7557314e-6, -1.9841270e-4), 8.3333333e-3), -1.6666667e-1), 1.0);
}
fn cos_poly(r: f32) -> f32 {
  let s = r * r;
  return fma(s, fma(s, fma(s, fma(s, 2.4801587e-5, -1.3888889e-3), 4.1666667e-2), -0.5), 1.0);
}
fn sin_exact(x: f32) -> f32 {
  if (is_inf(x) || is_nan(x)) { return nan(); }
  let rk = sincos_reduced(x);
  let q = i32(rk.y) & 3;
  let v = select(sin_poly(rk.x), cos_poly(rk.x), (q & 1) == 1);
  return select(v, -v, q >= 2);
}
fn cos_exact(x: f32) -> f32 {
  if (is_inf(x) || is_nan(x)) { return nan(); }
  let rk = sincos_reduced(x);
  let q = (i32(rk.y) + 1) & 3;
  let v = select(sin_poly(rk.x), cos_poly(rk.x), (q & 1) == 1);
  return select(v, -v, q >= 2);
}

// pow of torch: negative bases take integral exponents; WGSL's own is undefined for them.
fn pow_exact(x: f32, y: f32) -> f32 {
  if (y == 0.0 || x == 1.0) { return 1.0; }
  if (is_nan(x) || is_nan(y)) { return nan(); }
  let a = abs(x);
  var r: f32;
  if (a == 0.0) { r = select(0.0, inf(), y < 0.0); }
  else if (is_inf(x)) { r = select(inf(), 0.0, y < 0.0); }
  else { r = pow(a, y); }
  if (x < 0.0) {
    if (y != floor(y) && !is_inf(y)) { return select(nan(), r, is_inf(x)); }
    let odd = abs(y) < 16777216.0 && (i32(y) & 1) == 1;
    return select(r, -r, odd);
  }
  return r;
}

// The result has the sign of the divisor, as in Python.
fn remainder_f32(x: f32, y: f32) -> f32 { return x - y * floor(x / y); }
fn remainder_i32(x: i32, y: i32) -> i32 { let r = x % y; return select(r, r + y, r != 0 && (r < 0) != (y < 0)); }
fn floor_div_i32(x: i32, y: i32) -> i32 { let q = x / y; return select(q, q - 1, (x % y != 0) && ((x < 0) != (y < 0))); }
