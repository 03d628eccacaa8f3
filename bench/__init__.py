"""Figures and checks: one command for each question, listed in README.md."""
