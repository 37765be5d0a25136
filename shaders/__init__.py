"""WGSL templates, shipped as package data; read by `backend.runtime.shaders`."""
