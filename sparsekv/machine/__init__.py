"""What this machine has: processor, memory, GPU, the link between them, the kernels and versions in
use. Looks and measures; judges nothing.

Each `probe_*` returns a frozen dataclass. Paths are below a root that tests replace; what cannot be
read is None in the result, and named in its `unread`.
"""
