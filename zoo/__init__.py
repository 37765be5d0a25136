"""The command line and what it drives: export, run, check, plan, bench; output files and audio."""

__version__ = "0.1.0"
