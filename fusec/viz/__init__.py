"""One offline HTML page that shows a graph, pass by pass, down to the kernel and back to the source line."""
