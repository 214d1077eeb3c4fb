"""Sharding: ranks and meshes, what is wrapped in which order, weights by slices, memory, and checks."""
