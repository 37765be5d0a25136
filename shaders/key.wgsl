// Not a kernel: floats as integers of the same order.

{# key_of(v): an i32 that grows with v, or falls with it when `reverse`; -0 equals 0. NaN is above everything, and stays
   the greatest key under `reverse` when `nan_wins`. #}
{% macro key_function(type, reverse, nan_wins) %}
fn key_of(v: {{ type }}) -> i32 {
{% if type == "f32" %}
  let bits = bitcast<i32>(v);
  let size = bits & 0x7fffffff;
  if (size > 0x7f800000) { return {{ "0x7fffffff" if nan_wins or not reverse else "-2147483647 - 1" }}; }
  let ordered = select(size, -size, bits < 0);
{% else %}
  let ordered = v;
{% endif %}
  return {{ "~ordered" if reverse else "ordered" }};
}
{% endmacro %}
