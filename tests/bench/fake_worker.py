"""A worker for tests of the supervisor: its job's titles say what befalls it.

python fake_worker.py FD < job. Each title is "case" or "case/contender:fate" with fates fine, slow
(twice the time), impossible (above the roof), crash, hang, broken (asks to be started again).
"""

import json
import os
import signal
import sys
import time

FATES = ("fine", "slow", "impossible", "crash", "hang", "broken")


def result(seconds):
    return {"median": seconds, "q20": seconds, "q80": seconds, "rounds": 5}


def main():
    pipe = os.fdopen(int(sys.argv[1]), "w")
    job = json.load(sys.stdin)

    def emit(event, **facts):
        pipe.write(json.dumps({"event": event, **facts}) + "\n")
        pipe.flush()

    if job["ceilings"]:
        ceilings = {"copy": 4e12, "read": 4e12, "cached": 8e12, "rates": {"bf16": 8e14}}
        emit("ceilings", ceilings=ceilings, machine={"name": "test"})
    if "die first" in job["titles"]:
        sys.exit("no such device")
    for title in job["titles"]:
        fates = [part.split(":") for part in title.split("/")[1:]]
        emit("building", case=title)
        if title == "die building":
            sys.exit(9)
        emit("case", case=title, family="test", arguments={}, bytes=4e9, flop=4e9, rate="bf16",
             contenders=[name for name, _ in fates])  # fmt: skip
        for name, fate in fates:
            assert fate in FATES
            if name in job["skip"].get(title, ()):
                continue
            emit("contender", case=title, contender=name)
            if fate == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if fate == "hang":
                time.sleep(60)
            if fate == "broken":
                emit("left_out", case=title, contender=name, reason="bad address", failed=True)
                pipe.flush()
                os._exit(3)
            seconds = {"slow": 2e-3, "impossible": 1e-4}.get(fate, 1.1e-3)
            emit("result", case=title, contender=name, configuration="", tried=1, error=1e-3,
                 first_call=0.1, host=1e-5, cold=result(seconds), warm=result(seconds))  # fmt: skip
        emit("done", case=title, clock_mhz=[1980, 1755])


main()
