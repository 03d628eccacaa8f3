"""From a graph of kernels to one Python function: buffers, launches, vendor calls, constants, recordings."""
