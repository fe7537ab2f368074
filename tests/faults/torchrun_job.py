"""Jobs for torchrun, as JSON: only its first attempt has faults."""

import json
import os
import sys

from gradwire.bench.faults.injection import Fault
from gradwire.bench.faults.jobs import Job, run

if __name__ == "__main__":
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    pairs = [(Job(**job), fault and Fault(**fault)) for job, fault in json.loads(sys.argv[1])]
    run(*((job, None if restarts else fault) for job, fault in pairs), restarts=restarts)
