"""Questions asked of a graph: who reads what, where an element comes from, what it costs."""
