from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import BadSettings
from loraplex.roles.worker import worker_config
from loraplex.settings import MemoryRange, load_settings, parse_size
from workers.process.config import WorkerConfig
from workers.wire.transport.base import MutualTLS, Security


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path):
    file = tmp_path / "loraplex.toml"
    file.write_text('port = 1\nhost = "a"\nmax_num_seqs = 5\nthreads = 3\n')
    environ = {"LORAPLEX_PORT": "2", "LORAPLEX_MAX_NUM_SEQS": "6"}
    settings = load_settings({"port": 3, "host": None, "models": ()}, environ, file)
    assert (settings.port, settings.max_num_seqs) == (3, 6)
    assert (settings.host, settings.threads) == ("a", 3)
    assert settings.dtype == "bfloat16"


def test_each_layer_may_write_a_thing_its_own_way(tmp_path: Path):
    file = tmp_path / "loraplex.toml"
    file.write_text('memory = 4096\n[models]\na = "/x"\n')
    assert load_settings({}, {}, file).models == {"a": "/x"}
    assert load_settings({}, {}, file).memory == 4096
    environ = {"LORAPLEX_MODELS": "a=/x,b=/y", "LORAPLEX_ADAPTER_MEMORY": "1K:2K"}
    settings = load_settings({"memory": "1MiB"}, environ)
    assert settings.models == {"a": "/x", "b": "/y"}
    assert settings.adapter_memory == MemoryRange(1024, 2048)
    assert settings.memory == 1 << 20
    assert load_settings({"data_dir": tmp_path}, {}).home == tmp_path
    assert load_settings({}, {"LORAPLEX_DATA_DIR": "~/x"}).home == Path.home() / "x"
    assert load_settings({"models": ("n=/a=b",)}, {}).models == {"n": "/a=b"}
    assert load_settings({"adapter_memory": "1K:"}, {}).adapter_memory == MemoryRange(1024)
    proxies = load_settings({}, {"LORAPLEX_TRUSTED_PROXIES": "10.0.0.1, 10.1.0.0/16"})
    assert proxies.trusted_proxies == ("10.0.0.1/32", "10.1.0.0/16")
    file.write_text('workers = ["unix:/a", "tcp://b:1"]')
    assert load_settings({}, {}, file).workers == ("unix:/a", "tcp://b:1")


def test_an_old_name_is_taken_and_the_new_one_wins(tmp_path: Path):
    file = tmp_path / "loraplex.toml"
    file.write_text('max_usage_spool = "1MiB"\n')
    assert load_settings({}, {}, file).max_usage_wal == 1 << 20
    old = {"LORAPLEX_MAX_USAGE_SPOOL": "2MiB"}
    assert load_settings({}, old, file).max_usage_wal == 2 << 20
    both = old | {"LORAPLEX_MAX_USAGE_WAL": "3MiB"}
    assert load_settings({}, both, file).max_usage_wal == 3 << 20


def test_a_secret_may_lie_in_a_file_and_is_not_shown(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("postgresql://u:hunter2@h/d\n")
    environ = {"LORAPLEX_DATABASE_URL_FILE": str(secret), "LORAPLEX_KEY": "lpx_hunter2"}
    settings = load_settings({}, environ)
    assert settings.database_url == "postgresql://u:hunter2@h/d"
    assert "hunter2" not in str(settings.shown())
    environ |= {"LORAPLEX_DATABASE_URL": "postgresql://other"}
    assert load_settings({}, environ).database_url == "postgresql://other"


@pytest.mark.parametrize(
    ("flags", "environ", "text", "words"),
    [
        ({"port": "x"}, {}, "", "--port"),
        ({}, {"LORAPLEX_PORT": "x"}, "", "LORAPLEX_PORT: "),
        ({}, {"LORAPLEX_PORT": "tcp://10.0.0.1:80"}, "", "Kubernetes.*enableServiceLinks"),
        ({}, {}, "port = 'x'", "toml.*port"),
        ({}, {}, "colour = 1", "no setting 'colour'"),
        ({}, {}, "prot = 1", "no setting 'prot'; did you mean port"),
        ({}, {}, "colour = ", "toml"),
        ({}, {"LORAPLEX_COLOUR": "1"}, "", "the environment: .*no setting 'LORAPLEX_COLOUR'$"),
        ({}, {"LORAPLEX_MAX_NUM_SEQ": "8"}, "", "did you mean LORAPLEX_MAX_NUM_SEQS"),
        ({}, {"LORAPLEX_KEYFILE": "/x"}, "", "did you mean LORAPLEX_KEY_FILE"),
        ({}, {"LORAPLEX_PORT_FILE": "/x"}, "", "no setting 'LORAPLEX_PORT_FILE'"),
        ({}, {"LORAPLEX_": "x"}, "", "no setting 'LORAPLEX_'"),
        ({"memory": "much"}, {}, "", "memory: 'much' is not a size"),
        ({"adapter_memory": "5"}, {}, "", "not MIN:MAX"),
        ({"models": ("x=",)}, {}, "", "not NAME=PATH"),
        ({"models": ("/",)}, {}, "", "not NAME=PATH"),
        ({}, {"LORAPLEX_MODELS": "x=/a, x=/b"}, "", "'x' is given twice"),
        ({"device": "tpu"}, {}, "", "--device.*tpu"),
        ({"port": 65536}, {}, "", "--port"),
        ({}, {"LORAPLEX_DTYPE": "int"}, "", "^LORAPLEX_DTYPE: invalid value 'int'; allowed: 'bf"),
        ({}, {"LORAPLEX_DRAIN_S": "x"}, "", "^LORAPLEX_DRAIN_S: expected a number, got text$"),
        ({"memory": "0"}, {}, "", "--memory"),
        ({"threads": 0}, {}, "", "--threads"),
        ({"max_num_seqs": 0}, {}, "", "--max-num-seqs"),
        ({"max_num_seqs": 65537}, {}, "", "--max-num-seqs.*<= 65536"),
        ({"max_batched_tokens": 10**7}, {}, "", "--max-batched-tokens.*<= 65536"),
        ({"max_loaded_adapters": 10**20}, {}, "", "--max-loaded-adapters.*<= 65536"),
        ({"max_model_len": 4}, {}, "", "--max-model-len.*>= 5"),
        ({"max_batched_tokens": -1}, {}, "", "--max-batched-tokens"),
        ({"adapter_memory": "2G:1G"}, {}, "", "--adapter-memory.*not MIN:MAX"),
        ({}, {"LORAPLEX_WORKERS": "unix:/a, w.sock"}, "", "LORAPLEX_WORKERS: 'w.sock' is not"),
        (
            {},
            {"LORAPLEX_TRUSTED_PROXIES": "10.0.0.1,proxy"},
            "",
            "LORAPLEX_TRUSTED_PROXIES: 'proxy'",
        ),
        (
            {},
            {"LORAPLEX_TRUSTED_PROXIES": "10.0.0.1/8"},
            "",
            "LORAPLEX_TRUSTED_PROXIES: 10.0.0.1/8",
        ),
        ({}, {}, "trusted_proxies = [1]", "trusted_proxies: .1. is not a list of texts"),
        ({}, {}, "models = 5", "models: 5 is not a list of texts"),
        ({}, {"LORAPLEX_KEY_FILE": "/none"}, "", "LORAPLEX_KEY_FILE"),
    ],
)
def test_nonsense_is_named_with_its_source(
    tmp_path: Path, flags: dict[str, object], environ: dict[str, str], text: str, words: str
):
    file = tmp_path / "loraplex.toml"
    file.write_text(text)
    with pytest.raises(BadSettings, match=words):
        load_settings(flags, environ, file)


def test_a_model_is_named_by_its_folder_or_file(tmp_path: Path):
    given = (str(tmp_path / "Qwen 2.5"), "/models/tiny.gguf", "mine=/models/x")
    assert load_settings({"models": given}, {}).models == {
        "Qwen-2.5": given[0],
        "tiny": "/models/tiny.gguf",
        "mine": "/models/x",
    }


def test_variables_that_others_set_are_no_settings():
    environ = {
        "LORAPLEX_TEST_SCALE": "full",
        "LORAPLEX_SERVICE_HOST": "10.0.0.1",
        "LORAPLEX_SERVICE_PORT_HTTP": "80",
        "LORAPLEX_PORT_8000_TCP_ADDR": "10.0.0.1",
        "LORAPLEX_ADMIN_SERVICE_PORT": "80",
        "LORAPLEX_ADMIN_PORT": "tcp://10.0.0.1:80",
        "LORAPLEX_COLOUR": "",
        "LORAPLEXITY": "x",
    }
    assert load_settings({}, environ) == load_settings({}, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("1.5G", 3 << 29),
        ("2GB", 2 * 10**9),
        ("3TiB", 3 << 40),
        ("10B", 10),
        ("9007199254740993", (1 << 53) + 1),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1X", "MiB", "1iB", "1 2", "1e3", "inf"])
def test_what_is_no_size(text: str):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_a_plain_number_is_itself(number: int):
    assert parse_size(str(number)) == number


def test_where_the_store_is(tmp_path: Path):
    given = {"data_dir": tmp_path / "home"}
    assert load_settings(given, {}).store_location == str(tmp_path / "home" / "store")
    own = load_settings({**given, "store": "~/s"}, {})
    assert own.store_location == str(Path.home() / "s")
    bucket = load_settings(given, {"LORAPLEX_STORE": "s3://bucket/prefix"})
    assert bucket.store_location == "s3://bucket/prefix" == bucket.shown()["store"]
    for nowhere in ("http://bucket", "s3://"):
        with pytest.raises(BadSettings, match=f"store: {nowhere}"):
            load_settings({**given, "store": nowhere}, {}).open_store()
    reserved = {"LORAPLEX_MIN_FREE_DISK": "1TiB"}
    with pytest.raises(OSError, match="bytes are free"):
        load_settings(given, reserved).open_store().check_room(1 << 60)


def test_tcp_to_workers_is_secured_or_said_not_to_be(tmp_path: Path):
    assert load_settings({}, {}).security == Security()
    insecure = load_settings({}, {"LORAPLEX_INSECURE_TRANSPORT": "true"})
    assert insecure.security == Security(insecure=True)
    environment = {
        f"LORAPLEX_TRANSPORT_{name.upper()}": str(tmp_path / name)
        for name in ("certificate", "key", "authority")
    }
    with pytest.raises(BadSettings, match="certificate does not exist"):
        load_settings({}, environment).security  # noqa: B018
    for path in environment.values():
        Path(path).touch()
    files = MutualTLS(*(tmp_path / name for name in ("certificate", "key", "authority")))
    assert load_settings({}, environment).security == Security(files)
    with pytest.raises(BadSettings, match="transport_certificate"):
        load_settings({"transport_key": str(tmp_path / "key")}, {}).security  # noqa: B018


def test_names_of_certificates_come_from_the_environment_too():
    given = {"LORAPLEX_TRANSPORT_GATEWAYS": "DNS:gw-1, URI:spiffe://x/gateway/*"}
    settings = load_settings({}, given | {"LORAPLEX_TRANSPORT_WORKERS": "*"})
    assert settings.security.gateways == ("DNS:gw-1", "URI:spiffe://x/gateway/*")
    assert settings.security.workers == ("*",)


def test_a_worker_drains_as_long_as_it_is_told():
    for environ, expected in ({}, 120.0), ({"LORAPLEX_DRAIN_S": "300"}, 300.0):
        config = worker_config(load_settings({}, environ), {}, "unix:/w", "127.0.0.1:0")
        assert config.drain_s == expected


def test_a_worker_is_told_how_tcp_is_secured(tmp_path: Path):
    for name in ("certificate", "key", "authority"):
        (tmp_path / name).touch()
    given = {f"transport_{path.name}": str(path) for path in tmp_path.iterdir()}
    settings = load_settings(given | {"data_dir": str(tmp_path)}, {})
    config = worker_config(settings, {"tiny": "b" * 64}, "tcp://127.0.0.1:1", "127.0.0.1:0")
    (tmp_path / "worker.json").write_text(config.to_json())
    assert WorkerConfig.read(tmp_path / "worker.json").security == settings.security


@pytest.mark.parametrize("flags", [{}, {"device": "cuda", "ops": "cuda"}, {"device": "cpu"}])
def test_a_worker_is_told_the_device_and_left_what_follows_from_it(
    tmp_path: Path, flags: dict[str, str]
):
    settings = load_settings(flags | {"data_dir": str(tmp_path)}, {})
    config = worker_config(settings, {"tiny": "b" * 64}, "unix:/w", "127.0.0.1:0")
    assert config.device == flags.get("device", "auto")
    assert config.ops == flags.get("ops", "")
    left = (config.memory, config.device_memory, config.max_batched_tokens)
    assert left == (0, None, 0)


def test_a_child_has_the_same_settings(tmp_path: Path):
    flags: dict[str, object] = {
        "data_dir": tmp_path,
        "adapter_memory": "64MiB:256MiB",
        "max_token_gap": 0.5,
        "insecure_transport": True,
        "tls_certificate": tmp_path / "chain.pem",
        "cors_origins": "https://a.example,https://b.example",
        "adapter_roots": "acme=/srv/acme,globex=/srv/globex",
        "default_tenant_quota": "requests_per_minute=60",
        "kernel_variant": "avx2",
        "audit_days": 30,
    }
    settings = load_settings(flags, {})
    assert load_settings({}, settings.environment()) == settings
    assert load_settings({}, load_settings({}, {}).environment()) == msgspec.structs.replace(
        load_settings({}, {}), data_dir=load_settings({}, {}).home
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "--data-dir or LORAPLEX_DATA_DIR"),
        ({"data_dir": "/x", "store": "~/store"}, "store: .*an absolute path"),
        ({"data_dir": "/x", "tls_certificate": "~/c"}, "tls_certificate: "),
    ],
)
def test_an_account_without_a_home_is_asked_for_a_folder(
    given: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
):
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(BadSettings, match=named):
        settings = load_settings(given, {})
        assert settings.home and settings.store_location
        assert not settings.certificates
