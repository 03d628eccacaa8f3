"""Verification: the oracles that check rewrites, declarations and compiled models."""
