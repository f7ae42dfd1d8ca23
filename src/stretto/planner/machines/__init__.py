"""Devices, links, clusters, and the catalogue of known ones."""
