"""Every backend keeps the promises of the protocol; then what only a file system can do wrong."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME, prefix_of
from lightning_shardckpt.storage.local.local_outputs import LocalOutputs
from lightning_shardckpt.storage.local.local_reader import OPEN_FILES
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.local.posix import EXCHANGE, Rename, rename_with_flag
from lightning_shardckpt.storage.protocol import Draft, Reader, Storage, read_all
from lightning_shardckpt.storage.remote.remote_reader import PrefixedReader
from lightning_shardckpt.storage.router import StorageRouter
from tests.support.file_systems import without_flags
from tests.support.memory_storage import MemoryStorage
from tests.support.stores import IMPATIENT

ID, OTHER_ID = "0" * 32, "1" * 32


def put(storage: Storage, path: str, save_id: str = ID, **files: bytes) -> None:
    """Publish a checkpoint of these files."""
    draft = storage.draft(path, save_id)
    draft.begin()
    for name, content in {ROOT_NAME: root_of(save_id), **files}.items():
        draft.write(name, [content])
    draft.publish()


def root_of(save_id: str) -> bytes:
    """As much of a root index as a backend may look at."""
    return b'"prefix":"' + prefix_of(save_id).encode() + b'"'


def content(storage: Storage, path: str) -> dict[str, bytes]:
    """Every file, by the name under which it was written."""
    reader = storage.open(path)
    try:
        found = [(plain(name), read_all(reader, name)) for name in reader.names()]
    finally:
        reader.close()
    assert len(dict(found)) == len(found)
    return dict(found)


def plain(name: str) -> str:
    """Without what an object store puts before names."""
    return name.removeprefix(prefix_of(ID)).removeprefix(prefix_of(OTHER_ID))


# ── what every backend must do ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=[MemoryStorage, LocalStorage, "memory", "s3"])
def storage(request: pytest.FixtureRequest) -> Storage:
    """Each backend; of stores: this process's memory, and one that speaks S3."""
    if not isinstance(request.param, str):
        found: Storage = request.param()
        return found
    options = {"storage_options": request.getfixturevalue("s3").options} if request.param == "s3" else {}
    return StorageRouter(tuning=IMPATIENT, **options)


@pytest.fixture
def path(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    kind = getattr(getattr(request.node, "callspec", None), "params", {}).get("storage")
    if kind == "s3":
        return str(request.getfixturevalue("s3").url("runs", "step-1.ckpt"))
    start = "memory:/" if kind == "memory" else ""
    return f"{start}{tmp_path / 'runs' / 'step-1.ckpt'}"


def test_what_was_published_is_read_back(storage: Storage, path: str) -> None:
    draft = storage.draft(path, ID)
    draft.begin()
    draft.write("a", [b"one", memoryview(b"two"), b"", memoryview(b"three")])
    draft.write("empty", [])
    draft.write(ROOT_NAME, (bytes([i]) for i in range(5)))
    draft.publish()
    assert content(storage, path) == {"a": b"onetwothree", "empty": b"", ROOT_NAME: bytes(range(5))}


def test_a_buffer_may_be_used_again_after_it_was_given(storage: Storage, path: str) -> None:
    def parts() -> Iterator[memoryview]:
        buffer = bytearray(6 << 20)
        for value in range(4):
            buffer[:] = bytes([value]) * len(buffer)
            yield memoryview(buffer)

    draft = storage.draft(path, ID)
    draft.begin()
    draft.write("a", parts())
    draft.write(ROOT_NAME, [root_of(ID)])
    draft.publish()
    assert content(storage, path)["a"] == b"".join(bytes([value]) * (6 << 20) for value in range(4))


def test_nothing_is_there_before_it_is_published(storage: Storage, path: str) -> None:
    draft = storage.draft(path, ID)
    draft.begin()
    draft.write(ROOT_NAME, [b"x"])
    with pytest.raises(CheckpointNotFoundError, match=r"step-1\.ckpt"):
        storage.open(path)


def test_the_old_one_is_there_until_the_new_one_is(storage: Storage, path: str) -> None:
    put(storage, path, a=b"old", only_old=b"")
    draft = storage.draft(path, OTHER_ID)
    draft.begin()
    draft.write("a", [b"new"])
    draft.write(ROOT_NAME, [b"new"])
    assert content(storage, path)["a"] == b"old"
    draft.publish()
    assert content(storage, path) == {"a": b"new", ROOT_NAME: b"new"}


def test_every_rank_writes_into_the_same_draft(storage: Storage, path: str) -> None:
    first, second = storage.draft(path, ID), storage.draft(path, ID)
    first.begin()
    second.write("b", [b"2"])
    first.write(ROOT_NAME, [b"1"])
    first.publish()
    assert content(storage, path) == {"b": b"2", ROOT_NAME: b"1"}


def test_a_file_is_written_once(storage: Storage, path: str) -> None:
    draft = storage.draft(path, ID)
    draft.begin()
    draft.write("a", [b"1"])
    with pytest.raises(FileExistsError):
        draft.write("a", [b"2"])


def test_an_error_while_the_content_is_made_passes_through(storage: Storage, path: str) -> None:
    def parts() -> list[bytes]:
        raise RuntimeError("staging failed")

    draft = storage.draft(path, ID)
    draft.begin()
    with pytest.raises(RuntimeError, match="staging failed"):
        draft.write("a", (part for part in parts()))
    draft.discard()


def test_a_discarded_draft_leaves_nothing(storage: Storage, path: str) -> None:
    put(storage, path, a=b"old")
    draft = storage.draft(path, OTHER_ID)
    draft.begin()
    draft.write("a", [b"new"])
    draft.discard()
    draft.discard()
    assert content(storage, path)["a"] == b"old"
    if isinstance(storage, LocalStorage):
        assert os.listdir(os.path.dirname(path)) == ["step-1.ckpt"]


def test_a_range_is_read_into_the_memory_that_is_given(storage: Storage, path: str) -> None:
    put(storage, path, a=bytes(range(100)))
    reader: Reader = storage.open(path)
    if reader.high_latency:
        reader = PrefixedReader(reader, prefix_of(ID))
    target = bytearray(b"." * 10)
    reader.read_into("a", 90, memoryview(target)[2:7])
    assert target == b".." + bytes(range(90, 95)) + b"..."
    reader.read_into("a", 100, memoryview(bytearray()))
    assert reader.size("a") == 100
    with pytest.raises(EOFError, match="a ends at byte 100"):
        reader.read_into("a", 95, memoryview(target))
    with pytest.raises(FileNotFoundError):
        reader.size("b")
    with pytest.raises(FileNotFoundError):
        reader.read_into("b", 0, memoryview(target))
    reader.close()
    reader.close()


def test_removing_removes(storage: Storage, path: str) -> None:
    put(storage, path)
    storage.remove(path)
    with pytest.raises(CheckpointNotFoundError):
        storage.open(path)
    with pytest.raises(CheckpointNotFoundError):
        storage.remove(path)


# ── a file system ─────────────────────────────────────────────────────────────────────────────────────────────────

LOCAL = LocalStorage()
LOCAL_WITHOUT_FLAGS = LocalStorage(rename=without_flags)


def new_file(path: str, rename: Rename = rename_with_flag) -> AbstractContextManager[tuple[int, list[str]]]:
    """A file that appears at the end of the context, as consolidate writes it: its descriptor."""
    return LocalOutputs(rename).file(path, overwrite=False)


@pytest.fixture(params=[LOCAL, LOCAL_WITHOUT_FLAGS], ids=["exchange", "no exchange"])
def swapping(request: pytest.FixtureRequest) -> LocalStorage:
    """A file system that exchanges two names in one step, and one that cannot."""
    found: LocalStorage = request.param
    return found


def beside(path: str) -> list[str]:
    return sorted(name for name in os.listdir(os.path.dirname(path)) if name != os.path.basename(path))


def test_publishing_over_a_checkpoint_leaves_nothing_beside_it(path: str) -> None:
    put(LOCAL, path, a=b"1", gone=b"")
    put(LOCAL, path, OTHER_ID, a=b"2")
    assert content(LOCAL, path) == {"a": b"2", ROOT_NAME: root_of(OTHER_ID)}
    assert beside(path) == []


def test_this_file_system_exchanges_names_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "in a").touch()
    assert rename_with_flag(str(tmp_path / "a"), str(tmp_path / "b"), EXCHANGE)
    assert os.listdir(tmp_path / "b") == ["in a"]
    with pytest.raises(FileNotFoundError, match="exchanging"):
        rename_with_flag(str(tmp_path / "a"), str(tmp_path / "c"), EXCHANGE)


def test_no_temporary_name_looks_like_a_checkpoint_to_lightning(path: str) -> None:
    draft = LOCAL.draft(path, ID)
    draft.begin()
    names = beside(path)
    assert len(names) == 2
    for name in names:
        assert name.startswith(".") and not name.startswith("last")
        assert "ckpt" not in name


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_saving_to_a_link_replaces_the_link_and_keeps_what_it_names(path: str) -> None:
    other = os.path.join(os.path.dirname(path), "other.ckpt")
    put(LOCAL, other, a=b"other")
    os.symlink("other.ckpt", path)
    with pytest.raises(FileExistsError, match="is a link, and the file system can't exchange it"):
        put(LOCAL_WITHOUT_FLAGS, path, OTHER_ID, a=b"new")
    assert os.readlink(path) == "other.ckpt" and content(LOCAL, path)["a"] == b"other"
    put(LOCAL, path, OTHER_ID, a=b"new")
    assert not os.path.islink(path)
    assert (content(LOCAL, path)["a"], content(LOCAL, other)["a"]) == (b"new", b"other")
    assert beside(path) == ["other.ckpt"]


def test_saving_to_a_dangling_link_replaces_it(path: str, swapping: LocalStorage) -> None:
    link(Path(path), "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="a link to 'nowhere', which is gone"):
        LOCAL.open(path)
    put(swapping, path)
    assert ROOT_NAME in content(LOCAL, path)
    assert beside(path) == []


def test_a_checkpoint_is_read_through_a_link(path: str) -> None:
    put(LOCAL, path, a=b"1")
    os.symlink(os.path.basename(path), path + ".last")
    assert content(LOCAL, path + ".last")["a"] == b"1"
    LOCAL.remove(path + ".last")
    assert content(LOCAL, path)["a"] == b"1"


def test_saving_into_an_empty_directory_replaces_it(path: str, swapping: LocalStorage) -> None:
    os.makedirs(path)
    put(swapping, path)
    assert ROOT_NAME in content(LOCAL, path)
    assert beside(path) == []


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("what", ["a file", "a directory of somebody"])
def test_what_is_not_ours_is_never_replaced(what: str, when: str, path: str) -> None:
    def appear() -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if what == "a file":
            target.write_text("thesis")
        else:
            target.mkdir()
            (target / "thesis").touch()

    draft = LOCAL.draft(path, ID)
    with pytest.raises(FileExistsError, match=r"step-1\.ckpt.*use another path"):
        if when == "before":
            appear()
        draft.begin()
        appear()
        draft.write(ROOT_NAME, [b""])
        draft.publish()
    draft.discard()
    assert beside(path) == []
    with pytest.raises(CheckpointNotFoundError):
        LOCAL.remove(path)
    assert Path(path).is_file() or os.listdir(path) == ["thesis"]


def test_more_files_than_a_process_may_open_are_read(path: str) -> None:
    count = 200
    put(LOCAL, path, **{f"f{i}": bytes([i]) for i in range(count)})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader = LOCAL.open(path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, before[1]))
    try:
        for _ in range(2):
            assert [read_all(reader, f"f{i}") for i in range(count)] == [bytes([i]) for i in range(count)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        reader.close()


def test_a_clone_shares_the_files_that_are_open_and_outlives_its_original(path: str) -> None:
    put(LocalStorage(), path, a=b"first", b=b"second")
    original = LocalStorage().open(path)
    assert original.size("a") == 5
    clone = original.clone()
    os.unlink(f"{path}/a")  # by name it could not be opened any more
    assert read_all(clone, "a") == b"first"
    original.close()
    assert [read_all(clone, name) for name in "ab"] == [b"first", b"second"]
    clone.close()


def test_clones_read_at_once_while_each_closes_files_for_others(path: str) -> None:
    files = {f"f{i}": os.urandom(50 + i) for i in range(OPEN_FILES + 40)}
    put(LocalStorage(), path, **files)
    original = LocalStorage().open(path)

    def read(seed: int) -> bool:
        reader, draw = original.clone() if seed else original, random.Random(seed)
        names = [draw.choice(list(files)) for _ in range(3000)]
        try:
            return all(read_all(reader, name) == files[name] for name in names)
        finally:
            if seed:
                reader.close()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(4)))
    original.close()


def test_files_that_a_reader_opened_are_closed(path: str) -> None:
    put(LOCAL, path, a=b"")
    before = sorted(os.listdir("/proc/self/fd"))
    assert content(LOCAL, path)
    assert sorted(os.listdir("/proc/self/fd")) == before


# ── a disk that is full, or not to be written ─────────────────────────────────────────────────────────────────────

SAVE = f"""
import errno, os, sys
from lightning_shardckpt.storage.local.local_storage import LocalStorage
path, old, new = sys.argv[1], b"o" * 300_000, b"n" * 900_000
def put(save_id, content):
    draft = LocalStorage().draft(path, save_id)
    try:
        draft.begin()
        draft.write("a", [content[:1000], content[1000:]])
        draft.write({ROOT_NAME!r}, [b"root"])
        draft.publish()
    except OSError as error:
        draft.discard()
        return error.errno, str(error)
def check():
    reader = LocalStorage().open(path)
    found = bytearray(reader.size("a"))
    reader.read_into("a", 0, memoryview(found))
    assert found == old and reader.size({ROOT_NAME!r}) == 4
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)], os.listdir(os.path.dirname(path))
assert put("0" * 32, old) is None
check()
LIMIT
found = put("1" * 32, new)
assert found and found[0] == EXPECTED, found
check()
print("as it should be")
"""


def run(script: str, path: str, *command: str) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [*command, sys.executable, "-c", script, path], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "as it should be\n", done.stderr


def own_mounts() -> list[str]:
    """The command that runs another one with mounts of its own; skips where the system forbids it."""
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system allows no user namespaces; test_a_file_that_may_not_grow… covers the same path")
    return command


def mounted(script: str, options: str) -> str:
    mount = f"subprocess.run(['mount', '-t', 'tmpfs', {options!r}, 'none', sys.argv[1]], check=True)"
    return f"import subprocess, sys\n{mount}\nsys.argv[1] += '/a.ckpt'\n{script}"


def test_a_file_that_may_not_grow_is_an_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))"
    run(SAVE.replace("LIMIT", limit).replace("EXPECTED", "errno.EFBIG"), str(tmp_path / "a.ckpt"))


def test_a_read_only_place_is_an_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    limit = "import subprocess; subprocess.run(['mount', '-o', 'remount,ro', os.path.dirname(path)], check=True)"
    script = SAVE.replace("LIMIT", limit).replace("EXPECTED", "errno.EROFS")
    run(mounted(script, "-osize=4m"), str(tmp_path), *own_mounts())


def test_a_failing_discard_does_not_hide_why_the_save_failed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft: Draft = LOCAL.draft(path, ID)
    draft.begin()
    draft.write("a", [b"1"])

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "rmdir", refuse)
    draft.discard()
    assert os.listdir(os.path.dirname(path))  # what could not be removed
