"""Prove that a layout, a placement of tables or any parallel model computes what one process computes."""
