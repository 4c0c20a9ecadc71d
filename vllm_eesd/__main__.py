"""`python -m vllm_eesd` is the command `eesd`; so `accelerate launch -m vllm_eesd distill ...` starts it."""

import sys

from vllm_eesd.cli import main

sys.exit(main())
