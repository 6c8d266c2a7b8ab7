"""The worker process: reads one request a line, answers one line, and never trusts the text.

Started by `pool.py` as a fresh interpreter, with a memory limit and a CPU limit renewed for each
request. A request that exceeds it ends the worker, whatever that is doing and with or without a
parent.
"""

import json
import os
import resource
import sys
from typing import Any

from rivet.grading.verdict import BadRequest


def main() -> None:
    """Serve requests until the input closes."""
    sys.setrecursionlimit(5000)
    memory_mb, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    memory = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Whatever a library prints must not end up between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _preload()
    _send(replies, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
        if request["kind"] == "warm":
            limit = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        _send(replies, answer_request(request))


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; an unexpected exception is a fault of the grader, never a verdict."""
    try:
        return _answer(request)
    except BadRequest as error:
        return {"bad_request": str(error)}
    except MemoryError:
        return {"fault": "out of memory"}
    except Exception as error:
        # The worker's one boundary: the parent counts what arrives here as `died`.
        return {"fault": f"{type(error).__name__}: {str(error)[:200]}"}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    kind = request["kind"]
    if kind == "warm":
        return {"outcome": "right", "reason": _warm(request["what"])}
    if kind == "reasoning_gym":
        from rivet.grading.reasoning_tasks import decide_reasoning_gym

        outcome, reason = decide_reasoning_gym(request["gold"], request["answer"])
    elif kind == "check_gold":
        from rivet.grading.intake import check_math_gold

        outcome, reason = "right", check_math_gold(request["gold"]) or ""
    else:
        from rivet.grading.decide import decide_math

        outcome, reason = decide_math(request["gold"], request["answer"])
    return {"outcome": outcome, "reason": reason}


def _preload() -> None:
    import mpmath  # noqa: F401

    import rivet.grading.decide  # noqa: F401


def _warm(what: str) -> str:
    """Import what a kind of request needs, outside the time limit of a request."""
    if what == "reasoning_gym":
        import reasoning_gym  # noqa: F401
    return "warm"


def _send(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
