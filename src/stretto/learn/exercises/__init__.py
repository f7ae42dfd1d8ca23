"""One module per exercise: its template and its checks; tasks are in learn/tasks."""
