"""What `loraplex worker --advertise` does, around a stub worker:

python -m tests.loraplex.registered_worker DSN ID ADDRESS LEASE_S
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from loraplex.box.worker_process import run_worker
from loraplex.roles.registration import registered
from tests.adapters.files import BASE
from tests.scripted_worker import Reply, ScriptedWorker


async def main() -> int:
    match sys.argv[1:]:
        case [dsn, worker_id, address, lease_s]:
            worker = [sys.executable, "-m", "tests.loraplex.registered_worker", address, worker_id]
            return await run_worker(
                worker,
                registered(
                    *(dsn, worker_id, address, float(lease_s)),
                    is_listening=Path(address.removeprefix("unix:")).is_socket,
                ),
            )
        case [address, worker_id]:
            assert "LORAPLEX_DATABASE_URL" not in os.environ
            ending = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
            stub = ScriptedWorker(
                address, [BASE.digest], lambda _: Reply([65]), instance_id=worker_id
            )
            async with stub:
                await ending.wait()
            return 7
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
