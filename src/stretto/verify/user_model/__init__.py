"""Prove any parallel module against its plain one."""
