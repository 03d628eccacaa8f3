"""Generated C++ under sanitizers."""
