"""Break one promise at a time and see that a test fails: ``python -m tests.sweeps.mutations [NUMBER …]``.

Each mutation is data: a promise, a change of one place in the package, and the tests that must fail then. The package
and its tests are copied (by hard links; the working tree is not touched), changed, and tested in the copy. First, all
of these tests must pass in an unchanged copy. Exits with 1 if a mutation survives, or could not be tried: if its text
is not in its file exactly once, refresh it; if no test fails, add the test that is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_shardckpt"
TIMEOUT_S = 600.0
_LINES_SHOWN = 25


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change that breaks a promise.

    Attributes:
        name: what the changed code does wrong.
        promise: what is broken.
        file: below the package.
        old: text that is in the file exactly once.
        new: the text in its place.
        tests: files or ids below ``tests``, of which at least one test must fail.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


CORRUPT = "no corrupted byte loads silently"
DURABLE = "a save that returned is durable"
ATOMIC = "a crash leaves the old or the new checkpoint"
EXACT = "any topology to any topology, bit-equal"
ONCE = "each byte is written once"
RANKS = "a failure of one rank reaches all"
STATE = "the state of a run is complete"
SAFE = "a hostile directory can make a load fail, and nothing else"
STEP = "a step computes what one process computes"
KEPT = "a checkpoint under evaluation is kept, and what was to be deleted goes afterwards, and nothing else"

_FLIPPED = (
    "unit/transfer/test_write_read.py::"
    "test_a_flipped_bit_in_any_byte_of_any_file_is_an_error_that_names_the_file"
)
_POWER = (
    "ranks/checkpoint/test_faults.py::"
    "test_a_loss_of_power_leaves_the_old_or_the_new_state_and_the_new_one_after_a_save"
)
_BACKGROUND = (
    "ranks/checkpoint/test_failures.py::"
    "test_what_fails_in_the_background_is_raised_once_on_all_ranks_and_nothing_is_lost"
)

MUTATIONS = (
    # ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    Mutation("checksums of blocks are not compared", CORRUPT, "transfer/reader.py", "if actual == expected:",
             "if True:", (_FLIPPED,)),
    Mutation("the ends of rows that a window cuts are not copied", EXACT, "transfer/reader.py",
             "*range(max(first, stop), last)", "*range(0)",
             ("unit/transfer/test_write_read.py::test_regions_windows_blocks_and_gaps_of_any_size_meet",)),
    Mutation("the checksum of a header is not compared", CORRUPT, "transfer/reader.py",
             "if checksum(start) != info.checksum:", "if False:", (_FLIPPED,)),
    Mutation("the checksum of the root index is not compared", CORRUPT, "format/index.py",
             " or checksum(text[seal.end() :]) != seal[1].decode():", ":", ("unit/format/test_index.py",)),
    Mutation("the checksum of an index or a document is not compared", CORRUPT, "transfer/reader.py",
             "if checksum(content) != info.checksum:", "if False:", (_FLIPPED,)),
    Mutation("the size of a file is not compared", CORRUPT, "transfer/reader.py", "if size != info.nbytes:",
             "if False:", ("ranks/checkpoint/test_corruption.py::test_appended_bytes_are_found_even_quickly",)),
    Mutation("a stale index of an earlier save is accepted", CORRUPT, "transfer/reader.py",
             "if index.save_id != self.root.save_id:", "if False:", ("unit/format/test_format.py",)),
    Mutation("a checksum is taken of other bytes than are written", CORRUPT, "transfer/writer.py", "yield part\n",
             'yield bytes(part[:-1]) + b"\\0" if len(part) else part\n',
             ("unit/transfer/test_write_read.py::test_files_hold_what_their_header_and_the_index_say",)),
    # ── the commit ────────────────────────────────────────────────────────────────────────────────────────────────────
    Mutation("a file is renamed into place before it is synced", DURABLE, "storage/local_files.py",
             "        if sync:\n            os.fsync(", "        if False:\n            os.fsync(", (_POWER,)),
    Mutation("the parent directory is not synced after the rename", DURABLE, "storage/local_files.py",
             "sync_directory(self._folder)  # if it fails", "pass  # if it fails", (_POWER,)),
    Mutation("the draft's directory is not synced before the rename", DURABLE, "storage/local_storage.py",
             "            local_files.sync_directory(directory)\n", "            pass\n", (_POWER,)),
    Mutation("the old checkpoint is deleted before the new one is in place", ATOMIC, "storage/local_files.py",
             "        keep_owner_and_mode(target, self.path)\n        if not replaces:\n",
             "        keep_owner_and_mode(target, self.path)\n        delete(target)\n        if True:\n",
             ("ranks/checkpoint/test_faults.py::"
              "test_a_process_that_is_killed_at_a_call_leaves_the_old_or_the_new_state",)),
    Mutation("on an object store, the root index is put when it is written", ATOMIC, "storage/router.py",
             'self._root = b"".join(parts)\n',
             'self._root = b"".join(parts)\n            self._objects.put(f"{self._url}/{name}", self._root, None)\n',
             ("unit/storage/test_storage.py",)),
    Mutation("on an object store, a checkpoint that appeared meanwhile is overwritten", ATOMIC,
             "storage/object_store.py", 'mode: Any = expected or "create"', 'mode: Any = "overwrite"',
             ("unit/storage/test_clouds.py::test_gcs_and_azure_compare_as_they_write",)),
    Mutation("the writer's lock is not taken", ATOMIC, "storage/local_files.py",
             "                _try_lock(file)\n", "                pass\n", ("unit/storage/test_local.py",)),
    Mutation("a directory of someone else is replaced", ATOMIC, "storage/local_storage.py",
             "        if foreign and ROOT_NAME not in names:", "        if False:",
             ("unit/storage/test_storage.py::test_what_is_not_ours_is_never_replaced",)),
    Mutation("a directory is filled in place with the root index first", ATOMIC, "storage/local_storage.py",
             "if self.prefix and name != ROOT_NAME:\n            directory, stored = self._target, self.prefix + name",
             "if self.prefix:\n"
             "            directory, stored = self._target, name if name == ROOT_NAME else self.prefix + name",
             ("unit/storage/test_local.py",)),
    Mutation("files of the replaced checkpoint are deleted before the root index is in place", ATOMIC,
             "storage/local_storage.py", "            os.rename(os.path.join(new.path, ",
             "            [os.unlink(os.path.join(target, n)) for n in names if not n.startswith(self.prefix)]\n"
             "            os.rename(os.path.join(new.path, ",
             ("ranks/checkpoint/test_faults.py::"
              "test_a_process_that_is_killed_at_a_call_leaves_the_old_or_the_new_state",)),
    Mutation("a directory that is replaced gets another mode", "mode, owner and group stay", "storage/local_files.py",
             "        os.chmod(new, mode)\n", "        pass\n", ("unit/storage/test_local.py",)),
    Mutation("the root index leaves out a rank", ONCE, "checkpoint/save_job.py",
             "for rank, info in infos.items() if info is not None}",
             "for rank, info in infos.items() if info is not None and rank != 1}",
             ("ranks/state/test_state.py::"
              "test_ranks_write_balanced_shares_and_split_files_and_the_next_save_leaves_none",)),
    Mutation("a draft that failed is not discarded", ATOMIC, "checkpoint/save_job.py", "self._draft.discard()", "pass",
             ("ranks/checkpoint/test_failures.py::test_what_one_rank_raises_reaches_all_and_nothing_is_lost",)),
    Mutation("an asynchronous save copies nothing, and writes what later steps made of it", STATE,
             "checkpoint/save_job.py",
             "tensors = dict(zip(tensors, memory.copy([*tensors.values()]), strict=True))", "pass",
             ("ranks/checkpoint/test_failures.py::"
              "test_a_save_returns_before_anything_is_written_and_holds_the_values_of_the_call",)),
    Mutation("waiting for saves returns before they are committed", DURABLE, "checkpoint/background.py",
             "while self._jobs and self._writer is not None and self._writer.is_alive():", "while False:",
             ("ranks/checkpoint/test_failures.py::"
              "test_a_save_waits_until_the_one_before_is_complete_and_reuses_its_memory",)),
    Mutation("an error of the writing thread is swallowed", RANKS, "checkpoint/background.py",
             "                failure = error\n            except BaseException",
             "                pass\n            except BaseException", (_BACKGROUND,)),
    Mutation("a checkpoint is deleted before the save that replaces it is committed", ATOMIC,
             "checkpoint/background.py", "if at_once and not self._jobs:", "if at_once:",
             ("ranks/checkpoint/test_failures.py::test_a_removal_waits_for_the_save_before_it",)),
    Mutation("a checkpoint is deleted although the save that was to replace it failed", ATOMIC,
             "checkpoint/background.py", "            if self._failure is not None:\n                self.note",
             "            if False:\n                self.note", (_BACKGROUND,)),
    # ── boxes and plans ───────────────────────────────────────────────────────────────────────────────────────────────
    Mutation("uneven shards are rounded down", EXACT, "format/layout.py",
             "    size = -(-total // parts)\n", "    size = max(total // parts, 1)\n",
             ("unit/format/test_layout.py",)),
    Mutation("the second block of a shard begins at the wrong offset of local memory", EXACT, "format/layout.py",
             "        offset += b - a\n    return out", "        offset = b - a\n    return out",
             ("unit/format/test_layout.py",)),
    Mutation("a loaded box goes to the start of local memory", EXACT, "format/plan.py",
             "common.within(target.box).shift(target.at)", "common.within(target.box)", ("unit/format/test_plan.py",)),
    Mutation("a stored box is read from the wrong offset", EXACT, "format/plan.py", "return ByteRuns(source, at,",
             "return ByteRuns(at, at,", ("unit/format/test_plan.py",)),
    Mutation("every replica writes a tensor", ONCE, "format/plan.py",
             "return list(parts) if group[replica % len(group)] == rank else []", "return list(parts)",
             ("unit/format/test_plan.py::test_every_element_is_written_by_one_rank",)),
    Mutation("no replica writes a tensor", ONCE, "format/plan.py",
             "return list(parts) if group[replica % len(group)] == rank else []", "return []",
             ("unit/format/test_plan.py::test_every_element_is_written_by_one_rank",)),
    Mutation("a gap between the boxes of a tensor is accepted", EXACT, "format/plan.py",
             "for shard in find_unheld_shards(spec.layout, spec.holders):", "for shard in ():",
             ("unit/format/test_plan.py::test_a_gap_is_named",)),
    Mutation("a strided shard is taken as contiguous", EXACT, "state/local_tensors.py",
             "if factor > 1 and factor == later:", "if False:", ("ranks/state/test_dtensor_layout.py",)),
    Mutation("strided shards are cut from left to right", EXACT, "state/local_tensors.py",
             "tuple(direct + deferred[::-1])", "tuple(deferred + direct)", ("ranks/state/test_dtensor_layout.py",)),
    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    Mutation("an optimizer gets the moments of another parameter", STATE, "state/optimizer.py",
             "stored_names = [name for name in same(names[id(param)]) if name in self._group_of]\n",
             "stored_names = sorted(self._group_of)[: len(self._group_of) // 2 + 1][-1:]\n",
             ("ranks/state/test_optimizers.py",)),
    Mutation("the hyper-parameters of a param group stay as configured", STATE, "state/optimizer.py",
             "group[key] = copy.deepcopy(values[0])", "pass",
             ("ranks/checkpoint/test_functional.py::test_all_kinds_of_objects_come_back_bit_for_bit",)),
    Mutation("every rank continues with the random state of rank 0", STATE, "checkpoint/load_job.py",
             'first if rank == 0 else decode(source.document("rank", rank))', "first",
             ("system/test_resume.py::test_each_rank_continues_with_its_own_random_numbers",)),
    Mutation("the generator of NumPy is not restored", STATE, "system/random_generators.py",
             'np.random.set_state(state["numpy"])', "pass", ("unit/system/test_random_generators.py",)),
    Mutation("differences between checkpoint and model pass in silence", STATE, "checkpoint/checkpoint.py",
             "        if strict:\n", "        if False:\n",
             ("ranks/checkpoint/test_bad_input.py::"
              "test_all_differences_between_model_and_checkpoint_are_listed_at_once",)),
    Mutation("a module whose load failed goes on with half of it", STATE, "checkpoint/checkpoint.py",
             'with mark_partly_loaded(job.targets.objects, path, decision["is_full"]):', "with ExitStack():",
             ("system/test_failed_load.py",)),
    Mutation("replicas that differ are saved", STATE, "checkpoint/save_job.py",
             'if find_differences(request["replicas"] for request in requests):', "if False:",
             ("ranks/state/test_replica_digests.py::test_a_replica_that_differs_is_an_error_that_names_it",)),
    Mutation("state of a pipeline stage that another stage holds otherwise is saved", STATE, "checkpoint/save_job.py",
             'refuse_differences(self.path, [report["shared"] for report in reports])', "pass",
             ("ranks/state/test_replica_digests.py::test_what_several_stages_hold_is_compared_between_them",)),
    # ── ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    Mutation("the failure of a rank is not reported to the others", RANKS, "distributed/ranks.py",
             'failed = [rank for rank, report in enumerate(reports) if "error" in report]', "failed = list[int]()",
             ("ranks/distributed/test_ranks.py::test_the_error_of_one_rank_is_raised_on_all_and_names_it",)),
    Mutation("ranks in different calls take each other's answers", RANKS, "distributed/ranks.py", "if len(calls) > 1:",
             "if False:", ("ranks/distributed/test_ranks.py::test_ranks_in_different_calls_learn_who_is_where",)),
    Mutation("a rank that was killed is waited for until the timeout", RANKS, "distributed/ranks.py",
             "if (reason := self._peers.gone.get(member)) is not None:", "if (reason := None):",
             ("ranks/distributed/test_ranks.py::test_a_rank_that_is_killed_is_named_long_before_the_timeout",)),
    Mutation("ranks that save to different paths are not told", RANKS, "checkpoint/save_job.py",
             'for what in ("path", "step"):', "for what in ():",
             ("ranks/distributed/test_ranks.py::test_ranks_that_disagree_all_learn_who_wants_what",)),
    Mutation("the first error of a worker thread is lost", RANKS, "system/host.py",
             "            raise failures[0]\n", "            pass\n", ("unit/system/test_workers.py",)),
    # ── hostile directories ───────────────────────────────────────────────────────────────────────────────────────────
    Mutation("an index may name a file outside of its directory", SAFE, "format/value_checks.py",
             "[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", "[A-Za-z0-9._/-]{1,128}", ("unit/format/test_format.py",)),
    Mutation("a key may be twice in an index", SAFE, "format/value_checks.py", "if len(value) != len(pairs):",
             "if False:", ("unit/format/test_format.py",)),
    Mutation("a link in a checkpoint is followed", SAFE, "storage/local_storage.py",
             "if not stat.S_ISREG(mode):", "self._follow_links = True\n                if False:",
             ("unit/format/test_format.py::test_f6_a_link_in_place_of_a_file_is_refused",)),
    Mutation("a pickled object is executed although nobody allowed it", SAFE, "state/json_tree.py",
             "if unpickles else Pickled(name, _UNREAD)", "if True else Pickled(name, _UNREAD)",
             ("system/test_pickled_objects.py::test_nothing_is_executed_without_consent",)),
    # ── the step ──────────────────────────────────────────────────────────────────────────────────────────────────────
    Mutation("gradients of replicas are not reduced", STEP, "parallel/sharding/gradient_sync.py",
             "        if self._mean is not None and not self.is_blocked:", "        if False:",
             ("ranks/parallel/test_replicas.py",)),
    Mutation("gradients of replicas are summed, not averaged", STEP, "parallel/sharding/gradient_sync.py",
             "target.copy_(total.mul_(reduction.scale).view(target.shape))", "target.copy_(total.view(target.shape))",
             ("ranks/parallel/test_replicas.py",)),
    Mutation("tensors that are read together overwrite one another", ONCE, "sources/source.py",
             "            used += length\n", "            pass\n",
             ("unit/transfer/test_write_read.py::test_tensors_are_read_whole_and_in_parts_through_memory_of_any_size",)),
    Mutation("gradients are clipped by the norm of this rank's shard", STEP, "parallel/sharding/clip_grad.py",
             "    if ranks > 1:\n        dist.all_reduce(total", "    if False:\n        dist.all_reduce(total",
             ("ranks/parallel/test_parallel.py::test_clipping_counts_each_element_once_however_it_is_sharded",)),
    Mutation("the norm counts replicated elements once per rank", STEP, "parallel/sharding/clip_grad.py",
             "powers = powers * on_device(weights, total.dtype, device)", "pass",
             ("ranks/parallel/test_parallel.py::test_clipping_counts_each_element_once_however_it_is_sharded",)),
    Mutation("ranks that must draw the same random numbers draw their own", STEP, "parallel/tensors/values.py",
             "    broadcast_rng(group)\n", "",
             ("ranks/parallel/test_parallel.py::test_ranks_draw_alike_where_they_must_and_apart_elsewhere",)),
    # ── followed runs ─────────────────────────────────────────────────────────────────────────────────────────────────
    Mutation("a checkpoint under evaluation is deleted", KEPT, "storage/run_folder.py",
             "if not content or self.is_followed(name):", "if not content:",
             ("unit/storage/test_run_folder.py",)),
    Mutation("a postponed deletion takes what was saved since", KEPT, "storage/run_folder.py",
             'if self._root_checksum(path) == request["root"]:', "if True:", ("unit/storage/test_run_folder.py",)),
)


# ── execution ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def copied() -> Iterator[Path]:
    """Yield the path of a copy of the package and its tests, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        for part in (PACKAGE, "tests"):
            shutil.copytree(ROOT / part, folder / part, copy_function=_link_or_copy)
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield folder


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def find_problem(mutation: Mutation) -> str | None:
    """Return why a mutation cannot be applied, or None."""
    path = ROOT / PACKAGE / mutation.file
    if not path.exists():
        return f"{PACKAGE}/{mutation.file} does not exist"
    for file, _, name in (test.partition("::") for test in mutation.tests):
        test = ROOT / "tests" / file
        if not test.exists() or f"def {name.partition('[')[0]}" not in test.read_text():
            return f"there is no tests/{file} {name}"
    count = path.read_text().count(mutation.old)
    return None if count == 1 else f"its text is {count} times in {PACKAGE}/{mutation.file}, expected once"


def apply(mutation: Mutation, folder: Path) -> None:
    """Change the package in a copy."""
    path = folder / PACKAGE / mutation.file
    text = path.read_text()
    path.unlink()  # a hard link: the file itself is that of the working tree
    path.write_text(text.replace(mutation.old, mutation.new))


def run_tests(tests: Sequence[str], folder: Path, *, stop: bool) -> tuple[int | None, str]:
    """Run tests in a copy; return the exit status of pytest, None after a timeout, and its output."""
    ids = [f"tests/{test}" for test in tests]
    flags = ["-q", "-n", "0", "-p", "no:cacheprovider", *(["-x"] if stop else [])]
    command = [sys.executable, "-m", "pytest", *flags, *ids]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"the tests still ran after {TIMEOUT_S:g} s"
    return done.returncode, done.stdout + done.stderr


def find_failed(tests: Sequence[str], output: str) -> list[str]:
    """Return those of the tests, which may be files, that pytest's summary says have failed."""
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [test for test in tests if any(name.startswith(f"tests/{test}") for name in failed)]


def judge(mutation: Mutation) -> tuple[str, str]:
    """Return the verdict on a mutation, "killed" if a test fails, and details."""
    if problem := find_problem(mutation):
        return "NOT APPLIED", problem
    with copied() as folder:
        apply(mutation, folder)
        status, output = run_tests(mutation.tests, folder, stop=True)
    lines = output.splitlines()
    if status == 1:  # tests ran, and failed
        return "killed", next((line for line in lines if line.startswith("FAILED")), "")[:150]
    return ("SURVIVED" if status == 0 else "NOT TRIED"), "\n".join(lines[-_LINES_SHOWN:])


def main() -> int:
    """Run the mutations with the given numbers, or all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", metavar="NUMBER", nargs="*", type=int, help="of mutations; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="the number of mutations that are tried at once")
    arguments = parser.parse_args()
    numbers = arguments.numbers or list(range(1, len(MUTATIONS) + 1))
    began = time.monotonic()
    with copied() as folder:
        applicable = [MUTATIONS[number - 1] for number in numbers if find_problem(MUTATIONS[number - 1]) is None]
        tests = list(dict.fromkeys(test for mutation in applicable for test in mutation.tests))
        status, output = run_tests(tests, folder, stop=False)
    failed = find_failed(tests, output)
    if status != 0:
        print(output, f"\nwithout a mutation, pytest ended with {status}; these fail: {failed}", flush=True)
    verdicts = dict[int, str]()

    def try_one(number: int) -> None:
        mutation, details = MUTATIONS[number - 1], "its tests fail without it"
        verdict = "NOT TRIED"
        if status in (0, 1) and not {*failed} & {*mutation.tests}:
            verdict, details = judge(mutation)
        verdicts[number] = verdict
        print(f"{number:3} {verdict:11} {mutation.name} ({mutation.promise})\n    {details}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(try_one, numbers))
    killed = list(verdicts.values()).count("killed")
    print(f"{killed} of {len(numbers)} killed, in {time.monotonic() - began:.0f} s")
    return 0 if killed == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
