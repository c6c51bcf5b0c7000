"""The command line: `sparsekv generate`, `plan`, `calibrate`, `doctor` and `version`.

Commands import torch and transformers when they run, so that help, version and wrong options answer
at once.
"""
