"""One run of the common work in sched-sim, as a process of its environment: `PYTHON one_sched_sim.py COUNT`.

It is run as a file, from the checkout: its environment needs sched-sim only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).parent))

from sched_sim.core.event_engine import Simulator
from sched_sim.core.request import Request
from sched_sim.hardware.presets import get_hardware_profile
from sched_sim.memory.preemption import PreemptionMode
from sched_sim.schedulers.factory import create_scheduler
from work import TTFT_SLO_S, prompts


def main() -> None:
    count = int(sys.argv[1])
    hardware = get_hardware_profile("a100")
    scheduler = create_scheduler("chunked", hardware, PreemptionMode.RECOMPUTE, token_budget=2048)
    simulator = Simulator(hardware, scheduler)
    requests = [
        Request(request_id=str(row), arrived_at=at_s, prompt_tokens=tokens, output_tokens=1, slo_ttft=TTFT_SLO_S)
        for row, (at_s, tokens) in enumerate(prompts(count))
    ]
    began_s, began_cpu_s = perf_counter(), process_time()
    simulator.submit_workload(requests)
    simulator.run()
    loop = {"wall_s": perf_counter() - began_s, "cpu_s": process_time() - began_cpu_s}
    ttft_s = [one.first_token_at - one.arrived_at for one in requests if one.first_token_at is not None]
    figures = {"ttft_s": sum(ttft_s) / len(ttft_s), "utilisation": simulator.gpu_busy_time_s / simulator.current_time}
    print(json.dumps(loop | figures))


if __name__ == "__main__":
    main()
