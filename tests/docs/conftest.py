"""Runs the blocks of a document, once in a process. The tests that need them run are long."""

from collections.abc import Callable

import pytest

from tests.docs.scripts import Page

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BMBURST_LAUNCH_FOLDER")


@pytest.hookimpl(tryfirst=True)  # before those that are long are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "run_page" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Page]:
    """Return a function that returns a document by name, its blocks run in a folder of its own."""
    pages: dict[str, Page] = {}

    def run(name: str) -> Page:
        if name not in pages:
            with pytest.MonkeyPatch.context() as patch:
                for variable in LAUNCHED:
                    patch.delenv(variable, raising=False)
                pages[name] = Page(name, tmp_path_factory.mktemp("page"))
        return pages[name]

    return run
