"""Measures what ops cost on the GPU at hand: ``prism calibrate``."""
