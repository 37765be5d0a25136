// A chain of pointwise operators in one kernel: the work is in load_x.
//
// reads   x     the expression, by row-major index
// writes  out   count elements
// groups  ceil(count / workgroup)

{{ entry(workgroup) }}
  let i = group * {{ workgroup }}u + lid;
  if (i < p.count) { store(i, load_x(i)); }
}
