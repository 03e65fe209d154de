"""Importers: published operator measurements as operator traces. Each refuses what it does not understand."""
