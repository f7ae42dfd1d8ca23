"""Jobs in the words of other frameworks, and theirs in ours: `emit` writes a job as their arguments or
configs, `read` reads one back, and every choice is mapped, refused by name, or listed as left out.
"""
