"""One module per exercise: its docstring is the task, then the template and the checks."""
