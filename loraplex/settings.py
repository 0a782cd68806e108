"""All settings of all roles, in one frozen struct. Flags have the highest precedence, then
LORAPLEX_* variables, then the TOML file, and then the defaults.

A secret can also be read from a file that LORAPLEX_<NAME>_FILE names. Sizes are numbers of bytes,
or have a unit as in 512MiB.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fractions import Fraction
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from adapters.store.folder import Store
from adapters.store.opening import open_store
from loraplex.errors import BadSettings, NotPrivate
from loraplex.private import check_owner
from telemetry.logs import LogFormat, LogLevel
from web.decoding import find_fault, first_step
from web.held_bytes import MAX_BODIES_BYTES
from workers.wire.transport.base import MutualTLS, Security

SECRETS = ("database_url", "key", "key_pepper")
PREFIX = "LORAPLEX_"
RENAMED = {"max_usage_spool": "max_usage_wal"}
"""Current names of renamed settings. An old name is accepted for one version. The new name wins if
both are given."""

Positive = Annotated[int, Meta(ge=1)]
BYTES: dict[str, Any] = {"unit": "bytes"}
Bytes = Annotated[int, Meta(extra=BYTES)]
"""Number of bytes, which users may write with a unit."""
PositiveBytes = Annotated[Bytes, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Rows = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Number of rows in tables or steps, which take memory."""

OTHERS = re.compile(
    r"LORAPLEX_(TEST_\w+|(\w+_)?SERVICE_(HOST|PORT)\w*|(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)\w*)?)",
    re.ASCII,
)
"""Matches LORAPLEX_ variables that are not settings: variables of the test suite, which child
processes inherit, and variables that Kubernetes sets for services whose names begin with
loraplex."""

_ADDRESS = re.compile(r"unix:/.+|tcp://.+:(\d{1,5})", re.ASCII)
_ORIGIN = re.compile(
    r"https?://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?", re.ASCII
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


KINDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
"""Words in error messages for types, by the decoder's names of these types."""


class MemoryRange(msgspec.Struct, frozen=True):
    """Minimum and maximum bytes for adapters. Written as MIN:MAX."""

    min: int = 0
    max: int | None = None

    def __post_init__(self) -> None:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"{self} is not MIN:MAX, because MIN is larger")

    def __str__(self) -> str:
        return f"{self.min}:{'' if self.max is None else self.max}"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all roles. If a setting is also an option of a command, its docstring is the
    option's help."""

    data_dir: Path = Path("~/.loraplex")
    """Folder of everything that is stored."""
    store: str | None = None
    """Store of models and adapters: a folder, or a bucket at s3://, gs:// or az://. Default:
    <data_dir>/store."""
    min_free_disk: Bytes = 512 << 20
    """Bytes of disk space that uploads and imports leave free."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8000
    """Port to listen on. 0 chooses a free one."""
    management_host: str = "127.0.0.1"
    """Address for metrics, and for the admin plane if --host is public."""
    management_port: Port | None = None
    """Port on --management-host (default: 8002, or a free one if that is in use)."""
    tls_certificate: Path | None = None
    """PEM file with the certificate for TLS on --port. Needs --tls-key."""
    tls_key: Path | None = None
    """PEM file with the key for TLS on --port."""
    default_tenant_quota: dict[str, int | str] = {}
    """Limits of new tenants, with the names and values that a tenant's quota has."""
    url: str | None = None
    """URL of the server that the command line calls. Default: the URL that `serve` wrote on this
    machine."""
    key: str | None = None
    database_url: str | None = None
    """URL of a PostgreSQL server, which is used instead of the embedded one."""
    key_pepper: str | None = None
    """Secret of the keyed hash (HMAC) of API keys. Default: a file in the data directory."""
    pg_user: str | None = None
    models: dict[str, str] = {}
    """Path of each base model, by served name."""
    workers: tuple[str, ...] = ()
    """Addresses of workers for the gateway role, in addition to workers that register."""
    insecure_transport: bool = False
    """Allow tcp:// between gateways and workers without TLS."""
    transport_certificate: Path | None = None
    """PEM files for mutual TLS between gateways and workers. Set all three or none."""
    transport_key: Path | None = None
    transport_authority: Path | None = None
    transport_gateways: tuple[str, ...] = ()
    """Names in certificates of clients that a worker accepts as gateways. `*` matches any
    characters. By default, no certificate is accepted."""
    transport_workers: tuple[str, ...] = ()
    """Names in certificates that a gateway accepts for workers, in addition to the worker's
    address."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose X-Forwarded-For is trusted. Default: none."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the data plane from a browser. `*` allows all. Default: none."""
    max_connections: Positive | None = None
    """Maximum open connections of one server. Default: the most that the limit of file descriptors
    allows."""
    max_connections_per_address: Annotated[int, Meta(ge=0)] | None = None
    """Maximum connections from one address, if no proxy is trusted. Default: a quarter of
    `max_connections`. 0 sets no limit."""
    max_body_memory: Annotated[Bytes, Meta(ge=128 << 20)] = MAX_BODIES_BYTES
    """Maximum bytes of all request bodies in memory. One tenant may use an eighth of it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the worker. auto is a GPU if there is one."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of weights and KV pages."""
    ops: Literal["cpu", "reference", "cuda"] | None = None
    """Backend of the kernels (default: that of the device)."""
    kernel_variant: Literal["amx", "avx512bf16", "avx512", "avx2", "scalar", "tiles"] | None = None
    """Instruction set of the `cpu` backend's kernels. Default: the fastest one of the processor."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Kernel threads on a CPU (default: one for each core that the process may use)."""
    memory: PositiveBytes | None = None
    """Memory for KV pages and adapters, such as 512MiB (default on a CPU: 1 GiB, or a quarter of
    the RAM if that is less)."""
    device_memory: PositiveBytes | None = None
    """Memory for weights, KV pages and adapters together, instead of --memory (default on a GPU:
    90 % of its free memory)."""
    max_model_wait_s: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds that a request waits for its base model before a busy model is unloaded."""
    max_model_drain_s: Annotated[float, Meta(ge=0)] = 10.0
    """Seconds for which running sequences of a model that is to be unloaded may continue."""
    adapter_memory: MemoryRange = MemoryRange()
    """Minimum and maximum memory for adapters, as a part of --memory or --device-memory, such as
    64MiB:256MiB (default: no minimum and no maximum)."""
    host_adapter_memory: Bytes = 1 << 30
    """Host memory for packed adapters that are not on the device."""
    host_model_memory: PositiveBytes | None = None
    """Bytes of packed weights kept in a GPU machine's host memory, for models that are not on the
    device. Default: enough for all models."""
    adapter_cache: Bytes = 16 << 30
    """Disk space of the worker for packed adapters from the store."""
    max_num_seqs: Rows = 64
    """Maximum number of sequences that run at once."""
    max_batched_tokens: Rows | None = None
    """Maximum tokens of a step (default: 512 on a CPU, 2048 on a GPU)."""
    max_token_gap: Annotated[float, Meta(gt=0, le=60)] = 0.25
    """Maximum seconds between two tokens of a running stream while prompts are computed. Smaller
    values make streams smoother, and slow down long prompts."""
    max_gap_ratio: Annotated[float, Meta(ge=1.25, le=1000)] = 1.8
    """Maximum duration of a step that computes prompts beside running streams, as a multiple of its
    duration without prompts. Smaller values make streams smoother, and slow down prompts."""
    max_model_len: Annotated[int, Meta(ge=5)] | None = None
    """Maximum tokens of prompt and answer together (default: the model's)."""
    max_queued: Positive = 1024
    max_queued_tokens: Positive = 1 << 20
    max_queue_wait: Annotated[float, Meta(gt=0)] = 15.0
    """Maximum seconds that an interactive request may wait for a model. `max_queued` and
    `max_queued_tokens` limit the waiting requests and their prompt tokens. Requests beyond these
    limits are refused."""
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    """Seconds for running requests to end after SIGTERM. Default: 30 for gateways and admin planes,
    120 for a worker."""
    max_lora_rank: Positive = 256
    """Maximum rank of an uploaded adapter."""
    max_loaded_adapters: Rows = 128
    """Number of adapter slots in the device's tables, regardless of the adapters' bytes."""
    max_upload: Bytes = 1 << 30
    max_adapter_image: PositiveBytes = 1 << 30
    """Maximum bytes of a worker's memory that an uploaded adapter may take, in bfloat16."""
    admin_url: str | None = None
    """URL to which a gateway without an admin plane forwards requests that load adapters."""
    adapter_roots: dict[str, str] = {}
    """Folders on the admin plane's machine from which tenants may load adapters by path, keyed by
    tenant name. `*` stands for every tenant."""
    ephemeral_versions: Positive = 4
    """Maximum number of ephemeral versions kept of an adapter, including the newest."""
    ephemeral_ttl_s: Annotated[float, Meta(gt=0)] = 86_400.0
    """Seconds from the load of an ephemeral version until it is retired."""
    max_usage_wal: Bytes = 256 << 20
    """Maximum bytes of usage records in <data_dir>/spool that wait for the database. Beyond this,
    requests are refused."""
    catalog_stale_s: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds for which known keys and models are served while the database is unavailable. After
    that, requests get 503."""
    usage_days: Annotated[int, Meta(ge=2)] = 90
    """Days for which rows of single requests are kept. Hourly sums are kept forever."""
    audit_days: Annotated[int, Meta(ge=30)] = 400
    """Days for which rows of the audit log are kept. A sealed checkpoint replaces older rows."""
    tenant_writes_per_minute: Positive = 60
    """Changes per minute that a tenant's keys may make in the admin plane."""
    tenant_refusals_per_minute: Positive = 1200
    """Requests per minute of a tenant that may be refused after their bodies were read. Each 16 KiB
    of a body counts as another request. Beyond this, requests are refused before their bodies are
    read."""
    log_format: LogFormat | None = None
    """Format of log lines. Default: `short` for `serve` on a terminal, otherwise `text`."""
    log_level: LogLevel = "info"
    slow_request_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds to the first token above which a request is always traced."""

    @property
    def home(self) -> Path:
        return expanded(self.data_dir, "data_dir")

    def make_home(self) -> None:
        """Creates the data directory. Raises BadSettings, also if another account owns a folder."""
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.home, *(self.home / name for name in ("store", "cache", "spool"))):
                if folder.exists() or folder.is_symlink():
                    check_owner(folder)
        except OSError as error:
            raise BadSettings(f"data_dir: {error.strerror}: {error.filename}") from error
        except NotPrivate as error:
            raise BadSettings(f"data_dir: {error}") from error

    @property
    def store_location(self) -> str:
        if self.store and "://" in self.store:
            return self.store
        return str(expanded(Path(self.store or self.home / "store"), "store"))

    @property
    def security(self) -> Security:
        """TLS settings of TCP between gateways and workers. Raises BadSettings."""
        files = (self.transport_certificate, self.transport_key, self.transport_authority)
        given = [expanded(file, "transport_*") for file in files if file is not None]
        if len(given) not in (0, len(files)):
            raise BadSettings(
                "give all of transport_certificate, transport_key and transport_authority, or none"
            )
        for file in given:
            if not file.is_file():
                raise BadSettings(f"{file} does not exist")
        for pattern in (*self.transport_gateways, *self.transport_workers):
            if pattern != "*" and not pattern.startswith(("DNS:", "URI:", "IP:")):
                raise BadSettings(f"{pattern!r} is not DNS:NAME, URI:NAME, IP:ADDRESS or *")
        return Security(
            MutualTLS(*given) if given else None,
            self.insecure_transport,
            self.transport_gateways,
            self.transport_workers,
        )

    @property
    def opened_folders(self) -> dict[str, Path]:
        """Folders from which tenants may load adapters, by tenant name. Raises BadSettings."""
        folders = {tenant: Path(text) for tenant, text in self.adapter_roots.items()}
        for folder in folders.values():
            if not folder.is_absolute() or folder == Path("/"):
                raise BadSettings(f"adapter_roots: {folder} is not an absolute path below /")
        return folders

    @property
    def certificates(self) -> dict[str, Path]:
        """Certificate files, keyed by the settings that name them."""
        names = ("tls_certificate", "transport_certificate", "transport_authority")
        given = {name: getattr(self, name) for name in names}
        return {name: expanded(file, name) for name, file in given.items() if file}

    def open_store(self) -> Store:
        """Returns the store. Raises BadSettings."""
        try:
            return open_store(
                self.store_location,
                self.home / "cache" / "store",
                min_free_bytes=self.min_free_disk,
            )
        except ValueError as error:
            raise BadSettings(f"store: {error}") from error
        except OSError as error:
            raise BadSettings(
                f"store: {self.store_location} cannot be written: {error.strerror}"
            ) from error

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that pass the non-empty settings to another process."""
        values = {PREFIX + name.upper(): getattr(self, name) for name in self.__struct_fields__}
        return {name: _written(v) for name, v in values.items() if v not in (None, (), {})}

    def common_with(self, config: type[msgspec.Struct]) -> dict[str, Any]:
        """Returns the values of settings that a role's configuration has under the same names."""
        names = set(config.__struct_fields__).intersection(self.__struct_fields__)
        return {name: getattr(self, name) for name in names}

    def shown(self) -> dict[str, Any]:
        """Returns the effective values for display, with secrets hidden."""
        values: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        values |= {"data_dir": str(self.home), "store": self.store_location}
        values["adapter_memory"] = str(self.adapter_memory)
        return values | {name: "(set)" for name in SECRETS if values[name]}


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Path | None = None
) -> Settings:
    """Loads the settings. A flag that is None was not given. Raises BadSettings."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    layers = (
        (_from_file(file), lambda name: f"{file}: {name}"),
        (_from_environment(environ), lambda name: PREFIX + name.upper()),
        ({name: value for name, value in flags.items() if value not in (None, ())}, _flag),
    )
    for layer, place_of in layers:
        for name, value in _renamed(layer).items():
            if name not in Settings.__struct_fields__:
                raise _no_setting(str(file), name, Settings.__struct_fields__)
            places[name] = place_of(name)
            values[name] = _read(name, value, places[name])
    try:
        return msgspec.convert(values, Settings, strict=False, dec_hook=_decode)
    except msgspec.ValidationError as error:
        fault = find_fault(error, Settings)
        name = first_step(fault.path or "")
        reason = fault.reason.replace("`", "").replace("Expected", "expected", 1)
        reason = reason.replace("Invalid enum", "invalid", 1)
        if reason.startswith("expected"):
            reason = reason.replace(" | null", "")
            for kind, words in KINDS.items():
                reason = re.sub(rf"\b{kind}\b", words, reason)
        raise BadSettings(f"{places.get(name, name)}: {reason}") from error


def nested(kind: Any) -> Iterator[Any]:
    """Yields a type, and all type arguments and metadata nested in it."""
    yield kind
    for each in get_args(kind):
        yield from nested(each)


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as 4096, 64K, 512MiB, 1.5GiB or 2GB. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not a size such as 512MiB")
    unit = 1000 if found[2] and not found[3] and text.strip().upper().endswith("B") else 1024
    return int(Fraction(found[1]) * unit ** " KMGT".index(found[2].upper() or " "))


def expanded(path: Path, name: str) -> Path:
    """Returns an absolute path, in which `~` is this account's home directory. Raises BadSettings
    if `~` has no meaning, because HOME is not set and the account has no entry in /etc/passwd.
    `name` is the setting with the path."""
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        place = (
            "a data directory in --data-dir or LORAPLEX_DATA_DIR"
            if name == "data_dir"
            else "an absolute path"
        )
        raise BadSettings(
            f"{name}: {path} needs a home directory, and this account (uid {os.getuid()}) has none."
            f" Name {place}, or set HOME"
        ) from None


def named_model(text: str) -> str:
    """Returns the text as NAME=PATH. If the text is only a PATH, its last part becomes the name."""
    if "=" in text or not text:
        return text
    path = expanded(Path(text), "model")
    # Replaces characters that a name may not contain by dashes.
    return (
        re.sub(r"[^A-Za-z0-9._-]+", "-", path.name.removesuffix(".gguf")).strip("-.") + f"={text}"
    )


def check_address(address: str, *, lowest_port: int = 1) -> str:
    """Returns a valid worker address. Port 0 is valid only to listen. Raises ValueError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or (found[1] and not lowest_port <= int(found[1]) < 1 << 16):
        raise ValueError(f"{address!r} is not unix:/PATH or tcp://HOST:PORT")
    return address


def _renamed(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layer of settings, with current names for renamed settings."""
    old = {RENAMED[name]: value for name, value in layer.items() if name in RENAMED}
    return old | {name: value for name, value in layer.items() if name not in RENAMED}


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise BadSettings(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise BadSettings(f"{file} is not a TOML file: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    variables = {PREFIX + name.upper(): name for name in (*RENAMED, *Settings.__struct_fields__)}
    files = {f"{PREFIX}{name.upper()}_FILE": name for name in SECRETS}
    given = {name: text for name, text in environ.items() if text and name.startswith(PREFIX)}
    for variable in given:
        if variable not in variables and variable not in files and not OTHERS.fullmatch(variable):
            raise _no_setting("the environment", variable, (*variables, *files))
    found = {name: given[variable] for variable, name in variables.items() if variable in given}
    if "://" in found.get("port", ""):
        raise BadSettings(
            f"LORAPLEX_PORT={found['port']} comes from Kubernetes, for a service"
            " named loraplex: set `enableServiceLinks: false` in the pod's spec"
        )
    for variable, name in files.items():
        if variable in given and name not in found:
            try:
                found[name] = Path(given[variable]).read_text().strip()
            except OSError as error:
                raise BadSettings(f"{variable}: {error.filename}: {error.strerror}") from error
    return found


def _no_setting(source: str, name: str, known: Iterable[str]) -> BadSettings:
    by_end = {each.removeprefix(PREFIX): each for each in known}
    near = get_close_matches(name.removeprefix(PREFIX), by_end, 1, cutoff=0.7)
    hint = f"; did you mean {by_end[near[0]]}?" if near else ""
    return BadSettings(f"{source}: there is no setting {name!r}{hint}")


def _flag(name: str) -> str:
    return "--model" if name == "models" else f"--{name.replace('_', '-')}"


def _read(name: str, value: Any, place: str) -> Any:
    """Converts a value from the form in which users write it to the type of the struct's field.
    Raises BadSettings, which names the place."""
    try:
        if isinstance(value, str) and name in TEXTS:
            return TEXTS[name](value)
        if name in LISTS and not isinstance(value, Mapping):
            return LISTS[name](_listed(value))
    except ValueError as error:
        raise BadSettings(f"{place}: {error}") from error
    return value


def _written(value: Any) -> str:
    """Returns a value in the form of an environment variable. Paths are absolute, so that they do
    not depend on the working folder."""
    match value:
        case bool():
            return str(value).lower()
        case Path():
            return str(expanded(value, "setting"))
        case dict():
            return ",".join(f"{name}={item}" for name, item in value.items())
        case tuple():
            return ",".join(value)
        case _:
            return str(value)


def _parse_range(text: str) -> MemoryRange:
    low, colon, high = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is not MIN:MAX")
    return MemoryRange(parse_size(low) if low else 0, parse_size(high) if high else None)


def _check_url(text: str) -> str:
    if not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is not a URL such as http://loraplex-admin:8000")
    return text


def _check_origin(text: str) -> str:
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is not an origin such as https://app.example.com, or *")
    return text


def _listed(value: Any) -> list[str]:
    """Returns the items of a list or of comma-separated text. Raises ValueError."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise ValueError(f"{value!r} is not a list of texts")
    return [each.strip() for each in given]


def _parse_pairs(pairs: list[str], form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in pairs:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ValueError(f"{text!r} is not {form}")
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = path
    return found


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise NotImplementedError(f"{kind} from {type(value)}")


SIZES = tuple(
    field.name
    for field in msgspec.structs.fields(Settings)
    if any(isinstance(each, Meta) and each.extra == BYTES for each in nested(field.type))
)
TEXTS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(SIZES, parse_size),
    "adapter_memory": _parse_range,
    "admin_url": _check_url,
}
LISTS: Mapping[str, Callable[[list[str]], Any]] = {
    "models": lambda texts: _parse_pairs([named_model(each) for each in texts], "NAME=PATH"),
    "adapter_roots": lambda texts: _parse_pairs(texts, "TENANT=FOLDER"),
    "default_tenant_quota": lambda texts: _parse_pairs(texts, "LIMIT=VALUE"),
    "workers": lambda texts: [check_address(each) for each in texts],
    "trusted_proxies": lambda texts: [str(ip_network(each)) for each in texts],
    "cors_origins": lambda texts: [_check_origin(each) for each in texts],
    "transport_gateways": list,
    "transport_workers": list,
}
"""Parsers of settings that users may write as comma-separated text."""
