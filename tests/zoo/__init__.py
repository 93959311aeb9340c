"""Tiny models of many transformers types, and what is measured about them."""
