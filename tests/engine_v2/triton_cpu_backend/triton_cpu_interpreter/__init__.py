"""For tests only: Triton's interpreter, registered as Triton's backend named `cpu`.

vLLM for CPUs uses Triton, and with it Model Runner V2, where a backend of that name exists. The folder above this
one is laid out as an installed distribution: a process whose PYTHONPATH names it has the backend, no other has.
"""

import os

# Read when Triton is imported for the first time, which is what looks for backends.
os.environ["TRITON_INTERPRET"] = "1"
