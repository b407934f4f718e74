"""Buckets of obstore from URLs, from options by fsspec's names, and with credentials as botocore finds them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lightning_shardckpt.system.tuning import Tuning

_EXTRA = 'pip install "lightning-shardckpt[s3]"'
_PROTOCOLS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_KEPT_FOR = timedelta(minutes=6)  # obstore asks again five minutes before the end: botocore renews when asked

# obstore's names of options by fsspec's (s3fs, gcsfs, adlfs); a dot leads into a dictionary.
_NAMES = {
    "s3": {
        "endpoint_url": "endpoint",
        "client_kwargs.endpoint_url": "endpoint",
        "client_kwargs.region_name": "region",
        "anon": "skip_signature",
        "requester_pays": "request_payer",
        "s3_additional_kwargs.ServerSideEncryption": "server_side_encryption",
        "s3_additional_kwargs.SSEKMSKeyId": "sse_kms_key_id",
    },
    "gs": {"token": "token", "endpoint_url": "base_url"},
    "az": {
        "account_name": "account_name",
        "account_key": "account_key",
        "sas_token": "sas_key",
        "tenant_id": "tenant_id",
        "client_id": "client_id",
        "client_secret": "client_secret",
        "anon": "skip_signature",
    },
}
_CREDENTIALS = ("key", "secret", "token", "profile")
_CLIENT = ("config_kwargs.connect_timeout", "config_kwargs.read_timeout", "client_kwargs.verify")


def open_bucket(url: str, options: Mapping[str, Any], tuning: Tuning) -> Any:
    """Return obstore's store for the bucket of a URL; raises like ``ObjectStore``."""
    protocol, _, rest = url.partition("://")
    bucket, kind = rest.partition("/")[0], _PROTOCOLS.get(protocol)
    if kind is None:
        protocols = ", ".join(f"{name}://" for name in (*_PROTOCOLS, "memory"))
        raise ValueError(f"{url!r} can't be opened: checkpoints are in file systems or at {protocols}, not {protocol}://")
    if not bucket:
        raise ValueError(f"{url!r} is no path of a checkpoint, such as '{protocol}://bucket/name.ckpt'")
    try:
        import obstore.store
    except ImportError as error:
        raise ImportError(f"{url!r} can't be opened: {error}; {_EXTRA}") from error

    stores: Any = obstore.store  # its typed dictionaries can't be built from tables
    flat = dict(_dotted(options))
    names = _NAMES[kind]
    known = {*names, *(_CREDENTIALS if kind == "s3" else ()), *_CLIENT}
    if unknown := sorted(flat.keys() - known):
        raise TypeError(
            f"unknown storage_options for {url!r}: {', '.join(unknown)}; known are {', '.join(sorted(known))} "
            "(a dot leads into a dictionary) and throttle_uploads"
        )
    config: dict[str, Any] = {names[name]: value for name, value in flat.items() if name in names}
    common = {"client_options": _client(flat), "retry_config": _retry(tuning)}
    if kind == "gs":
        token = config.pop("token", None)
        if token == "anon":
            config["skip_signature"] = True
        elif token is not None:
            config["application_credentials" if os.path.exists(token) else "bearer_token"] = token
        return stores.GCSStore(bucket, config=config, **common)
    if kind == "az":
        bucket, _, host = bucket.partition("@")  # abfss://container@account.dfs.core.windows.net/…
        account = {"account_name": host.partition(".")[0]} if host else {}
        return stores.AzureStore(bucket, config={**account, **config}, **common)
    region, endpoint, provider = find_aws(url, flat, anonymous=bool(config.get("skip_signature")))
    config = {**({"region": region} if region else {}), **({"endpoint": endpoint} if endpoint else {}), **config}
    return stores.S3Store(bucket, config=config, credential_provider=provider, **common)


def _dotted(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options by dotted names.

    >>> dict(_dotted({"key": "a", "client_kwargs": {"region_name": "b"}}))
    {'key': 'a', 'client_kwargs.region_name': 'b'}
    """
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _client(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the HTTP client. A stalled connection times out; an endpoint may be of http://."""
    client: dict[str, Any] = {"allow_http": True, "timeout": timedelta(minutes=10)}
    for name, default_s in (("connect_timeout", 10), ("read_timeout", 30)):
        client[name] = timedelta(seconds=flat.get(f"config_kwargs.{name}", default_s))
    verify = flat.get("client_kwargs.verify", True)
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif verify is not True:
        client["root_certificate"] = Path(verify).read_bytes()
    return client


def _retry(tuning: Tuning) -> dict[str, Any]:
    pauses = {"init_backoff": tuning.retry_pause_s, "max_backoff": tuning.retry_longest_pause_s}
    return {
        "max_retries": tuning.retry_attempts - 1,
        "retry_timeout": timedelta(seconds=tuning.retry_total_s),
        "backoff": {"base": 2, **{name: timedelta(seconds=pause) for name, pause in pauses.items()}},
    }


def find_aws(
    url: str, given: Mapping[str, Any], *, anonymous: bool = False
) -> tuple[str | None, str | None, Callable[[], dict[str, Any]] | None]:
    """Find the settings of S3 as botocore does: in the environment, profiles and files, from roles and processes.

    Args:
        url: for messages.
        given: ``profile``, or ``key``, ``secret`` and ``token``; missing ones are looked for.
        anonymous: look for no credentials.

    Returns:
        The region, the endpoint, and a function that returns credentials for obstore, renewed by botocore.

    Raises:
        PermissionError: if there are no credentials.
        ImportError: if botocore is missing.
    """
    try:
        from botocore.configprovider import ConfiguredEndpointProvider  # type: ignore[import-untyped]
        from botocore.credentials import Credentials  # type: ignore[import-untyped]
        from botocore.session import Session  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"{url!r} can't be opened: {error}; {_EXTRA}") from error

    session = Session(profile=given.get("profile"))
    endpoints = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3")
    found = session.get_config_variable("region"), endpoints.provide()
    if anonymous:
        return *found, None
    names = ("key", "secret", "token")
    credentials = Credentials(*map(given.get, names)) if "key" in given else session.get_credentials()
    if credentials is None:
        raise PermissionError(
            errno.EACCES,
            f"no credentials for {url!r}: set AWS_PROFILE or AWS_ACCESS_KEY_ID, or storage_options (key, secret; or "
            "anon=True)",
        )

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _KEPT_FOR,
        }

    return *found, provide
