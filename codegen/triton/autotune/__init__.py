"""Kernel configurations that are timed: candidates, trials, and the vendor's library as one of them."""
