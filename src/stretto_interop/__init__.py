"""Stretto beside other frameworks: their configs, scripts, checkpoints and sharding plans, read and written.

A second package of the same distribution. It imports `stretto`; of `stretto` only the command line's table of
what is loaded when it is needed (`stretto.cli.interop`) names it.
"""
