"""Worker process with its telemetry: `python -m loraplex.roles.worker_process CONFIG.json [ID]`."""

from __future__ import annotations

import sys
from pathlib import Path

from loraplex.telemetry import render_metrics, send_metrics, show_certificates
from workers.__main__ import main
from workers.process.config import WorkerConfig

if __name__ == "__main__":
    send_metrics("worker")
    if (tls := WorkerConfig.read(Path(sys.argv[1])).security.tls) is not None:
        show_certificates(
            {"transport_certificate": tls.certificate, "transport_authority": tls.authority}
        )
    main(metrics=render_metrics)
