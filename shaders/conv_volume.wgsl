// 3-d convolution and its transposed form, one invocation a result; for volumes, which are rare, nothing is staged.
//
// reads   x       raw: [N, sets * in_c, in_d, in_h, in_w], contiguous from x_start; in_c and out_c count a group's channels
//         weight  raw, contiguous from w_start: [sets * out_c, in_c, kernel…], TRANSPOSED: [sets * in_c, out_c, kernel…]
// writes  out     [N, sets * out_c, out_d, out_h, out_w]; sums are f32
// params  in, out, kernel, stride, pad, dil of the axes d, h, w; count = number of results
// groups  ceil(count / 64)

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  var rest = i;
{% for a in "whd" %}
  let o_{{ a }} = i32(rest % p.out_{{ a }});
  rest /= p.out_{{ a }};
{% endfor %}
  let channel = rest % p.out_c;
  rest /= p.out_c;
  let part = rest % p.sets;
  let n = rest / p.sets;
  let taps = p.kernel_d * p.kernel_h * p.kernel_w;
  let volume = p.in_d * p.in_h * p.in_w;
  var sum = 0.0;
{% for a in "dhw" %}
  for (var k_{{ a }} = 0u; k_{{ a }} < p.kernel_{{ a }}; k_{{ a }}++) {
{% if TRANSPOSED %}
    let t_{{ a }} = o_{{ a }} + i32(p.pad_{{ a }}) - i32(k_{{ a }} * p.dil_{{ a }});
    let x_{{ a }} = t_{{ a }} / i32(p.stride_{{ a }});
    if (t_{{ a }} < 0 || x_{{ a }} * i32(p.stride_{{ a }}) != t_{{ a }} || x_{{ a }} >= i32(p.in_{{ a }})) { continue; }
{% else %}
    let x_{{ a }} = o_{{ a }} * i32(p.stride_{{ a }}) + i32(k_{{ a }} * p.dil_{{ a }}) - i32(p.pad_{{ a }});
    if (x_{{ a }} < 0 || x_{{ a }} >= i32(p.in_{{ a }})) { continue; }
{% endif %}
{% endfor %}
    var at = p.x_start + (n * p.sets + part) * p.in_c * volume
      + (u32(x_d) * p.in_h + u32(x_h)) * p.in_w + u32(x_w);
    let tap = (k_d * p.kernel_h + k_h) * p.kernel_w + k_w;
{% if TRANSPOSED %}
    var w = p.w_start + (part * p.in_c * p.out_c + channel) * taps + tap;
    let step = p.out_c * taps;
{% else %}
    var w = p.w_start + (part * p.out_c + channel) * p.in_c * taps + tap;
    let step = taps;
{% endif %}
    for (var c = 0u; c < p.in_c; c++) {
      sum += load_x(at) * load_weight(w);
      at += volume;
      w += step;
    }
  }
  }
  }
  store(i, sum);
}
