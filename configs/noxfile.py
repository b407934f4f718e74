"""Import, quick tests and main job with every supported version of torch and Lightning, in an environment each.

The wheels are those that pip installs for a user, so a build with CUDA where the index has one.

    pipx run nox -f configs/noxfile.py -s versions
    pipx run nox -f configs/noxfile.py -s "versions(torch='2.15.0', lightning='2.6.6')" -- tests/unit

An environment takes several gigabytes; what follows -- goes to pytest.
"""

from __future__ import annotations

from pathlib import Path

import nox

NEWEST_LIGHTNING = "2.6.6"
VERSIONS = [
    *((torch, NEWEST_LIGHTNING) for torch in ("2.12.1", "2.13.0", "2.14.1", "2.15.0")),
    ("2.13.0", "2.5.6"),
]
# torch 2.12 refuses the setuptools that the other versions are tested with.
CHOSEN_HERE = ("torch==", "lightning==", "pytorch-lightning==", "setuptools==")


@nox.session(python="3.11")
@nox.parametrize(("torch", "lightning"), VERSIONS)
def versions(session: nox.Session, torch: str, lightning: str) -> None:
    """Import the package, run the tests that are not slow, and train, save, resume and consolidate a few steps."""
    session.chdir(Path(__file__).parents[1])
    pins = Path("configs/constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp(), "constraints.txt")
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith(CHOSEN_HERE)))
    session.install("-c", str(constraints), f"torch=={torch}", f"lightning=={lightning}", "-e", ".[dev]")
    session.run("python", "-c", "from lightning_shardckpt import *")
    session.run("python", "-m", "pytest", "-m", "not slow", *session.posargs)
    session.run("python", "examples/main_job.py", "--steps", "12")
