"""Tables in checkpoints, by table, rows and columns: `save.tensors_to_save` and `load.load_tables`."""
