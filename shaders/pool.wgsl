// Maximum or mean over windows of a picture or a volume, one invocation a result.
//
// reads   x        [planes, in_d, in_h, in_w] by row-major index; AXES names the axes that there are: hw or dhw
// writes  out      [planes, out_d, out_h, out_w]; with INDICES also out_indices, where in its plane the maximum lies
// params  count = number of results; in and out of every axis;
//         kernel, stride, pad and, MODE max, dil of every axis, unless ADAPTIVE: window o of an axis is
//         floor(o * in / out) to ceil((o + 1) * in / out);
//         MODE avg: divisor, or 0 for the window's own size, its padding included when count_pad is 1
// groups  ceil(count / 64)

{%- macro place(begin) -%}
{% if AXES == "dhw" %}({{ begin }}d * p.in_h + {{ begin }}h) * p.in_w + {{ begin }}w{% else %}{{ begin }}h * p.in_w + {{ begin }}w{% endif %}
{%- endmacro %}
{%- macro product(before) -%}
{% for a in AXES %}{{ before }}{{ a }}{{ "" if loop.last else " * " }}{% endfor %}
{%- endmacro %}

{{ entry(64) }}
  let i = group * 64u + lid;
  if (i >= p.count) { return; }
  var rest = i;
{% for a in AXES | reverse %}
  let o_{{ a }} = rest % p.out_{{ a }};
  rest /= p.out_{{ a }};
{% endfor %}
  let plane = rest * ({{ product("p.in_") }});
{% for a in AXES %}
{% if ADAPTIVE %}
  let from_{{ a }} = o_{{ a }} * p.in_{{ a }} / p.out_{{ a }};
  let to_{{ a }} = ((o_{{ a }} + 1u) * p.in_{{ a }} + p.out_{{ a }} - 1u) / p.out_{{ a }};
{% elif MODE == "max" %}
  var first_{{ a }} = i32(o_{{ a }} * p.stride_{{ a }}) - i32(p.pad_{{ a }});
  let to_{{ a }} = u32(min(first_{{ a }} + i32((p.kernel_{{ a }} - 1u) * p.dil_{{ a }}) + 1, i32(p.in_{{ a }})));
  while (first_{{ a }} < 0) { first_{{ a }} += i32(p.dil_{{ a }}); }
  let from_{{ a }} = u32(first_{{ a }});
{% else %}
  // The window, first with its padding, then without.
  let start_{{ a }} = i32(o_{{ a }} * p.stride_{{ a }}) - i32(p.pad_{{ a }});
  let stop_{{ a }} = min(start_{{ a }} + i32(p.kernel_{{ a }}), i32(p.in_{{ a }} + p.pad_{{ a }}));
  let from_{{ a }} = u32(max(start_{{ a }}, 0));
  let to_{{ a }} = u32(max(min(stop_{{ a }}, i32(p.in_{{ a }})), i32(from_{{ a }})));
{% endif %}
{% endfor %}
{% if MODE == "max" %}
  var best = -inf();
  var at = {{ place("from_") }};
{% else %}
  var sum = 0.0;
{% endif %}
{% for a in AXES %}
  for (var {{ a }} = from_{{ a }}; {{ a }} < to_{{ a }}; {{ a }} += {{ "p.dil_" ~ a if MODE == "max" and not ADAPTIVE else "1u" }}) {
{% endfor %}
    let spot = {{ place("") }};
    let v = load_x(plane + spot);
{% if MODE == "max" %}
    // The first of equal maxima, but the last NaN, as torch has it.
    if (is_nan(v) || (v > best && !is_nan(best))) { best = v; at = spot; }
{% else %}
    sum += v;
{% endif %}
{% for a in AXES %}
  }
{% endfor %}
{% if MODE == "max" %}
  store(i, best);
{% if INDICES %}
  store_indices(i, i32(at));
{% endif %}
{% else %}
  let inside = {% for a in AXES %}(to_{{ a }} - from_{{ a }}){{ "" if loop.last else " * " }}{% endfor %};
{% if ADAPTIVE %}
  store(i, sum / f32(inside));
{% else %}
  let whole = u32({% for a in AXES %}(stop_{{ a }} - start_{{ a }}){{ "" if loop.last else " * " }}{% endfor %});
  let by = select(f32(select(inside, whole, p.count_pad == 1u)), p.divisor, p.divisor != 0.0);
  store(i, select(sum / by, 0.0, inside == 0u));
{% endif %}
{% endif %}
}
