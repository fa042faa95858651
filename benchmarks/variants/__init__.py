"""Scripts spelled anew: rewrites that keep what a training script means, and the comparison of
what is said of it. One file a family of rewrites; ``benchmarks/metamorphic.py`` runs them.
"""
