"""Rows of embedding tables outside of the device's memory."""
