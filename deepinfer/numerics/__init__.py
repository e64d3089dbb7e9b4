"""Numbers: formats and quantisers, fixed-sequence functions, declared summation orders, RoPE.

Import the modules (`from deepinfer.numerics import formats, functions, rope, sums`); this package
file itself loads nothing.
"""
