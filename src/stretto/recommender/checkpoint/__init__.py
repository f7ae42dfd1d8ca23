"""Saves and loads embedding tables, under any sharding: `save.tensors_to_save` and `load.load_tables`."""
