"""Random graphs through passes and kernels, held against what they mean."""
