"""The GPU backend: ahead of time (torch) in `partitioner`, `preprocess`, `convert`; at run time (numpy + wgpu) in
`runtime`, `ops`, `graph`. The two halves meet in `graph.py`."""
