"""Every operator of PyTorch's operator database through the backend, held against eager."""
