"""Inject an exception into each function of fusec that a compile calls, and check that the model still runs."""
