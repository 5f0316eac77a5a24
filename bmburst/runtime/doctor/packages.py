"""The Python packages that parts of bmburst use."""

import importlib
import importlib.util
from dataclasses import dataclass
from importlib import metadata

from bmburst.runtime.doctor.finding import PIP, Finding, one_line


@dataclass(frozen=True, slots=True)
class Package:
    """A check for a package: `name` is filled in by the list of checks.

    Attributes:
        module: What a program imports.
        distribution: Its name in the registry.
        use: What it is for.
    """

    module: str
    distribution: str
    use: str

    def __call__(self, name: str) -> Finding:
        """Look for the package and import it."""
        if importlib.util.find_spec(self.module) is None:
            return Finding(name, "missing", f"for {self.use}", f"{PIP} install {self.distribution}")
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            fix = f"{PIP} install --force-reinstall {self.distribution}"
            return Finding(name, "broken", one_line(error), fix)
        return Finding(name, "ok", metadata.version(self.distribution))
