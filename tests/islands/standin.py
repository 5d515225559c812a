"""An island without JAX: it joins, counts steps that all take together, and leaves.

python -m tests.islands.standin NAME ADDRESS WAY: `WAY` says how it goes wrong.
"""

import os
import signal
import subprocess
import sys
import time

from hexijax.islands.member import LOST, LauncherGone, Member
from hexijax.islands.processes import end_with_launcher
from hexijax.islands.wire import TOKEN, Refused
from hexijax.islands.world import IslandLost, Welcome


def main(name: str, address: str, way: str) -> int:
    end_with_launcher()
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    member = Member.connect(
        address, name, token=os.environ[TOKEN], seconds=30.0, grace_s=0.3, deaf_s=20.0
    )
    if way == "fault":
        print("ValueError: a fault of its own", flush=True)
        return 70
    if way == "child":
        child = [sys.executable, "-c", "import time; time.sleep(600)"]
        print(f"child {subprocess.Popen(child).pid}", flush=True)
    done, after, code = 0, -1, 0
    while True:
        welcome = member.welcome(after, seconds=30.0)
        after = welcome.generation
        try:
            member.join(
                welcome,
                address="127.0.0.1:1",
                facts={"plan": "p", "code": "other" if way == "code" else "c"},
                seconds=30.0,
                pull_s=5.0,
            )
            start = member.gather("start", done, 30.0)
            done = min(start.values())  # as a checkpoint would have it
            print(f"generation {after} from {done}", flush=True)
            if way == "cut":
                member._line.close()  # as a network that is cut
            done = steps(member, done, total(welcome))
            if done == total(welcome) or not member.change:
                break
            member.halted(done)
        except IslandLost as error:
            print(f"IslandLost: {error}", flush=True)
            if not welcome.brief.get("elastic"):
                code = LOST
                break
        except LauncherGone:
            return LOST
        except Refused as error:
            member.leave(2, error=str(error))
            return 2
    print(f"done {done}", flush=True)
    member.leave(code, done=done)
    return code


def total(welcome: Welcome) -> int:
    return int(welcome.brief["steps"])


def steps(member: Member, done: int, total: int) -> int:
    last: int | None = None
    posted: int | None = None
    while done < total and done != last:
        if member.stopping.is_set() and last is None:
            if posted is None:
                posted = done
                member.post("halt", done)
            if member.collected("halt") or done == posted + 3:
                last = max(member.collect("halt", 30.0).values()) + 3
                continue
        member.gather(f"step {done}", done, 30.0)
        done += 1
        time.sleep(0.02)
    if posted is None:  # another may ask just now
        member.post("halt", done)
    if last is None:
        member.collect("halt", 30.0)
    return done


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
