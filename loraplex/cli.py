"""The command `loraplex`. Importing it imports neither a server nor torch.

Exit codes: 0 success, 1 failure, 2 wrong usage or settings.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from shutil import get_terminal_size

import click

from loraplex.commands.lazy_group import LazyGroup
from loraplex.errors import LoraplexError, OutputLost
from loraplex.output import watch_output
from loraplex.tables import wrapped
from store.errors import ApiError

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 65_536
"""Maximum number of file descriptors that this process allows itself. With a far higher limit,
programs that close every possible descriptor when they start become slow."""


COMMANDS = {
    "adapter": "adapters:adapter_group",
    "admin": "roles:admin_command",
    "audit": "audit:audit_group",
    "bench": "bench:bench_command",
    "bootstrap": "roles:bootstrap_command",
    "chat": "chat:chat_command",
    "completion": "completion:completion_command",
    "config": "roles:config_command",
    "doctor": "doctor:doctor_command",
    "gateway": "roles:gateway_command",
    "key": "tenants:key_group",
    "migrate": "roles:migrate_command",
    "model": "models:model_group",
    "price": "prices:price_group",
    "quickstart": "quickstart:quickstart_command",
    "quota": "quotas:quota_group",
    "serve": "roles:serve_command",
    "signing-key": "signing_keys:signing_key_group",
    "status": "top:status_command",
    "tenant": "tenants:tenant_group",
    "top": "top:top_command",
    "usage": "usage:usage_group",
    "worker": "roles:worker_command",
    "workers": "workers:workers_group",
}
"""Module (below `loraplex.commands`) and attribute of each command, by the command's name."""


@click.group(
    cls=LazyGroup, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="loraplex")
def cli() -> None:
    """Serve many LoRA fine-tunes of a few base models behind one OpenAI-compatible endpoint."""


def main() -> None:
    # Disables core dumps, also of children, because they would contain keys and prompts.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    raise_descriptor_limit()
    watch_output()
    try:
        code = cli(prog_name="loraplex", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OutputLost as lost:
        # Standard output is replaced, because Python would flush the lost output again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if str(lost):
            click.echo(f"loraplex: {lost}", err=True)
        sys.exit(lost.exit_code)
    except (LoraplexError, ApiError) as error:
        _print_error(str(error))
        sys.exit(getattr(error, "exit_code", 1))
    except OSError as error:
        # An OSError with a file name is reported without a traceback. Any other OSError is a bug.
        if error.filename is None:
            raise
        _print_error(f"{error.strerror}: {error.filename}")
        sys.exit(1)
    except UnicodeError as error:
        click.echo(f"loraplex: what was given is not UTF-8: {error}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(code or 0)


def raise_descriptor_limit() -> None:
    """Raises this process's limit of open files to the hard limit, but at most `MAX_DESCRIPTORS`.
    Its children inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _print_error(failure: str) -> None:
    if logging.root.handlers:
        log.error("%s", failure)
    else:
        text = f"loraplex: {failure}"
        is_seen = sys.stderr is not None and sys.stderr.isatty()
        click.echo(wrapped(text, get_terminal_size().columns) if is_seen else text, err=True)
