"""From a region to loop nests: where every element comes from, and which kind of kernel computes it."""
