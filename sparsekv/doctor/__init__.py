"""`sparsekv doctor`: what is amiss with a machine, and what to do about it.

`examination` looks; the modules beside it judge what was found. Each rule is a pure function of
what `sparsekv.machine` reports; nothing here prints.
"""
