"""Sharding: strategies and meshes, sharding a model, loading its weights by slices, the quantized cache, and checks."""
