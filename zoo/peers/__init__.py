"""Other engines that run the same graphs as ours, for `zoo bench --against`: generic ones, for any model or kernel.

table.py       their names, what each needs and how to get it, which of them take part by themselves
graph.py       a method at fixed shapes, as a module and as an ONNX file; what all peers open
replay.py      the method calls behind a workload, done again by a peer, and how far its outputs are from ours
pytorch.py     eager on the CPU, torch.compile, CUDA
onnx_runtime.py tiny_grad.py

None of them is needed for anything else; each is imported when it is opened.
"""
