"""Proof that a placement of tables changes nothing."""
