"""Flyweight's kernels and formats inside other engines, through their plug-in points."""
